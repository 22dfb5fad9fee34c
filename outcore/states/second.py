"""Second homes of states: an update that may have to be taken back writes there, and leaves the first ones alone.

With a global gradient norm no update counts before the last gradient is there. One that begins sooner, as if nothing
had to be clipped, writes the new states beside the old ones, which costs no traffic that an update in place would not;
parameters, which other parts of the engine have addresses of, are written in place, and kept as they were. When the
norm is known the second homes become the first (`stand`), or parameters are put back (`take_back`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from outcore.flow.parts import Part
from outcore.optim import JobBatch
from outcore.staging.pool import HostMemory
from outcore.states.homes import Homes


@dataclass
class _Second:
    """One part's."""

    states: list[torch.Tensor]
    """uint8, for each chunk as many bytes as it has."""
    params: torch.Tensor
    """[trainable parameters], of their type, as they were before the update."""
    jobs: JobBatch | None = None
    """The update that was handed out, until it stands or is taken back."""
    is_real: bool = False
    """Whether it was ever written to, so that its pages take RAM."""

    @property
    def size_bytes(self) -> int:
        return sum(one.nbytes for one in (*self.states, self.params))


class SecondHomes:
    """Second homes of these parts."""

    def __init__(self, homes: Homes, parts: Iterable[Part], memory: HostMemory) -> None:
        self._homes, self._seconds = homes, dict[int, _Second]()
        self.size_bytes = 0
        for part in parts:
            chunks = homes[part].chunks
            sizes = [chunk.n_bytes for chunk in chunks] + [sum(chunk.numel for chunk in chunks) * part.dtype.itemsize]
            *states, params = (
                memory.take(n_bytes, f"second home of {part.name}", pinned=False, touch=False) for n_bytes in sizes
            )
            self._seconds[part.index] = _Second(states, params.view(part.dtype))
            self.size_bytes += sum(sizes)

    @property
    def real_bytes(self) -> int:
        """RAM that they take by now."""
        return sum(second.size_bytes for second in self._seconds.values() if second.is_real)

    def jobs(self, part: Part, grad: torch.Tensor) -> JobBatch | None:
        """The part's update with `grad` as it can be taken back; None where it has no second home."""
        second = self._seconds.get(part.index)
        if second is None:
            return None
        jobs = self._homes.jobs(part, grad)
        assert jobs is not None and len(jobs) == len(second.states), "all of the part's states are in RAM"
        second.jobs = jobs.ahead(second.states, second.params)
        return second.jobs

    def stand(self, part: Part) -> None:
        """The update handed out last counts: what it writes are the states from now on."""
        home, second = self._homes[part], self._seconds[part.index]
        for number, chunk in enumerate(home.chunks):
            assert chunk.buffer is not None
            chunk.buffer, second.states[number] = second.states[number], chunk.buffer
        home.jobs, second.jobs, second.is_real = None, None, True

    def take_back(self, part: Part) -> None:
        """The update handed out last, which has ended, does not count: its parameters are what they were before."""
        second = self._seconds[part.index]
        jobs = second.jobs
        assert jobs is not None
        for job in jobs.jobs:
            if job.param is not None and job.kept is not None:
                job.param.copy_(job.kept)
        second.jobs, second.is_real = None, True
