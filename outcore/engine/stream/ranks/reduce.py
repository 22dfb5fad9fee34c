"""Gradients of all ranks added up in RAM, part by part, while the next ones are computed.

When a rank's gradient of a part has arrived in its slot, the rank says where it lies. Once all have, the optimizer's
threads of each rank add up its own share of the values, in fp32 and in order of rank, round once, write the part's
home and count the squares for the norm. So the sum does not depend on timing, and equals what one rank adds up over as
many micro-batches in the same order.

Cost: each gradient is read once per rank and its sum written once: (N + 2) x 2 B of DRAM traffic per parameter and host
(a line is fetched before it is written), beside the update's 28 B.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from outcore.common.deadline import CLOSE_TIMEOUT_S
from outcore.engine.stream.gradients.accumulator import GradAccumulator
from outcore.engine.stream.gradients.arena import GradientArena
from outcore.engine.stream.gradients.download import GradientShipping
from outcore.engine.stream.ranks.host import ARRIVED, REDUCED, RankHost
from outcore.flow.parts import Part
from outcore.optim import OptimizerPool
from outcore.states import BEFORE_ALL_UNITS


class ReducedGradient:
    """A part's gradient on its way to the home that all ranks share; waited for as a `LaneTransfer` is."""

    def __init__(self, part: Part, transfer: Any, count: int) -> None:
        self.part, self.transfer, self.count = part, transfer, count
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._callbacks: list[Callable[[Any], object]] = []

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> int:
        """Until it is at home; its bytes. Raises what went wrong, TimeoutError."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"the ranks' gradients of {self.part.name} were not added up in time")
        if self.error is not None:
            raise self.error
        return self.part.layout.trainable_numel * self.part.layout.dtype.itemsize

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(fn)
                return
        fn(self)

    def end(self, error: BaseException | None = None) -> None:
        """Over, well or not."""
        with self._lock:
            self.error = error
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for fn in callbacks:
            fn(self)


class _Items(SimpleQueue["ReducedGradient | None"]):
    """Gradients in order; None ends them."""


class GradientReducer:
    """Adds up what the ranks ship, on the threads of `pool`. `homes`: shared, one for each part."""

    def __init__(self, host: RankHost, homes: GradientArena, pool: OptimizerPool) -> None:
        self._host, self._group, self._homes, self._pool = host, host.group, homes, pool
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._held: list[ReducedGradient] = []
        """Gradients whose slots have not been given back, in order."""
        self._shipped: list[ReducedGradient] = []
        """Gradients of this step, in order."""
        self._queue, summed = _Items(), _Items()
        # Two threads: the next part is added up here while other ranks are still at this one.
        self._threads = [
            threading.Thread(target=self._run, args=args, name=f"gradient-{name}", daemon=True)
            for name, args in (("sums", (self._add_up, self._queue, summed)), ("ends", (self._end, summed, None)))
        ]
        for thread in self._threads:
            thread.start()

    def begin(self) -> None:
        """Start a step. A part that is shipped in tiles takes its slot before it is submitted: those of the last step,
        which `norm` has waited for, must have been given back by then."""
        self._give_back()
        self._shipped = []

    def submit(self, part: Part, transfer: Any) -> ReducedGradient:
        """`transfer` brings this rank's gradient into its slot."""
        self._counts[part.index] += 1
        found = ReducedGradient(part, transfer, self._counts[part.index])
        self._held.append(found)
        self._shipped.append(found)
        self._give_back()
        self._queue.put(found)
        return found

    def make_room(self) -> None:
        """Wait until one slot more is free; raises what went wrong with its gradient."""
        if not self._give_back():
            assert self._held, "slots are full of gradients that nobody adds up"
            first = self._held[0]
            first.wait(self._group.timeout_s)
            self._give_back()

    def _give_back(self) -> bool:
        over = [item for item in self._held if item.done()]
        for item in over:
            self._host.slots.give_back(item.part)
        self._held = [item for item in self._held if item not in over]
        return bool(over)

    def norm_of(self, part: Part) -> float:
        """L2 norm of a part's sum that is done."""
        return self._sumsq(part) ** 0.5

    def norm(self) -> torch.Tensor:
        """fp64 scalar: L2 norm of all sums of this step, once they are there. Raises what went wrong with one."""
        total = 0.0
        for item in self._shipped:
            item.wait(self._group.timeout_s)
            total += self._sumsq(item.part)
        return torch.tensor(total, dtype=torch.float64).sqrt()

    def _sumsq(self, part: Part) -> float:
        """NaN where a value is not finite."""
        reduced = self._host.counter(REDUCED, part)
        return sum(self._group.value(reduced, rank) for rank in range(self._group.world_size))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Add up nothing more. TimeoutError when a sum is still being written."""
        self._queue.put(None)
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise TimeoutError("gradients of several ranks are still being added up")

    # --- on the threads

    def _run(self, work: Callable[[ReducedGradient], None], given: _Items, then: _Items | None) -> None:
        """Do `work` on what is `given`, and pass it on. After a failure whoever waits for what comes is told."""
        failed: BaseException | None = None
        while (item := given.get()) is not None:
            try:
                if failed is None:
                    work(item)
            except BaseException as error:  # raised again on the thread that waits
                self._group.fail(error)
                failed = error
            if failed is not None:
                item.end(failed)
            elif then is not None:
                then.put(item)
        if then is not None:
            then.put(None)

    def _add_up(self, item: ReducedGradient) -> None:
        group, host, part = self._group, self._host, item.part
        item.transfer.wait()
        own = host.slots[part]
        arrived = host.counter(ARRIVED, part)
        group.post(arrived, item.count, float(host.homes.segment.offset_of(own)))
        group.wait(arrived, item.count, f"gradient of {part.name}")
        home = self._homes[part]
        start, stop = host.place.share(len(home))
        sumsq = 0.0
        if start < stop:
            slots = [
                host.homes.segment.at(int(group.value(arrived, rank)), own.nbytes).view(own.dtype)[start:stop]
                for rank in range(group.world_size)
            ]
            priority = part.index - 3 * BEFORE_ALL_UNITS  # a gradient's slot is wanted before any state
            ticket = self._pool.submit_add_up(f"sum of {part.name}", priority, slots, home[start:stop])
            stats = self._pool.wait(ticket, group.timeout_s).stats
            assert stats is not None
            sumsq = stats.sumsq
        group.post(host.counter(REDUCED, part), item.count, sumsq)

    def _end(self, item: ReducedGradient) -> None:
        what = f"sum of the gradients of {item.part.name}"
        self._group.wait(self._host.counter(REDUCED, item.part), item.count, what)
        item.end()


class ReducedDownload:
    """The `GradientShipping` of one rank of several: what `inner` brings into this rank's slots is added up there."""

    def __init__(self, inner: GradientShipping, reducer: GradientReducer) -> None:
        self._inner, self._reducer = inner, reducer

    @property
    def device_bytes(self) -> int:
        return self._inner.device_bytes

    def begin(self) -> None:
        self._inner.begin()
        self._reducer.begin()

    def accumulator(self, unit: Part, *, only_once: bool = False) -> GradAccumulator:
        return self._inner.accumulator(unit, only_once=only_once)

    def ship(self, unit: Part, accumulator: GradAccumulator) -> ReducedGradient:
        return self._reducer.submit(unit, self._inner.ship(unit, accumulator))

    def norm_of(self, unit: Part) -> float | None:
        return self._reducer.norm_of(unit)

    def norm(self) -> torch.Tensor:
        return self._reducer.norm()
