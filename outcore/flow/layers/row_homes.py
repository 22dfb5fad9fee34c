"""Homes of whole rows of long micro-batches, mostly in RAM, and their way to the device and back, block by block.

A row of 131,072 tokens of an 8 B model takes 1 GiB for each tensor that holds it whole: hidden states, their gradient,
queries, keys, values, attention's result. So the device holds blocks. The next block is uploaded while one computes,
and results are downloaded behind it. The host runs at most two blocks ahead, because blocks in flight would otherwise
fill the device. Rows are [..., T, width]; a block is some tokens of all of them, or, for attention, one group of heads
of all tokens. If the device has room for one layer's rows, they live there during that layer: near rows, whose blocks
are views. Inputs of layers live in RAM in any case."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch

from outcore.common.deadline import after
from outcore.flow.weights import settle
from outcore.staging import DownloadLane, LaneTransfer, UploadLane
from outcore.staging.pool import HostMemory

Lanes = tuple[UploadLane, DownloadLane]
Coming = tuple[list[torch.Tensor], list[LaneTransfer]]
"""Rows on the device, and what must have ended before they are there."""
MOST_EXPECTED = 2
"""A layer's first block, and the next one's."""


class RowHomes:
    """Rows in `memory`. `lanes`: move them to the device and back; None: plain copies, for trials on the CPU. `near`:
    rows that pass live on the device."""

    def __init__(
        self,
        memory: HostMemory,
        lanes: Lanes | None = None,
        device: torch.device | str = "cpu",
        *,
        near: bool = False,
    ) -> None:
        self._memory, self._lanes, self.device, self._near = memory, lanes, device, near
        self._free: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        """Memory in RAM, and on the device."""
        self._near_memory: set[int] = set()
        """Addresses."""
        self._expected: dict[tuple[int, torch.Size], tuple[torch.Tensor, Coming]] = {}
        """First blocks on their way by address and shape, with their home, which is nobody else's meanwhile."""

    def room(self, shape: Sequence[int], dtype: torch.dtype, *, passes: bool = False) -> torch.Tensor:
        """A home; its memory is used again when nobody has this tensor any more. Old numbers may be in it. `passes`:
        of rows that may live on the device."""
        near, n_bytes = passes and self._near, math.prod(shape) * dtype.itemsize
        free = self._free[near]
        fitting = [memory for memory in free if memory.nbytes >= n_bytes]
        if fitting:
            memory = min(fitting, key=lambda memory: memory.nbytes)
            self._free[near] = [one for one in free if one is not memory]
        else:
            if free:  # of shorter rows than now
                self._give_back(free.pop(), near)
            memory = self._take(n_bytes, near)
        home = memory[:n_bytes].view(dtype).view(*shape)
        weakref.finalize(home, self._set_free, memory, near).atexit = False
        return home

    def room_after(self, home: torch.Tensor) -> torch.Tensor:
        """A home of the same size for rows that pass: near, or that very home, whose rows nobody needs any more."""
        return self.room(home.shape, home.dtype, passes=True) if self._near else home

    def is_near(self, rows: torch.Tensor) -> bool:
        """Whether these are rows of a home on the device."""
        return rows.untyped_storage().data_ptr() in self._near_memory

    def down(self, rows: torch.Tensor, *, passes: bool = False) -> torch.Tensor:
        """Rows of the device in a home of theirs."""
        with self.sending() as leaving:
            home = self.room(rows.shape, rows.dtype, passes=passes)
            leaving.send(rows.contiguous(), home)
        return home

    def up(self, home: torch.Tensor) -> torch.Tensor:
        """Bring a home's rows, or some tokens of them, to the device; rows that are there are returned."""
        ((rows,),) = ([*found] for found in self.arriving([[home]]))
        return rows

    def expect(self, home: torch.Tensor, tokens: int) -> None:
        """Have the first tokens of these rows come up now: they are asked for next, when the link may be busy."""
        first = home[..., :tokens, :]
        self._expected[first.data_ptr(), first.shape] = home, self._fetch([first])
        while len(self._expected) > MOST_EXPECTED:  # nobody asked for it
            self._expected.pop(next(iter(self._expected)))

    def arriving(self, wanted: Iterable[Sequence[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
        """Yield the rows asked for, on the device, while the next ones are read. Each list is emptied when the next one
        is asked for. A caller that keeps no tensor of it holds two sets on the device at a time, otherwise three."""
        left, ahead = iter(wanted), deque[Coming]()

        def fetch() -> None:
            if (homes := next(left, None)) is not None:
                ahead.append(self._fetch(homes))

        fetch()
        while ahead:
            fetch()
            rows, transfers = ahead.popleft()
            for transfer in transfers:
                transfer.wait_stream()
            yield rows
            rows.clear()
            for transfer in transfers:
                transfer.wait()

    def sending(self) -> Leaving:
        """For `with`, at whose end all that was sent has arrived."""
        return Leaving(self, None if self._lanes is None else self._lanes[1])

    def writer(self, home: torch.Tensor, block_tokens: int) -> RowWriter:
        """For `with`, at whose end the home has all rows."""
        return RowWriter(self.sending(), home, block_tokens)

    def _fetch(self, homes: Sequence[torch.Tensor]) -> Coming:
        found: list[torch.Tensor] = []
        transfers: list[LaneTransfer] = []
        for home in homes:
            if self.is_near(home):
                found.append(home)
                continue
            if (expected := self._expected.pop((home.data_ptr(), home.shape), None)) is not None:
                _, (rows, coming) = expected
                found += rows
                transfers += coming
                continue
            rows = torch.empty(home.shape, dtype=home.dtype, device=self.device)
            found.append(rows)
            for there, here in _pieces(home, rows):
                if self._lanes is None:
                    here.copy_(there)
                else:
                    # Aside: weights of a later layer may wait in line until their buffer is free.
                    transfers.append(self._lanes[0].submit_host(there, here, label="rows", aside=True))
        return found, transfers

    def _take(self, n_bytes: int, near: bool) -> torch.Tensor:
        if not near:
            return self._memory.take(n_bytes, "whole rows")
        memory = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        self._near_memory.add(memory.untyped_storage().data_ptr())
        return memory

    def _give_back(self, memory: torch.Tensor, near: bool) -> None:
        if near:
            self._near_memory.remove(memory.untyped_storage().data_ptr())
        else:
            self._memory.give_back(memory)

    def _set_free(self, memory: torch.Tensor, near: bool) -> None:
        self._free[near] = sorted([*self._free[near], memory], key=lambda memory: memory.nbytes)


class Leaving:
    """Blocks on their way home, two at most to RAM."""

    def __init__(self, homes: RowHomes, lane: DownloadLane | None) -> None:
        self._homes, self._lane = homes, lane
        self._under_way: deque[list[LaneTransfer]] = deque()

    def send(self, rows: torch.Tensor, home: torch.Tensor) -> None:
        """Contiguous rows of the device, which nobody changes any more."""
        if self.is_near(home):
            if rows.data_ptr() != home.data_ptr():  # they may have been made in place
                home.copy_(rows)
            return
        transfers: list[LaneTransfer] = []
        for there, here in _pieces(home, rows):
            if self._lane is None:
                there.copy_(here)
            else:
                transfers.append(self._lane.submit_host(here, there, label="rows"))
        self._under_way.append(transfers)
        if len(self._under_way) > 1:
            self._wait_first()

    @property
    def device(self) -> torch.device | str:
        """Blocks are on this one."""
        return self._homes.device

    def is_near(self, home: torch.Tensor) -> bool:
        """Whether this home is on the device."""
        return self._homes.is_near(home)

    def _wait_first(self) -> None:
        for transfer in self._under_way.popleft():
            transfer.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:  # what is under way must not arrive where somebody else's rows are by then
            settle([transfer for transfers in self._under_way for transfer in transfers], after(error))
            return
        while self._under_way:
            self._wait_first()


class RowWriter:
    """Takes rows in the order of their tokens and sends them home block by block; near ones tile by tile."""

    def __init__(self, leaving: Leaving, home: torch.Tensor, block_tokens: int) -> None:
        self._leaving, self._home, self._block_tokens = leaving, home, block_tokens
        self._block: torch.Tensor | None = None

    def put(self, tokens: slice, rows: torch.Tensor) -> None:
        """[..., tokens, width]"""
        with self.room(tokens) as place:
            place.copy_(rows)

    @contextmanager
    def room(self, tokens: slice) -> Iterator[torch.Tensor]:
        """For `with`, at whose end all rows of these tokens [..., tokens, width] have been filled in."""
        home = self._home
        if self._leaving.is_near(home):
            yield home[..., tokens, :]
            return
        start = tokens.start // self._block_tokens * self._block_tokens
        end = min(start + self._block_tokens, home.shape[-2])
        if self._block is None:
            shape = (*home.shape[:-2], end - start, home.shape[-1])
            self._block = torch.empty(shape, dtype=home.dtype, device=self._leaving.device)
        yield self._block[..., tokens.start - start : tokens.stop - start, :]
        if tokens.stop == end:
            self._leaving.send(self._block, home[..., start:end, :])
            self._block = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._leaving.__exit__(kind, error, trace)


def _pieces(home: torch.Tensor, rows: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of what lies in one piece at both ends."""
    if home.is_contiguous():
        return [(home, rows)]
    return zip(home.view(-1, *home.shape[-2:]), rows.view(-1, *rows.shape[-2:]), strict=True)
