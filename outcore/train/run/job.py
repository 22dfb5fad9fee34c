"""The process that runs: what it computes on, what it said, what it must close, and what it is doing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from outcore.common.output import printable
from outcore.config import Precision, ProcessFacts, TrainConfig
from outcore.engine.deepspeed import init_process_group, prepare_environment
from outcore.monitor.metrics import StartupClock
from outcore.train.configure.rooms import choose_device


class RunJob:
    """One run's process. Close `opened` at its end, also when assembling the rest fails."""

    def __init__(self, config: TrainConfig, clock: StartupClock) -> None:
        self.config, self.clock = config, clock
        self.started_s = time.perf_counter()
        self.device = choose_device(config)
        self.is_main = True
        said = config.per_device_train_batch_size
        self.micro_batch_size = said if isinstance(said, int) else 1
        self.engine_name = "deepspeed"
        """Engine that trains, as far as it is decided; advice for a full tier names its settings."""
        self.opened = ExitStack()
        """Resources to close at the end, in reverse order."""
        self.told: BaseException | None = None
        """The error that the user has read."""
        self.tells = True
        """Whether errors are told on the screen; False for a caller that is given them."""
        self.phase = "starting"
        """Phase that the run is in, for an error of the system that says nothing of it."""
        self.saved: Callable[[], Path | None] = lambda: None
        """The last checkpoint that this process saved or resumed from."""
        self.said: list[str] = []

    def say(self, line: str) -> None:
        """A line on the screen, from rank 0 only."""
        self.said.append(line)
        if self.is_main:
            print(printable(line), flush=True)

    def join(self, precision: Precision) -> ProcessFacts:
        """This process among those of the run. One needs no group; DeepSpeed makes its own when it is chosen."""
        prepare_environment(self.device.has_cuda, self.config.local_rank)
        world_size = int(os.environ["WORLD_SIZE"])
        if world_size > 1:
            init_process_group(self.device.has_cuda, self.config.local_rank)
            world_size = torch.distributed.get_world_size()
            self.is_main = torch.distributed.get_rank() == 0
        self.say(f"device: {self.device.reason}; {world_size} process{'es' if world_size > 1 else ''}")
        return ProcessFacts(precision, world_size, min(world_size, int(os.environ["LOCAL_SIZE"])))
