"""How much is pinned: the probing child, and what its parent makes of it; with a CUDA runtime made of Python."""

import json
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outcore.common.quantities import GIB, MIB
from outcore.staging.pool import pinned_grant, probe_pinned
from tests.machine.fakes import linux_root, write
from tests.staging.cuda_fakes import CUDA0, FakeRuntime

SCRIPT = Path(probe_pinned.__file__)


def probe(runtime: FakeRuntime, pinned_bytes: int, combined_bytes: int = 0) -> dict:
    seen: list[dict] = []
    probe_pinned.probe(runtime, pinned_bytes, combined_bytes, 1 * MIB, lambda found: seen.append(dict(found)))
    assert runtime.pinned == {} and runtime.memory == {}  # everything is given back
    return seen[-1]


# ---------------------------------------------------------------------- the child


def test_the_probe_stops_at_the_first_refusal_and_scales_both_parts() -> None:
    found = probe(FakeRuntime(3 * MIB + 5), 6 * MIB, 2 * MIB)
    assert found["granted_bytes"] == 3 * MIB and "out of memory" in found["reason"]
    assert found["pinned_bytes"] + found["write_combined_bytes"] == 3 * MIB
    assert found["write_combined_bytes"] == 768 * 1024


def test_the_probe_finds_out_that_only_small_pieces_and_no_write_combined_memory_are_given() -> None:
    found = probe(FakeRuntime(16 * MIB, piece_bytes=1 * MIB, write_combined=False), 4 * MIB, 1 * MIB)
    assert found["granted_bytes"] == 5 * MIB and found["pinned_bytes"] == 0
    assert found["largest_piece_bytes"] == 1 * MIB and "in one piece" in found["reason"]
    assert found["write_combined_bytes"] == 0 and "801" in found["write_combined_reason"]
    assert probe(FakeRuntime(0), 4 * MIB)["granted_bytes"] == 0


def test_the_child_says_why_cuda_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe_pinned.main(["--libcudart", "/no/such/libcudart.so", "--pinned-bytes", "4096"]) == 1
    assert "/no/such/libcudart.so" in json.loads(capsys.readouterr().out)["error"]


def test_the_childs_runtime_checks_every_call() -> None:
    calls: list[str] = []

    class Function:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, *arguments: Any) -> Any:
            calls.append(self.name)
            if self.name == "cudaGetErrorString":
                return b"out of memory"
            return 2 if self.name in ("cudaHostRegister", "cudaHostAlloc") else 0

    names = "HostRegister HostUnregister HostAlloc FreeHost GetErrorString SetDevice Free GetLastError"
    lib = SimpleNamespace(**{f"cuda{name}": Function(f"cuda{name}") for name in names.split()})
    runtime = probe_pinned.Runtime(lib)
    assert runtime.start(0) == "" and runtime.unregister(0) == "" and runtime.free_write_combined(0) == ""
    assert runtime.register(0, 1) == "out of memory (CUDA error 2)"
    assert runtime.alloc_write_combined(1) == (0, "out of memory (CUDA error 2)")
    assert calls.count("cudaGetLastError") == 2  # the refusal is not left behind for the next kernel launch


# ---------------------------------------------------------------------- the parent's reading of it


def child(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def test_the_grant_follows_the_childs_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = f"""
        import sys, json; sys.path.insert(0, {str(SCRIPT.parent)!r})
        import probe_pinned
        class R:
            held = 0
            def register(self, a, n):
                if self.held + n > 3 << 20: return "out of memory (CUDA error 2)"
                self.held += n; return ""
            def unregister(self, a): self.held = 0; return ""
        probe_pinned.probe(R(), 8 << 20, 0, 1 << 20, probe_pinned._print)
    """
    grant = pinned_grant.probe_pinned_memory(CUDA0, 8 * MIB, 0, command=child(runner))
    assert grant.pinned_bytes == grant.largest_piece_bytes == 3 * MIB and grant.pageable_bytes == 0
    assert grant.reasons == ("CUDA pins only 3.00 MiB of 8.00 MiB here: out of memory (CUDA error 2)",)


STEP = (
    '{"granted_bytes": %d, "pinned_bytes": 0, "write_combined_bytes": 0, "largest_piece_bytes": 1048576, '
    '"reason": "%s", "write_combined_reason": "", "error": ""}'
)


def test_a_child_that_is_killed_still_tells_what_had_been_granted() -> None:
    code = f"import os; print({STEP % (2 * MIB, '')!r}, flush=True); os.kill(os.getpid(), 9)"
    grant = pinned_grant.probe_pinned_memory(CUDA0, 8 * MIB, 0, command=child(code))
    assert grant.pinned_bytes == 2 * MIB and grant.largest_piece_bytes == 1 * MIB
    assert "ended early, exit status -9" in grant.reasons[0]
    code = f"import os; print({STEP % (8 * MIB, '')!r}, flush=True); os.kill(os.getpid(), 9)"
    grant = pinned_grant.probe_pinned_memory(CUDA0, 6 * MIB, 2 * MIB, command=child(code))
    assert grant.total_bytes == grant.pinned_bytes == 8 * MIB
    assert "ended early (exit status -9)" in grant.reasons[0] and "it was not tried" in grant.reasons[1]


@pytest.mark.parametrize(("command", "said"), [
    (child("raise SystemExit(3)"), r"it said nothing \(exit status 3\)"),
    (child('print(\'{"error": "CUDA did not start: busy"}\')'), "CUDA did not start: busy"),
    (["/no/such/python"], "did not start"), (None, "no libcudart is mapped"),
])  # fmt: skip
def test_without_a_probe_the_ram_test_stands_alone(command: list[str] | None, said: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(pinned_grant, "find_libcudart", lambda: None)
    grant = pinned_grant.probe_pinned_memory(CUDA0, 8 * MIB, 4 * MIB, command=command)
    assert (grant.pinned_bytes, grant.write_combined_bytes) == (8 * MIB, 4 * MIB) and len(grant.reasons) == 1
    assert re.search(said, grant.reasons[0])


def test_the_real_child_is_started_by_path_and_a_hanging_one_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_grant, "find_libcudart", lambda: Path("/no/such/libcudart.so.13"))
    grant = pinned_grant.probe_pinned_memory(CUDA0, 8 * MIB, 0)
    assert grant.pinned_bytes == 8 * MIB and "/no/such/libcudart.so.13" in grant.reasons[0]
    monkeypatch.setattr(pinned_grant, "PROBE_BASE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(pinned_grant, "PROBE_TIMEOUT_S_PER_GIB", 0.0)
    code = f"import time; print({STEP % (3 * MIB, '')!r}, flush=True); time.sleep(60)"
    grant = pinned_grant.probe_pinned_memory(CUDA0, 8 * MIB, 0, command=child(code))
    assert grant.pinned_bytes in (3 * MIB, 8 * MIB) and "no answer within 0 s" in grant.reasons[0]


def test_ram_and_control_groups_limit_the_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = linux_root(tmp_path, ram_kib=1024 * MIB)
    assert pinned_grant.reserve_bytes(root) == 1024 * GIB // 20
    write(root / "sys/fs/cgroup/memory.max", f"{40 * GIB}\n")
    assert pinned_grant.reserve_bytes(root) == 2 * GIB
    write(root / "sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    assert pinned_grant.reserve_bytes(root) == 1 * GIB
    monkeypatch.setattr(pinned_grant, "available_ram_bytes", lambda: 0)
    grant = pinned_grant.probe_pinned_memory(CUDA0, 8 * MIB, 4 * MIB)
    assert grant.total_bytes == 0 and "only 0 B of RAM" in grant.reasons[0]
    grant = pinned_grant.fit_into_ram(6 * MIB, 2 * MIB, 4 * MIB)
    assert (grant.pinned_bytes, grant.write_combined_bytes) == (3 * MIB, 1 * MIB)


def test_a_child_is_asked_only_where_a_refusal_does_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pinned_grant.refusal_is_harmless("Linux", "6.8.0-45-generic")
    assert not pinned_grant.refusal_is_harmless("Linux", "5.15.167.4-microsoft-standard-WSL2")
    assert not pinned_grant.refusal_is_harmless("Windows", "10")
    asked = []
    monkeypatch.setattr(pinned_grant, "probe_pinned_memory", lambda *sizes: asked.append(sizes))
    for harmless in (True, False):
        monkeypatch.setattr(pinned_grant, "refusal_is_harmless", lambda answer=harmless: answer)
        pinned_grant.settle_grant(CUDA0, 2 * MIB, 1 * MIB, True)
        pinned_grant.settle_grant(CUDA0, 2 * MIB, 1 * MIB, False)
        assert len(asked) == (not harmless)
    assert asked == [(CUDA0, 2 * MIB, 1 * MIB)]


@pytest.mark.parametrize(("ram_mib", "expected_mib"), [(100, 8), (6, 6)])
def test_an_earlier_grant_is_kept_within_what_ram_is_left(monkeypatch, ram_mib: int, expected_mib: int) -> None:
    monkeypatch.setattr(pinned_grant, "available_ram_bytes", lambda: ram_mib * MIB)
    monkeypatch.setattr(pinned_grant, "reserve_bytes", lambda: 0)
    earlier = pinned_grant.PinnedGrant(8 * MIB, 0, 8 * MIB, ("earlier",))
    found = pinned_grant.settle_grant(torch.device("cpu"), 16 * MIB, 0, earlier)
    assert found.total_bytes == expected_mib * MIB
    assert (found.reasons == earlier.reasons) == (ram_mib == 100)
