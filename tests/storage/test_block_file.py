"""BlockFile against a bytearray, aligned or not, direct or buffered; sizes, ends and refusals."""

import errno
import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.common.quantities import MIB
from outcore.storage import BlockFile, StorageError, aligned_bytes
from tests.refused import failing, refused
from tests.storage.block_file_cases import at_address, make

FILE_BYTES = 20_011  # no multiple of anything


operation = st.tuples(
    st.sampled_from(["read", "write", "sync"]),
    st.one_of(st.integers(0, FILE_BYTES), st.integers(0, 4).map(lambda block: block * 4096)),
    st.one_of(st.integers(0, 9000), st.sampled_from([512, 4096, 8192])), st.sampled_from([0, 1, 8, 512, 4095]),
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(operation, max_size=25), fill=st.integers(1, 255))
def test_any_mix_of_unaligned_transfers_equals_a_bytearray(tmp_path: Path, kind: str, operations: list, fill: int):
    path = tmp_path / "data.bin"
    model = bytearray(FILE_BYTES)
    with make(path, kind, FILE_BYTES) as file:
        for number, (action, offset, n_bytes, shift) in enumerate(operations):
            if action == "write":
                buffer = at_address(n_bytes, shift)
                buffer[:] = (np.arange(n_bytes) * fill + number) % 251
                file.write_from(buffer, offset)
                if n_bytes and offset + n_bytes > len(model):
                    model.extend(bytes(offset + n_bytes - len(model)))
                model[offset : offset + n_bytes] = buffer.tobytes()
            elif action == "read":
                n_bytes = max(0, min(n_bytes, len(model) - offset))
                buffer = at_address(n_bytes, shift)
                file.read_into(buffer, offset)
                assert buffer.tobytes() == model[offset : offset + n_bytes]
            else:
                file.sync()
                assert path.stat().st_size == len(model)
        assert file.size_bytes == len(model)
    assert path.read_bytes() == model


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.sets(st.integers(1, FILE_BYTES - 1), min_size=20, max_size=120), seed=st.integers(0, 2**31))
def test_concurrent_writers_of_one_block_lose_nothing(tmp_path: Path, kind: str, cuts: set, seed: int):
    edges = [0, *sorted(cuts), FILE_BYTES]
    ranges = list(itertools.pairwise(edges))
    np.random.default_rng(seed).shuffle(ranges)
    data = np.random.default_rng(seed).integers(0, 256, FILE_BYTES, dtype=np.uint8)
    failures: list[BaseException] = []

    def write(mine: list) -> None:
        try:
            for start, stop in mine:
                file.write_from(data[start:stop], start)
        except BaseException as error:
            failures.append(error)

    with make(tmp_path / "data.bin", kind, FILE_BYTES) as file:
        threads = [threading.Thread(target=write, args=(ranges[index::4],)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures
    assert (tmp_path / "data.bin").read_bytes() == data.tobytes()


def test_transfers_larger_than_one_bounce_buffer(tmp_path: Path, kind: str):
    n_bytes = 3 * MIB + 77
    source, target = at_address(n_bytes, 3), at_address(n_bytes, 5)
    source[:] = np.random.default_rng(0).integers(0, 256, n_bytes, dtype=np.uint8)
    with make(tmp_path / "data.bin", kind) as file:
        file.write_from(source, 1001)
        file.read_into(target, 1001)
        assert (source == target).all()
        assert file.size_bytes == 1001 + n_bytes


def test_buffers_of_every_sort(tmp_path: Path):
    with make(tmp_path / "data.bin", "direct") as file:
        file.write_from(b"12345678", 0)
        file.write_from(torch.arange(4, dtype=torch.bfloat16), 8)
        file.write_from(memoryview(bytearray(b"abcd")), 16)
        file.write_from(np.float32(1.5).reshape(1), 20)
        file.write_from(torch.tensor(7, dtype=torch.int64), 24)
        file.write_from(b"", 0)
        file.read_into(torch.empty(0), 1000)
        numbers = torch.empty(4, dtype=torch.bfloat16)
        file.read_into(numbers, 8)
        assert numbers.tolist() == [0, 1, 2, 3]
        text = bytearray(8)
        file.read_into(text, 0)
        assert text == b"12345678"
        grid = torch.zeros(2, 2, dtype=torch.bfloat16)
        file.read_into(grid, 8)
        assert grid.tolist() == [[0, 1], [2, 3]]
    assert (tmp_path / "data.bin").stat().st_size == 32


def test_bad_arguments_are_refused_before_anything_moves(tmp_path: Path):
    with make(tmp_path / "data.bin", "direct", 4096) as file:
        refused(ValueError, "read-only", lambda: file.read_into(b"12", 0))
        refused(ValueError, "not contiguous", lambda: file.write_from(torch.zeros(8, 8).t()[1:, :3], 0))
        refused(ValueError, "not contiguous", lambda: file.write_from(np.zeros((8, 8))[:, ::2], 0))
        refused(ValueError, "buffer protocol", lambda: file.write_from([1, 2], 0))
        refused(ValueError, "non-negative", lambda: file.write_from(b"1", -1))
        refused(ValueError, "moves host memory only", lambda: file.write_from(torch.empty(8, device="meta"), 0))
    refused(ValueError, "mode must be", lambda: BlockFile(tmp_path / "data.bin", "w"))  # type: ignore[arg-type]
    refused(ValueError, "negative", lambda: BlockFile(tmp_path / "data.bin", "create", -1))


def test_reading_past_the_end_says_how_much_there_was(tmp_path: Path, kind: str):
    with make(tmp_path / "data.bin", kind, 1000) as file:
        with pytest.raises(StorageError) as caught:
            file.read_into(bytearray(100), 950)
        assert (caught.value.path, caught.value.offset) == (file.path, 950)
        assert (caught.value.wanted, caught.value.got, caught.value.errno) == (100, 50, None)
        assert "the file ends at 1000 bytes" in str(caught.value)
        with pytest.raises(StorageError):
            file.read_into(bytearray(1), 2000)


def test_padding_of_the_last_block_is_never_readable(tmp_path: Path, kind: str):
    with make(tmp_path / "data.bin", kind) as file:
        file.write_from(b"x" * 700, 0)
        refused(StorageError, "ends at 700", lambda: file.read_into(bytearray(10), 695))


def test_sync_during_a_write_of_the_last_block_leaves_the_exact_size(tmp_path, kind, monkeypatch):
    with make(tmp_path / "data.bin", kind) as file:
        file.write_from(b"x" * 1000, 0)  # padded on the drive in direct mode
        real = os.pwritev

        def syncing(fd: int, buffers: list, offset: int) -> int:
            monkeypatch.setattr(os, "pwritev", real)
            file.sync()
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", syncing)
        file.write_from(b"y" * 10, 990)
        assert os.pwritev is real
    assert (tmp_path / "data.bin").read_bytes() == b"x" * 990 + b"y" * 10


def test_a_file_that_another_process_made_longer_can_be_read(tmp_path: Path, kind: str):
    path = tmp_path / "data.bin"
    path.write_bytes(b"a" * 100)
    with make(path, kind, mode="r") as file:
        with path.open("ab") as other:
            other.write(b"b" * 100)
        text = bytearray(120)
        file.read_into(text, 50)
        assert text == b"a" * 50 + b"b" * 70


def test_a_file_truncated_under_us_is_an_error_on_read_and_on_sync(tmp_path: Path, kind: str):
    with make(tmp_path / "data.bin", kind, 3 * MIB) as file:
        os.truncate(file.path, MIB + 100)
        with pytest.raises(StorageError, match="truncated while in use") as caught:
            file.read_into(aligned_bytes(2 * MIB), 0)
        assert caught.value.wanted == 2 * MIB
        assert MIB <= caught.value.got <= MIB + 100  # type: ignore[operator]
        with pytest.raises(StorageError, match="truncated while in use"):
            file.read_into(aligned_bytes(2 * MIB)[1 : MIB + 400], 77)
        for left_bytes, got in ((305, 5), (300, 0), (100, 0)):  # the end lies in the block that is bounced
            os.truncate(file.path, left_bytes)
            with pytest.raises(StorageError, match="truncated while in use") as caught:
                file.read_into(bytearray(10), 300)
            assert (caught.value.wanted, caught.value.got) == (10, got)
        if file.direct:  # what else is in the block is read first
            refused(StorageError, "truncated while in use", lambda: file.write_from(b"some", 300))
        refused(StorageError, "truncated while in use", file.sync)


def test_open_refusals_have_words(tmp_path: Path):
    with pytest.raises(StorageError, match=r"ENOENT.*path is wrong") as caught:
        BlockFile(tmp_path / "missing.bin")
    assert caught.value.errno == errno.ENOENT
    refused(StorageError, r"not a regular file|EISDIR", lambda: BlockFile(tmp_path))
    refused(StorageError, "EISDIR", lambda: BlockFile(tmp_path, "rw"))
    (tmp_path / "short.bin").write_bytes(b"12")
    refused(StorageError, "2 bytes where 3 were expected", lambda: BlockFile(tmp_path / "short.bin", "r", 3))
    with BlockFile(tmp_path / "short.bin", "r", 2) as file:
        refused(StorageError, "read-only", lambda: file.write_from(b"1", 0))
        refused(StorageError, "read-only", lambda: file.preallocate(100))


def test_a_closed_file_refuses_and_closing_twice_is_harmless(tmp_path: Path):
    file = make(tmp_path / "data.bin", "direct", 4096)
    seen: list[int] = []
    file.add_close_callback(lambda: seen.append(os.fstat(file._descriptor.file.fd).st_size))
    file.close()
    file.close()
    assert file.closed and seen == [4096], "a callback runs once, before the file is closed"
    assert "closed" in repr(file)
    for call in (lambda: file.read_into(bytearray(1), 0), lambda: file.write_from(b"1", 0), file.sync):
        refused(StorageError, "the file is closed", call)


def test_preallocated_space_is_really_reserved(tmp_path: Path, kind: str):
    with make(tmp_path / "data.bin", kind, MIB) as file:
        assert file.path.stat().st_blocks * 512 >= MIB
        file.write_from(b"x", 5)
        file.preallocate(2 * MIB + 3)
        assert file.size_bytes == 2 * MIB + 3
        file.preallocate(10)  # never shrinks
        assert file.size_bytes == 2 * MIB + 3
        one = bytearray(1)
        file.read_into(one, 5)
        assert one == b"x"


def test_where_space_cannot_be_reserved_zeros_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "posix_fallocate", failing(OSError(errno.EOPNOTSUPP, "no")))
    with make(tmp_path / "data.bin", "direct", 2 * MIB + 5) as file:
        assert file.path.stat().st_blocks * 512 >= 2 * MIB
