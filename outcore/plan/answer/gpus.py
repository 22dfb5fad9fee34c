"""Whether several GPUs are worth it: the same tokens a step on one of them, planned and by what runs took."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from outcore.common.quantities import format_s
from outcore.plan.choose import choose
from outcore.plan.hardware import Hardware
from outcore.plan.learned import LEARNED, expected_s
from outcore.plan.profile import RunRequest
from outcore.plan.record import Plan
from outcore.sizing.shape import ModelShape


@dataclass(frozen=True)
class BesideOne:
    """A plan for several GPUs beside the best one of a single GPU with the same global batch."""

    num_gpus: int
    tokens: int
    step_s: float
    one_s: float
    is_measured: bool
    """Whether runs on this machine corrected a forecast."""

    @property
    def is_slower(self) -> bool:
        return self.step_s > self.one_s

    def words(self) -> str:
        """A sentence, and what to do where one GPU is faster."""
        by = "by what runs on this machine took" if self.is_measured else "by forecast"
        text = (
            f"{by} {self.num_gpus} GPUs take {format_s(self.step_s)} a step of {self.tokens:,} tokens and one GPU "
            f"{format_s(self.one_s)}"
        )
        if self.is_slower:
            return f"{text}: one GPU is faster. Start with --num_gpus=1, or give a step more tokens"
        return f"{text}: {self.one_s / self.step_s:.1f} x"


def beside_one(
    shape: ModelShape, request: RunRequest, hardware: Hardware, plan: Plan, path: Path = LEARNED
) -> BesideOne | None:
    """Give nothing for a plan of one GPU, and where its model does not fit one or rates are not known."""
    if plan.num_gpus == 1 or not plan.compute_known:
        return None
    same = replace(request, micro_batch=plan.micro_batch, accumulation=plan.accumulation * plan.num_gpus)
    one = choose(shape, same, replace(hardware, num_gpus=1)).plan
    if not one.fits:
        return None
    (step_s, was_seen), (one_s, one_seen) = expected_s(plan, hardware, path), expected_s(one, hardware, path)
    return BesideOne(plan.num_gpus, plan.tokens_per_step, step_s, one_s, was_seen or one_seen)
