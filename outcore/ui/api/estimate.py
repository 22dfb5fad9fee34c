"""The forecast of a run while its form is being filled in: the planner's answer in a fraction of a second."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from outcore.config import ConfigError
from outcore.machine import drive_of
from outcore.plan.asked import Asked, answer_to, parse_plan
from outcore.serve.additions import bad
from outcore.ui.api.form import argv_of, command_of, field_of, said, yaml_of

GB = 10**9
TIERS = ("vram", "ram", "nvme")


def estimate(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The forecast beside command line and YAML; where there is no forecast, `problem` says why. ApiError for settings
    that cannot be."""
    began_s = time.perf_counter()
    settings = said(fields)
    found: dict[str, Any] = {"command": command_of(settings), "yaml": yaml_of(settings), "problem": ""}
    try:
        found |= _answer(tuple(argv_of(_planned(settings))))
    except ConfigError as error:
        raise bad(str(error), field_of(str(error))) from error
    except (ValueError, RuntimeError, OSError) as error:
        found["problem"] = str(error)
    return found | {"seconds": time.perf_counter() - began_s}


def _planned(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as the planner takes them: the default model and its row, the user's RAM and drive as limits."""
    found = dict(settings)
    if not any(found.get(name) for name in ("model_name_or_path", "preset", "config_file", "model_module")):
        found["preset"] = "tiny"
    if found.get("preset") == "tiny":
        found.setdefault("seq_length", 256)
    return found


@lru_cache(maxsize=64)
def _cached(argv: tuple[str, ...], minute: int) -> Asked:
    args = [*argv, "--nominal", "true"]
    config = parse_plan(args)
    if config.nvme_offload_path:
        args += ["--nvme_free_gb", str((drive_of(config.nvme_offload_path).free_bytes or 0) / GB)]
    return answer_to(parse_plan(args))


def _answer(argv: tuple[str, ...]) -> dict[str, Any]:
    asked = _cached(argv, int(time.time() // 60))  # memory and drives change while a form is open
    plan = asked.answer.plan
    whole = asked.to_dict()
    return {
        "fits": plan.fits,
        "title": plan.title,
        "reason": asked.answer.reason,
        "limit": asked.advice.words(),
        "machine": asked.hardware.words(),
        "plan": whole["plan"],
        "offloaded": _offloaded(whole["plan"]),
        "stages": {name: _short(stage) for name, stage in whole["stages"].items()}
        | ({"stream": _short(whole["stream"])} if whole["stream"] else {}),
        "needs_infinity": _needs_infinity(asked),
        "smallest_change": whole["smallest_change"]["words"] if whole["smallest_change"] else None,
        "notes": whole["notes"],
        "life_steps": plan.drive_life_steps,
        "life_days": plan.drive_life_days,
        "tokens_per_s": plan.tokens_per_s,
        "planned_command": asked.command,
    }


def _offloaded(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes that would lie on the drive, by part, with the safety factor in all, and what is free there."""
    tier = plan["tiers"]["nvme"]
    return {
        "parts_bytes": plan["parts_bytes"]["nvme"],
        "needed_bytes": tier["used_bytes"],
        "free_bytes": tier["capacity_bytes"],
    }


def warm_up() -> None:
    """Import what the first forecast of a folder or a config needs: seconds, which nobody should wait for."""
    estimate({"preset": "tiny"})
    importlib.import_module("peft")


def _short(plan: Mapping[str, Any]) -> dict[str, Any]:
    """One stage's line: where things live, bytes by tier, seconds a step, what is short."""
    return {
        "offload": plan["offload"],
        "fits": plan["fits"],
        "step_s": plan["time_s"]["step_s"],
        **{f"{tier}_bytes": plan["tiers"][tier]["used_bytes"] for tier in TIERS},
        "short": [tier for tier in TIERS if plan["tiers"][tier]["short_bytes"]],
    }


def _needs_infinity(asked: Asked) -> str:
    """Whether anything must go to a drive, in words."""
    fitting = [name for name, plan in asked.answer.stages.items() if plan.fits and name != "infinity"]
    stream = asked.answer.stream
    if stream is not None and stream.fits and not stream.uses_drive:
        return "You do not need infinity for this model: everything fits without a drive."
    if fitting:
        return f"You do not need infinity for this model: {fitting[0]} fits without a drive."
    if asked.answer.stages["infinity"].fits or (stream is not None and stream.fits):
        return "This model needs the drive: RAM alone does not hold its states."
    return "This model does not fit this machine as asked, not even with the drive."
