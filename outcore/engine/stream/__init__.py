"""The streaming engine: every layer of a decoder passes through the GPU, its home is RAM or NVMe.

Where to look: `blueprint` decides what an engine is to be, `build` puts it together, `engine` is the training step and
its clipping, `schedule` the order of things within a step: forward by `outcore.flow`, back by `backward`. `gradients`
take them to RAM, `activations` keeps what backward needs, `updates` says what the CPU optimizer is at, `state` reads
and writes checkpoints, `check` finds out whether a model trains when it is streamed. States live in `outcore.states`.
"""

from outcore.engine.stream.check.gradients import why_config_not_trained, why_not_trained
from outcore.engine.stream.decision import StreamDecision, decide_stream
from outcore.engine.stream.settings import StreamSettings
