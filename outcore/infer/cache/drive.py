"""Pages of one attention on NVMe: the third home of keys and values, for contexts that RAM does not hold either.

A page is a record of its own in a scratch store of the storage room, which verifies what comes back. A page that is
being filled lies in RAM (it changes with every token) and goes to the drive once it is full; reads of the next layer's
pages begin while this layer computes. Cost: each pass reads all pages that its tokens see.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outcore.common.quantities import KIB, round_up
from outcore.flow.weights import Scratch
from outcore.infer.cache.memory import KvMemory, MappedMemory
from outcore.infer.cache.store import KvFormat, KvShape, KvStore, as_stored, dequantized
from outcore.storage import TensorSpec, TensorStore, Transfer, aligned_bytes

SECTOR_BYTES, BLOCK_BYTES = 4 * KIB, 64 * KIB
"""Records begin at multiples of the first; larger ones at multiples of the second, what is verified as one."""
MAX_LEAVING, MAX_AHEAD = 32, 2
"""Records on their way to the drive, and reads ahead, that hold memory at a time."""


@dataclass
class _Records:
    """Records read for these pages, in their order; those of `waits` are still on their way."""

    pages: tuple[int, ...]
    bytes: torch.Tensor
    waits: list[Transfer]
    from_drive: set[int]
    """Pages whose bytes come from the drive and are still what the drive has."""

    def wait(self) -> None:
        for transfer in self.waits:
            transfer.wait()
        self.waits = []


class DriveMemory(KvMemory):
    """Memory of pages on NVMe. `open_pages`: of each attention, how many may be in RAM while they are filled."""

    def __init__(self, scratch: Scratch, open_pages: int) -> None:
        super().__init__(torch.device("cpu"))
        self._scratch, self._open_pages = scratch, open_pages
        self._count = 0

    def store(
        self, shape: KvShape, num_pages: int, page_tokens: int, dtype: torch.dtype, kv_format: KvFormat
    ) -> KvStore:
        self._count += 1
        name = f"keys and values {self._count}"
        record_bytes = DriveStore.record_bytes(shape, page_tokens, dtype, kv_format)
        files = self._scratch.store(
            name.replace(" ", "-"), [TensorSpec(name, torch.uint8, (num_pages * record_bytes,))]
        )
        return DriveStore(shape, num_pages, page_tokens, dtype, files, name, self._open_pages, kv_format)


def open_memory(
    device: torch.device, home: str, n_bytes: int, scratch: Scratch | None, open_pages: int, *, pins: bool = True
) -> KvMemory:
    """Memory for pages of keys and values that live in `home` ("vram", "ram", "nvme"). `pins`: RAM is page-locked."""
    if home == "nvme":
        assert scratch is not None
        return DriveMemory(scratch, open_pages)
    if device.type == "cpu" or home == "vram":
        return KvMemory(device)
    try:
        if not pins:
            raise MemoryError("pin_memory is false")
        return MappedMemory(n_bytes, device)
    except (MemoryError, RuntimeError) as error:
        plain = KvMemory(torch.device("cpu"))
        plain.note = f"keys and values live in RAM that the GPU cannot read by itself, which is slower: {error}"
        return plain


class DriveStore(KvStore):
    """Pages on a drive. `files`: a store with the tensor `name`. StorageError where the drive fails."""

    def __init__(
        self,
        shape: KvShape,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        files: TensorStore,
        name: str,
        open_pages: int,
        kv_format: KvFormat = "same",
    ) -> None:
        super().__init__(shape, 0, page_tokens, dtype, KvMemory(torch.device("cpu")), kv_format)
        self._files, self._name, self._most_open = files, name, max(2, open_pages)
        self._stored = dtype if kv_format == "same" else torch.int8
        self._record_bytes = self.record_bytes(shape, page_tokens, dtype, kv_format)
        self._num_pages = num_pages
        self._open: OrderedDict[int, torch.Tensor] = OrderedDict()
        """Page -> its record, least recently written first."""
        self._leaving: OrderedDict[int, tuple[torch.Tensor, Transfer]] = OrderedDict()
        self._written: set[int] = set()
        """Pages that the drive has, or will."""
        self._ahead: OrderedDict[tuple[int, ...], _Records] = OrderedDict()

    @staticmethod
    def record_bytes(shape: KvShape, page_tokens: int, dtype: torch.dtype, kv_format: KvFormat) -> int:
        """Bytes of a page on the drive."""
        n_bytes = page_tokens * shape.token_bytes(dtype, kv_format)
        return round_up(n_bytes, BLOCK_BYTES if n_bytes > BLOCK_BYTES else SECTOR_BYTES)

    @property
    def size_bytes(self) -> int:
        return self._num_pages * self._record_bytes

    @property
    def ram_bytes(self) -> int:
        """Held in RAM now: pages being filled, on their way, and read ahead."""
        return self._record_bytes * (
            len(self._open) + len(self._leaving) + sum(len(ahead.pages) for ahead in self._ahead.values())
        )

    def write(self, keys_NHD: torch.Tensor, values_NHD: torch.Tensor, slots_N: torch.Tensor) -> None:
        stored = [given.cpu() for given in as_stored(keys_NHD, values_NHD, in_8_bits=self.is_packed)]
        of_page: dict[int, list[int]] = {}
        slots = slots_N.tolist()
        for row, slot in enumerate(slots):
            of_page.setdefault(slot // self.page_tokens, []).append(row)
        for page, rows in of_page.items():
            places = [slots[row] % self.page_tokens for row in rows]
            self._drop_ahead_of(page)
            record = self._opened(page, is_new=0 in places)
            at, chosen = torch.tensor(places), torch.tensor(rows)
            for views, given in zip(self._views(record[None]), stored, strict=True):
                views[0].index_copy_(0, at, given[chosen].to(views.dtype))
            if self.page_tokens - 1 in places:
                self._send(page)
        while len(self._open) > self._most_open:  # left by answers that have ended, mostly
            self._send(next(iter(self._open)))

    def read(self, pages: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        unique, inverse = torch.unique(pages, return_inverse=True)
        records = self._records(tuple(unique.tolist()))
        keys, values, *scales = self._views(records.bytes)
        found = []
        for which, part in enumerate((keys, values)):
            rows = part[inverse].to(device)
            if scales:
                rows = dequantized(rows, scales[which][inverse].to(device), self.dtype)
            found.append(rows.flatten(pages.ndim - 1, pages.ndim))
        return found[0], found[1]

    def read_ahead(self, pages: torch.Tensor) -> None:
        """Begin to bring these pages from the drive; a `read` of the same ones will find them."""
        wanted = tuple(torch.unique(pages).tolist())
        if wanted not in self._ahead and len(self._ahead) < MAX_AHEAD:
            self._ahead[wanted] = self._begin(wanted)

    def page_contents(self, page: int) -> list[torch.Tensor]:
        return [views[0] for views in self._views(self._records((page,)).bytes)]

    def put_page(self, page: int, contents: Sequence[torch.Tensor]) -> None:
        self._drop_ahead_of(page)
        record = self._opened(page, is_new=True)
        for views, given in zip(self._views(record[None]), contents, strict=True):
            views[0].copy_(given)
        self._send(page)

    # --- records

    def _views(self, records: torch.Tensor) -> list[torch.Tensor]:
        """Keys, values (and their scales) of records [R, bytes], as tensors [R, T, H, D]."""
        shape, found, at = self.shape, [], 0
        kinds = [(shape.key_width, self._stored), (shape.value_width, self._stored)]
        if self.is_packed:
            kinds += [(1, torch.float32)] * 2
        # Scales first: 4-byte numbers must begin at multiples of 4.
        for width, dtype in sorted(kinds, key=lambda kind: -kind[1].itemsize):
            n_bytes = self.page_tokens * shape.heads * width * dtype.itemsize
            view = records[:, at : at + n_bytes].view(dtype)
            found.append(view.unflatten(1, (self.page_tokens, shape.heads, width)))
            at += n_bytes
        return [*found[2:], *found[:2]] if self.is_packed else found

    def _opened(self, page: int, *, is_new: bool) -> torch.Tensor:
        """The record of a page that is about to be written to, in RAM."""
        if page in self._open:
            self._open.move_to_end(page)
            return self._open[page]
        record = self._empty(1)[0]
        if not is_new:
            record.copy_(self._records((page,)).bytes[0])
        self._open[page] = record
        return record

    def _send(self, page: int) -> None:
        """Have a page's record written; it is at hand until it is."""
        record = self._open.pop(page)
        if page in self._leaving:
            self._leaving.pop(page)[1].wait()
        for left in [left for left, (_, transfer) in self._leaving.items() if transfer.done()]:
            self._leaving.pop(left)[1].wait()
        while len(self._leaving) >= MAX_LEAVING:
            self._leaving.popitem(last=False)[1][1].wait()
        self._leaving[page] = record, self._files.submit_write(self._name, record, page * self._record_bytes)
        self._written.add(page)

    def _records(self, pages: tuple[int, ...]) -> _Records:
        records = self._ahead.pop(pages, None) or self._begin(pages)
        records.wait()
        for row, page in enumerate(pages):
            if (at_hand := self._at_hand(page)) is not None:
                records.bytes[row].copy_(at_hand)
            elif page in self._written and page not in records.from_drive:  # it left since the reads began
                records.waits.append(self._read(records.bytes[row], page))
        records.wait()
        return records

    def _at_hand(self, page: int) -> torch.Tensor | None:
        if page in self._open:
            return self._open[page]
        return self._leaving[page][0] if page in self._leaving else None

    def _read(self, records: torch.Tensor, page: int) -> Transfer:
        return self._files.submit_read(self._name, records, page * self._record_bytes)

    def _begin(self, pages: tuple[int, ...]) -> _Records:
        """Ask the drive for those that are not at hand; neighbours on the drive come in one request."""
        records = self._empty(len(pages))
        absent = [page in self._written and self._at_hand(page) is None for page in pages]
        waits, at = [], 0
        while at < len(pages):
            end = at + 1
            if absent[at]:
                while end < len(pages) and absent[end] and pages[end] == pages[end - 1] + 1:
                    end += 1
                waits.append(self._read(records[at:end], pages[at]))
            at = end
        return _Records(pages, records, waits, {page for page, here in zip(pages, absent, strict=True) if here})

    def _drop_ahead_of(self, page: int) -> None:
        """A page is about to change: what was read of it ahead no longer holds."""
        for records in self._ahead.values():
            records.from_drive.discard(page)

    def _empty(self, count: int) -> torch.Tensor:
        return torch.from_numpy(aligned_bytes(count * self._record_bytes)).view(count, self._record_bytes)
