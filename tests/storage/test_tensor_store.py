"""TensorStore: layouts, sub-ranges, and every refusal of arguments with its reason."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outcore.common.quantities import KIB
from outcore.optim.digest import crc32_digest
from outcore.storage import DigestRule, PosixEngine, StorageError, TensorSpec, TensorStore
from outcore.storage.store.files import DATA_NAME, StripeLayout
from tests.refused import failing, refused
from tests.storage.store_cases import SPECS, WAIT_S, assert_holds, read_back, values, write_all


def test_tensors_come_back(paths: list[Path], engine: PosixEngine):
    tensors = values()
    with TensorStore.create(paths, SPECS, engine, stripe_bytes=64 * KIB) as store:
        assert store.names == tuple(tensors)
        assert "scale" in store and "x" not in store
        assert store.spec("moments") == SPECS[3]
        assert torch.equal(read_back(store, "moments"), torch.zeros(600_001))  # new stores hold zeros
        write_all(store, tensors)
        assert_holds(store, tensors)
        assert store.total_bytes == sum((path / DATA_NAME).stat().st_size for path in paths)
        if len(paths) == 3:
            assert len({extent.path for extent in store.extent("moments")}) == 3
        store.delete()
    assert [list(path.iterdir()) for path in paths] == [[] for _ in paths]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(steps=[("write", 7, 0)], drives=1, verified=True)  # nothing is written, and all stays checked
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["write", "read"]), st.integers(0, 2_999_999), st.integers(0, 1_500_000)),
        max_size=8,
    ),
    drives=st.integers(1, 3), verified=st.booleans(),
)  # fmt: skip
def test_any_mix_of_sub_range_reads_and_writes_equals_a_tensor(tmp_path_factory, engine, steps, drives, verified):
    base = tmp_path_factory.mktemp("store")
    paths = [base / str(number) for number in range(drives)]
    model = torch.zeros(3_000_000, dtype=torch.uint8)
    specs = [TensorSpec("before", torch.uint8, (5,)), TensorSpec("x", torch.uint8, (3_000_000,))]
    digests = DigestRule(crc32_digest) if verified else None
    store = TensorStore.create(paths, specs, engine, stripe_bytes=128 * KIB, digests=digests)
    for number, (action, start, n_bytes) in enumerate(steps):
        stop = min(start + n_bytes, 3_000_000)
        if action == "write":
            model[start:stop] = torch.arange(stop - start).mul_(7).add_(number).remainder_(251)
            store.submit_write("x", model[start:stop].clone(), start).wait(WAIT_S)
        else:
            back = torch.empty(stop - start, dtype=torch.uint8)
            store.submit_read("x", back, start).wait(WAIT_S)
            assert torch.equal(back, model[start:stop])
    assert torch.equal(read_back(store, "x"), model) and not store.unchecked_bytes
    store.delete()


@given(drives=st.integers(1, 4), start=st.integers(0, 500), n_bytes=st.integers(0, 500))
def test_stripes_are_a_bijection(drives: int, start: int, n_bytes: int):
    layout = StripeLayout(drives, 16)
    seen: dict[tuple[int, int], int] = {}
    place = 0
    for byte in range(1000):
        ((file, offset, _),) = layout.pieces(byte, 1)
        assert (file, offset) not in seen
        seen[file, offset] = byte
        assert offset < layout.file_sizes(1000)[file]
    for file, offset, length in layout.pieces(start, n_bytes):
        assert [seen[file, offset + inside] for inside in range(length)] == list(
            range(start + place, start + place + length)
        )
        place += length
    assert place == n_bytes


# ---------------------------------------------------------------------- arguments


def test_impossible_arguments_are_refused(tmp_path: Path, engine: PosixEngine):
    path = tmp_path / "store"
    spec = TensorSpec("x", torch.float32, (10,))
    bad: list[tuple[str, Callable[[], object]]] = [
        ("at least one path", lambda: TensorStore.create([], [spec])),
        ("must be a list", lambda: TensorStore.create(str(path), [spec])),
        ("must differ", lambda: TensorStore.create([path, path], [spec])),
        ("multiple of 4096", lambda: TensorStore.create([path], [spec], stripe_bytes=1000)),
        ("two tensors are named", lambda: TensorStore.create([path], [spec, spec])),
        ("non-empty name", lambda: TensorSpec("", torch.float32, (1,))),
        ("negative size", lambda: TensorSpec("x", torch.float32, (-1,))),
    ]
    for words, call in bad:
        refused(ValueError, words, call)
    assert not path.exists()
    with TensorStore.create([path], [spec], engine=engine) as store:
        for words, call in [
            ("has no tensor", lambda: store.submit_read("y", torch.empty(1))),
            ("holds torch.float32", lambda: store.submit_read("x", torch.empty(10, dtype=torch.float64))),
            ("do not fit", lambda: store.submit_write("x", torch.empty(11))),
            ("do not fit", lambda: store.submit_write("x", torch.empty(5), 24)),
            ("do not fit", lambda: store.submit_write("x", torch.empty(1), -4)),
            ("not contiguous", lambda: store.submit_write("x", torch.empty(4, 4).t())),
            ("not contiguous", lambda: store.submit_write("x", torch.empty(4, 4, device="meta").t())),
        ]:
            refused(ValueError, words, call)
    refused(RuntimeError, "closed", lambda: store.submit_read("x", torch.empty(10)))
    refused(RuntimeError, "closed", store.delete)
    store.close()


# ---------------------------------------------------------------------- who may open it


def test_a_place_in_use_is_refused(paths: list[Path], engine: PosixEngine):
    with TensorStore.create(paths, SPECS, engine=engine) as store:
        refused(StorageError, "in use by another process", lambda: TensorStore.create(paths, SPECS))
        write_all(store, values())
        assert_holds(store, values())


def test_what_a_killed_process_left_is_replaced(paths: list[Path], engine: PosixEngine):
    for path in paths:
        path.mkdir()
        (path / DATA_NAME).write_bytes(b"half")
    with TensorStore.create(paths, SPECS, engine=engine) as store:
        write_all(store, values())
        assert_holds(store, values())


def test_a_failed_creation_leaves_nothing(paths: list[Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "posix_fallocate", failing(OSError(errno.EDQUOT, "Disk quota exceeded")))
    refused(StorageError, "quota", lambda: TensorStore.create(paths, SPECS))
    assert [list(path.iterdir()) for path in paths] == [[] for _ in paths]


def test_too_little_space_is_said_with_numbers_before_anything_is_written(tmp_path: Path):
    free_bytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(StorageError, match=r"needs .* on this drive and .* are free, .* too few") as caught:
        # Two directories of one drive: each half would fit, both do not.
        half = TensorSpec("x", torch.uint8, (free_bytes * 5 // 4,))
        TensorStore.create([tmp_path / "a", tmp_path / "b"], [half])
    assert caught.value.errno == errno.ENOSPC
    assert list((tmp_path / "a").iterdir()) == []
