"""Lessons of finished runs about forecasts on this machine: measured seconds of a step over forecast ones.

One ratio for each kind of run (engine, homes of the states, weights or adapters, precision), the last run's, in
`forecasts.json` beside the machine's profile and with the machine it was measured on: the probe replaces the
profile as a whole, and a run must not undo that. Only a ratio that is off by more than `WORTH_SAYING` is said.

Beside them: rates of the CPU beside its link, which starts of models measured. The probe has no such trial, and a plan
made before a model opens counts layers on the CPU by the last start's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outcore.common.files import newest, read_object, user_folder
from outcore.common.quantities import format_s
from outcore.plan.hardware import Hardware
from outcore.plan.record import Plan
from outcore.sizing.inference import InPlaceRates

LEARNED = user_folder() / "forecasts.json"
WORTH_SAYING = 0.2
"""Share of the forecast: a step that took so much more or less is told with the next forecast."""
LEAST_STEPS = 5
"""After the first one, which compiles and allocates."""


def kind_of(plan: Plan) -> str:
    """The kind of run whose forecasts err alike."""
    trained = f"LoRA r={plan.lora_r}" if plan.lora_r else "all weights"
    trained += f" over {plan.quantize}" if plan.quantize else ""
    gpus = f"{plan.num_gpus} GPUs, " if plan.num_gpus > 1 else ""
    return f"{gpus}{plan.engine} engine, {plan.offload}, {plan.state_format}, {plan.precision}, {trained}"


def remember(plan: Plan, step_s: float, run: str, hardware: Hardware, path: Path = LEARNED) -> str:
    """Keep how long a step took. In words, how far that is from the forecast; '' within `WORTH_SAYING`."""
    if not plan.compute_known or plan.time.step_s <= 0 or step_s <= 0:
        return ""
    ratio = step_s / plan.time.step_s
    known = known_of(hardware, path)
    known["ratios"][kind_of(plan)] = {
        "ratio": ratio,
        "step_s": step_s,
        "forecast_s": plan.time.step_s,
        "run": run,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    keep(known, path)
    if abs(ratio - 1) <= WORTH_SAYING:
        return ""
    return (
        f"a step took {format_s(step_s)}, {ratio:.1f} times the forecast of {format_s(plan.time.step_s)}; the next "
        "forecast for this kind of run says so"
    )


def last_time(plan: Plan, hardware: Hardware, path: Path = LEARNED) -> str:
    """In words, how the last run of this kind on this machine went against its forecast; '' where that was right."""
    found = _found(plan, hardware, path)
    if not found or abs(found["ratio"] - 1) <= WORTH_SAYING:
        return ""
    return (
        f"this machine took {found['ratio']:.1f} times the forecast last time (run {found['run']}: "
        f"{format_s(found['step_s'])} a step, forecast {format_s(found['forecast_s'])}); by that a step takes "
        f"{format_s(found['ratio'] * plan.time.step_s)}"
    )


def expected_s(plan: Plan, hardware: Hardware, path: Path = LEARNED) -> tuple[float, bool]:
    """Seconds of a step by the forecast and by what the last run of this kind took; whether there was one."""
    found = _found(plan, hardware, path)
    return (found["ratio"] * plan.time.step_s, True) if found else (plan.time.step_s, False)


def _found(plan: Plan, hardware: Hardware, path: Path) -> dict[str, Any] | None:
    return known_of(hardware, path)["ratios"].get(kind_of(plan))


def known_of(hardware: Hardware, path: Path) -> dict[str, Any]:
    """Read what was learned on this machine, nothing of another."""
    known = _read(path)
    return known if known.get("machine") == hardware.identity else {"machine": hardware.identity, "ratios": {}}


def keep(known: dict[str, Any], path: Path) -> None:
    """Write it as a whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(known, indent=1), encoding="utf-8")
    aside.replace(path)


def _read(path: Path) -> dict[str, Any]:
    """{} for a file that is missing or damaged: it is written anew."""
    known = read_object(newest(path))
    is_whole = all(isinstance(known.get(part, {}), dict) for part in ("ratios", "rates"))
    parts = {"ratios": "ratio", "rates": "part_s"} if is_whole else {}
    found = [(one, key) for part, key in parts.items() for one in known.get(part, {}).values()]
    return known if is_whole and all(key in one for one, key in found) else {}


def remember_rates(name: str, rates: InPlaceRates, hardware: Hardware, path: Path = LEARNED) -> None:
    """Keep what was measured with the packed format, or in the precision, of this name."""
    known = known_of(hardware, path)
    known.setdefault("rates", {})[name] = asdict(rates)
    keep(known, path)


def known_rates(hardware: Hardware, path: Path = LEARNED) -> Mapping[str, InPlaceRates]:
    """Rates by the name of the packed format or precision; {} where no start on this machine measured any."""
    found = known_of(hardware, path).get("rates", {})
    return {
        name: InPlaceRates(
            {int(tokens): rate for tokens, rate in one["cpu_gb_per_s"].items()}, one["link_gb_per_s"], one["part_s"]
        )
        for name, one in found.items()
    }
