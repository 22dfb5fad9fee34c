"""TensorStore: layouts, sub-ranges, commits, and every refusal of arguments with its reason."""

import errno
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.common.quantities import KIB, MIB
from outcore.storage import BlockFile, PosixEngine, StorageError, TensorSpec, TensorStore
from outcore.storage.store.files import DATA_NAME
from outcore.storage.store.manifest import FILE_NAME as MANIFEST
from outcore.storage.store.stripe_layout import StripeLayout, stripe_pattern
from tests.refused import failing, refused
from tests.storage.faulty import FaultyEngine
from tests.storage.store_cases import SPECS, WAIT_S, assert_holds, read_back, values, write_all
from tests.waiting import until


@pytest.mark.parametrize("checksum", [False, True])
def test_tensors_come_back_here_and_in_the_next_process(paths: list[Path], engine: PosixEngine, checksum: bool):
    tensors = values()
    with TensorStore.create(paths, SPECS, checksum, engine, stripe_bytes=64 * KIB) as store:
        assert store.generation == 0
        assert store.names == tuple(tensors)
        assert "scale" in store and "x" not in store
        assert store.spec("moments") == SPECS[3]
        assert torch.equal(read_back(store, "moments"), torch.zeros(600_001))  # new stores hold zeros
        write_all(store, tensors)
        assert store.commit() == 1
        assert_holds(store, tensors)
        assert store.total_bytes == sum((path / DATA_NAME).stat().st_size for path in paths)
        if len(paths) == 3:
            assert len({extent.path for extent in store.extent("moments")}) == 3
    with TensorStore.open(paths, "r") as store:
        assert store.generation == 1
        assert_holds(store, tensors)
        refused(StorageError, "opened for reading", lambda: store.submit_write("scale", tensors["scale"]))
        refused(StorageError, "opened for reading", store.commit)
        refused(StorageError, "opened for reading", store.delete)
    with TensorStore.open(paths) as store:
        store.delete()
    assert [list(path.iterdir()) for path in paths] == [[] for _ in paths]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["write", "read", "commit"]), st.integers(0, 2_999_999), st.integers(0, 1_500_000)),
        max_size=8,
    ),
    drives=st.integers(1, 3), checksum=st.booleans(),
)  # fmt: skip
def test_any_mix_of_sub_range_reads_and_writes_equals_a_tensor(tmp_path_factory, engine, steps, drives, checksum):
    base = tmp_path_factory.mktemp("store")
    paths = [base / str(number) for number in range(drives)]
    model = torch.zeros(3_000_000, dtype=torch.uint8)
    specs = [TensorSpec("before", torch.uint8, (5,)), TensorSpec("x", torch.uint8, (3_000_000,))]
    store = TensorStore.create(paths, specs, checksum, engine, stripe_bytes=128 * KIB)
    for number, (action, start, n_bytes) in enumerate(steps):
        stop = min(start + n_bytes, 3_000_000)
        if action == "write":
            model[start:stop] = torch.arange(stop - start).mul_(7).add_(number).remainder_(251)
            store.submit_write("x", model[start:stop].clone(), start).wait(WAIT_S)
        elif action == "read":
            back = torch.empty(stop - start, dtype=torch.uint8)
            store.submit_read("x", back, start).wait(WAIT_S)
            assert torch.equal(back, model[start:stop])
        else:
            store.commit()
    store.commit()
    store.close()
    with TensorStore.open(paths, engine=engine) as again:
        assert torch.equal(read_back(again, "x"), model)
        again.delete()


@given(
    weights=st.lists(st.integers(1, 4), min_size=1, max_size=4), start=st.integers(0, 500), n_bytes=st.integers(0, 500)
)
def test_stripes_are_a_bijection(weights: list[int], start: int, n_bytes: int):
    layout = StripeLayout(len(weights), 16, stripe_pattern(weights), 64)
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


def test_weights_share_by_speed(tmp_path: Path, engine: PosixEngine):
    assert stripe_pattern([2, 1]) == (0, 1, 0)
    assert sorted(stripe_pattern([1, 3])) == [0, 1, 1, 1]
    paths = [tmp_path / "fast", tmp_path / "slow"]
    specs = [TensorSpec("x", torch.uint8, (3 * MIB,))]
    with TensorStore.create(paths, specs, engine=engine, stripe_bytes=64 * KIB, weights=[2, 1]) as store:
        fast, slow = (sum(e.n_bytes for e in store.extent("x") if e.path.parent == path) for path in paths)
        assert (fast, slow) == (2 * MIB, MIB)


# ---------------------------------------------------------------------- arguments


def test_impossible_arguments_are_refused(tmp_path: Path, engine: PosixEngine):
    path = tmp_path / "store"
    spec = TensorSpec("x", torch.float32, (10,))
    bad: list[tuple[str, Callable[[], object]]] = [
        ("at least one path", lambda: TensorStore.create([], [spec])),
        ("must be a list", lambda: TensorStore.create(str(path), [spec])),
        ("must differ", lambda: TensorStore.create([path, path], [spec])),
        ("multiple of 4096", lambda: TensorStore.create([path], [spec], stripe_bytes=1000)),
        ("one per path", lambda: TensorStore.create([path], [spec], weights=[1, 2])),
        ("at least 1", lambda: TensorStore.create([path], [spec], weights=[0])),
        ("two tensors are named", lambda: TensorStore.create([path], [spec, spec])),
        ("mode must be", lambda: TensorStore.open([path], "w")),  # type: ignore[arg-type]
        ("non-empty name", lambda: TensorSpec("", torch.float32, (1,))),
        ("negative size", lambda: TensorSpec("x", torch.float32, (-1,))),
        ("cannot be stored", lambda: TensorSpec("x", torch.complex64, (1,))),
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
        store.commit()
    refused(RuntimeError, "closed", lambda: store.submit_read("x", torch.empty(10)))
    refused(RuntimeError, "closed", store.commit)
    refused(RuntimeError, "closed", store.delete)
    store.close()


# ---------------------------------------------------------------------- who may open it


def test_a_second_writer_is_refused_and_readers_share(paths: list[Path], engine: PosixEngine):
    with TensorStore.create(paths, SPECS, engine=engine):
        for mode in ("rw", "r"):
            with pytest.raises(StorageError, match="in use by another process"):
                TensorStore.open(paths, mode)  # type: ignore[arg-type]
        refused(StorageError, "in use by another process", lambda: TensorStore.create(paths, SPECS))
    with (
        TensorStore.open(paths, "r", engine),
        TensorStore.open(paths, "r", engine),
        pytest.raises(StorageError, match="in use"),
    ):
        TensorStore.open(paths)
    refused(StorageError, "a store is here already", lambda: TensorStore.create(paths, SPECS))
    with TensorStore.open(paths, engine=engine) as store:  # the refused attempts left it whole
        store.delete()
    with TensorStore.create(paths, SPECS, engine=engine):
        pass


def test_debris_of_an_unfinished_creation_is_replaced(paths: list[Path], engine: PosixEngine):
    for path in paths:
        path.mkdir()
        (path / DATA_NAME).write_bytes(b"half")
        (path / f".{MANIFEST}.part").write_text("half")
    with TensorStore.create(paths, SPECS, engine=engine) as store:
        write_all(store, values())
        store.commit()
    with TensorStore.open(paths, engine=engine) as store:
        assert_holds(store, values())


def test_a_part_of_another_store_is_not_overwritten(tmp_path: Path, engine: PosixEngine):
    one, two = tmp_path / "one", tmp_path / "two"
    with TensorStore.create([one, two], SPECS, engine=engine) as store:
        write_all(store, values())
        store.commit()
    with pytest.raises(StorageError, match=r"holds file 2 of 2 of store .* manifest is elsewhere"):
        TensorStore.create([two], SPECS, engine=engine)
    with TensorStore.open([one, two], engine=engine) as store:
        assert_holds(store, values())
    (one / MANIFEST).unlink()
    TensorStore.create([one], SPECS, engine=engine).close()  # its first file without a manifest is debris


def test_a_failed_creation_leaves_nothing(paths: list[Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "posix_fallocate", failing(OSError(errno.EDQUOT, "Disk quota exceeded")))
    refused(StorageError, "quota", lambda: TensorStore.create(paths, SPECS))
    assert [list(path.iterdir()) for path in paths] == [[] for _ in paths]
    monkeypatch.undo()
    monkeypatch.setattr("outcore.common.files.os.replace", lambda *a: (_ for _ in ()).throw(OSError(errno.EIO, "")))
    refused(StorageError, "manifest failed", lambda: TensorStore.create(paths, SPECS))
    assert [list(path.iterdir()) for path in paths] == [[] for _ in paths]


def test_too_little_space_is_said_with_numbers_before_anything_is_written(tmp_path: Path):
    free_bytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(StorageError, match=r"needs .* on this drive and .* are free, .* too few") as caught:
        # Two directories of one drive: each half would fit, both do not.
        half = TensorSpec("x", torch.uint8, (free_bytes * 5 // 4,))
        TensorStore.create([tmp_path / "a", tmp_path / "b"], [half])
    assert caught.value.errno == errno.ENOSPC
    assert list((tmp_path / "a").iterdir()) == []


# ---------------------------------------------------------------------- commit


def test_the_manifest_on_disk_is_always_whole(tmp_path: Path, engine: PosixEngine, monkeypatch: pytest.MonkeyPatch):
    with TensorStore.create([tmp_path], SPECS, True, engine) as store:
        write_all(store, values(1))
        store.commit()
        before = (tmp_path / MANIFEST).read_text()
        write_all(store, values(2))
        real = os.replace
        monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        refused(StorageError, "ENOSPC", store.commit)
        assert (tmp_path / MANIFEST).read_text() == before
        assert store.generation == 1
        monkeypatch.setattr(os, "replace", real)
        assert store.commit() == 2


def test_commit_refuses_after_a_failed_write_until_it_is_repeated(paths: list[Path]):
    faulty = FaultyEngine(PosixEngine(2))
    with TensorStore.create(paths, SPECS, engine=faulty, stripe_bytes=64 * KIB) as store:
        moments = values()["moments"]
        faulty.fail("write")
        transfer = store.submit_write("moments", moments)
        refused(StorageError, r"commit failed.*1 writes failed.*'moments'.*injected", store.commit)
        refused(StorageError, "injected", lambda: transfer.wait(WAIT_S))
        store.submit_write("moments", moments[:10]).wait(WAIT_S)  # does not cover the failed range
        refused(StorageError, "writes failed", store.commit)
        store.submit_write("moments", moments).wait(WAIT_S)
        assert store.commit() == 1
    faulty.close()


def test_commit_waits_for_writes_and_refuses_new_ones(tmp_path: Path):
    faulty = FaultyEngine(PosixEngine(2))
    with TensorStore.create([tmp_path], SPECS, engine=faulty) as store:
        tensors = values()
        faulty.delay(math.inf, "write")
        slow = store.submit_write("moments", tensors["moments"])
        committing = threading.Thread(target=store.commit)
        committing.start()
        until(lambda: store._traffic._writes_held)
        refused(RuntimeError, r"during commit\(\)", lambda: store.submit_write("scale", tensors["scale"]))
        refused(RuntimeError, "already running", store.commit)
        faulty.let_go()
        committing.join(WAIT_S)
        assert slow.done()
        assert store.generation == 1
    faulty.close()


def test_a_failed_fsync_breaks_the_store_for_good(tmp_path: Path, engine: PosixEngine, monkeypatch: pytest.MonkeyPatch):
    with TensorStore.create([tmp_path], SPECS, engine=engine) as store:

        def fail(file: BlockFile) -> None:
            raise StorageError("sync", path=file.path, errno=errno.EIO)

        monkeypatch.setattr(BlockFile, "sync", fail)
        refused(StorageError, "EIO", store.commit)
        monkeypatch.undo()
        refused(StorageError, "an earlier commit failed", store.commit)
    with TensorStore.open([tmp_path], engine=engine) as store:
        assert store.generation == 0
