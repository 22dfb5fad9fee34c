"""RAM where whole rows of long micro-batches live, and their way to the device and back, block by block.

A row of 131,072 tokens of 8 B takes 1 GiB wherever it is held whole: hidden states, their gradient, queries, keys and
values, attention's result. So the device has blocks of them: the next one comes up while one is worked on, and what was
made goes down behind. The host never runs more than two blocks ahead, or blocks on their way would fill the device.
Rows are [..., T, width]; a block is some tokens of all of them, or, for attention, one group of heads of all tokens."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import torch

from outcore.common.deadline import after
from outcore.flow.weights import settle
from outcore.staging import DownloadLane, LaneTransfer, UploadLane
from outcore.staging.pool import HostMemory

Lanes = tuple[UploadLane, DownloadLane]


class RowHomes:
    """Rows in `memory`. `lanes`: move them to the device and back; None: plain copies, for trials on the CPU."""

    def __init__(self, memory: HostMemory, lanes: Lanes | None = None, device: torch.device | str = "cpu") -> None:
        self._memory, self._lanes, self.device = memory, lanes, device
        self._free: list[torch.Tensor] = []

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A home in RAM; its memory is used again when nobody has this tensor any more. Old numbers may be in it."""
        n_bytes = math.prod(shape) * dtype.itemsize
        fitting = [memory for memory in self._free if memory.nbytes >= n_bytes]
        if fitting:
            memory = min(fitting, key=lambda memory: memory.nbytes)
            self._free = [one for one in self._free if one is not memory]
        else:
            if self._free:  # of shorter rows than now
                self._memory.give_back(self._free.pop())
            memory = self._memory.take(n_bytes, "whole rows")
        home = memory[:n_bytes].view(dtype).view(*shape)
        weakref.finalize(home, self._set_free, memory).atexit = False
        return home

    def down(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the device in a home of theirs."""
        with self.sending() as leaving:
            home = self.room(rows.shape, rows.dtype)
            leaving.send(rows.contiguous(), home)
        return home

    def up(self, home: torch.Tensor) -> torch.Tensor:
        """All of a home, or some tokens of it, on the device."""
        ((rows,),) = ([*found] for found in self.arriving([[home]]))
        return rows

    def arriving(self, wanted: Iterable[Sequence[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
        """What is asked for, on the device, the next while one is worked on. Each list is emptied when the next one is
        asked for; who keeps none of its tensors either lets two be on the device at a time, otherwise three."""
        left, ahead = iter(wanted), deque[tuple[list[torch.Tensor], list[LaneTransfer]]]()

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
        return Leaving(None if self._lanes is None else self._lanes[1])

    def writer(self, home: torch.Tensor, block_tokens: int) -> RowWriter:
        """For `with`, at whose end the home has all rows."""
        return RowWriter(self.sending(), home, block_tokens)

    def _fetch(self, homes: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[LaneTransfer]]:
        found = [torch.empty(home.shape, dtype=home.dtype, device=self.device) for home in homes]
        transfers: list[LaneTransfer] = []
        for home, rows in zip(homes, found, strict=True):
            for there, here in _pieces(home, rows):
                if self._lanes is None:
                    here.copy_(there)
                else:
                    transfers.append(self._lanes[0].submit_host(there, here, label="rows"))
        return found, transfers

    def _set_free(self, memory: torch.Tensor) -> None:
        self._free = sorted([*self._free, memory], key=lambda memory: memory.nbytes)


class Leaving:
    """Blocks on their way down, two at most."""

    def __init__(self, lane: DownloadLane | None) -> None:
        self._lane = lane
        self._under_way: deque[list[LaneTransfer]] = deque()

    def send(self, rows: torch.Tensor, home: torch.Tensor) -> None:
        """Contiguous rows of the device, which nobody changes any more."""
        transfers: list[LaneTransfer] = []
        for there, here in _pieces(home, rows):
            if self._lane is None:
                there.copy_(here)
            else:
                transfers.append(self._lane.submit_host(here, there, label="rows"))
        self._under_way.append(transfers)
        if len(self._under_way) > 1:
            self._wait_first()

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
    """Takes rows in the order of their tokens and sends them home block by block."""

    def __init__(self, leaving: Leaving, home: torch.Tensor, block_tokens: int) -> None:
        self._leaving, self._home, self._block_tokens = leaving, home, block_tokens
        self._block: torch.Tensor | None = None

    def put(self, tokens: slice, rows: torch.Tensor) -> None:
        """[..., tokens, width]"""
        home = self._home
        start = tokens.start // self._block_tokens * self._block_tokens
        end = min(start + self._block_tokens, home.shape[-2])
        if self._block is None:
            shape = (*home.shape[:-2], end - start, home.shape[-1])
            self._block = torch.empty(shape, dtype=home.dtype, device=rows.device)
        self._block[..., tokens.start - start : tokens.stop - start, :] = rows
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
