"""AdamW's hyper-parameters of one update, and the fp32 scalars that both implementations compute with.

Per element, in fp32, each operation rounded once and in this order (torch.optim.AdamW(foreach=False), which does the
same but may fuse a multiplication with an addition where the processor can):

    g = grad * grad_scale
    m = m + (1 - beta1) * (g - m)                    torch.lerp; its other branch when 1 - beta1 >= 0.5:
                                                     m = g - beta1' * (g - m), beta1' = 1 - fp32(1 - beta1)
    v = v * beta2 + ((1 - beta2) * g) * g
    w = w * (1 - lr * weight_decay) + (-lr / (1 - beta1^step) * m) / (sqrt(v) / sqrt(1 - beta2^step) + eps)

The scalars are computed in double precision and rounded to fp32 once, as torch does. Two additions to torch's formula:
every NaN becomes the same quiet NaN, and moments below 2^-126 become 0 (8-bit ones below 2^-112 and 2^-93), since they
would stay denormals for ever, for which many processors take a slow path. The root of such a v is below 1e-19 (1e-14),
nothing beside the usual eps; an eps that does not dwarf it is refused."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

SMALLEST_EPS = 1e-16
SMALLEST_EPS_8_BIT = 1e-11
"""30 times the root of the largest v that is stored as zero, at step 1 with beta2 = 0.999."""
WHY_EPS = "second moments too small to be stored count as zero, and eps must be larger than their root"


class AdamWScalars(NamedTuple):
    """Numbers that the kernels take: exact fp32 values, held as Python floats."""

    grad_scale: float
    lerp_coefficient: float
    beta2: float
    one_minus_beta2: float
    bias_correction2_sqrt: float
    eps: float
    negative_step_size: float
    decay: float
    lerp_from_grad: bool


def round_to_fp32(value: float) -> float:
    """The nearest fp32; infinity when it is too large."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def check_eps(eps: float, moments8: bool) -> None:
    """ValueError when eps is too small for moments that are stored so."""
    smallest = SMALLEST_EPS_8_BIT if moments8 else SMALLEST_EPS
    if not (math.isfinite(eps) and eps >= smallest):
        kind = "8-bit moments need" if moments8 else "AdamW needs"
        raise ValueError(f"{kind} eps of at least {smallest:g}, got {eps}: {WHY_EPS}")


@dataclass(frozen=True)
class AdamWHyper:
    """Hyper-parameters of one update. ValueError when one of them is out of range."""

    lr: float
    step: int
    """Number of this update, from 1 on: bias correction and stochastic rounding depend on it."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_scale: float = 1.0
    """Multiplies the gradient: 1 / (loss scale x accumulated tokens) times the clipping factor."""
    seed: int = 0
    """Seed of stochastic rounding (8-bit moments, masters of 24 bits)."""

    def __post_init__(self) -> None:
        def refuse(what: str) -> None:
            raise ValueError(f"AdamW needs {what}")

        if not (math.isfinite(self.lr) and self.lr >= 0):
            refuse(f"a finite lr >= 0, got {self.lr}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                refuse(f"{name} in [0, 1), got {getattr(self, name)}")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            refuse(f"a finite weight_decay >= 0, got {self.weight_decay}")
        check_eps(self.eps, moments8=False)
        if not (math.isfinite(self.grad_scale) and self.grad_scale > 0):
            refuse(f"a finite grad_scale > 0, got {self.grad_scale}")
        if isinstance(self.step, bool) or not isinstance(self.step, int) or not 1 <= self.step < 2**63:
            refuse(f"step to be a whole number from 1 on, got {self.step!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            refuse(f"seed to be a whole number in [0, 2**64), got {self.seed!r}")
        scalars = self.scalars()
        if not all(math.isfinite(float(value)) for value in scalars) or scalars.grad_scale == 0:
            refuse(f"hyper-parameters within the range of fp32, got {self}")
        if scalars.bias_correction2_sqrt == 0:
            refuse(f"beta2 further from 1 than {self.beta2} at step {self.step}")

    def check_moments(self, moments8: bool) -> None:
        """ValueError when eps is too small for 8-bit moments."""
        check_eps(self.eps, moments8)

    def scalars(self) -> AdamWScalars:
        """The constants of the formula above."""
        bias_correction1 = 1 - self.beta1**self.step
        bias_correction2_sqrt = (1 - self.beta2**self.step) ** 0.5
        weight = round_to_fp32(1 - self.beta1)
        from_grad = abs(weight) >= 0.5
        return AdamWScalars(
            grad_scale=round_to_fp32(self.grad_scale),
            # 1 - weight in fp32 is exact in double and rounded once here, as it is in torch
            lerp_coefficient=-round_to_fp32(1.0 - weight) if from_grad else weight,
            beta2=round_to_fp32(self.beta2),
            one_minus_beta2=round_to_fp32(1 - self.beta2),
            bias_correction2_sqrt=round_to_fp32(bias_correction2_sqrt),
            eps=round_to_fp32(self.eps),
            negative_step_size=round_to_fp32(-(self.lr / bias_correction1)) if bias_correction1 else math.inf,
            decay=round_to_fp32(1 - self.lr * self.weight_decay),
            lerp_from_grad=from_grad,
        )
