"""Two GPUs of one host against one: the same losses, and checkpoints that either goes on from."""

from dataclasses import replace

import pytest
import torch

from tests.engine.stream.ranks.world import SETTINGS, run_ranks, train

GPU = replace(SETTINGS, compile="off")
pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]  # fmt: skip


def on_gpus(count: int, folder, **job):
    """What rank 0 of `count` found."""
    ranks = run_ranks(count, folder, train, device="cuda", settings=GPU, dtype="bfloat16", micro=4, **job)
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks)
    return ranks[0]


def test_fifty_steps_of_two_gpus_are_those_of_one(tmp_path):
    one, two = (on_gpus(count, tmp_path / str(count), steps=50) for count in (1, 2))
    assert two["losses"] == pytest.approx(one["losses"], rel=5e-3)
    assert two["norms"] == pytest.approx(one["norms"], rel=5e-2) and two["tokens"] == one["tokens"]
    assert sum(one["losses"][-10:]) < 0.99 * sum(one["losses"][:10])  # other tokens in every step


def test_two_gpus_one_gpu_two_gpus_go_on_from_each_others_checkpoints(tmp_path):
    straight = on_gpus(1, tmp_path / "straight", steps=9)
    losses, saved = [], ""
    for turn, count in enumerate((2, 1, 2)):
        found = on_gpus(
            count, tmp_path / str(turn), steps=3, first=3 * turn, load=saved, save=str(tmp_path / f"s{turn}")
        )
        losses, saved = losses + found["losses"], str(tmp_path / f"s{turn}")
    assert losses == pytest.approx(straight["losses"], rel=5e-3)
