"""Window of the steps that are traced into a file: a recorder listens to the engine's parts for those steps only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from outcore.engine.base import TracePlan
from outcore.engine.stream.parts import EngineParts
from outcore.flow.trace import NO_TRACE, Slice, Traced, TraceRecorder, write_trace

logger = logging.getLogger(__name__)

LEFT_BY_A_STEP = ("optimizer", "download")


class StepTracing(Protocol):
    """Listener to what the engine tells of its steps."""

    def step_begins(self) -> None: ...

    def step_ends(self) -> None: ...

    def close(self) -> None: ...


class NoTracing:
    """No step is traced."""

    def step_begins(self) -> None:
        return

    def step_ends(self) -> None:
        return

    def close(self) -> None:
        return


class TraceWindow:
    """Steps that a recorder listens to. The file is written when the step after the last traced one begins, or at
    `close`."""

    def __init__(self, parts: EngineParts, plan: TracePlan, model: str, say: Callable[[str], None]) -> None:
        self._parts, self._plan, self._model, self._say = parts, plan, model, say
        self._steps = 0
        self._recorder: TraceRecorder | None = None
        self._begin_s = self._end_s = self._step_s = 0.0
        self._over = False

    def step_begins(self) -> None:
        if self._over:
            return
        if self._recorder is None and self._steps == self._plan.skip_steps:
            self._attach()
        elif self._recorder is not None and self._steps == self._plan.skip_steps + self._plan.num_steps:
            self._finish()
        self._step_s = time.perf_counter()

    def step_ends(self) -> None:
        if self._over:
            return
        self._steps += 1
        self._end_s = time.perf_counter()
        if self._recorder is not None:
            self._recorder.step(self._plan.first_step + self._steps - 1, self._step_s, self._end_s)

    def close(self) -> None:
        """Write what there is, also after a failure in mid-step: that is when one wants to see it."""
        if self._recorder is not None:
            if self._step_s > self._end_s:  # a step began and did not end
                self._end_s = time.perf_counter()
            self._finish()

    def _belongs(self, one: Slice) -> bool:
        """Within the traced steps, or begun by them (updates run under the next forward)."""
        return one.end_s > self._begin_s and (one.begin_s < self._end_s or one.track in LEFT_BY_A_STEP)

    def _attach(self) -> None:
        parts = self._parts
        recorder = self._recorder = TraceRecorder(parts.device)
        parts.flow.trace = parts.stalls.trace = recorder
        for lane in (parts.upload, *parts.drive_lanes):
            lane.clock.on_copy = partial(recorder.copied, "upload")
        parts.download_lane.clock.on_copy = partial(recorder.copied, "download")
        parts.optimizer.on_finished = recorder.updated
        if (drives := self._drives()) is not None:
            drives.on_finished = recorder.moved
        self._begin_s = time.perf_counter()

    def _detach(self) -> None:
        parts = self._parts
        parts.flow.trace = parts.stalls.trace = NO_TRACE
        parts.optimizer.on_finished = None
        for lane in (parts.upload, parts.download_lane, *parts.drive_lanes):
            lane.clock.on_copy = None
        if (drives := self._drives()) is not None:
            drives.on_finished = None

    def _drives(self) -> Traced | None:
        """Readers and writers of the scratch files, if there are any."""
        engine = self._parts.scratch.engine if self._parts.scratch is not None else None
        return engine if isinstance(engine, Traced) else None

    def _finish(self) -> None:
        assert self._recorder is not None
        recorder, self._recorder, self._over = self._recorder, None, True
        _ = self._parts.optimizer.num_pending  # has it tell of units that have just finished
        self._detach()
        plan = self._plan
        first = plan.first_step + plan.skip_steps
        last = plan.first_step + self._steps - 1
        words = f"step {first}" if last <= first else f"steps {first} to {last}"
        try:
            slices = [one for one in recorder.slices() if self._belongs(one)]
            about = {"what": words, "model": self._model, "device": str(self._parts.device)}
            write_trace(plan.path, slices, about)
        except (OSError, RuntimeError) as error:  # the run is worth more than its picture
            logger.error("the trace of %s could not be written to %s: %s", words, plan.path, error)
            return
        self._say(f"trace: {words} in {plan.path} (open it at ui.perfetto.dev; docs/trace.md says how to read it)")
