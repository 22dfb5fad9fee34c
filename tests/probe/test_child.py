"""The child of the decisive test with a faked driver and a faked kvikio; running children for real."""

from __future__ import annotations

import ctypes
import os
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest

from outcore.probe.gds import child as gds_child
from outcore.probe.gds.child import LINE_PREFIX, main, parse_findings
from outcore.probe.gds.cuda_driver import CudaDriver, CudaUnavailable
from outcore.probe.gds.facts import READ_BYTES, collect_facts
from outcore.probe.system import ChildResult, RealSystem
from tests.refused import failing


class FakeCuda:
    """libcuda with one GPU; device memory is host memory. `fails` names functions that return an error."""

    def __init__(self, count: int = 1, attribute_116: int | None = 1, fails: tuple[str, ...] = ()) -> None:
        self.count, self.attribute_116, self.fails = count, attribute_116, fails
        self.memory: dict[int, Any] = {}
        self.freed = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            return lambda *arguments: 0
        raise AttributeError(name)

    def cuInit(self, flags: Any) -> int:
        return 100 if "cuInit" in self.fails else 0

    def cuGetErrorString(self, code: Any, text: Any) -> int:
        text._obj.value = b"no CUDA-capable device is detected"
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12080
        return 0

    def cuDeviceGetName(self, name: Any, size: Any, handle: Any) -> int:
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, handle: Any) -> int:
        known = {75: 9, 76: 0, 18: 0, 116: self.attribute_116}
        answer = known[attribute.value]
        if answer is None:
            return 1
        value._obj.value = answer
        return 0

    def cuMemAlloc_v2(self, pointer: Any, size: Any) -> int:
        if "cuMemAlloc_v2" in self.fails:
            return 2
        memory = ctypes.create_string_buffer(size.value)
        address = ctypes.addressof(memory)
        self.memory[address] = memory
        pointer._obj.value = address
        return 0

    def cuMemsetD8_v2(self, pointer: Any, value: Any, size: Any) -> int:
        ctypes.memset(pointer.value, value.value, size.value)
        return 0

    def cuMemcpyDtoH_v2(self, host: Any, pointer: Any, size: Any) -> int:
        ctypes.memmove(host, pointer.value, size.value)
        return 0

    def cuMemFree_v2(self, pointer: Any) -> int:
        self.freed += 1
        del self.memory[pointer.value]
        return 0


class FakeCuFile:
    """kvikio.CuFile over the fake device; `behaviour` is what its reads do."""

    behaviour = "right"
    calls: ClassVar[list[str]] = []

    def __init__(self, path: str, flags: str) -> None:
        self.path = path

    def __enter__(self) -> FakeCuFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def read(self, buffer: Any, size: int) -> int:
        return self._read("read", buffer, size)

    def raw_read(self, buffer: Any, size: int) -> int:
        return self._read("raw_read", buffer, size)

    def _read(self, call: str, buffer: Any, size: int) -> int:
        type(self).calls.append(call)
        if self.behaviour == "refuse":
            Path("cufile.log").write_text("ERROR cufio-drv: nvidia-fs driver is not loaded\n")
            raise RuntimeError("cuFile error: driver not loaded")
        data = Path(self.path).read_bytes()[:size]
        if self.behaviour == "stale":
            return size
        pointer, _ = buffer.__cuda_array_interface__["data"]
        ctypes.memmove(pointer, data, len(data))
        return size if self.behaviour == "right" else size - 4096


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """A kvikio that reads through POSIX, in a scratch directory."""
    module = types.ModuleType("kvikio")
    defaults, cufile_driver = types.ModuleType("kvikio.defaults"), types.ModuleType("kvikio.cufile_driver")
    settings: dict[str, Any] = {}

    class Monitor:
        def get(self) -> Any:
            return types.SimpleNamespace(by_backend={"POSIX": {"num_ops": 1}, "GDS": {"num_ops": 0}})

    for name, value in {
        "__version__": "26.10.00", "CuFile": type("CuFile", (FakeCuFile,), {"calls": []}),
        "CompatMode": types.SimpleNamespace(OFF="OFF", AUTO="AUTO"), "SummaryMonitor": Monitor, "defaults": defaults,
        "cufile_driver": cufile_driver, "settings": settings,
    }.items():  # fmt: skip
        setattr(module, name, value)
    vars(defaults).update(set=settings.update, is_compat_mode_preferred=lambda: True)
    vars(cufile_driver).update(get=failing(RuntimeError("libcufile is not there")), libcufile_version=lambda: (1, 15))
    monkeypatch.setitem(sys.modules, "kvikio", module)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", defaults)
    monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", cufile_driver)
    monkeypatch.chdir(tmp_path)
    return module


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(65536))
    return path


def run(monkeypatch: pytest.MonkeyPatch, capsys: Any, mode: str, path: Path, cuda: FakeCuda) -> tuple[int, Any]:
    monkeypatch.setattr(gds_child, "CudaDriver", lambda: CudaDriver(cuda))
    code = main([mode, str(path), "65536"])
    return code, parse_findings(capsys.readouterr().out)


def test_auto_finds_device_kvikio_and_the_backend(monkeypatch: Any, capsys: Any, kvikio: Any, data: Path) -> None:
    cuda = FakeCuda()
    code, found = run(monkeypatch, capsys, "auto", data, cuda)
    assert code == 0
    assert found["device"]["cuda_version"] == "12.8"
    assert found["device"]["devices"][0]["gpu_direct_rdma_supported"] is True
    assert found["device"]["devices"][0]["compute_capability"] == "9.0"
    assert found["cufile"]["libcufile_version"] == "1.15"
    assert found["cufile"]["is_gds_available"] is None and "not there" in found["cufile"]["is_gds_available_error"]
    assert found["read"]["ok"] and found["read"]["backends"] == {"POSIX": 1, "GDS": 0}
    assert kvikio.CuFile.calls == ["read"]
    assert cuda.freed == 1


def test_direct_switches_kvikios_fallback_off_and_reads_raw(
    monkeypatch: Any, capsys: Any, kvikio: Any, data: Path
) -> None:
    code, found = run(monkeypatch, capsys, "direct", data, FakeCuda())
    assert code == 0 and found["read"]["ok"]
    assert kvikio.settings["compat_mode"] == "OFF"
    assert kvikio.settings["gds_threshold"] == 0
    assert kvikio.CuFile.calls == ["raw_read"]
    assert "cufile" not in found  # asking opens the driver, with the fallback's settings


@pytest.mark.parametrize(("behaviour", "says_right"), [("stale", False), ("short", True)])
def test_a_read_that_only_claims_success_fails(
    monkeypatch: Any, capsys: Any, kvikio: Any, data: Path, behaviour: str, says_right: bool
) -> None:
    kvikio.CuFile.behaviour = behaviour
    code, found = run(monkeypatch, capsys, "direct", data, FakeCuda())
    assert code == 1
    assert found["read"]["ok"] is False
    assert found["read"]["bytes_right"] is says_right


def test_a_refusal_carries_libcufiles_log(monkeypatch: Any, capsys: Any, kvikio: Any, data: Path) -> None:
    kvikio.CuFile.behaviour = "refuse"
    code, found = run(monkeypatch, capsys, "direct", data, FakeCuda())
    assert code == 1
    assert "driver not loaded" in found["read"]["error"]
    assert found["read"]["log"] == ["ERROR cufio-drv: nvidia-fs driver is not loaded"]


def test_no_device_memory(monkeypatch: Any, capsys: Any, kvikio: Any, data: Path) -> None:
    code, found = run(monkeypatch, capsys, "auto", data, FakeCuda(fails=("cuMemAlloc_v2",)))
    assert code == 1
    assert "cuMemAlloc_v2 failed: CUDA error 2" in found["read"]["error"]


@pytest.mark.parametrize("cuda", [FakeCuda(count=0), FakeCuda(fails=("cuInit",))])
def test_no_usable_gpu(monkeypatch: Any, capsys: Any, kvikio: Any, data: Path, cuda: FakeCuda) -> None:
    code, found = run(monkeypatch, capsys, "auto", data, cuda)
    assert code == 1 and found["device"]["devices"] == []
    assert "GPU" in found["device"]["error"] or "no CUDA-capable device" in found["device"]["error"]


def test_no_kvikio(monkeypatch: Any, capsys: Any, data: Path) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    code, found = run(monkeypatch, capsys, "auto", data, FakeCuda())
    assert code == 1 and "kvikio" in found["kvikio"]["error"]


def test_usage(capsys: Any) -> None:
    assert main(["auto"]) == 2
    assert "usage" in capsys.readouterr().err


def test_findings_of_a_child_cut_short() -> None:
    text = f'{LINE_PREFIX}{{"step": "device", "devices": []}}\nnoise\n{LINE_PREFIX}{{"step": "rea'
    assert parse_findings(text) == {"device": {"devices": []}}
    assert parse_findings(f"{LINE_PREFIX}[1]\n{LINE_PREFIX}{{}}") == {}


def test_a_machine_without_driver_for_real(tmp_path: Path) -> None:
    """On a machine with a GPU the ladder runs for real; without one the reason is in words."""
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(READ_BYTES))
    facts = collect_facts(RealSystem(), str(path))
    assert facts.gpus or facts.gpu_error
    try:
        CudaDriver()
    except CudaUnavailable as error:
        assert str(error) in facts.gpu_error


def test_children_for_real() -> None:
    system = RealSystem()
    done = system.run(
        [sys.executable, "-c", "import os; print(os.environ.get('A'), os.environ.get('HOME'))"],
        20,
        {"A": "1", "HOME": ""},
    )
    assert (done.returncode, done.stdout.split()) == (0, ["1", "None"])
    aborted = system.run([sys.executable, "-c", "import os; os.abort()"], 20)
    assert aborted.signal_name == "SIGABRT"
    hung = system.run(["sh", "-c", "echo x; exec sleep 60"], 2.0)
    assert hung.timed_out and hung.returncode is None and hung.stdout == "x\n"
    missing = system.run(["/does/not/exist"], 5)
    assert missing.returncode == 127 and "could not be started" in missing.stderr
    assert ChildResult(-99).signal_name == "signal 99"
    assert ChildResult(0).signal_name is None


def test_the_real_system_answers(tmp_path: Path) -> None:
    system = RealSystem()
    (tmp_path / "a").write_text("x")
    assert system.read_text(str(tmp_path / "a")) == "x"
    assert system.read_text(str(tmp_path / "b")) is None
    assert system.glob(str(tmp_path / "*")) == [str(tmp_path / "a")]
    assert system.which("sh")
    assert system.module_version("pytest", ["no-such-package", "pytest"]) == pytest.__version__
    assert system.module_version("json", []) == "unknown"
    assert system.module_version("no_such_module", []) is None
