"""KvikioEngine against a stand-in for the kvikio module (host memory), and on a GPU with the real one."""

from __future__ import annotations

import errno
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outcore.common.quantities import KIB, MIB
from outcore.storage import BlockFile, KvikioEngine, StorageError, aligned_bytes, open_engine
from outcore.storage.engines import kvikio as kvikio_engine
from tests.refused import failing, refused

WAIT_S = 60.0


class FakeFuture:
    def __init__(self, result: int | BaseException) -> None:
        self.result = result

    def get(self) -> int:
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class FakeCuFile:
    """pread and pwrite as kvikio documents them, for host memory. The requests seen are noted."""

    opened: list[FakeCuFile]
    misbehave: Any = None

    def __init__(self, file: Path, flags: str = "r") -> None:
        self.flags = flags
        self.closed = False
        self.calls: list[tuple[str, int, int, int]] = []
        self.fd = os.open(file, os.O_RDONLY if flags == "r" else os.O_RDWR)
        type(self).opened.append(self)

    def pread(self, buf: Any, size: int, file_offset: int, task_size: int) -> FakeFuture:
        self.calls.append(("read", size, file_offset, task_size))
        if type(self).misbehave is not None:
            return FakeFuture(type(self).misbehave(size))
        return FakeFuture(os.preadv(self.fd, [buf[:size].data], file_offset))

    def pwrite(self, buf: Any, size: int, file_offset: int, task_size: int) -> FakeFuture:
        self.calls.append(("write", size, file_offset, task_size))
        if type(self).misbehave is not None:
            return FakeFuture(type(self).misbehave(size))
        return FakeFuture(os.pwritev(self.fd, [buf[:size].data], file_offset))

    def close(self) -> None:
        if not self.closed:
            os.close(self.fd)
        self.closed = True


class FakeSettings:
    def __init__(self, log: list, values: dict) -> None:
        self.log = log
        log.append(values)

    def __exit__(self, *exc_info: object) -> None:
        self.log.append("restored")


class FakeDriver:
    status = 0

    def cuInit(self, flags: int) -> int:
        return type(self).status


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Any:
    class CuFile(FakeCuFile):
        opened: list[FakeCuFile] = []  # noqa: RUF012

    class Driver(FakeDriver):
        pass

    fake: Any = types.ModuleType("kvikio")
    fake.CuFile = CuFile
    fake.CompatMode = types.SimpleNamespace(ON="ON", OFF="OFF")
    fake.settings = []
    defaults: Any = types.ModuleType("kvikio.defaults")
    defaults.set = lambda values: FakeSettings(fake.settings, values)
    fake.defaults = defaults
    fake.driver = Driver
    monkeypatch.setitem(sys.modules, "kvikio", fake)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", fake.defaults)
    monkeypatch.setattr(kvikio_engine, "load_driver", Driver)
    return fake


def test_without_kvikio_driver_or_gpu_it_refuses_with_the_reason(kvikio: Any, monkeypatch: pytest.MonkeyPatch):
    kvikio.driver.status = 100
    refused(RuntimeError, r"cuInit fails with CUDA error 100.*posix engine", KvikioEngine)
    monkeypatch.setattr(kvikio_engine, "load_driver", failing(OSError("libcuda.so.1: cannot open shared object file")))
    refused(RuntimeError, r"libcuda.so.1 cannot be loaded.*posix engine", lambda: open_engine("kvikio"))

    def broken(name: str) -> None:  # as kvikio's own loader when libcufile is missing
        raise RuntimeError("libcufile.so.0 not found")

    monkeypatch.setattr(kvikio_engine.importlib, "import_module", broken)
    refused(RuntimeError, r"needs the kvikio package \(libcufile", lambda: open_engine("kvikio"))
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "kvikio", None)
    refused(RuntimeError, r"needs the kvikio package.*setup.py", lambda: open_engine("kvikio"))


def test_settings_are_always_given_and_restored(kvikio: Any):
    engine = open_engine("kvikio", num_threads=5, task_bytes=MIB)
    assert kvikio.settings[0] == {
        "compat_mode": "ON", "num_threads": 5, "task_size": MIB, "auto_direct_io_read": True,
        "auto_direct_io_write": True,
    }  # fmt: skip
    engine.close()
    engine.close()
    assert kvikio.settings[1:] == ["restored"]
    KvikioEngine(gds=True).close()
    assert kvikio.settings[2]["compat_mode"] == "OFF"
    assert kvikio.settings[2]["gds_threshold"] == 1
    bad_settings: list[dict[str, Any]] = [{"num_threads": 0}, {"task_bytes": 100}, {"num_requests": 0}]
    for bad in bad_settings:
        with pytest.raises(ValueError, match="must be"):
            KvikioEngine(**bad)


def test_whole_blocks_go_through_kvikio_and_edges_through_the_block_file(kvikio: Any, file: BlockFile):
    data = aligned_bytes(64 * KIB + 700)
    data[:] = np.random.default_rng(0).integers(0, 256, data.nbytes)
    with KvikioEngine(num_threads=2, task_bytes=4 * KIB) as engine:
        assert engine.name == "kvikio"
        assert engine.submit_write(file, 8192, data).wait(WAIT_S) == data.nbytes
        back = aligned_bytes(data.nbytes)
        engine.submit_read(file, 8192, torch.from_numpy(back)).wait(WAIT_S)
        assert (back == data).all()
        (handle,) = kvikio.CuFile.opened
        assert handle.flags == "r+"
        pieces = [(8192 + at, 8 * KIB) for at in range(0, 64 * KIB, 8 * KIB)]  # num_threads tasks at a time
        for kind in ("read", "write"):
            moved = sorted((at, size) for action, size, at, task in handle.calls if action == kind and task == 4 * KIB)
            assert moved == pieces
        seen = len(handle.calls)
        for offset, shift in ((100, 0), (4096, 3)):  # odd offset; odd address
            odd = aligned_bytes(10_000 + shift)[shift:]
            odd[:] = 9
            engine.submit_write(file, offset, odd).wait(WAIT_S)
            engine.submit_read(file, offset, odd).wait(WAIT_S)
            assert (odd == 9).all()
        assert len(handle.calls) == seen


def test_closing_the_file_or_the_engine_closes_the_handle(kvikio: Any, tmp_path: Path):
    first, second = (BlockFile(tmp_path / name, "create", 8192) for name in ("first", "second"))
    with KvikioEngine() as engine:
        for file in (first, second):
            engine.submit_write(file, 0, aligned_bytes(4096)).wait(WAIT_S)
        first.close()
        assert [handle.closed for handle in kvikio.CuFile.opened] == [True, False]
    assert [handle.closed for handle in kvikio.CuFile.opened] == [True, True]
    second.close()


@pytest.mark.parametrize("action", ["read", "write"])
def test_short_and_failed_transfers_are_errors(kvikio: Any, file: BlockFile, action: str):
    with KvikioEngine() as engine:
        submit = engine.submit_read if action == "read" else engine.submit_write
        kvikio.CuFile.misbehave = lambda size: size - 4096
        with pytest.raises(StorageError, match="fewer bytes") as caught:
            submit(file, 4096, aligned_bytes(16384)).wait(WAIT_S)
        assert (caught.value.offset, caught.value.wanted, caught.value.got) == (4096, 16384, 12288)
        kvikio.CuFile.misbehave = lambda size: RuntimeError("cuFile internal error")
        refused(StorageError, "cuFile internal error", lambda: submit(file, 0, aligned_bytes(4096)).wait(WAIT_S))
        kvikio.CuFile.misbehave = lambda size: OSError(errno.EIO, "Input/output error")
        refused(StorageError, "EIO", lambda: submit(file, 0, aligned_bytes(4096)).wait(WAIT_S))
        kvikio.CuFile.misbehave = None
        with pytest.raises(StorageError, match=r"the file ends at|preallocate it"):
            submit(file, file.size_bytes - 4096, aligned_bytes(8192)).wait(WAIT_S)


# ---------------------------------------------------------------------- with a GPU


def open_or_skip(**settings: Any) -> KvikioEngine:
    try:
        return KvikioEngine(**settings)
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize(("offset", "n_bytes"), [(0, 4 * MIB), (4096, 123_457), (513, 99_999), (7, 100), (4000, 200)])
def test_device_memory_to_the_drive_and_back(tmp_path: Path, offset: int, n_bytes: int):
    with BlockFile(tmp_path / "data.bin", "create", 8 * MIB) as file, open_or_skip() as engine:
        data = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, device="cuda")
        assert engine.submit_write(file, offset, data).wait(WAIT_S) == n_bytes
        host = torch.empty(n_bytes, dtype=torch.uint8)
        file.read_into(host, offset)
        assert torch.equal(host, data.cpu())
        back = torch.zeros_like(data)
        assert engine.submit_read(file, offset, back).wait(WAIT_S) == n_bytes
        assert torch.equal(back, data)


@pytest.mark.gpu
def test_device_transfers_wait_for_the_kernels_before_them(tmp_path: Path):
    with BlockFile(tmp_path / "data.bin", "create", 64 * MIB) as file, open_or_skip() as engine:
        square = torch.randn(4096, 4096, device="cuda")
        result = torch.zeros(4096, 4096, device="cuda")
        for _ in range(20):
            result = result + square @ square
        transfer = engine.submit_write(file, 0, result)
        transfer.wait(WAIT_S)
        back = torch.empty_like(result)
        engine.submit_read(file, 0, back).wait(WAIT_S)
        assert torch.equal(back, result)


@pytest.mark.gpu
def test_host_memory_through_the_real_kvikio(tmp_path: Path):
    with BlockFile(tmp_path / "data.bin", "create", 8 * MIB) as file, open_or_skip(num_threads=4) as engine:
        data = torch.from_numpy(aligned_bytes(5 * MIB + 3))
        data.random_(0, 256)
        engine.submit_write(file, 4096, data).wait(WAIT_S)
        back = torch.from_numpy(aligned_bytes(data.nbytes))
        engine.submit_read(file, 4096, back).wait(WAIT_S)
        assert torch.equal(back, data)


@pytest.mark.gds
@pytest.mark.gpu
def test_direct_path_to_device_memory(tmp_path: Path):
    with BlockFile(tmp_path / "data.bin", "create", 64 * MIB) as file, open_or_skip(gds=True) as engine:
        data = torch.randint(0, 256, (64 * MIB,), dtype=torch.uint8, device="cuda")
        engine.submit_write(file, 0, data).wait(WAIT_S)
        back = torch.zeros_like(data)
        engine.submit_read(file, 0, back).wait(WAIT_S)
        assert torch.equal(back, data)
