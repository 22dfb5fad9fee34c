"""Updates under way: which part waits for its gradient, which for its updaters, which is up to date.

`submit` returns at once: when the gradient has arrived in RAM (a callback on the lane's thread), the part goes to the
updater of each place where its states live, with its order of need as priority. A guarded part is skipped whole when
its gradient is not finite: by the norm that came down with it, or else by looking at it first. `wait` blocks until the
part's parameters may be read and is where failures come out: a failed download, transfer or update, a gradient that
was not finite in a guarded update.

Updaters, one a place: each begins a part's update where its states live, and tells when it is over. Layers that stay
on the device have theirs in `residents`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch

from outcore.common.deadline import CLOSE_TIMEOUT_S, TIMEOUT_S
from outcore.common.quantities import format_s
from outcore.engine.base import LOWER_RATE, EngineError, NonFiniteLossError
from outcore.engine.stream.gradients.arena import GradientArena
from outcore.engine.stream.ranks.host import PublishedUpdates
from outcore.engine.stream.residents import Residents
from outcore.flow.parts import Part
from outcore.flow.trace import Stalls
from outcore.optim import LARGEST_GRAD, AdamWHyper, JobBatch, MatrixUpdates, OptimizerPool
from outcore.sizing.streaming import LEAST_GAIN
from outcore.staging import LaneTransfer
from outcore.states import BEFORE_ALL_UNITS, Homes, SecondHomes, StateRing
from outcore.storage import TensorStore

MOST_UNDER_WAY = 2
"""Updates ahead of the norm that the optimizer has at once: one runs, one is next. Where gradients come faster, others
wait for the norm: they would not be over before it, and in place they take less time."""
MOST_WHOLE, LATE_WEIGHT = 0.6, 0.25
"""Updates begin ahead of the norm where so large a share of late steps clipped nothing: a mean in which a step counts
so much. Measured (H100, 1.2 B, 16,384 tokens): those that stand spare 0.07 to 0.08 s of 0.42, taken back they cost
0.09."""


@dataclass(frozen=True)
class BegunUpdate:
    """An update that has begun."""

    reason: Literal["optimizer", "nvme"]
    """Cause that a wait for this update is counted under."""
    words: str
    is_done: Callable[[], bool]
    end: Callable[[float], bool]
    """Blocks until it is over, at most so many seconds; whether it was skipped, because the gradient was not usable.
    Raises what went wrong."""
    optimizer_s: Callable[[], float] = lambda: 0.0
    """Tells seconds in which its place was busy updating, which are no wait for anything else."""


class RamUpdater:
    """States in RAM, by the CPU's optimizer. An updater's `begin` gives None where nothing of the part lives in its
    place; `guard`: the part is skipped whole when its gradient is not finite."""

    def __init__(self, homes: Homes, pool: OptimizerPool) -> None:
        self._homes, self._pool = homes, pool

    def begin(self, part: Part, grad: torch.Tensor, hyper: AdamWHyper, *, guard: bool) -> BegunUpdate | None:
        jobs = self._homes.jobs(part, grad)
        return None if jobs is None else self.hand_out(part, jobs, hyper, guard=guard)

    def hand_out(self, part: Part, jobs: JobBatch, hyper: AdamWHyper, *, guard: bool = False) -> BegunUpdate:
        """Begin these jobs of a part."""
        pool, ticket = self._pool, self._pool.submit(part.name, part.index, jobs, hyper, guard=guard)

        def end(timeout_s: float) -> bool:
            return pool.wait(ticket, timeout_s).status == "skipped"

        return BegunUpdate("optimizer", f"update of {part.name}", lambda: pool.done(ticket), end)


class MatrixUpdater:
    """Matrices of layers, by Muon."""

    def __init__(self, homes: Homes, muon: MatrixUpdates) -> None:
        self._homes, self._muon = homes, muon

    def begin(self, part: Part, grad: torch.Tensor, hyper: AdamWHyper, *, guard: bool) -> BegunUpdate | None:
        matrices = self._homes.matrices(part, grad)
        if not matrices:
            return None
        assert not guard, "layers come down whole, with their norms"
        future = self._muon.submit(matrices, hyper)

        def end(timeout_s: float) -> bool:
            if (failed := future.exception(timeout_s)) is not None:
                raise not_made(part, failed) from failed
            return False

        return BegunUpdate("optimizer", f"update of {part.name}", future.done, end)

    def close(self) -> None:
        """Start nothing more."""
        self._muon.close()


class DriveUpdater:
    """States on the drive, chunk by chunk through the ring."""

    def __init__(self, homes: Homes, ring: StateRing, pool: OptimizerPool) -> None:
        self._homes, self._pool, self.ring = homes, pool, ring
        self.looking = ThreadPoolExecutor(1, thread_name_prefix="gradient-guard")
        """Thread on which `has_usable` is asked: it waits for the optimizer."""

    def begin(self, part: Part, grad: torch.Tensor, hyper: AdamWHyper, *, guard: bool) -> BegunUpdate | None:
        flowing = self._homes.flowing(part)
        if not flowing:
            return None
        ticket, ring = self.ring.submit(part, flowing, grad, hyper), self.ring

        def end(timeout_s: float) -> bool:
            ring.wait(ticket)
            return False

        return BegunUpdate("nvme", f"states of {part.name}", ticket.done.is_set, end, ring.optimizer_time.total_s)

    def has_usable(self, part: Part, grad: torch.Tensor, hyper: AdamWHyper, timeout_s: float) -> bool:
        """Whether the part's gradient may reach the states, by a pass over it; chunks of one part must not differ."""
        pieces = [grad[chunk.start : chunk.stop] for chunk in self._homes[part].chunks]
        priority = part.index - 2 * BEFORE_ALL_UNITS
        ticket = self._pool.submit_sumsq(f"gradient of {part.name}", priority, pieces)
        stats = self._pool.wait(ticket, timeout_s).stats
        assert stats is not None
        return stats.all_finite and is_usable(stats.sumsq**0.5 * hyper.grad_scale)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Start nothing more and wait for transfers. TimeoutError when they did not end."""
        self.looking.shutdown(wait=False, cancel_futures=True)
        if not self.ring.close(timeout_s):
            raise TimeoutError("optimizer states are still being moved from or to NVMe")


class AheadUpdater:
    """Before the RAM's updater: begins updates before the step's norm is known, and takes them back."""

    def __init__(self, ram: RamUpdater, seconds: SecondHomes) -> None:
        self.seconds, self.ram = seconds, ram
        self._hold_up = False
        """Whether a step waited for updates, so that some that begin sooner are worth their RAM."""
        self._steps, self._whole = 0, 0.0
        """Steps made, and the share of late ones that clipped nothing."""
        self._begun: list[BegunUpdate] = []
        self._settled, self._waiting = set[int](), set[int]()
        """Parts whose norm is known, and those that were left to wait for it."""
        self._choosing = threading.Lock()

    @property
    def may_begin(self) -> bool:
        """Whether updates that begin before the norm is known gain: steps waited for updates, and most clip nothing."""
        return self._hold_up and self._whole >= MOST_WHOLE

    def step_ended(self, phase_s: Mapping[str, float], clipped_nothing: bool) -> None:
        """Take note of a step, with its seconds as in `StepResult`."""
        self._steps += 1
        self._whole += (clipped_nothing - self._whole) * max(LATE_WEIGHT, 1 / self._steps)
        passes_s = phase_s["forward"] + phase_s["backward"] + phase_s["optimizer"]
        self._hold_up |= phase_s["stall_optimizer"] >= LEAST_GAIN * passes_s

    def begin_step(self) -> None:
        """Count updates under way anew. Of the last step gradients may still be on their way; what was settled of them
        holds until their parts are asked for again."""
        self._begun = []

    def jobs(self, part: Part, grad: torch.Tensor) -> JobBatch | None:
        """The part's next update, before its norm is known, as it can be taken back; None where it has no second
        home."""
        jobs = self.seconds.jobs(part, grad)
        with self._choosing:
            self._settled.discard(part.index)
            self._waiting.discard(part.index)
        return jobs

    def begin(self, part: Part, jobs: JobBatch, hyper: AdamWHyper) -> BegunUpdate | None:
        """Update the part in its second home; None where the optimizer is behind, so that it waits for the norm."""
        with self._choosing:
            if part.index not in self._settled and self._is_behind():
                self._waiting.add(part.index)
                return None
        update = self.ram.hand_out(part, jobs, hyper)
        self._begun.append(update)
        return update

    def stands(self, part: Part, clipped_nothing: bool) -> bool:
        """The norm is known: whether the part's update counts, which it does then."""
        with self._choosing:
            self._settled.add(part.index)
        if not clipped_nothing or part.index in self._waiting:
            return False
        self.seconds.stand(part)
        return True

    def _is_behind(self) -> bool:
        return sum(not update.is_done() for update in self._begun) >= MOST_UNDER_WAY


def not_made(part: Part, error: BaseException) -> EngineError:
    """Make the exception for an update that failed."""
    return EngineError(
        f"the update of {part.name} could not be made: {error}. Its states are those of the step before, those of "
        "other layers may be newer: resume from the last checkpoint."
    )


def is_usable(norm: float) -> bool:
    """Whether a gradient of this norm, as the optimizer gets it, may reach the states: it is finite, and squares of its
    values are."""
    return norm <= LARGEST_GRAD


class _Pending:
    """One update between its submission and its end. `jobs`: what it is handed if it begins ahead of the norm."""

    def __init__(self, unit: Part, jobs: JobBatch | None = None) -> None:
        self.unit, self.jobs = unit, jobs
        self.handed_over = threading.Event()
        self.under_way: list[BegunUpdate] = []
        self.skipped = False
        self.error: BaseException | None = None

    @property
    def has_ended(self) -> bool:
        return self.handed_over.is_set() and all(update.is_done() for update in self.under_way)


class PartUpdates:
    """Queue of all parts' updates. Called from one thread (the lanes' callbacks apart). `drive` None: all is in RAM;
    `matrices`: where Muon updates them; `published`: where other ranks update the rest of each part. `residents` update
    their parts themselves."""

    def __init__(
        self,
        homes: Homes,
        arena: GradientArena,
        ahead: AheadUpdater,
        *,
        residents: Residents,
        matrices: MatrixUpdater | None = None,
        drive: DriveUpdater | None = None,
        published: PublishedUpdates | None = None,
        stalls: Stalls | None = None,
    ) -> None:
        self.ahead = ahead
        self._ahead: dict[int, _Pending] = {}
        """Updates of this step that may begin before its norm is known."""
        self._homes, self._arena, self.residents, self._timeout_s = homes, arena, residents, TIMEOUT_S
        self._drive, self._matrices, self._published = drive, matrices, published
        self._updaters = [place for place in (matrices, ahead.ram, drive) if place is not None]
        self._pending: dict[int, _Pending] = {}
        self._stalls = stalls or Stalls(torch.device("cpu"))

    def begin_step(self) -> None:
        """Read ahead on NVMe for a new step; what a checkpoint read of states there is about to be old."""
        self._homes.flush_states()
        self._ahead.clear()
        self.ahead.begin_step()
        if self._drive is not None:
            self._drive.ring.check()
            self._drive.ring.begin_step()

    def submit(
        self,
        unit: Part,
        gradient: LaneTransfer,
        hyper: AdamWHyper,
        *,
        guard: bool = False,
        norm_of: Callable[[Part], float | None] | None = None,
    ) -> None:
        """Update `unit` once `gradient` has arrived in its home. `norm_of`: its norm, if that is known then, which
        spares a guarded update a pass over the gradient."""
        if unit.index in self._ahead or self.residents.update(unit, hyper, guard=guard):
            return
        self._submit(_Pending(unit), gradient, hyper, guard=guard, norm_of=norm_of)

    def submit_ahead(self, unit: Part, gradient: LaneTransfer, hyper: AdamWHyper) -> None:
        """Update `unit` before the step's norm is known, if it has a second home and the optimizer keeps up. `hyper` is
        as it will be if nothing is clipped; `settle` says whether it was so."""
        if self.residents.slab(unit) is not None:
            return
        jobs = self.ahead.jobs(unit, self._arena[unit])
        if jobs is not None:
            pending = self._ahead[unit.index] = _Pending(unit, jobs)
            self._submit(pending, gradient, hyper)

    def settle(self, hyper: AdamWHyper | None, ahead: AdamWHyper | None) -> None:
        """Let updates stand that began ahead with `ahead` if `hyper` is the same, or take all of them back, once they
        have ended. The rest of the step's parts come by `submit` then."""
        for pending in list(self._ahead.values()):
            if self.ahead.stands(pending.unit, hyper == ahead):
                continue
            self._wait_for_gradient(pending)
            for update in pending.under_way:  # none: it was left to wait
                update.end(self._timeout_s)
                self.ahead.seconds.take_back(pending.unit)
            del self._pending[pending.unit.index], self._ahead[pending.unit.index]

    def _wait_for_gradient(self, pending: _Pending) -> None:
        if not pending.handed_over.wait(self._timeout_s):
            limit = format_s(self._timeout_s)
            raise TimeoutError(f"the gradient of {pending.unit.name} did not arrive in RAM within {limit}")

    def _submit(
        self,
        pending: _Pending,
        gradient: LaneTransfer,
        hyper: AdamWHyper,
        *,
        guard: bool = False,
        norm_of: Callable[[Part], float | None] | None = None,
    ) -> None:
        unit = pending.unit
        assert unit.index not in self._pending, f"{unit.name} is still being updated"
        self._pending[unit.index] = pending
        grad = self._arena[unit]
        if self._drive is not None:
            self._drive.ring.passed(unit)

        def hand_over(transfer: LaneTransfer) -> None:
            try:
                if transfer.error is not None:
                    raise transfer.error
                if pending.jobs is not None:
                    begun = self.ahead.begin(unit, pending.jobs, hyper)
                    pending.under_way = [] if begun is None else [begun]
                elif guard and norm_of is not None and (norm := norm_of(unit)) is not None:
                    self._begin_if(is_usable(norm * hyper.grad_scale), pending, grad, hyper)
                elif guard and self._drive is not None and self._homes.flowing(unit):
                    self._drive.looking.submit(self._begin_if_usable, pending, grad, hyper)
                    return
                else:
                    self._begin(pending, grad, hyper, guard=guard)
            except BaseException as error:  # raised again on the thread that waits
                pending.error = error
            pending.handed_over.set()

        gradient.add_done_callback(hand_over)
        if self._published is not None:
            self._published.watch(unit, lambda: self._has_ended_well(pending))

    def _begin(self, pending: _Pending, grad: torch.Tensor, hyper: AdamWHyper, *, guard: bool) -> None:
        for updater in self._updaters:
            update = updater.begin(pending.unit, grad, hyper, guard=guard)
            if update is not None:
                pending.under_way.append(update)

    def _begin_if(self, usable: bool, pending: _Pending, grad: torch.Tensor, hyper: AdamWHyper) -> None:
        pending.skipped = not usable
        if usable:
            self._begin(pending, grad, hyper, guard=False)

    def _begin_if_usable(self, pending: _Pending, grad: torch.Tensor, hyper: AdamWHyper) -> None:
        """On the thread that looks first: a guarded update over the part's chunks wherever they live."""
        assert self._drive is not None
        try:
            usable = self._drive.has_usable(pending.unit, grad, hyper, self._timeout_s)
            self._begin_if(usable, pending, grad, hyper)
        except BaseException as error:  # raised again on the thread that waits
            pending.error = error
        pending.handed_over.set()

    def is_done(self, unit: Part) -> bool:
        """Whether `wait` would return or raise at once."""
        pending = self._pending.get(unit.index)
        if pending is None:
            return True
        return pending.has_ended and (self._published is None or self._published.is_done(unit))

    def _has_ended_well(self, pending: _Pending) -> bool:
        """Whether it has ended; raises what went wrong."""
        if self._drive is not None:
            self._drive.ring.check()
        if not pending.has_ended:
            return False
        if pending.error is not None:
            raise pending.error
        for update in pending.under_way:
            update.end(self._timeout_s)
        return True

    def wait(self, unit: Part) -> None:
        """Wait until the unit is up to date. TimeoutError, NonFiniteLossError, or what went wrong with it."""
        if self._drive is not None:
            self._drive.ring.check()  # a write of an earlier update may have failed since
        pending = self._pending.get(unit.index)
        if pending is None:
            return
        with self._stalls.because("pcie", f"gradient of {unit.name}"):
            self._wait_for_gradient(pending)
        if pending.error is not None:
            raise not_made(unit, pending.error) from pending.error
        skipped = pending.skipped
        for update in pending.under_way:
            if skipped:
                break
            busy_s = update.optimizer_s()
            with self._stalls.because(update.reason, update.words):
                skipped = update.end(self._timeout_s)
            if busy_s := update.optimizer_s() - busy_s:
                self._stalls.add(update.reason, -busy_s)
                self._stalls.add("optimizer", busy_s)
        if skipped:
            raise NonFiniteLossError(
                f"the gradient of {unit.name} was not finite, or its square would not be. Its states were left alone, "
                "those of other layers may have been updated in the same step: resume from the last checkpoint with "
                f"gradient clipping (--max_grad_norm), under which such a step is skipped whole, or {LOWER_RATE}."
            )
        if self._published is not None:
            with self._stalls.because("optimizer", f"update of {unit.name} on other ranks"):
                self._published.wait(unit)
        del self._pending[unit.index]
        self._arena.give_back(unit)

    def make_room(self) -> None:
        """Wait until at least one unit's gradient is not needed any more; raises what went wrong with it."""
        assert not self._ahead, "gradients of updates ahead of the norm stay until it is known"
        over = [pending.unit for pending in self._pending.values() if self.is_done(pending.unit)]
        if not over:
            assert self._pending, "the arena is full of gradients that nobody updates with"
            over = [self._pending[min(self._pending)].unit]  # the first in the optimizer's order
        for unit in over:
            self.wait(unit)

    def drain(self) -> None:
        """Wait until every unit is up to date, on the drive too; the first failure is raised."""
        for pending in list(self._pending.values()):
            self.wait(pending.unit)
        if self._drive is not None:
            self._drive.ring.flush()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Start nothing more on NVMe and wait for its transfers. TimeoutError when they did not end."""
        if self._matrices is not None:
            self._matrices.close()
        if self._drive is not None:
            self._drive.close(timeout_s)


class UpdatedWeights:
    """Source of weights for flow (`WeightSource`): homes, and whether their last update is over."""

    def __init__(self, homes: Homes, updates: PartUpdates, arena: GradientArena) -> None:
        self._homes, self._updates, self._arena = homes, updates, arena

    def ram(self, unit: Part) -> torch.Tensor:
        return self._homes[unit].slab

    def stored(self, unit: Part) -> tuple[TensorStore, str] | None:
        return self._homes.weights.rest(unit)

    def cached(self, unit: Part) -> torch.Tensor | None:
        return self._arena.weights(unit)

    def is_current(self, unit: Part) -> bool:
        return self._updates.is_done(unit)

    def wait_current(self, unit: Part) -> None:
        self._updates.wait(unit)
