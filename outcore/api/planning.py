"""`outcore.plan`: will a model fit, how fast will it be, what would have to change. Nothing of the model is loaded."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outcore.config import checked
from outcore.model import named_model
from outcore.plan import InferencePlan, Plan
from outcore.plan.asked import PlanConfig, answer_to, answers_to, check_planned, method_answer
from outcore.plan.inference import DoesNotFit, to_json


@dataclass(frozen=True)
class PlanResult:
    """A forecast; `print(result)` shows it as `outcore plan` does."""

    fits: bool
    bytes: Mapping[str, int]
    """Use of each tier: vram, ram, nvme; empty where answers do not fit."""
    seconds: float
    """Time of an optimizer step, or of one answer's token behind 1,024 others; infinite where answers do not fit."""
    tokens_per_s: float
    """Rate of training, or of that answer."""
    lines: tuple[str, ...]
    """Forecast for people."""
    command: str = ""
    """Command that makes it a run; '' for answers."""
    details: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """All of it as plain values, as `outcore plan --json` prints it."""

    def __str__(self) -> str:
        return "\n".join(self.lines)


def plan(model: str | os.PathLike[str], *, infer: bool = False, **settings: Any) -> PlanResult:
    """Plan training of a model (a preset, folder, hub id, config file), or with `infer` its answers.

    `settings`: those of `outcore.TrainConfig`, and the machine's: machine="rtx4070-laptop", nominal, vram_gib, ram_gib,
    nvme_free_gb, num_gpus; for answers aim, context, quantize, kv_format ... What is left out is chosen. ValueError for
    what cannot be planned; a model that does not fit is an answer."""
    said: dict[str, Any] = {"infer" if infer else "model_name_or_path": str(model), **settings}
    if infer and "quantize" in said:
        said["infer_quantize"] = said.pop("quantize")
    config = check_planned(checked(PlanConfig, said, named_model))
    if config.method != "sft":
        return _method(config)
    return _answers(config) if infer else _training(config)


def _method(config: PlanConfig) -> PlanResult:
    found = method_answer(config)
    used = {"vram": found.vram_bytes, "ram": found.ram_bytes, "nvme": 0}
    rate = found.step_tokens / found.step_s
    return PlanResult(found.fits, used, found.step_s, rate, found.words, details=found.to_dict())


def _training(config: PlanConfig) -> PlanResult:
    asked, shown = answer_to(config), io.StringIO()
    asked.show(shown)
    found: Plan = asked.answer.plan
    return PlanResult(
        found.fits,
        {tier: found.tier(tier).used_bytes for tier in ("vram", "ram", "nvme")},
        found.time.step_s,
        found.tokens_per_s,
        tuple(shown.getvalue().splitlines()),
        asked.command,
        asked.to_dict(),
    )


def _answers(config: PlanConfig) -> PlanResult:
    try:
        asked = answers_to(config)
    except DoesNotFit as error:
        return PlanResult(False, {}, math.inf, 0.0, (str(error),))
    found: InferencePlan = asked.plan
    placement = found.placement
    used = {home: placement.bytes_at(home) for home in ("vram", "ram", "nvme")}
    used[placement.kv_home] += placement.kv_bytes
    used["vram"] = sum(placement.vram_bytes.values())  # with buffers beside weights, keys and values
    seconds = found.decode(1, 1024).seconds
    return PlanResult(True, used, seconds, 1 / seconds, tuple(asked.words()), details=to_json(found))
