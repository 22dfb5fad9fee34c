"""A device whose copies end later, each stream in its own order: `CopyStreams` for lanes, and a stream that computes.

A copy reads its source when it runs and not when it was queued, in two halves with other threads between, so memory
that is used again too early shows in the bytes."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from tests.simulation.threads import Simulation

LONGEST_COPY_S = 0.02


class Event:
    """The end of a copy, or of all that was queued before."""

    is_over = False

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.is_passed = False
        self.error: Exception | None = None
        self.span = (0.0, 0.0)

    def has_ended(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_passed

    def synchronize(self) -> None:
        self._simulation.block(lambda: self.is_passed)
        self.has_ended()


class Device:
    """`count` streams for copies, one beside them, and the one that computes. `errors`: copies in a thousand fail."""

    def __init__(
        self, simulation: Simulation, count: int, errors: float, pinned: Callable[[torch.Tensor], bool]
    ) -> None:
        self.simulation, self.count, self.errors, self._pinned = simulation, count, errors, pinned
        self.failed = 0
        self._compute = count + 1
        self._queues: list[deque[tuple[Callable[[], None], Event | None, Event]]] = [deque() for _ in range(count + 2)]
        self._is_busy = [False] * (count + 2)
        for number in range(count + 2):
            simulation.start(lambda number=number: self._run(number), f"stream {number}")

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued."""
        return not any(self._queues) and not any(self._is_busy)

    def _run(self, number: int) -> None:
        queue, simulation = self._queues[number], self.simulation
        while True:
            simulation.block(lambda: bool(queue))
            self._is_busy[number] = True
            work, after, event = queue.popleft()
            if after is not None:
                simulation.block(lambda after=after: after.is_passed)
            simulation.sleep(simulation.random.random() * LONGEST_COPY_S)
            try:
                work()
            except RuntimeError as error:
                event.error = error
            event.is_passed, self._is_busy[number] = True, False

    def _queue(self, number: int, work: Callable[[], None], after: Event | None = None) -> Event:
        event = Event(self.simulation)
        self._queues[number].append((work, after, event))
        self.simulation.step()
        return event

    def is_pinned(self, host: torch.Tensor) -> bool:
        return self._pinned(host)

    def copy(self, index: int, target: torch.Tensor, source: torch.Tensor, after: Any) -> Event:
        return self.copy_pieces(index, [(target, source)], after)

    def copy_pieces(self, index: int, pieces: Any, after: Any) -> Event:
        def work() -> None:
            if self.simulation.chance(self.errors / 1000):
                self.failed += 1
                raise RuntimeError("CUDA error: simulated")
            for target, source in pieces:
                half = target.numel() // 2
                target[:half].copy_(source[:half])
                self.simulation.step()
                target[half:].copy_(source[half:])

        return self._queue(index, work, after)

    def now(self) -> Event:
        return self._queue(self._compute, lambda: None)

    def hold(self, stream: Any, event: Any) -> None:
        self._queue(self._compute, lambda: None, event)

    def compute(self, work: Callable[[], None]) -> Event:
        """Have `work` done on the stream that computes."""
        return self._queue(self._compute, work)

    def ambient(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
