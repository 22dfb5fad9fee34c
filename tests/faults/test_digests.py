"""Every block that a scratch store gives back is verified; what a drive lost, tore or flipped is named."""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.common.quantities import KIB, MIB
from outcore.optim import find_digest
from outcore.optim.digest import crc32_digest
from outcore.storage import DigestRule, StorageError, TensorSpec, TensorStore
from outcore.storage.store.digests import BLOCK_BYTES, BlockDigests
from tests.refused import refused

N = 5 * BLOCK_BYTES + 777
DIGEST = find_digest().digest


def digests(rule: DigestRule | None = None, n: int = N) -> BlockDigests:
    return BlockDigests("states of a layer", n, rule or DigestRule(DIGEST), lambda byte: (Path("/drive/file"), byte))


@pytest.mark.parametrize("digest", [DIGEST, crc32_digest])
def test_each_bit_counts(digest) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 * KIB + 5, dtype=np.uint8)
    sums = digest(data, KIB)
    assert len(sums) == 4 and len(set(sums.tolist())) == 4
    for bit in range(0, 8 * len(data), 7):
        data[bit // 8] ^= 1 << bit % 8
        assert [i for i, (a, b) in enumerate(zip(digest(data, KIB), sums)) if a != b] == [bit // 8 // KIB]
        data[bit // 8] ^= 1 << bit % 8
    assert digest(data[:0], KIB).size == 0
    assert (digest(np.zeros(8, np.uint8), KIB) != digest(np.zeros(16, np.uint8), KIB)).all()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, N), st.integers(1, 3 * BLOCK_BYTES)), max_size=7), st.integers(0, N - 1))
def test_what_was_written_whole_is_verified_whatever_came_before(writes: list, flipped: int) -> None:
    """A second write of the same ranges, then reads of them: nothing unchecked, each flipped byte found."""
    sums, drive = digests(), np.zeros(N, dtype=np.uint8)
    ranges = [(start, min(N, start + n)) for start, n in writes if start < N]
    cuts = sorted({0, N, *(edge for one in ranges for edge in one)})
    draw = np.random.default_rng(1)
    for start, stop in [*ranges, *itertools.pairwise(cuts)]:
        sums.mark(start, stop)
        drive[start:stop] = draw.integers(0, 256, stop - start, dtype=np.uint8)
        sums.written(drive[start:stop], start)
    sums.verify(drive, 0)
    for start, stop in itertools.pairwise(cuts):
        sums.verify(drive[start:stop], start)
    assert sums.unchecked_bytes == 0
    drive[flipped] ^= 16
    with pytest.raises(StorageError, match=r"states of a layer.*came back other than they were written") as caught:
        sums.verify(drive, 0)
    assert caught.value.offset is not None and caught.value.offset <= flipped


@settings(max_examples=25)
@given(st.integers(0, N - 1), st.integers(1, N), st.integers(0, N - 1), st.booleans())
def test_a_read_that_cuts_blocks_is_verified(start: int, n: int, flipped: int, again: bool) -> None:
    stop = min(N, start + n)
    data = torch.randint(0, 256, (N,), dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as folder:  # noqa: SIM117
        with TensorStore.create([folder], [TensorSpec("x", torch.uint8, (N,))], digests=DigestRule(DIGEST)) as store:
            store.submit_write("x", data).wait(60)
            if again:  # parts of blocks
                for at in range(0, N, 40000):
                    store.submit_write("x", data[at : at + 40000], at).wait(60)
            place = store.extent("x")[0]
            back = torch.empty(stop - start, dtype=torch.uint8)
            store.submit_read("x", back, start).wait(60)
            assert torch.equal(back, data[start:stop]) and store.unchecked_bytes == 0
            with open(place.path, "r+b") as file:
                file.seek(place.offset + flipped)
                file.write(bytes([int(data[flipped]) ^ 8]))
            if start <= flipped < stop:
                refused(StorageError, "came back other", lambda: store.submit_read("x", back, start).wait(60))


def test_what_was_never_written_is_zeros_and_what_is_being_written_is_not_judged() -> None:
    sums, drive = digests(), np.zeros(N, dtype=np.uint8)
    sums.verify(drive, 0)
    drive[-1] = 1
    with pytest.raises(StorageError):
        sums.verify(drive[-900:], N - 900 + 0)
        sums.verify(drive, 0)
    sums.mark(N - 777, N)
    sums.verify(drive, 0)
    assert sums.unchecked_bytes == 777


def test_a_write_that_cuts_a_block_leaves_the_rest_verified(tmp_path: Path) -> None:
    data = torch.randint(0, 256, (N,), dtype=torch.uint8)
    with TensorStore.create([tmp_path], [TensorSpec("x", torch.uint8, (N,))], digests=DigestRule(DIGEST)) as store:
        for start, stop in [(0, N), (100, 3000), (2000, BLOCK_BYTES + 5), (2 * BLOCK_BYTES - 1, N - 3), (7, 8)]:
            store.submit_write("x", data[start:stop], start).wait(60)
        back = torch.empty_like(data)
        store.submit_read("x", back).wait(60)
        assert torch.equal(back, data) and store.unchecked_bytes == 0
        place = store.extent("x")[0]
        with open(place.path, "r+b") as file:
            file.seek(place.offset + 50)
            file.write(bytes([int(data[50]) ^ 1]))
        with pytest.raises(StorageError, match="came back other"):  # the rest would be forgotten otherwise
            store.submit_write("x", data[60:70], 60).wait(60)


@pytest.mark.parametrize("how", ["lost write", "torn write", "flipped bit"])
def test_a_store_names_file_offset_and_part(tmp_path: Path, how: str) -> None:
    spec = TensorSpec("states of layers.3 from 0", torch.uint8, (9 * MIB,))
    one, two = (torch.randint(0, 256, (9 * MIB,), dtype=torch.uint8) for _ in range(2))
    with TensorStore.create([tmp_path / "a", tmp_path / "b"], [spec], digests=DigestRule(DIGEST)) as store:
        file = store.extent(spec.name)[0]
        store.submit_write(spec.name, one).wait(60)
        before = file.path.read_bytes()
        store.submit_write(spec.name, two).wait(60)
        back = torch.empty_like(two)
        store.submit_read(spec.name, back).wait(60)
        assert torch.equal(back, two) and store.unchecked_bytes == 0
        at = file.offset + 3 * BLOCK_BYTES
        data = bytearray(file.path.read_bytes())
        if how == "lost write":
            data[at : at + 4096] = before[at : at + 4096]
        elif how == "torn write":
            data[at : at + 2 * MIB] = before[at : at + 2 * MIB]
        else:
            data[at + 99] ^= 2
        with open(file.path, "r+b") as handle:
            handle.write(data)
        with pytest.raises(StorageError) as caught:
            store.submit_read(spec.name, back).wait(60)
        words = str(caught.value)
        assert caught.value.path == file.path and caught.value.offset == at
        assert "states of layers.3 from 0" in words and "smartctl" in words and "checkpoint" in words
        store.submit_write(spec.name, two).wait(60)
        store.submit_read(spec.name, back).wait(60)


@pytest.mark.parametrize("start, stop", [(BLOCK_BYTES, 2 * BLOCK_BYTES), (BLOCK_BYTES + 8 * KIB, 2 * BLOCK_BYTES)])
def test_a_neighbour_written_after_a_read_began_says_nothing_of_the_bytes_read(start: int, stop: int) -> None:
    """A whole block and a part of one; what nobody wrote since is judged as ever."""
    sums, drive = digests(), np.zeros(N, dtype=np.uint8)
    for at, to in ((0, start), (start, stop)):
        sums.mark(at, to)
        sums.written(drive[at:to], at)
    before, read = sums.seen(0, stop), drive[:stop].copy()
    drive[start:stop] = 7
    sums.mark(start, stop)
    sums.written(drive[start:stop], start)
    sums.verify(read, 0, before)
    assert sums.unchecked_bytes == stop - start
    read[100] ^= 1
    refused(StorageError, "came back other", lambda: sums.verify(read, 0, before))
    refused(StorageError, "came back other", lambda: sums.verify(np.zeros(stop, dtype=np.uint8), 0))
