"""Updates under way: which unit waits for its gradient, which for the CPU optimizer, which is up to date.

`submit` returns at once: when the gradient has arrived in RAM (a callback on the lane's thread), the unit goes to the
optimizer with its order of need as priority. `wait` blocks until its parameters may be read and is where failures come
out: a failed download, a failed update, a gradient that was not finite in a guarded update.
"""

from __future__ import annotations

import threading

import torch

from outcore.engine.base import EngineError, NonFiniteLossError
from outcore.engine.stream.homes import Homes
from outcore.engine.stream.stalls import Stalls
from outcore.engine.stream.units import Unit
from outcore.optim import AdamWHyper, OptimizerPool, Ticket
from outcore.staging import LaneTransfer
from outcore.units import format_s

TIMEOUT_S = 600.0


class _Pending:
    """One update between its submission and its end."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.handed_over = threading.Event()
        self.ticket: Ticket | None = None
        self.error: BaseException | None = None


class UnitUpdates:
    """See the module docstring. Called from one thread (the lanes' callbacks apart)."""

    def __init__(
        self, homes: Homes, pool: OptimizerPool, timeout_s: float = TIMEOUT_S, *, stalls: Stalls | None = None
    ) -> None:
        self._homes, self._pool, self._timeout_s = homes, pool, timeout_s
        self._stalls = stalls or Stalls(torch.device("cpu"))
        self._pending: dict[int, _Pending] = {}

    def submit(self, unit: Unit, gradient: LaneTransfer, hyper: AdamWHyper, *, guard: bool = False) -> None:
        """Update `unit` once `gradient` has arrived in its home."""
        assert unit.index not in self._pending, f"{unit.name} is still being updated"
        pending = self._pending[unit.index] = _Pending(unit)

        def hand_over(transfer: LaneTransfer) -> None:
            try:
                if transfer.error is not None:
                    raise transfer.error
                jobs = self._homes[unit].jobs
                assert jobs is not None
                pending.ticket = self._pool.submit(unit.name, unit.index, jobs, hyper, guard=guard)
            except BaseException as error:  # raised again on the thread that waits
                pending.error = error
            pending.handed_over.set()

        gradient.add_done_callback(hand_over)

    def is_done(self, unit: Unit) -> bool:
        """Whether `wait` would return or raise at once."""
        pending = self._pending.get(unit.index)
        if pending is None:
            return True
        if not pending.handed_over.is_set():
            return False
        return pending.ticket is None or self._pool.done(pending.ticket)

    def wait(self, unit: Unit) -> None:
        """Until the unit is up to date. TimeoutError, NonFiniteLossError, or what went wrong with it."""
        pending = self._pending.get(unit.index)
        if pending is None:
            return
        with self._stalls.because("pcie", f"gradient of {unit.name}"):
            arrived = pending.handed_over.wait(self._timeout_s)
        if not arrived:
            raise TimeoutError(f"the gradient of {unit.name} did not arrive in RAM within {format_s(self._timeout_s)}")
        if pending.error is not None:
            raise EngineError(
                f"the update of {unit.name} could not be made: {pending.error}. Its states are those of the step "
                "before, those of other layers may be newer: resume from the last checkpoint."
            ) from pending.error
        assert pending.ticket is not None
        with self._stalls.because("optimizer", f"update of {unit.name}"):
            result = self._pool.wait(pending.ticket, self._timeout_s)
        if result.status == "skipped":
            raise NonFiniteLossError(
                f"the gradient of {unit.name} was not finite. Its states were left alone, those of other layers may "
                "have been updated in the same step: resume from the last checkpoint with a lower --learning_rate, or "
                "with gradient clipping, under which such a step is skipped whole."
            )
        del self._pending[unit.index]

    def drain(self) -> None:
        """Until every unit is up to date; the first failure is raised."""
        for pending in list(self._pending.values()):
            self.wait(pending.unit)
