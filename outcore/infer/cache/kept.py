"""Full pages of prompts on a drive, so that a beginning computed once is not computed again after a restart.

A page is a record in one file: its key, the tokens before it by their key, its own tokens, a checksum, then keys and
values of all attentions. It counts only when those tokens are what was asked for, read from the record itself; a record
that is damaged or another's is forgotten, and said. All space is reserved at the start, so the budget is never
exceeded; the least recently used ends of chains go first. A list of pages lies beside the records and is replaced whole
after every commit: what a kill loses is what was kept in the last minute. Recurrent states at ends of pages are records
of a file of their own, under the names of those pages."""

from __future__ import annotations

import json
import logging
import time
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from outcore.common import make_folder, write_json
from outcore.common.quantities import KIB, MIB, format_gib, round_up
from outcore.infer.cache.prefix import PrefixIndex, is_root, key_of
from outcore.infer.cache.states import LayerStates, SequenceStates
from outcore.storage import BlockFile, StorageError, StoreInUse, Transfer, aligned_bytes, open_engine
from outcore.storage.store import lock_directories

logger = logging.getLogger(__name__)
LIST, IDENTITY, RECORDS = "pages.json", "model.json", "records.bin"
COMMIT_EVERY_S = 60.0
SECTOR_BYTES, KEY_BYTES, SUM_BYTES = 4 * KIB, 16, 4
MAX_PAGES = 1 << 14
"""Each has its line in the list: 8 GiB of a tiny model's small pages would be a million."""
MAX_UNDER_WAY, MAX_UNDER_WAY_BYTES = 8, 64 * MIB
"""Records being written, which hold memory; a single one may be larger."""
NAME_BYTES = 256
"""Bytes that name a tensor of states in its file, at most: its name, type, shape and place."""


class PrefixesDamaged(ValueError):
    """Error of kept prefixes that cannot be read; the message says why and what to do."""


class KeptPrefixes:
    """Pages of one model in `folder` / a name that `identity` gives: whatever changes keys and values must be in it.

    `page_bytes`: keys and values of all attentions; `is_chained`: a page is of use only behind the one before it, which
    has to be here too. One process at a time. ValueError, in words, for a folder that is in use or on a drive without
    room; PrefixesDamaged for one that was made and cannot be read."""

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        identity: Mapping[str, Any],
        page_tokens: int,
        page_bytes: int,
        *,
        is_chained: bool = True,
    ) -> None:
        name = key_of(b"", list(json.dumps(identity, sort_keys=True).encode())).hex()
        self.folder, self._page_tokens = folder.expanduser() / name, page_tokens
        self._head_bytes = round_up(2 * KEY_BYTES + 8 * page_tokens + SUM_BYTES, SECTOR_BYTES)
        self._record_bytes = round_up(self._head_bytes + page_bytes, SECTOR_BYTES)
        self._most, self._is_chained = min(budget_bytes // self._record_bytes, MAX_PAGES), is_chained
        self._most_under_way = max(1, min(MAX_UNDER_WAY, MAX_UNDER_WAY_BYTES // self._record_bytes))
        if not self._most:
            what = f"one page of {page_tokens} tokens" if is_chained else "the recurrent states of one prompt"
            raise ValueError(
                f"prefix_gib leaves {format_gib(budget_bytes)}, but {what} takes {format_gib(self._record_bytes)}: "
                "raise it, or lower --page_tokens."
            )
        self._index = PrefixIndex(page_tokens)
        self._free = list(range(self._most - 1, -1, -1))
        self._under_way: list[Transfer] = []
        self._committed_s, self._has_news, self.why_not = time.monotonic(), False, ""
        self.num_damaged = 0
        try:
            make_folder(self.folder)
            with suppress(OSError):  # another user's, who alone may shut it, or on a drive that knows no users
                self.folder.chmod(0o700)
            (self._lock,) = lock_directories([self.folder], exclusive=True)
            try:
                self._file = self._opened(identity)
            except BaseException:
                self._lock.release()
                raise
        except StoreInUse as error:
            raise ValueError(
                f"prefix_path: {self.folder} is in use by another process that runs this model. Give this one another "
                "folder, or leave --prefix_path out."
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            kind = PrefixesDamaged if (self.folder / IDENTITY).is_file() else ValueError
            raise kind(
                f"prefix_path: {self.folder} cannot be used ({error}). Mend the drive, or remove that folder: it holds "
                "nothing that is not computed again."
            ) from error
        self._engine = open_engine()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def size_bytes(self) -> int:
        """Reserved on the drive."""
        return self._file.size_bytes

    def has(self, parent: bytes, tokens: Sequence[int]) -> bool:
        """Whether the page with these tokens behind `parent` is kept."""
        return not self.why_not and self._index.get(parent, tokens) is not None

    def read(
        self, parent: bytes, tokens: Sequence[int], like: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[torch.Tensor]] | None:
        """Contents of a page that is kept, in tensors shaped `like` those; None where it is kept no longer, or where
        the drive's are not right, which is logged, and the page is forgotten."""
        page = self._index.get(parent, tokens)
        if page is None:  # memory made room for it by keeping another, for which the drive made room with this one
            return None
        record = self._empty()
        try:
            self._settle()
            self._engine.submit_read(self._file, page.pages[0] * self._record_bytes, record).wait()
            if not torch.equal(record[: self._head_bytes], self._head(parent, tokens, record)):
                reason = "it holds other tokens, or bytes that changed"
                raise StorageError("read of a kept page", path=self.folder, reason=reason)
        except StorageError as error:
            self.forget(parent, tokens, error)
            return None
        self._index.used(page)
        found, at = [], self._head_bytes
        for of_store in like:
            found.append([])
            for tensor in of_store:
                found[-1].append(record[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
                at += tensor.nbytes
        return found

    def forget(self, parent: bytes, tokens: Sequence[int], why: object) -> None:
        """Forget a page that cannot be used, with those behind it, and say so."""
        self.num_damaged += 1
        logger.warning("a page of a prompt on the drive is not used, and computed again: %s", why)
        self._forget_from(key_of(parent, tokens))

    def put(self, parent: bytes, tokens: Sequence[int], contents: Sequence[Sequence[torch.Tensor]]) -> None:
        """Keep a page whose parent is kept or which begins a prompt. A drive that fails is logged once; nothing is
        kept from then on."""
        if self.why_not or not self._may_follow(parent):
            return
        try:
            if not self._free:
                self._make_room(parent)
            if not self._free:
                return
            record, slot = self._empty(), self._free.pop()
            at = self._head_bytes
            for tensor in (tensor for of_store in contents for tensor in of_store):
                flat = tensor.contiguous().view(-1).view(torch.uint8)
                record[at : at + flat.numel()].copy_(flat)
                at += flat.numel()
            record[: self._head_bytes] = self._head(parent, tokens, record)
            while len(self._under_way) >= self._most_under_way:
                self._under_way.pop(0).wait()
            self._under_way.append(self._engine.submit_write(self._file, slot * self._record_bytes, record))
            self._index.add(parent, tokens, (slot,))
            self._has_news = True
            if time.monotonic() - self._committed_s > COMMIT_EVERY_S:
                self.commit()
        except OSError as error:  # StorageError is one
            self.give_up(error)

    def commit(self) -> None:
        """Make durable what was kept so far. StorageError."""
        self._committed_s = time.monotonic()
        if self._has_news:
            self._settle()
            self._file.sync()  # the records before the list that names them
            pages = [[page.parent.hex(), list(page.tokens), page.pages[0]] for page in self._index.all()]
            write_json(self.folder / LIST, {"most": self._most, "pages": pages})
            self._has_news = False

    def close(self) -> None:
        """Commit, and let the files go."""
        try:
            if not self.why_not:
                self.commit()
        except OSError as error:
            self.give_up(error)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._engine.close()
        self._file.close()
        self._lock.release()

    def give_up(self, why: object) -> None:
        """Keep nothing from now on, and find nothing."""
        if not self.why_not:
            self.why_not = str(why)
            logger.error("prompts are no longer kept on the drive: %s", why)

    # --- parts

    def _opened(self, identity: Mapping[str, Any]) -> BlockFile:
        """The file of records: the one that was kept, with its list read, or a new one where the budget is another."""
        path, size_bytes = self.folder / RECORDS, self._most * self._record_bytes
        if (self.folder / LIST).is_file():
            kept = json.loads((self.folder / LIST).read_text(encoding="utf-8"))
            if kept["most"] == self._most:
                self._read_list(kept["pages"])
                return BlockFile(path, "rw", size_bytes)
            (self.folder / LIST).unlink()
        (self.folder / IDENTITY).unlink(missing_ok=True)  # without room nothing was kept here, so nothing is damaged
        path.unlink(missing_ok=True)
        file = BlockFile(path, "create", size_bytes)
        write_json(self.folder / IDENTITY, dict(identity))
        return file

    def _read_list(self, pages: list[list[Any]]) -> None:
        """Enter the listed pages into the index, parents before those behind them."""
        waiting = [(bytes.fromhex(parent), tokens, int(slot)) for parent, tokens, slot in pages]
        while waiting:
            left = []
            for parent, tokens, slot in waiting:
                if not self._may_follow(parent):
                    left.append((parent, tokens, slot))
                else:
                    self._index.add(parent, tokens, (slot,))
            if len(left) == len(waiting):
                raise KeyError("its list names pages whose beginning is missing")
            waiting = left
        used = {page.pages[0] for page in self._index.all()}
        self._free = [slot for slot in self._free if slot not in used]

    def _may_follow(self, parent: bytes) -> bool:
        return not self._is_chained or is_root(parent) or parent in self._index

    def _make_room(self, parent: bytes) -> None:
        """Forget the least recently used end of a chain, but not of the one that is to get longer."""
        page = self._index.oldest(lambda page: page.key != parent)
        if page is not None:
            self._settle()  # two writes to one place would have no order
            self._index.remove(page)
            self._free.append(page.pages[0])

    def _forget_from(self, key: bytes) -> None:
        """Forget a page and all behind it."""
        for page in [page for page in self._index.all() if page.parent == key]:
            self._forget_from(page.key)
        for page in [page for page in self._index.all() if page.key == key]:
            self._index.remove(page)
            self._free.append(page.pages[0])
        self._has_news = True

    def _head(self, parent: bytes, tokens: Sequence[int], record: torch.Tensor) -> torch.Tensor:
        head = torch.zeros(self._head_bytes, dtype=torch.uint8)
        total = zlib.crc32(record[self._head_bytes :].numpy().data).to_bytes(SUM_BYTES, "little")
        data = parent.ljust(KEY_BYTES, b"\0") + key_of(parent, tokens) + array("q", tokens).tobytes() + total
        head[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return head

    def _settle(self) -> None:
        while self._under_way:
            self._under_way.pop(0).wait()

    def _empty(self) -> torch.Tensor:
        return torch.from_numpy(aligned_bytes(self._record_bytes))


class KeptStates:
    """Recurrent states at ends of kept pages. `state_bytes`: those of one sequence; `fresh`: gives layers that hold
    none, as the model has them. Errors are those of `KeptPrefixes`."""

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        identity: Mapping[str, Any],
        page_tokens: int,
        state_bytes: int,
        fresh: Callable[[], dict[int, LayerStates]],
    ) -> None:
        self._fresh = fresh
        num_states = sum(2 * layer.number_of_states for layer in fresh().values())
        self._most_bytes = state_bytes + NAME_BYTES * (1 + num_states)
        identity = {**identity, "states": state_bytes, "transformers": version("transformers")}  # lays states out
        record_bytes = 8 + self._most_bytes
        self.records = KeptPrefixes(folder, budget_bytes, identity, page_tokens, record_bytes, is_chained=False)

    def read(self, parent: bytes, tokens: Sequence[int], length: int) -> SequenceStates | None:
        """Get those at the end of a page, `length` tokens from the beginning; None: none are kept, or damaged."""
        if not self.records.has(parent, tokens):
            return None
        like = [torch.empty(1, dtype=torch.int64)], [torch.empty(self._most_bytes, dtype=torch.uint8)]
        found = self.records.read(parent, tokens, like)
        if found is None:
            return None
        (size,), (data,) = found
        try:
            return SequenceStates.from_bytes(data[: int(size)].numpy().tobytes(), self._fresh(), length)
        except Exception as error:  # as it was written, and another layout's: what comes of that is of many kinds
            self.records.forget(parent, tokens, f"{type(error).__name__}: {error}")
            return None

    def put(self, parent: bytes, tokens: Sequence[int], states: SequenceStates) -> None:
        """Keep those at the end of a page, unless they are."""
        if self.records.has(parent, tokens):
            return
        data = states.to_bytes()
        if len(data) > self._most_bytes:
            self.records.give_up(f"states of {len(data):,} bytes, where {self._most_bytes:,} were counted")
            return
        size = torch.tensor([len(data)])
        self.records.put(parent, tokens, [[size], [torch.frombuffer(bytearray(data), dtype=torch.uint8)]])
