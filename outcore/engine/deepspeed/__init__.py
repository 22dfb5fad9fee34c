"""DeepSpeed's ZeRO engine: several GPUs, several hosts, and every model shape."""

from outcore.engine.deepspeed.build import DeepSpeedDecision, decide_deepspeed, init_process_group
from outcore.engine.deepspeed.environment import prepare_environment, watch_launcher
