"""BlockFile and the kernel: direct or buffered, partial transfers, errors of the drive."""

import errno
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest

from outcore.common.quantities import KIB, MIB
from outcore.storage import BlockFile, BufferedFallbackWarning, StorageError, aligned_bytes, filesystem
from outcore.storage import descriptor as descriptor_module
from outcore.storage import posix_file as posix_module
from outcore.storage.descriptor import WriteBehind
from outcore.storage.filesystem import DirectLimits, direct_limits, filesystem_of
from tests.refused import failing, refused
from tests.storage.block_file_cases import at_address, make

# ---------------------------------------------------------------------- direct or buffered


def test_direct_io_is_used_where_the_filesystem_has_it(tmp_path: Path):
    with BlockFile(tmp_path / "data.bin", "create", 8192) as file:
        if not file.direct:
            pytest.skip(f"{filesystem_of(tmp_path)} has no direct I/O")
        import fcntl

        assert fcntl.fcntl(file._descriptor.file.fd, fcntl.F_GETFL) & os.O_DIRECT
        assert file.block_bytes in (512, 4096)


def test_refusal_at_open_falls_back_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.open

    def refuse(path: object, flags: int, mode: int = 0o777, **more: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(BufferedFallbackWarning, match="refuses O_DIRECT"):
        file = BlockFile(tmp_path / "data.bin", "create", 100)
    with file:
        assert not file.direct
        file.write_from(b"abc", 7)


@pytest.mark.parametrize("action", ["read", "write"])
def test_refusal_at_the_first_transfer_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str):
    file = BlockFile(tmp_path / "data.bin", "create", 10_000)
    if not file.direct:
        pytest.skip("no direct I/O here")
    import fcntl

    def refusing(real):  # as some network and FUSE filesystems do
        def call(fd: int, buffers: list, offset: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, buffers, offset)

        return call

    monkeypatch.setattr(os, "preadv", refusing(os.preadv))
    monkeypatch.setattr(os, "pwritev", refusing(os.pwritev))
    with file:
        data = np.arange(9000, dtype=np.uint8) if action == "write" else np.zeros(9000, dtype=np.uint8)
        with pytest.warns(BufferedFallbackWarning, match="refuses direct transfers"):
            if action == "write":
                file.write_from(data, 513)
            else:
                file.read_into(data, 513)
        assert not file.direct
        back = np.empty(9000, dtype=np.uint8)
        file.read_into(back, 513)
        assert (back == data).all()
    assert file.path.stat().st_size == 10_000


def test_the_fallback_is_said_once_per_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(posix_module, "direct_limits", lambda fd: DirectLimits(False, 4096, 4096, "test"))
    monkeypatch.setattr(descriptor_module, "__warningregistry__", {}, raising=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for number in range(3):
            BlockFile(tmp_path / f"{number}.bin", "create", 10).close()
    assert len([w for w in seen if w.category is BufferedFallbackWarning]) == 1


@pytest.mark.skipif(filesystem_of("/dev/shm")[0] != "tmpfs", reason="no tmpfs at /dev/shm")
def test_tmpfs_counts_as_buffered():
    path = Path(f"/dev/shm/outcore-test-{os.getpid()}.bin")
    try:
        with pytest.warns(BufferedFallbackWarning, match="lives in memory"):
            file = BlockFile(path, "create", 5000)
        with file:
            assert not file.direct
            file.write_from(aligned_bytes(4096), 3)
    finally:
        path.unlink(missing_ok=True)


def test_block_size_from_sysfs_where_the_kernel_does_not_tell_per_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(filesystem, "_statx_limits", lambda fd: None)
    with (tmp_path / "x").open("wb") as file:
        limits = direct_limits(file.fileno())
        assert limits.source in ("sysfs", "assumed")
        assert limits.block_bytes in (512, 4096)
        monkeypatch.setattr(filesystem, "_sysfs_block_bytes", lambda device: None)
        assert direct_limits(file.fileno()) == DirectLimits(None, 4096, 4096, "assumed")


def test_buffered_writes_leave_a_bounded_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr("outcore.storage.descriptor.drop_cached", lambda fd, at, n: dropped.append((at, n)))
    cache = WriteBehind(window_bytes=256 * KIB)
    with make(tmp_path / "data.bin", "buffered", MIB) as file:
        for at in range(0, MIB, 128 * KIB):
            cache.after_write(file._descriptor.file.fd, at, 128 * KIB)
        cache.after_read(file._descriptor.file.fd, 0, 100)
    assert dropped == [(at, 128 * KIB) for at in range(0, MIB - 256 * KIB, 128 * KIB)]


# ---------------------------------------------------------------------- what the kernel may do


def test_partial_transfers_are_continued(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(3)

    def partly(real):
        def call(fd: int, buffers: list, offset: int) -> int:
            whole = buffers[0]
            few = int(rng.integers(1, whole.nbytes + 1))
            if kind != "buffered" and few < whole.nbytes:
                few = max(4096, few - few % 4096)  # what drives do: whole blocks
            return real(fd, [whole[:few]], offset)

        return call

    monkeypatch.setattr(os, "preadv", partly(os.preadv))
    monkeypatch.setattr(os, "pwritev", partly(os.pwritev))
    data = rng.integers(0, 256, 70_001, dtype=np.uint8)
    with make(tmp_path / "data.bin", kind) as file:
        file.write_from(data, 99)
        back = at_address(70_001, 1)
        file.read_into(back, 99)
    assert (back == data).all()


@pytest.mark.parametrize("action", ["preadv", "pwritev"])
def test_a_transfer_without_progress_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str):
    with make(tmp_path / "data.bin", "direct", 8192) as file:
        monkeypatch.setattr(os, action, lambda fd, buffers, offset: 0)
        with pytest.raises(StorageError) as caught:
            if action == "preadv":
                file.read_into(aligned_bytes(4096), 0)
            else:
                file.write_from(aligned_bytes(4096), 0)
        assert (caught.value.wanted, caught.value.got) == (4096, 0)
        monkeypatch.undo()


def test_short_of_resources_is_retried_and_then_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(descriptor_module, "BUSY_SLEEP_S", 0.0)
    real, calls = os.preadv, []

    def busy(fd: int, buffers: list, offset: int) -> int:
        calls.append(offset)
        if len(calls) < 5:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return real(fd, buffers, offset)

    with make(tmp_path / "data.bin", "direct", 4096) as file:
        monkeypatch.setattr(os, "preadv", busy)
        file.read_into(bytearray(10), 0)
        assert len(calls) == 5
        calls.clear()
        monkeypatch.setattr(os, "preadv", lambda *a: (_ for _ in ()).throw(BlockingIOError(errno.EAGAIN, "x")))
        refused(StorageError, "EAGAIN", lambda: file.read_into(bytearray(10), 0))


@pytest.mark.parametrize(("number", "words"), [
    (errno.EIO, "hardware error"), (errno.ENOSPC, "full"), (errno.EDQUOT, "quota"), (errno.EFBIG, "ulimit -f"),
    (errno.EROFS, "read-only"),
])  # fmt: skip
def test_errors_of_the_drive_have_place_amount_and_words(tmp_path, monkeypatch, number, words):
    with make(tmp_path / "data.bin", "direct", 64 * KIB) as file:
        monkeypatch.setattr(os, "pwritev", failing(OSError(number, os.strerror(number))))
        with pytest.raises(StorageError, match=words) as caught:
            file.write_from(aligned_bytes(8192), 4096)
        error = caught.value
        assert (error.path, error.offset, error.wanted, error.got, error.errno) == (file.path, 4096, 8192, 0, number)
        assert errno.errorcode[number] in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        monkeypatch.undo()


def test_sync_errors_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with make(tmp_path / "data.bin", "direct", 100) as file:
        monkeypatch.setattr(os, "fsync", failing(OSError(errno.EIO, "Input/output error")))
        refused(StorageError, r"sync failed.*EIO", file.sync)
        monkeypatch.undo()
