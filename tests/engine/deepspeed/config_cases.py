"""What the tests of the builder share."""

from __future__ import annotations

from typing import Any

from outcore.engine.deepspeed.config.builder import BuiltConfig, DeepSpeedSettings, RunFacts, WeightCounts, build_config

TINY = WeightCounts(3_000_000, 1_048_576, 20, 512)


def accept(path: str, required_space_gb: float) -> tuple[bool, str]:
    return True, f"{path} taken for {required_space_gb:.1f} GB."


def build(
    user: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    model: WeightCounts = TINY,
    check: Any = accept,
) -> BuiltConfig:
    facts = RunFacts(**{"memlock_limit_bytes": 1 << 60, **(run or {})})
    return build_config(user or {}, DeepSpeedSettings(**(settings or {})), model, facts, nvme_check=check)


INFINITY = {"zero_stage": "infinity", "nvme_offload_path": "/mnt/nvme"}
