"""The efficiency model of the ZeRO-Infinity paper: how much bandwidth a fraction of the GPU's peak needs.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", 2021,
arXiv 2104.07857, sections 3 (memory) and 4 (bandwidth). A transformer of `num_layers` layers and width `hidden` has
12 * num_layers * hidden^2 parameters; computation and transfer are taken not to overlap:

    efficiency = compute / (compute + transfer) = ait * bw / (ait * bw + peak)

with the arithmetic intensity `ait` in FLOPs per byte. Bandwidths in bytes/s, peaks in FLOP/s. The planner's own times
(stream.py, deepspeed.py) know overlap and count bytes of the real engines; this is the paper's picture.
"""

from __future__ import annotations

PAPER_PEAK_FLOP_PER_S = 70e12
"""What the paper takes a V100 to achieve (section 4.2, figure 3)."""


def transformer_params(num_layers: int, hidden: int) -> int:
    """Parameters of the paper's transformer (equation 1): 12 * num_layers * hidden^2."""
    return 12 * num_layers * hidden * hidden


def model_state_bytes(num_layers: int, hidden: int) -> int:
    """Weights, gradients and Adam states in mixed precision (equation 2): 20 bytes per parameter."""
    return 20 * transformer_params(num_layers, hidden)


def activation_checkpoint_bytes(batch: int, seq: int, hidden: int, num_layers: int, per_checkpoint: int = 1) -> int:
    """16-bit activation checkpoints, one every `per_checkpoint` layers (equation 3)."""
    return 2 * batch * seq * hidden * num_layers // per_checkpoint


def model_state_working_bytes(hidden: int) -> int:
    """Least GPU memory for the largest operator, hidden -> 4 hidden: weights and gradients (equation 4)."""
    return 4 * hidden * 4 * hidden


def activation_working_bytes(batch: int, seq: int, hidden: int, heads: int, per_checkpoint: int = 1) -> int:
    """Activations between two checkpoints (equation 5)."""
    return batch * seq * per_checkpoint * (16 * hidden + 2 * heads * seq)


def compute_flops(batch: int, seq: int, num_layers: int, hidden: int) -> int:
    """FLOPs of one iteration with recomputation (equations 7 and 8): 2 * 4 * batch * seq * parameters."""
    return 8 * batch * seq * transformer_params(num_layers, hidden)


def ait_parameters(seq: int, batch: int) -> float:
    """FLOPs per byte of parameters and gradients moved (equation 9): each is moved once a pass, 2 * 4 bytes in all."""
    return float(seq * batch)


def ait_optimizer(seq: int, batch: int) -> float:
    """FLOPs per byte of optimizer states, read and written once an iteration, 2 * 16 bytes (equation 10)."""
    return seq * batch / 4


def ait_activations(hidden: int, per_checkpoint: int = 1) -> float:
    """FLOPs per byte of activation checkpoints, saved and loaded (equation 11)."""
    return 24.0 * hidden * per_checkpoint


def efficiency(ait: float, bytes_per_s: float, peak_flop_per_s: float = PAPER_PEAK_FLOP_PER_S) -> float:
    """Share of the peak that is reached when transfers hide behind nothing (equation 6). In [0, 1)."""
    if ait < 0 or bytes_per_s < 0 or peak_flop_per_s <= 0:
        raise ValueError(
            f"efficiency needs an intensity and a bandwidth of at least 0 and a peak above 0, got {ait}, "
            f"{bytes_per_s}, {peak_flop_per_s}"
        )
    return ait * bytes_per_s / (ait * bytes_per_s + peak_flop_per_s)


def bandwidth_for(target: float, ait: float, peak_flop_per_s: float = PAPER_PEAK_FLOP_PER_S) -> float:
    """Bytes/s that an efficiency needs: `efficiency` solved for the bandwidth."""
    if not 0 <= target < 1 or ait <= 0:
        raise ValueError(f"an efficiency lies in [0, 1) and an intensity above 0, got {target} and {ait}")
    return target / (1 - target) * peak_flop_per_s / ait
