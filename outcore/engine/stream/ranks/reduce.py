"""Gradients of all ranks added up in RAM, part by part, while the next ones are computed.

When a rank's gradient of a part has arrived in its slot, the rank says where it lies. Once all have, the optimizer's
threads of each rank add up its own share of the values, in fp32 and in order of rank, round once, write the part's
home and count the squares for the norm. So the sum does not depend on timing, and equals what one rank adds up over as
many micro-batches in the same order. Small gradients are added up several parts at a time: a rank goes on alone
meanwhile, and LoRA's ranks wait for each other once a step.

Cost: each gradient is read once per rank and its sum written once, past the caches: (N + 1) x 2 B of DRAM traffic per
parameter and host, beside the update's 28 B.

Which rank the others wait for, step after step: seconds for the log, and a word when one rank holds up the run."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from outcore.common.deadline import CLOSE_TIMEOUT_S
from outcore.engine.stream.gradients.arena import GradientArena, gradient_bytes_of
from outcore.engine.stream.gradients.download import GradAccumulator, GradientShipping, ShippingBefore
from outcore.engine.stream.ranks.host import ARRIVED, REDUCED, RankHost
from outcore.flow.parts import Part
from outcore.optim import OptimizerPool, Ticket
from outcore.sizing.streaming import SUM_GROUP_BYTES
from outcore.staging.shared import Ranks
from outcore.states import BEFORE_ALL_UNITS


class ReducedGradient:
    """A part's gradient on its way to the home that all ranks share; waited for as a `LaneTransfer` is."""

    def __init__(self, part: Part, transfer: Any, count: int) -> None:
        self.part, self.transfer, self.count = part, transfer, count
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._callbacks: list[Callable[[Any], object]] = []

    def done(self, within_s: float = 0.0) -> bool:
        return self._done.wait(within_s)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the sum is at home; returns its bytes. Raises the error that stopped it, or TimeoutError."""
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


LOOK_S = 2e-3
"""Seconds between two looks of the waiting training thread at which rank is late."""
_TOGETHER = object()
"""In a queue: add up what has come so far."""


class _Items(SimpleQueue[Any]):
    """Gradients in order, and `_TOGETHER`; None ends them."""


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
        self._group_items: list[ReducedGradient] = []
        """Gradients that have arrived and are not added up yet."""
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
        """Wait until one more slot is free; raises the error of its gradient, if it had one."""
        if not self._give_back():
            assert self._held, "slots are full of gradients that nobody adds up"
            self._queue.put(_TOGETHER)
            with self._group.spending("slot"):
                self._wait(self._held[0])
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
        self._queue.put(_TOGETHER)
        with self._group.spending("norm"):
            for item in self._shipped:
                self._wait(item)
                total += self._sumsq(item.part)
        return torch.tensor(total, dtype=torch.float64).sqrt()

    def _wait(self, item: ReducedGradient) -> None:
        """Wait on the training thread until the sum is at home, and count which rank was late."""
        end_s = time.monotonic() + self._group.timeout_s
        while not item.done() and time.monotonic() < end_s:
            late, begin_s = self._group.late(self._host.counter(ARRIVED, item.part), item.count), time.monotonic()
            item.done(LOOK_S)
            if late is not None:
                self._group.waited_s[late] += time.monotonic() - begin_s
        item.wait(0.0)

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

    def _run(self, work: Callable[[Any], list[ReducedGradient]], given: _Items, then: _Items | None) -> None:
        """Do `work` on each item of `given`, and pass on its result. A failure is passed on to whoever waits."""
        failed: BaseException | None = None
        while (item := given.get()) is not None:
            done: list[ReducedGradient] = []
            try:
                if failed is None:
                    done = work(item)
            except BaseException as error:  # raised again on the thread that waits
                self._group.fail(error)
                failed = error
                for waiting in self._group_items:
                    waiting.end(error)
            if failed is not None and item is not _TOGETHER:
                item.end(failed)
            if then is not None:
                for one in done:
                    then.put(one)
        if then is not None:
            then.put(None)

    def _add_up(self, item: Any) -> list[ReducedGradient]:
        """Have it take part in a sum; the gradients that have now been added up."""
        together, host = self._group_items, self._host
        if item is not _TOGETHER:
            item.transfer.wait()
            offset = host.homes.segment.offset_of(host.slots[item.part])
            self._group.post(host.counter(ARRIVED, item.part), item.count, float(offset))
            together.append(item)
            if sum(gradient_bytes_of(one.part) for one in together) < SUM_GROUP_BYTES:
                return []
        for one in together:
            self._group.wait(host.counter(ARRIVED, one.part), one.count, f"gradient of {one.part.name}")
        with self._group.spending("adding up"):
            tickets = [self._submit(one.part) for one in together]
            for one, ticket in zip(together, tickets, strict=True):
                stats = None if ticket is None else self._pool.wait(ticket, self._group.timeout_s).stats
                self._group.post(host.counter(REDUCED, one.part), one.count, 0.0 if stats is None else stats.sumsq)
        self._group_items = []
        return together

    def _submit(self, part: Part) -> Ticket | None:
        """Add up this rank's share of a part whose gradients have all arrived; None if it has no share."""
        group, host, home = self._group, self._host, self._homes[part]
        start, stop = host.place.share(len(home))
        if start == stop:
            return None
        slots = [
            host.homes.segment.at(int(group.value(host.counter(ARRIVED, part), rank)), home.nbytes).view(home.dtype)
            for rank in range(group.world_size)
        ]
        priority = part.index - 3 * BEFORE_ALL_UNITS  # a gradient's slot is wanted before any state
        sources = [slot[start:stop] for slot in slots]
        return self._pool.submit_add_up(f"sum of {part.name}", priority, sources, home[start:stop])

    def _end(self, item: ReducedGradient) -> list[ReducedGradient]:
        what = f"sum of the gradients of {item.part.name}"
        self._group.wait(self._host.counter(REDUCED, item.part), item.count, what)
        item.end()
        return []


class ReducedDownload(ShippingBefore):
    """The `GradientShipping` of one rank of several: what `inner` brings into this rank's slots is added up there."""

    def __init__(self, inner: GradientShipping, reducer: GradientReducer) -> None:
        super().__init__(inner)
        self._reducer = reducer

    def begin(self) -> None:
        super().begin()
        self._reducer.begin()

    def ship(self, unit: Part, accumulator: GradAccumulator) -> ReducedGradient:
        return self._reducer.submit(unit, super().ship(unit, accumulator))

    def norm_of(self, unit: Part) -> float | None:
        return self._reducer.norm_of(unit)

    def norm(self) -> torch.Tensor:
        return self._reducer.norm()


logger = logging.getLogger(__name__)

STEPS = 10
"""Steps in a row that make a rank slow: in a single one it may have read data or met another program."""
SHARE = 0.2
"""Share of a step that this rank must have waited for the same rank."""


class SlowRank:
    """Sees every step of this rank."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._before = list(ranks.waited_s)
        self._collectives_before: dict[str, float] = {}
        self.collective_s: dict[str, float] = {}
        """Seconds of the last step in each collective: `collective_update`, ..."""
        self.waited_s: dict[str, float] = {}
        """Seconds of the last step that this rank waited for each other one: `waited_rank_1`, ..."""
        self._last, self._in_a_row = -1, 0
        self._named: set[int] = set()

    def step(self, step_s: float) -> float:
        """Seconds of this step in which this rank waited for others. Logs a rank that is slow, once."""
        waited = [now - before for now, before in zip(self._ranks.waited_s, self._before, strict=True)]
        self._before = list(self._ranks.waited_s)
        self.waited_s = {f"waited_rank_{n}": s for n, s in enumerate(waited) if n != self._ranks.rank}
        now = dict(self._ranks.collective_s)
        spent = {kind: seconds - self._collectives_before.get(kind, 0.0) for kind, seconds in now.items()}
        self.collective_s = {f"collective_{kind.replace(' ', '_')}": seconds for kind, seconds in spent.items()}
        self._collectives_before = now
        slowest = max(range(len(waited)), key=waited.__getitem__)
        is_slow = waited[slowest] > SHARE * step_s
        self._in_a_row = self._in_a_row + 1 if is_slow and slowest == self._last else int(is_slow)
        self._last = slowest
        if self._in_a_row >= STEPS and slowest not in self._named:
            self._named.add(slowest)
            logger.warning(
                "rank %d is slow: rank %d waited for it %.0f %% of each of the last %d steps, mostly in: %s. Look at "
                "its GPU's clock, temperature and link (nvidia-smi -q -d PERFORMANCE), and at what else runs there",
                slowest,
                self._ranks.rank,
                100 * waited[slowest] / step_s,
                STEPS,
                max(spent, key=spent.__getitem__, default="?"),
            )
        return sum(waited)
