"""DeepSpeed's ZeRO engine: several GPUs, several hosts, and every model shape."""

from __future__ import annotations

from outcore.engine.deepspeed.build import init_process_group
from outcore.engine.deepspeed.decision import DeepSpeedDecision, decide_deepspeed
from outcore.engine.deepspeed.environment import prepare_environment
from outcore.engine.deepspeed.settings import ChosenOffload, RunFacts
from outcore.machine.offload import resolve_nvme_path, validate_nvme_path

__all__ = [
    "ChosenOffload",
    "DeepSpeedDecision",
    "RunFacts",
    "decide_deepspeed",
    "init_process_group",
    "prepare_environment",
    "resolve_nvme_path",
    "validate_nvme_path",
]
