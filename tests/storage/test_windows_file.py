"""Unbuffered, overlapped files of Windows, by a stand-in for kernel32 that refuses what Windows refuses.

Not tried on real Windows; tests/optim/test_targets.py makes the same calls under wine."""

import ctypes
import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outcore.common import os_layer
from outcore.common.quantities import KIB, MIB
from outcore.storage import BlockFile, PosixEngine, StorageError, aligned_bytes, filesystem, windows_file
from outcore.storage.windows_file import (
    ALLOCATION_INFO,
    CREATE_ALWAYS,
    END_OF_FILE_INFO,
    ERROR_HANDLE_EOF,
    ERROR_INVALID_PARAMETER,
    ERROR_IO_PENDING,
    FLAG_NO_BUFFERING,
    FLAG_OVERLAPPED,
    INVALID_HANDLE,
    Overlapped,
)

BLOCK = 4096
DISK_FULL = 112


class FakeKernel:
    """kernel32's calls on files of this machine. `refuses`: called with each call's name, an error number or 0."""

    def __init__(self) -> None:
        self.error = threading.local()
        self.files: dict[int, tuple[int, int]] = {}
        self.results: dict[int, int] = {}
        self.events = 1 << 20
        self.moved: list[tuple[str, bool, int, int]] = []
        """(call, unbuffered, offset, bytes) of every transfer."""
        self.refuses: Callable[[str], int] = lambda name: 0

    def _fail(self, number: int) -> int:
        self.error.number = number
        return 0

    def CreateFileW(self, path: str, access: int, share: int, _: Any, how: int, flags: int, __: Any) -> int:
        assert share == 7 and flags & FLAG_OVERLAPPED
        if number := self.refuses("unbuffered" if flags & FLAG_NO_BUFFERING else "CreateFileW"):
            self._fail(number)
            return INVALID_HANDLE  # type: ignore[return-value]
        try:
            more = os.O_CREAT | os.O_TRUNC if how == CREATE_ALWAYS else 0
            handle = os.open(path, (os.O_RDWR if access & 0x40000000 else os.O_RDONLY) | more, 0o644)
        except OSError as error:
            self._fail({errno.ENOENT: 2, errno.EACCES: 5, errno.EISDIR: 5}[error.errno or 0])
            return INVALID_HANDLE  # type: ignore[return-value]
        self.files[handle] = flags, access
        return handle

    def CreateEventW(self, *_: Any) -> int:
        self.events += 1
        return self.events

    def _transfer(self, name: str, handle: int, address: int, n_bytes: int, counted: Any, over: Any) -> int:
        over = over._obj
        assert counted is None and over.event
        at = over.offset | over.offset_high << 32
        unbuffered = bool(self.files[handle][0] & FLAG_NO_BUFFERING)
        if number := self.refuses(name):
            return self._fail(number)
        if unbuffered and (at % BLOCK or n_bytes % BLOCK or address % BLOCK):
            return self._fail(ERROR_INVALID_PARAMETER)
        memory = (ctypes.c_char * n_bytes).from_address(address)
        if name == "ReadFile":
            data = os.pread(handle, n_bytes, at)
            if not data:
                return self._fail(ERROR_HANDLE_EOF)
            ctypes.memmove(memory, data, len(data))
            moved = len(data)
        else:
            moved = os.pwrite(handle, bytes(memory), at)
        self.moved.append((name, unbuffered, at, moved))
        self.results[ctypes.addressof(over)] = moved
        return self._fail(ERROR_IO_PENDING)

    def ReadFile(self, *given: Any) -> int:
        return self._transfer("ReadFile", *given)

    def WriteFile(self, *given: Any) -> int:
        return self._transfer("WriteFile", *given)

    def GetOverlappedResult(self, handle: int, over: Any, moved: Any, wait: bool) -> int:
        assert wait and isinstance(over._obj, Overlapped)
        moved._obj.value = self.results.pop(ctypes.addressof(over._obj))
        return 1

    def GetFileType(self, handle: int) -> int:
        return windows_file.FILE_TYPE_DISK

    def GetFileSizeEx(self, handle: int, size: Any) -> int:
        size._obj.value = os.fstat(handle).st_size
        return 1

    def SetFileInformationByHandle(self, handle: int, kind: int, value: Any, n_bytes: int) -> int:
        assert n_bytes == 8
        if number := self.refuses("allocate" if kind == ALLOCATION_INFO else "resize"):
            return self._fail(number)
        if kind == END_OF_FILE_INFO:
            os.ftruncate(handle, value._obj.value)
        return 1

    def FlushFileBuffers(self, handle: int) -> int:
        if not self.files[handle][1] & 0x40000000:
            return self._fail(5)
        os.fsync(handle)
        return 1

    def CloseHandle(self, handle: int) -> int:
        if self.files.pop(handle, None):
            os.close(handle)
        return 1


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    fake = FakeKernel()
    monkeypatch.setattr(os_layer, "IS_WINDOWS", True)
    monkeypatch.setattr(windows_file, "kernel32", lambda: fake)
    monkeypatch.setattr(windows_file, "last_error", lambda: fake.error.number)
    monkeypatch.setattr(filesystem, "_libc", lambda: None)
    for name in ("preadv", "pwritev", "posix_fallocate", "posix_fadvise", "statvfs"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2 * MIB, MIB, MIB))
    return fake


@pytest.mark.parametrize("offset, size", [(0, BLOCK), (0, 3 * MIB), (1, 10), (4095, 2), (5000, 100_000), (BLOCK, 1)])
def test_bytes_come_back_whatever_their_place(kernel: FakeKernel, tmp_path: Path, offset: int, size: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    with BlockFile(tmp_path / "f", "create") as file:
        file.write_from(data, offset)
        back = aligned_bytes(size)
        file.read_into(back, offset)
        assert file.direct and (np.asarray(back)[:size] == data).all()
        file.sync()
    assert (tmp_path / "f").stat().st_size == offset + size
    assert all(unbuffered for _, unbuffered, _, _ in kernel.moved) and not kernel.files


def test_offsets_beyond_4_gib_are_whole(kernel: FakeKernel, tmp_path: Path) -> None:
    at = (5 << 30) + BLOCK
    with BlockFile(tmp_path / "f", "create") as file:
        file.write_from(np.full(BLOCK, 7, np.uint8), at)
        back = np.zeros(BLOCK, np.uint8)
        file.read_into(back, at)
    assert (back == 7).all() and ("WriteFile", True, at, BLOCK) in kernel.moved


def test_a_file_that_may_only_be_read_is_read_and_closed(kernel: FakeKernel, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(256)) * 40)
    with BlockFile(tmp_path / "f") as file:
        back = np.zeros(300, np.uint8)
        file.read_into(back, 9_900)
        with pytest.raises(StorageError, match="the file ends at 10240 bytes"):
            file.read_into(np.zeros(500, np.uint8), 10_000)
        file.sync()
    assert bytes(back) == (bytes(range(256)) * 40)[9_900:10_200] and not kernel.files


def test_where_unbuffered_files_are_refused_it_goes_on_buffered_and_says_so(kernel: FakeKernel, tmp_path: Path) -> None:
    kernel.refuses = lambda name: ERROR_INVALID_PARAMETER if name == "unbuffered" else 0
    with pytest.warns(UserWarning, match="refuses unbuffered files"), BlockFile(tmp_path / "f", "create") as file:
        file.write_from(np.ones(10, np.uint8), 3)
        assert not file.direct
    assert (tmp_path / "f").read_bytes() == bytes(3) + b"\1" * 10


def test_where_only_transfers_are_refused_the_file_is_not_emptied(kernel: FakeKernel, tmp_path: Path) -> None:
    with BlockFile(tmp_path / "f", "create") as file:
        file.write_from(np.full(BLOCK, 5, np.uint8), 0)
        once = iter([ERROR_INVALID_PARAMETER])
        kernel.refuses = lambda name: next(once, 0) if name == "ReadFile" else 0
        back = aligned_bytes(BLOCK)
        with pytest.warns(UserWarning, match="refuses direct transfers"):
            file.read_into(back, 0)
        assert (np.asarray(back) == 5).all() and not file.direct
    assert not kernel.files


@pytest.mark.parametrize(
    "call, number, errno_, words",
    [
        ("WriteFile", DISK_FULL, errno.ENOSPC, "drive or its filesystem is full"),
        ("WriteFile", 1117, errno.EIO, "hardware error"),
        ("WriteFile", 19, errno.EROFS, "read-only"),
        ("WriteFile", 1167, errno.ENODEV, "the device is gone"),
    ],
)
def test_refusals_have_the_words_of_posix(
    kernel: FakeKernel, tmp_path: Path, call: str, number: int, errno_: int, words: str
) -> None:
    with BlockFile(tmp_path / "f", "create") as file:
        kernel.refuses = lambda name: number if name == call else 0
        with pytest.raises(StorageError, match=words) as refused:
            file.write_from(aligned_bytes(BLOCK), 0)
        assert refused.value.errno == errno_
        kernel.refuses = lambda name: 0


def test_a_full_drive_is_found_when_space_is_reserved(kernel: FakeKernel, tmp_path: Path) -> None:
    kernel.refuses = lambda name: DISK_FULL if name == "allocate" else 0
    with BlockFile(tmp_path / "f", "create") as file, pytest.raises(StorageError, match="free there"):
        file.preallocate(10 * MIB)
    assert (tmp_path / "f").stat().st_size == 0


def test_where_space_cannot_be_set_aside_zeros_are_written(kernel: FakeKernel, tmp_path: Path) -> None:
    kernel.refuses = lambda name: 120 if name == "allocate" else 0
    with BlockFile(tmp_path / "f", "create") as file:
        file.write_from(np.ones(100, np.uint8), 0)
        file.preallocate(3 * MIB + 5)
    assert (tmp_path / "f").read_bytes() == b"\1" * 100 + bytes(3 * MIB - 95)


def test_a_missing_file_is_said(kernel: FakeKernel, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="the path is wrong") as refused:
        BlockFile(tmp_path / "none")
    assert refused.value.errno == errno.ENOENT


def test_threads_share_one_file(kernel: FakeKernel, tmp_path: Path) -> None:
    """The engine's threads, many pieces at once, each at its own place."""
    data = np.random.default_rng(1).integers(0, 256, 2 * MIB, dtype=np.uint8)
    with BlockFile(tmp_path / "f", "create") as file, PosixEngine(num_threads=4, block_bytes=64 * KIB) as engine:
        engine.submit_write(file, 0, data).wait()
        back = aligned_bytes(2 * MIB)
        engine.submit_read(file, 0, back).wait()
        assert (np.asarray(back) == data).all()
