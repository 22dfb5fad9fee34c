"""Everything the ladder finds out about GPUDirect Storage on this machine, collected once into a frozen record.

Order, cheapest first: operating system, GPU and attribute 116, kvikio, the nvidia-fs module, the kernel's P2PDMA, the
drive under the test file, gdscheck, and the decisive test in a child process. `verdict` judges the record; nothing here
decides. Cost: two or three child processes, 1-3 s each; none on a machine that has no GPU driver at all."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import Any

from outcore.probe.gds.child import parse_findings
from outcore.probe.gds.nvidia_fs import STATS_PATH, NvidiaFsStats, carried_the_read, parse_stats
from outcore.probe.system import ChildResult, System

KVIKIO_PACKAGES = ("kvikio-cu13", "kvikio-cu12", "kvikio")
READ_BYTES = 16 << 20  # above every threshold under which cuFile or kvikio prefer a bounce buffer
CHILD_TIMEOUT_S = 45.0  # importing the CUDA stack from a cold drive takes up to 20 s; a hung driver takes for ever
GDSCHECK_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class GpuFact:
    """One GPU as the driver describes it."""

    name: str
    compute_capability: str = ""
    gpu_direct_rdma_supported: bool | None = None


@dataclass(frozen=True)
class ReadTest:
    """One read into device memory in a child process. `status` is one of:

    not-run, ok, refused (an error came back), wrong-bytes, signal (the library aborted), timeout."""

    status: str = "not-run"
    detail: str = ""
    backend: str | None = None
    """'GDS' (cuFile) or 'POSIX', as kvikio counted it; None where it does not count."""
    nvidia_fs_moved: bool = False
    elapsed_s: float | None = None
    log: tuple[str, ...] = ()


@dataclass(frozen=True)
class GdsFacts:
    """Facts about this machine. None means "could not be found out", never "no"."""

    platform: str = "linux"
    kernel_release: str = ""
    is_wsl2: bool = False
    gpus: tuple[GpuFact, ...] = ()
    gpu_error: str = ""
    cuda_version: str | None = None
    kvikio_version: str | None = None
    kvikio_error: str = ""
    libcufile_version: str | None = None
    is_gds_available: bool | None = None
    nvidia_fs: NvidiaFsStats | None = None
    open_kernel_module: bool | None = None
    kernel_has_p2pdma: bool | None = None
    static_bar1: bool | None = None
    nvme_multipath: bool | None = None
    cufile_json: dict[str, Any] = field(default_factory=dict)
    cufile_json_path: str | None = None
    gdscheck_path: str | None = None
    gdscheck_lines: tuple[str, ...] = ()
    drive_device: str = ""
    drive_kind: str = "unknown"
    drive_filesystem: str = ""
    auto: ReadTest = field(default_factory=ReadTest)
    direct: ReadTest = field(default_factory=ReadTest)
    p2pdma_trial: ReadTest = field(default_factory=ReadTest)

    @property
    def kernel_version(self) -> tuple[int, int]:
        """(6, 18) for '6.18.44-generic'; (0, 0) when the release does not begin like that."""
        match = re.match(r"(\d+)\.(\d+)", self.kernel_release)
        return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def collect_facts(system: System, test_file: str | None, drive: Any | None = None) -> GdsFacts:
    """Walks the ladder.

    test_file: a file of at least `READ_BYTES` on the drive in question, which the children read; None leaves the
        tests out.
    drive: the `Drive` under it (device, kind, filesystem), for the reasons."""
    known: dict[str, Any] = {
        "platform": system.platform,
        "kernel_release": system.kernel_release,
        "is_wsl2": "microsoft" in (system.read_text("/proc/version") or system.kernel_release).lower(),
        "kvikio_version": system.module_version("kvikio", KVIKIO_PACKAGES),
    }
    if drive is not None:
        known |= {
            "drive_device": str(getattr(drive, "device", "") or ""),
            "drive_kind": str(getattr(drive, "kind", "unknown")),
            "drive_filesystem": str(getattr(drive, "filesystem", "") or ""),
        }
    if not system.platform.startswith("linux"):
        return GdsFacts(**known)
    known |= _kernel_facts(system)
    known |= _gdscheck(system)
    if test_file is None:
        return GdsFacts(**known)
    known |= _auto_test(system, test_file)
    if known["gpus"] and known["kvikio_version"] and not known["kvikio_error"]:
        known["direct"] = _direct_test(system, test_file, {})
        if known["direct"].status != "ok" and _p2pdma_is_plausible(GdsFacts(**known)):
            known["p2pdma_trial"] = _direct_test(system, test_file, {"CUFILE_USE_PCIP2PDMA": "true"})
    return GdsFacts(**known)


def _kernel_facts(system: System) -> dict[str, Any]:
    stats = system.read_text(STATS_PATH)
    driver = system.read_text("/proc/driver/nvidia/version")
    parameters = system.read_text("/proc/driver/nvidia/params")
    multipath = system.read_text("/sys/module/nvme_core/parameters/multipath")
    path, settings = _cufile_json(system)
    return {
        "nvidia_fs": parse_stats(stats) if stats is not None else None,
        "open_kernel_module": "open kernel module" in driver.lower() if driver else None,
        "kernel_has_p2pdma": _kernel_has_p2pdma(system),
        "static_bar1": "rmforcestaticbar1=1" in parameters.lower().replace(" ", "") if parameters else None,
        "nvme_multipath": multipath.strip().upper() == "Y" if multipath else None,
        "cufile_json_path": path,
        "cufile_json": settings,
    }


def _kernel_has_p2pdma(system: System) -> bool | None:
    """NVIDIA's guide looks for the symbol p2pdma_pgmap_ops; the kernel's own build configuration says the same."""
    symbols = system.read_text("/proc/kallsyms")
    if symbols and "p2pdma_pgmap_ops" in symbols:
        return True
    config = system.read_text(f"/boot/config-{system.kernel_release}")
    if config:
        return "CONFIG_PCI_P2PDMA=y" in config
    return False if symbols and len(symbols) > 10_000 else None


def _cufile_json(system: System) -> tuple[str | None, dict[str, Any]]:
    """libcufile's own configuration; it allows // comments, which JSON does not."""
    for path in (os.environ.get("CUFILE_ENV_PATH_JSON", ""), "/etc/cufile.json"):
        text = system.read_text(path) if path else None
        if text is None:
            continue
        try:
            settings = json.loads(re.sub(r"^\s*//.*$|(?<=[\s,{])//.*$", "", text, flags=re.MULTILINE))
        except json.JSONDecodeError:
            return path, {}
        return path, settings if isinstance(settings, dict) else {}
    return None, {}


def _gdscheck(system: System) -> dict[str, Any]:
    candidates = [system.which("gdscheck"), *system.glob("/usr/local/cuda*/gds/tools/gdscheck")]
    path = next((candidate for candidate in candidates if candidate), None)
    if path is None:
        return {"gdscheck_path": None, "gdscheck_lines": ()}
    result = system.run([path, "-p"], GDSCHECK_TIMEOUT_S)
    if result.timed_out:
        return {"gdscheck_path": path, "gdscheck_lines": (f"gave no answer within {GDSCHECK_TIMEOUT_S:.0f} s",)}
    wanted = re.compile(r"nvme|supports gds|compat_mode|p2pdma|iommu|bar:", re.IGNORECASE)
    lines = tuple(" ".join(line.split()) for line in result.stdout.splitlines() if wanted.search(line))
    return {"gdscheck_path": path, "gdscheck_lines": lines}


def _auto_test(system: System, test_file: str) -> dict[str, Any]:
    result = system.run_child(["auto", test_file, str(READ_BYTES)], CHILD_TIMEOUT_S, {"KVIKIO_COMPAT_MODE": "AUTO"})
    found = parse_findings(result.stdout)
    device, kvikio, cufile = found.get("device", {}), found.get("kvikio", {}), found.get("cufile", {})
    known: dict[str, Any] = {
        "gpus": tuple(
            GpuFact(gpu["name"], gpu.get("compute_capability", ""), gpu.get("gpu_direct_rdma_supported"))
            for gpu in device.get("devices", [])
        ),
        "gpu_error": device.get("error", "") or ("" if device else _ending(result)),
        "cuda_version": device.get("cuda_version"),
        "kvikio_error": kvikio.get("error", ""),
        "libcufile_version": cufile.get("libcufile_version"),
        "is_gds_available": cufile.get("is_gds_available"),
    }
    if device.get("devices") and "error" not in kvikio:
        if kvikio or result.timed_out or result.signal_name:
            known["auto"] = _read_test(result, found)
        else:
            known["kvikio_error"] = _ending(result)
    return known


def _direct_test(system: System, test_file: str, extra_env: dict[str, str]) -> ReadTest:
    env = {
        "CUFILE_ALLOW_COMPAT_MODE": "false",
        "CUFILE_FORCE_COMPAT_MODE": "",
        "CUFILE_LOGGING_LEVEL": "INFO",
        "KVIKIO_COMPAT_MODE": "OFF",
        **extra_env,
    }
    result = system.run_child(["direct", test_file, str(READ_BYTES)], CHILD_TIMEOUT_S, env)
    return _read_test(result, parse_findings(result.stdout))


def _read_test(result: ChildResult, found: dict[str, dict[str, Any]]) -> ReadTest:
    read = found.get("read")
    if read is None:
        status = "timeout" if result.timed_out else "signal" if result.signal_name else "refused"
        return ReadTest(status=status, detail=_ending(result))
    log = tuple(str(line) for line in read.get("log") or ())
    if "error" in read:
        return ReadTest(status="refused", detail=str(read["error"]), log=log)
    counted = {name: int(number) for name, number in (read.get("backends") or {}).items() if int(number) > 0}
    backend = "GDS" if "GDS" in counted else "POSIX" if "POSIX" in counted else None
    before, after = (
        NvidiaFsStats(**read[key]) if read.get(key) else None for key in ("nvidia_fs_before", "nvidia_fs_after")
    )
    if not read.get("bytes_right") or not read.get("ok"):
        detail = f"{read.get('got_bytes')} of {READ_BYTES} bytes came back and they do not match the file"
        return ReadTest(status="wrong-bytes", detail=detail, backend=backend, log=log)
    return ReadTest(
        status="ok",
        backend=backend,
        nvidia_fs_moved=carried_the_read(before, after),
        elapsed_s=read.get("elapsed_s"),
        log=log,
    )


def _ending(result: ChildResult) -> str:
    if result.timed_out:
        return f"the test gave no answer within {CHILD_TIMEOUT_S:.0f} s and was killed"
    last = [line for line in result.stderr.splitlines() if line.strip()]
    words = f": {last[-1].strip()}" if last else ""
    if result.signal_name:
        return f"the test process was ended by {result.signal_name}{words}"
    return f"the test process ended with code {result.returncode} and no result{words}"


def _p2pdma_is_plausible(facts: GdsFacts) -> bool:
    """Whether asking libcufile for P2PDMA is worth a second test: native Linux, new enough, not asked for already."""
    asked = bool((facts.cufile_json.get("properties") or {}).get("use_pci_p2pdma"))
    return not facts.is_wsl2 and not asked and facts.kernel_has_p2pdma is not False and facts.open_kernel_module is True
