"""The child process of the ladder: looks at the GPU, at kvikio, and reads one file into device memory.

    python -m outcore.probe.gds.child auto   FILE SIZE_BYTES
    python -m outcore.probe.gds.child direct FILE SIZE_BYTES

`auto` lets kvikio choose its path and reports which one it took. `direct` is the decisive test: started with
CUFILE_ALLOW_COMPAT_MODE=false it switches kvikio's own fallback off as well, so that the read can only succeed by DMA
between drive and GPU. libcufile may abort the process when it cannot; that is why this is a process of its own.

Each finding is one line on stdout, `OUTCORE {json}`, flushed at once: what was found before a crash is not lost."""

from __future__ import annotations

import glob
import hashlib
import importlib
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outcore.probe.gds.cuda_driver import CudaDriver, CudaUnavailable
from outcore.probe.gds.nvidia_fs import STATS_PATH, parse_stats

LINE_PREFIX = "OUTCORE "
LOG_TAIL_LINES = 12


def emit(step: str, **finding: Any) -> None:
    """Prints one finding, flushed."""
    print(LINE_PREFIX + json.dumps({"step": step, **finding}), flush=True)


def parse_findings(stdout: str) -> dict[str, dict[str, Any]]:
    """The findings a child printed, by step. Other lines (libraries print what they like) are skipped."""
    findings: dict[str, dict[str, Any]] = {}
    for line in stdout.splitlines():
        if not line.startswith(LINE_PREFIX):
            continue
        try:
            finding = json.loads(line[len(LINE_PREFIX) :])
        except json.JSONDecodeError:  # cut short by a crash
            continue
        if isinstance(finding, dict) and isinstance(finding.get("step"), str):
            findings[finding.pop("step")] = finding
    return findings


def main(argv: list[str]) -> int:
    """Runs one mode. Exit code 0 when the read succeeded and its bytes are right, 1 otherwise."""
    if len(argv) != 3 or argv[0] not in ("auto", "direct"):
        print("usage: gds_child auto|direct FILE SIZE_BYTES", file=sys.stderr)
        return 2
    mode, path, size_bytes = argv[0], argv[1], int(argv[2])
    try:
        driver = CudaDriver()
        devices = [asdict(driver.device(index)) for index in range(driver.device_count)]
        emit("device", devices=devices, cuda_version=driver.driver_version())
    except CudaUnavailable as error:
        emit("device", devices=[], error=str(error))
        return 1
    try:
        kvikio = importlib.import_module("kvikio")
        importlib.import_module("kvikio.cufile_driver")
        importlib.import_module("kvikio.defaults")
    except (ImportError, OSError, RuntimeError) as error:
        emit("kvikio", error=f"{type(error).__name__}: {error}")
        return 1
    emit("kvikio", version=str(kvikio.__version__))
    if mode == "auto":
        emit("cufile", **_cufile_facts(kvikio))
    return 0 if _read_once(kvikio, driver, mode, path, size_bytes) else 1


def _cufile_facts(kvikio: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    questions = {
        "is_gds_available": lambda: bool(kvikio.cufile_driver.get("is_gds_available")),
        "libcufile_version": lambda: ".".join(str(part) for part in kvikio.cufile_driver.libcufile_version()),
        "kvikio_prefers_posix": lambda: bool(kvikio.defaults.is_compat_mode_preferred()),
    }
    for name, ask in questions.items():
        try:
            facts[name] = ask()
        except Exception as error:  # each of these calls into libcufile, whose errors have many types
            facts[name] = None
            facts[f"{name}_error"] = f"{type(error).__name__}: {error}"
    return facts


def _read_once(kvikio: Any, driver: CudaDriver, mode: str, path: str, size_bytes: int) -> bool:
    expected = hashlib.sha256(Path(path).read_bytes()[:size_bytes]).hexdigest()
    try:
        driver.make_current(0)
        buffer = driver.allocate(size_bytes)
    except CudaUnavailable as error:
        emit("read", ok=False, error=str(error))
        return False
    settings: dict[str, Any] = {"gds_threshold": 0}
    if mode == "direct":
        settings["compat_mode"] = kvikio.CompatMode.OFF
    try:
        monitor = kvikio.SummaryMonitor() if hasattr(kvikio, "SummaryMonitor") else None
        kvikio.defaults.set(settings)
        stats_before = _nvidia_fs_stats()
        start_s = time.perf_counter()
        with kvikio.CuFile(path, "r") as file:
            # raw_read goes straight to cuFileRead, without threads; read is what users of kvikio call
            got = file.raw_read(buffer, size_bytes) if mode == "direct" else file.read(buffer, size_bytes)
        elapsed_s = time.perf_counter() - start_s
        stats_after = _nvidia_fs_stats()
        right = hashlib.sha256(buffer.to_bytes()).hexdigest() == expected
        backends = {name: total["num_ops"] for name, total in monitor.get().by_backend.items()} if monitor else None
    except Exception as error:  # whatever the stack under us throws is the finding
        emit("read", ok=False, error=f"{type(error).__name__}: {error}", log=_cufile_log())
        return False
    emit(
        "read",
        ok=bool(got == size_bytes and right),
        got_bytes=int(got),
        bytes_right=right,
        elapsed_s=elapsed_s,
        backends=backends,
        nvidia_fs_before=stats_before,
        nvidia_fs_after=stats_after,
        log=_cufile_log(),
    )
    buffer.close()
    return bool(got == size_bytes and right)


def _nvidia_fs_stats() -> dict[str, Any] | None:
    try:
        return asdict(parse_stats(Path(STATS_PATH).read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return None


def _cufile_log() -> list[str]:
    """The last lines of libcufile's log, which names the reason of a refusal better than its error code does."""
    lines: list[str] = []
    for name in sorted(glob.glob("cufile*.log")):
        try:
            lines += Path(name).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
    return lines[-LOG_TAIL_LINES:]


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # libcufile's exit handlers have been seen to crash; the finding is already out
