"""DeepSpeed's ZeRO engine: several GPUs, several hosts, and every model shape."""

from outcore.engine.deepspeed.build import init_process_group
from outcore.engine.deepspeed.decision import DeepSpeedDecision, decide_deepspeed
from outcore.engine.deepspeed.environment import prepare_environment, watch_launcher
