"""What the tests of the builder share."""

from dataclasses import fields
from typing import Any

from outcore.config import ProcessFacts, RunSettings, TrainConfig, parse, resolve, understand
from outcore.engine.deepspeed.config.builder import BuiltConfig, RunFacts, build_config
from outcore.sizing.swapping import WeightCounts

TINY = WeightCounts(3_000_000, 1_048_576, 20, 512)


def accept(path: str, required_space_gb: float) -> tuple[bool, str]:
    return True, f"{path} taken for {required_space_gb:.1f} GB."


def settings_of(
    user: Any = None, flags: dict[str, Any] | None = None, precision: Any = None, world_size: int = 1
) -> RunSettings:
    """Settings of a run with this deepspeed_config.json and these flags."""
    said = [f"--{name}={value}" for name, value in {"preset": "llama-1b", **(flags or {})}.items() if value is not None]
    file = understand({} if user is None else user)
    return resolve(parse(said, TrainConfig, "test", ""), file, ProcessFacts(precision, world_size))


def build(
    user: dict[str, Any] | None = None,
    flags: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    model: WeightCounts = TINY,
    check: Any = accept,
    *,
    staged: bool = True,
) -> BuiltConfig:
    """`run`: as in `run_of`."""
    settings, facts = run_of(user, flags, run)
    return build_config(settings, model, facts, nvme_check=check, staged=staged)


def run_of(
    user: Any = None, flags: dict[str, Any] | None = None, run: dict[str, Any] | None = None
) -> tuple[RunSettings, RunFacts]:
    """Settings and facts of a run. `run`: fields of RunFacts, the precision, and further flags."""
    run = dict(run or {})
    precision = run.pop("precision", None)
    known = {f.name for f in fields(RunFacts)}
    facts = RunFacts(**{name: value for name, value in run.items() if name in known})
    said = {**(flags or {}), **{name: value for name, value in run.items() if name not in known}}
    return settings_of(user, said, precision, facts.world_size), facts


INFINITY = {"zero_stage": "infinity", "nvme_offload_path": "/mnt/nvme"}
