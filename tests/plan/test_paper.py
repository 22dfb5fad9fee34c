"""The ZeRO-Infinity paper's model: its own statements (arXiv 2104.07857, sections 3 and 4), inverses, bad input."""

from __future__ import annotations

import pytest

from outcore.plan.answer.efficiency import ait_activations, ait_optimizer, ait_parameters, efficiency

GB = 1e9


def bandwidth_for(target: float, ait: float, peak_flop_per_s: float = 70e12) -> float:
    """Bytes/s that an efficiency needs: `efficiency` solved for the bandwidth."""
    return target / (1 - target) * peak_flop_per_s / ait


def test_statements_of_the_paper():
    # "With a bandwidth of over 70 GB/s for parameter and gradients, we can achieve over 50 % efficiency for even the
    # smallest batch size."
    assert efficiency(ait_parameters(1024, 1), 70 * GB) > 0.5
    # "optimizer states require nearly 4x higher bandwidth to achieve 50 % efficiency"
    ratio = bandwidth_for(0.5, ait_optimizer(1024, 1)) / bandwidth_for(0.5, ait_parameters(1024, 1))
    assert ratio == pytest.approx(4)
    # "an effective bandwidth of nearly 1.5 TB/s to achieve 90 % efficiency with a batch size of 2 per GPU"
    assert bandwidth_for(0.9, ait_optimizer(1024, 2)) == pytest.approx(1.5e12, rel=0.2)
    # "a meager bandwidth of 2 GB/s is able to sustain over 50 % efficiency even for a hidden size of 2K", and
    # "the bandwidth requirement drops down to less than 1 GB/s once the hidden size grows over 8K"
    assert efficiency(ait_activations(2048), 2 * GB) > 0.5
    assert bandwidth_for(0.5, ait_activations(8192)) < 1 * GB


def test_nonsense_is_refused():
    for call in (lambda: efficiency(-1, 1), lambda: efficiency(1, 1, 0)):
        with pytest.raises(ValueError):
            call()
