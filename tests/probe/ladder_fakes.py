"""Machines made of Python for the tests of the ladder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from outcore.probe.gds.child import LINE_PREFIX
from outcore.probe.gds.facts import READ_BYTES, collect_facts
from outcore.probe.gds.ladder import ladder_rows
from outcore.probe.gds.nvidia_fs import parse_stats
from outcore.probe.gds.verdict import PATHS, PathVerdict, judge
from outcore.probe.system import ChildResult

STATS = """GDS Version: 1.7.0.149
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2:17:3)
Mellanox PeerDirect Supported: False
IO stats: {stats}, peer IO stats: Disabled
Logging level: info

Active Shadow-Buffer (MiB): 0
Active Process: 0
Reads                           : n={reads} ok={reads} err=0 readMiB=0 io_state_err=0
Writes                          : n=0 ok=0 err=0 writeMiB=0 io_state_err=0 pg-cache=0 pg-cache-fail=0 pg-cache-eio=0
Mmap                            : n=3 ok=3 err=0 munmap=3
Bar1-map                        : n={maps} ok={maps} err=0 free=3 callbacks=0 active=0
"""
NATIVE = "Linux version 6.8.0-45-generic (buildd@lcy02) #45-Ubuntu SMP"
NVME = SimpleNamespace(device="/dev/nvme0n1p2", kind="nvme", filesystem="ext4")


def stats(reads: int, maps: int = 3, enabled: bool = True) -> str:
    return STATS.format(reads=reads, maps=maps, stats="Enabled" if enabled else "Disabled")


def lines(*findings: dict[str, Any]) -> str:
    return "\n".join(["chatter of a library", *(LINE_PREFIX + json.dumps(finding) for finding in findings)])


def device(name: str, attribute_116: bool | None, cuda: str = "13.0") -> dict[str, Any]:
    gpu = {"name": name, "compute_capability": "8.9", "gpu_direct_rdma_supported": attribute_116, "integrated": False}
    return {"step": "device", "devices": [gpu], "cuda_version": cuda}


KVIKIO = {"step": "kvikio", "version": "26.10.00"}


def cufile(available: bool) -> dict[str, Any]:
    return {"step": "cufile", "is_gds_available": available, "libcufile_version": "1.15", "kvikio_prefers_posix": False}


def good_read(backend: str, before: str | None = None, after: str | None = None) -> dict[str, Any]:
    return {
        "step": "read", "ok": True, "got_bytes": READ_BYTES, "bytes_right": True, "elapsed_s": 0.01,
        "backends": {"POSIX": int(backend == "POSIX"), "GDS": int(backend == "GDS"), "MMAP": 0},
        "nvidia_fs_before": asdict(parse_stats(before)) if before else None,
        "nvidia_fs_after": asdict(parse_stats(after)) if after else None, "log": [],
    }  # fmt: skip


def bad_read(error: str, log: Sequence[str] = ()) -> dict[str, Any]:
    return {"step": "read", "ok": False, "error": error, "log": list(log)}


class FakeSystem:
    """A computer made of a few files and the answers of its child processes."""

    def __init__(
        self,
        *,
        platform: str = "linux",
        kernel: str = "6.8.0-45-generic",
        files: dict[str, str] | None = None,
        kvikio: str | None = "26.10.0",
        auto: ChildResult | None = None,
        direct: ChildResult | None = None,
        p2pdma: ChildResult | None = None,
        gdscheck: ChildResult | None = None,
    ) -> None:
        self.platform = platform
        self.kernel_release = kernel
        self.files = files or {}
        self.kvikio = kvikio
        self.children = {"auto": auto, "direct": direct, "p2pdma": p2pdma}
        self.gdscheck = gdscheck
        self.calls: list[tuple[str, Mapping[str, str]]] = []

    def read_text(self, path: str) -> str | None:
        return self.files.get(path)

    def which(self, name: str) -> str | None:
        return f"/usr/bin/{name}" if name == "gdscheck" and self.gdscheck else None

    def glob(self, pattern: str) -> list[str]:
        return []

    def module_version(self, module: str, packages: Sequence[str]) -> str | None:
        return self.kvikio

    def run(self, command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> ChildResult:
        assert self.gdscheck is not None
        return self.gdscheck

    def run_child(
        self, arguments: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None
    ) -> ChildResult:
        mode = "p2pdma" if "CUFILE_USE_PCIP2PDMA" in (env or {}) else arguments[0]
        self.calls.append((mode, env or {}))
        result = self.children[mode]
        assert result is not None, f"this machine does not expect the {mode} test"
        return result


def probe(system: FakeSystem, drive: Any = NVME) -> tuple[PathVerdict, str]:
    """The verdict and the whole table as text."""
    facts = collect_facts(system, "/data/test.bin", drive)
    verdict = judge(facts)
    assert verdict.path in PATHS
    assert set(verdict.why_not) == set(PATHS[: PATHS.index(verdict.path)])
    assert all(reasons for reasons in verdict.why_not.values()), verdict.why_not
    table = "\n".join(f"{row.step} | {row.state} | {row.found}" for row in ladder_rows(facts))
    return verdict, table
