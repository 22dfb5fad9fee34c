"""Updates under way: which unit waits for its gradient, which for the CPU optimizer, which is up to date.

`submit` returns at once: when the gradient has arrived in RAM (a callback on the lane's thread), the unit goes to the
optimizer with its order of need as priority; its chunks on NVMe go through the ring. A guarded unit is skipped whole
when its gradient is not finite: by the norm that came down with it, or else by looking at it first. `wait` blocks until
the unit's parameters may be read and is where failures come out: a failed download, transfer or update, a gradient that
was not finite in a guarded update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from outcore.common.deadline import CLOSE_TIMEOUT_S, TIMEOUT_S
from outcore.common.quantities import format_s
from outcore.engine.base import LOWER_RATE, EngineError, NonFiniteLossError
from outcore.engine.stream.gradients.arena import GradientArena
from outcore.engine.stream.ranks.published import PublishedUpdates
from outcore.engine.stream.residents import Residents
from outcore.flow.parts import Part
from outcore.flow.trace import Stalls
from outcore.optim import LARGEST_GRAD, AdamWHyper, JobBatch, MatrixUpdates, OptimizerPool, Ticket
from outcore.sizing.residents import LEAST_GAIN
from outcore.staging import LaneTransfer
from outcore.states import BEFORE_ALL_UNITS, Homes, RingTicket, SecondHomes, StateRing
from outcore.storage import TensorStore

MOST_UNDER_WAY = 2
"""Updates ahead of the norm that the optimizer has at once: one runs, one is next. Where gradients come faster, others
wait for the norm: they would not be over before it, and in place they take less time."""
MOST_WHOLE, LATE_WEIGHT = 0.6, 0.25
"""Updates begin ahead of the norm where so large a share of late steps clipped nothing: a mean in which a step counts
so much. Measured (H100, 1.2 B, 16,384 tokens): those that stand spare 0.07 to 0.08 s of 0.42, taken back they cost
0.09."""


class _Pending:
    """One update between its submission and its end."""

    def __init__(self, unit: Part) -> None:
        self.unit = unit
        self.handed_over = threading.Event()
        self.ticket: Ticket | None = None
        self.ring_ticket: RingTicket | None = None
        self.matrices: Future[None] | None = None
        self.skipped = False
        self.error: BaseException | None = None
        self.jobs: JobBatch | None = None
        """What an update that begins ahead of the norm is handed; None: as its homes say."""
        self.norm_is_known = self.waits = False
        """Whether `settle` was here, and whether such an update was left to wait for that."""


class PartUpdates:
    """Updates of all parts. Called from one thread (the lanes' callbacks apart). `ring` None: all is in RAM;
    `published`: where other ranks update the rest of each part. `residents` update their parts themselves, `muon`
    matrices. `seconds`: parts whose updates can begin ahead of the global norm."""

    def __init__(
        self,
        homes: Homes,
        arena: GradientArena,
        pool: OptimizerPool,
        ring: StateRing | None = None,
        timeout_s: float = TIMEOUT_S,
        *,
        stalls: Stalls | None = None,
        published: PublishedUpdates | None = None,
        residents: Residents,
        muon: MatrixUpdates | None = None,
        seconds: SecondHomes,
    ) -> None:
        self.seconds = seconds
        self._hold_up = False
        """Whether a step waited for updates, so that some that begin sooner are worth their RAM."""
        self._steps, self._whole = 0, 0.0
        """Steps made, and the share of late ones that clipped nothing."""
        self._ahead: dict[int, _Pending] = {}
        """Updates of this step that may begin before its norm is known."""
        self._choosing = threading.Lock()
        self._muon = muon
        self._published, self._residents = published, residents
        self._homes, self._arena, self._pool, self._ring, self._timeout_s = homes, arena, pool, ring, timeout_s
        self._pending: dict[int, _Pending] = {}
        self._guards = ThreadPoolExecutor(1, thread_name_prefix="gradient-guard") if ring is not None else None
        self._stalls = stalls or Stalls(torch.device("cpu"))

    def begin_step(self) -> None:
        """Read ahead on NVMe for a new step; what a checkpoint read of states there is about to be old."""
        self._homes.flush_states()
        self._ahead.clear()
        if self._ring is not None:
            self._ring.check()
            self._ring.begin_step()

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
        if unit.index in self._ahead or self._residents.update(unit, hyper, guard=guard):
            return
        self._submit(_Pending(unit), gradient, hyper, guard=guard, norm_of=norm_of)

    def submit_ahead(self, unit: Part, gradient: LaneTransfer, hyper: AdamWHyper) -> None:
        """Update `unit` before the step's norm is known, if it has a second home and the optimizer keeps up. `hyper` is
        as it will be if nothing is clipped; `settle` says whether it was so."""
        if self._residents.slab(unit) is not None:
            return
        jobs = self.seconds.jobs(unit, self._arena[unit])
        if jobs is None:
            return
        pending = self._ahead[unit.index] = _Pending(unit)
        pending.jobs = jobs
        self._submit(pending, gradient, hyper)

    def settle(self, hyper: AdamWHyper | None, ahead: AdamWHyper | None) -> None:
        """Let updates stand that began ahead with `ahead` if `hyper` is the same, or take all of them back, once they
        have ended. The rest of the step's parts come by `submit` then."""
        for pending in list(self._ahead.values()):
            with self._choosing:
                pending.norm_is_known = True
            if hyper == ahead and not pending.waits:
                self.seconds.stand(pending.unit)
                continue
            if self._has_begun(pending):
                assert pending.ticket is not None
                self._pool.wait(pending.ticket, self._timeout_s)
                self.seconds.take_back(pending.unit)
            del self._pending[pending.unit.index], self._ahead[pending.unit.index]

    @property
    def may_begin_ahead(self) -> bool:
        """Whether updates that begin before the norm is known gain: steps waited for updates, and most clip nothing."""
        return self._hold_up and self._whole >= MOST_WHOLE

    def step_ended(self, phase_s: Mapping[str, float], clipped_nothing: bool) -> None:
        """Take note of a step, with its seconds as in `StepResult`."""
        self._steps += 1
        self._whole += (clipped_nothing - self._whole) * max(LATE_WEIGHT, 1 / self._steps)
        passes_s = phase_s["forward"] + phase_s["backward"] + phase_s["optimizer"]
        self._hold_up |= phase_s["stall_optimizer"] >= LEAST_GAIN * passes_s

    def _is_behind(self) -> bool:
        under_way = [one for one in list(self._ahead.values()) if one.ticket is not None]
        return sum(not self._pool.done(one.ticket) for one in under_way if one.ticket is not None) >= MOST_UNDER_WAY

    def _has_begun(self, pending: _Pending) -> bool:
        """Wait until it is known whether the update of a part whose gradient was to arrive began."""
        if not pending.handed_over.wait(self._timeout_s):
            raise TimeoutError(f"the gradient of {pending.unit.name} did not arrive within {format_s(self._timeout_s)}")
        return pending.ticket is not None

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
        if self._ring is not None:
            self._ring.passed(unit)

        def hand_over(transfer: LaneTransfer) -> None:
            try:
                if transfer.error is not None:
                    raise transfer.error
                if pending.jobs is not None:
                    with self._choosing:
                        pending.waits = not pending.norm_is_known and self._is_behind()
                    if pending.waits:
                        pending.handed_over.set()
                        return
                norm = norm_of(unit) if guard and norm_of is not None else None
                if norm is not None:
                    pending.skipped = not is_usable(norm * hyper.grad_scale)
                    if not pending.skipped:
                        self._begin(pending, grad, hyper, guard=False)
                elif guard and self._guards is not None and self._homes.flowing(unit):
                    self._guards.submit(self._begin_finite, pending, grad, hyper)
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
        unit = pending.unit
        if self._muon is not None and (matrices := self._homes.matrices(unit, grad)):
            assert not guard, "layers come down whole, with their norms"
            pending.matrices = self._muon.submit(matrices, hyper)
        if self._ring is not None and (flowing := self._homes.flowing(unit)):
            pending.ring_ticket = self._ring.submit(unit, flowing, grad, hyper)
        jobs = pending.jobs or self._homes.jobs(unit, grad)
        if jobs is not None:
            pending.ticket = self._pool.submit(unit.name, unit.index, jobs, hyper, guard=guard)

    def _begin_finite(self, pending: _Pending, grad: torch.Tensor, hyper: AdamWHyper) -> None:
        """On the guards' thread: as a guarded update, over the unit's chunks wherever they live."""
        try:
            pieces = [grad[chunk.start : chunk.stop] for chunk in self._homes[pending.unit].chunks]
            priority = pending.unit.index - 2 * BEFORE_ALL_UNITS
            ticket = self._pool.submit_sumsq(f"gradient of {pending.unit.name}", priority, pieces)
            stats = self._pool.wait(ticket, self._timeout_s).stats
            assert stats is not None
            pending.skipped = not stats.all_finite or not is_usable(stats.sumsq**0.5 * hyper.grad_scale)
            if not pending.skipped:
                self._begin(pending, grad, hyper, guard=False)
        except BaseException as error:  # raised again on the thread that waits
            pending.error = error
        pending.handed_over.set()

    def is_done(self, unit: Part) -> bool:
        """Whether `wait` would return or raise at once."""
        pending = self._pending.get(unit.index)
        if pending is None:
            return True
        return self._has_ended(pending) and (self._published is None or self._published.is_done(unit))

    def _has_ended_well(self, pending: _Pending) -> bool:
        """Do as `_has_ended`; raises what went wrong."""
        if self._ring is not None:
            self._ring.check()
        if not self._has_ended(pending):
            return False
        if pending.error is not None:
            raise pending.error
        if pending.ticket is not None:
            self._pool.wait(pending.ticket, self._timeout_s)
        if pending.matrices is not None:
            pending.matrices.result(self._timeout_s)
        return True

    def _has_ended(self, pending: _Pending) -> bool:
        if not pending.handed_over.is_set():
            return False
        if pending.ticket is not None and not self._pool.done(pending.ticket):
            return False
        if pending.matrices is not None and not pending.matrices.done():
            return False
        return pending.ring_ticket is None or pending.ring_ticket.done.is_set()

    def wait(self, unit: Part) -> None:
        """Until the unit is up to date. TimeoutError, NonFiniteLossError, or what went wrong with it."""
        if self._ring is not None:
            self._ring.check()  # a write of an earlier update may have failed since
        pending = self._pending.get(unit.index)
        if pending is None:
            return
        with self._stalls.because("pcie", f"gradient of {unit.name}"):
            arrived = pending.handed_over.wait(self._timeout_s)
        if not arrived:
            raise TimeoutError(f"the gradient of {unit.name} did not arrive in RAM within {format_s(self._timeout_s)}")
        failed = pending.error
        if failed is None and pending.matrices is not None:
            with self._stalls.because("optimizer", f"update of {unit.name}"):
                failed = pending.matrices.exception(self._timeout_s)
        if failed is not None:
            raise EngineError(
                f"the update of {unit.name} could not be made: {failed}. Its states are those of the step "
                "before, those of other layers may be newer: resume from the last checkpoint."
            ) from failed
        skipped = pending.skipped
        if pending.ticket is not None:
            with self._stalls.because("optimizer", f"update of {unit.name}"):
                skipped = self._pool.wait(pending.ticket, self._timeout_s).status == "skipped"
        if pending.ring_ticket is not None and not skipped:
            assert self._ring is not None
            busy_s = self._ring.optimizer_time.total_s()
            with self._stalls.because("nvme", f"states of {unit.name}"):
                self._ring.wait(pending.ring_ticket)
            busy_s = self._ring.optimizer_time.total_s() - busy_s
            self._stalls.add("nvme", -busy_s)
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
        """Until every unit is up to date, on the drive too; the first failure is raised."""
        for pending in list(self._pending.values()):
            self.wait(pending.unit)
        if self._ring is not None:
            self._ring.flush()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Start nothing more on NVMe and wait for its transfers. TimeoutError when they did not end."""
        if self._guards is not None:
            self._guards.shutdown(wait=False, cancel_futures=True)
        if self._muon is not None:
            self._muon.close()
        if self._ring is not None and not self._ring.close(timeout_s):
            raise TimeoutError("optimizer states are still being moved from or to NVMe")


class UpdatedWeights:
    """What flow asks (its `WeightSource`): homes, and whether their last update is over."""

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


def is_usable(norm: float) -> bool:
    """Whether a gradient of this norm, as the optimizer gets it, may reach the states: it is finite, and squares of its
    values are."""
    return norm <= LARGEST_GRAD
