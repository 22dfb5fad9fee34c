"""The efficiency model of the ZeRO-Infinity paper: how much bandwidth a fraction of the GPU's peak needs.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", 2021,
arXiv 2104.07857, section 4 (bandwidth). Computation and transfer are taken not to overlap:

    efficiency = compute / (compute + transfer) = ait * bw / (ait * bw + peak)

with the arithmetic intensity `ait` in FLOPs per byte. Bandwidths in bytes/s, peaks in FLOP/s. The planner's own times
(stream.py, deepspeed.py) know overlap and count bytes of the real engines; this is the paper's picture.
`outcore plan --efficiency` puts a machine's rates into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outcore.common.quantities import GB
from outcore.plan.hardware import Hardware

PAPER_PEAK_FLOP_PER_S = 70e12
"""FLOP/s that the paper takes a V100 to achieve (section 4.2, figure 3)."""


def ait_parameters(seq: int, batch: int) -> float:
    """FLOPs per byte of parameters and gradients moved (equation 9): each is moved once a pass, 2 * 4 bytes in all."""
    return float(seq * batch)


def ait_optimizer(seq: int, batch: int) -> float:
    """FLOPs per byte of optimizer states, read and written once an iteration, 2 * 16 bytes (equation 10)."""
    return seq * batch / 4


def ait_activations(hidden: int) -> float:
    """FLOPs per byte of activation checkpoints, one a layer, saved and loaded (equation 11)."""
    return 24.0 * hidden


def efficiency(ait: float, bytes_per_s: float, peak_flop_per_s: float = PAPER_PEAK_FLOP_PER_S) -> float:
    """Share of the peak that is reached when transfers hide behind nothing (equation 6). In [0, 1)."""
    if ait < 0 or bytes_per_s < 0 or peak_flop_per_s <= 0:
        raise ValueError(
            f"efficiency needs an intensity and a bandwidth of at least 0 and a peak above 0, got {ait}, "
            f"{bytes_per_s}, {peak_flop_per_s}"
        )
    return ait * bytes_per_s / (ait * bytes_per_s + peak_flop_per_s)


SEQ_LENGTH = 1024
BATCHES = (1, 4, 16, 64, 256)
WIDTHS = (2048, 8192, 32768, 65536)


@dataclass(frozen=True)
class HomeRow:
    """One kind of data in one home, on a machine."""

    data: str
    home: str
    gb_per_s: float
    """GB/s at which the home gives and takes it."""
    shares: dict[int, float]
    """Tokens a step (of activation checkpoints: the hidden size) -> efficiency."""
    half_at: float
    """Tokens (or hidden size) from which half of the peak is reached."""


def rows_on(hardware: Hardware) -> list[HomeRow]:
    """Apply the paper's formulas to a machine's rates. ValueError where its compute rate is not known.

    Weights and gradients cross the link to the GPU whatever their home; states in RAM are updated there at RAM's rate;
    on the drive all of them are read and written at its mixed rate (the slower of both where that was not measured)."""
    if hardware.compute_tflops is None:
        raise ValueError(f"the compute rate of {hardware.name} is not known: give --tflops")
    peak = hardware.compute_tflops * 1e12
    link = min(hardware.h2d_gb_per_s, hardware.d2h_gb_per_s)
    drive = hardware.drive_mixed_gb_per_s or min(hardware.drive_read_gb_per_s, hardware.drive_write_gb_per_s)
    by_tokens = [SEQ_LENGTH * batch for batch in BATCHES]
    rows = []
    for data, home, rate in (
        ("parameters, gradients", "RAM", link),
        ("parameters, gradients", "NVMe", min(link, drive)),
        ("optimizer states", "RAM", hardware.ram_gb_per_s),
        ("optimizer states", "NVMe", drive),
        ("activation checkpoints", "RAM", link),
        ("activation checkpoints", "NVMe", min(link, drive)),
    ):
        if data == "activation checkpoints":
            intensity = {width: ait_activations(width) for width in WIDTHS}
        else:
            ait = ait_parameters if data.startswith("parameters") else ait_optimizer
            intensity = {tokens: ait(tokens, 1) for tokens in by_tokens}
        shares = {size: efficiency(value, rate * GB, peak) for size, value in intensity.items()}
        size, value = next(iter(intensity.items()))  # the intensity is in proportion to the size
        rows.append(HomeRow(data, home, rate, shares, peak / (rate * GB) / (value / size)))
    return rows


def efficiency_lines(hardware: Hardware) -> list[str]:
    """The table in words."""
    lines = [
        f"{hardware.name}: {hardware.compute_tflops or 0:g} TFLOPS. Efficiency = ait x bw / (ait x bw + peak), nothing "
        "overlaps (arXiv 2104.07857, section 4)."
    ]
    said = ""
    for row in rows_on(hardware):
        is_width = row.data == "activation checkpoints"
        if (unit := "hidden size" if is_width else "tokens a step") != said:
            head = "".join(f"{size:>10,}" for size in row.shares)
            lines.append(f"{unit + ':':40}{head}   half at")
            said = unit
        cells = "".join(f"{share:>10.1%}" for share in row.shares.values())
        lines.append(f"{f'{row.data}, {row.home} ({row.gb_per_s:g} GB/s)':40}{cells}{row.half_at:>10,.0f}")
    return lines


def efficiency_json(hardware: Hardware) -> dict[str, Any]:
    """Plain values, as JSON takes them."""
    rows = [
        {**vars(row), "shares": {str(size): share for size, share in row.shares.items()}} for row in rows_on(hardware)
    ]
    return {"machine": hardware.name, "compute_tflops": hardware.compute_tflops, "rows": rows}
