"""Updaters, one a place: each begins a part's update where its states live, and tells when it is over. Layers that stay
on the device have theirs in `residents`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch

from outcore.common.deadline import CLOSE_TIMEOUT_S
from outcore.engine.base import EngineError
from outcore.flow.parts import Part
from outcore.optim import LARGEST_GRAD, AdamWHyper, JobBatch, MatrixUpdates, OptimizerPool
from outcore.sizing.streaming import LEAST_GAIN
from outcore.states import BEFORE_ALL_UNITS, Homes, SecondHomes, StateRing

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
    """What a wait for it counts as."""
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
        self.seconds, self._ram = seconds, ram
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
        update = self._ram.hand_out(part, jobs, hyper)
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
    """What is raised for an update that failed."""
    return EngineError(
        f"the update of {part.name} could not be made: {error}. Its states are those of the step before, those of "
        "other layers may be newer: resume from the last checkpoint."
    )


def is_usable(norm: float) -> bool:
    """Whether a gradient of this norm, as the optimizer gets it, may reach the states: it is finite, and squares of its
    values are."""
    return norm <= LARGEST_GRAD
