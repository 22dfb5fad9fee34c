"""Sixty cells of fault x phase: each goes on with the same result, or is told with its path, or dies and loses nothing.

The whole matrix, over whole runs of both engines, is `python -m tests.faults.runs matrix` (slow: test_runs.py).
"""

from collections.abc import Iterator

import pytest

from tests.faults.kit import Fault, Server, is_told, server
from tests.faults.phases import PHASES

EIO, ENOSPC, EACCES, EMFILE, ENOMEM, EROFS, ENOLCK = 5, 28, 13, 24, 12, 30, 37
CELLS: dict[str, tuple[Fault, ...]] = {
    "save": (
        *(Fault("write", f"{kind}", "step-00000003") for kind in (EIO, ENOSPC, "short", "kill", "killed")),
        *(Fault("fsync", f"{EIO}", "step-00000003", nth) for nth in (1, 2, 4, 6)),
        *(Fault("open", f"{number}", "step-00000003", nth) for number, nth in ((EMFILE, 1), (EACCES, 2), (EIO, 4))),
        *(Fault("rename", kind, "step-00000003", nth) for kind, nth in (("5", 1), ("kill", 3), ("killed", 3))),
        Fault("mkdir", f"{EROFS}", "step-00000003"), Fault("unlink", f"{EIO}", "step-00000001"),
        Fault("rmdir", f"{EIO}", "step-00000001"), Fault("rmdir", "kill", "step-00000001"),
        Fault("unlink", "killed", "step-00000001"),
    ),
    "resume": (
        Fault("read", f"{EIO}", "step-00000002/model"), Fault("read", f"{EIO}", "step-00000002/manifest"),
        Fault("read", f"{EIO}", "step-00000002/trainer", 2), Fault("read", "flip", "step-00000002/model"),
        Fault("read", "flip", "step-00000002/manifest", 1, 3), Fault("read", "flip", "step-00000002/trainer"),
        Fault("read", "short", "step-00000002/model"), Fault("open", f"{EACCES}", "step-00000002/manifest", 1, 9),
        Fault("open", f"{EMFILE}", "step-00000002/model"), Fault("stat", f"{EIO}", "step-00000002/model"),
        Fault("open", f"{EIO}", "/run", 1, 1),
    ),
    "export": (
        Fault("write", f"{ENOSPC}", "final_model"), Fault("write", f"{EIO}", "final_model", 2),
        Fault("fsync", f"{EIO}", "final_model"), Fault("rename", "kill", "final_model"),
        Fault("rename", f"{EIO}", "final_model"), Fault("mkdir", f"{EACCES}", "final_model"),
        Fault("read", f"{EIO}", "step-00000002/model", 2),
    ),
    "cache": (
        Fault("write", f"{ENOSPC}", "cache/tokens"), Fault("fsync", f"{EIO}", "cache/tokens"),
        Fault("open", f"{EACCES}", "cache/tokens"), Fault("rename", "kill", "cache/tokens"),
        Fault("read", "flip", "cache/tokens", 1), Fault("mmap", f"{ENOMEM}", "cache/tokens"),
    ),
    "tokenizer": (
        Fault("write", f"{ENOSPC}", "cache/tokenizer"), Fault("open", f"{EMFILE}", "cache/tokenizer", 3),
        Fault("fsync", f"{EIO}", "cache/tokenizer"), Fault("rename", "killed", "cache/tokenizer"),
    ),
    "metrics": (
        Fault("write", f"{ENOSPC}", "metrics.jsonl", 2), Fault("write", f"{EIO}", "metrics.jsonl", 1),
        Fault("fsync", f"{EIO}", "metrics.jsonl", 1), Fault("write", "kill", "metrics.jsonl", 3),
        Fault("open", f"{EACCES}", "metrics.jsonl", 1),
    ),
    "scratch": (
        Fault("write", f"{EIO}", "tensors.bin", 2), Fault("write", "lost", "tensors.bin", 4),
        Fault("write", "torn", "tensors.bin", 4), Fault("write", "short", "tensors.bin", 3),
        Fault("read", "flip", "tensors.bin", 2), Fault("read", f"{EIO}", "tensors.bin", 2),
        Fault("space", f"{ENOSPC}", "tensors.bin"), Fault("open", f"{EMFILE}", "tensors.bin"),
        Fault("mkdir", f"{EROFS}", "outcore-scratch"), Fault("thread", "11", "-", 1, 99),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("library")) as running:
        yield running


@pytest.fixture(scope="module")
def expected(made: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each phase says when nothing happens."""
    found = {}
    for name, phase in PHASES.items():
        root = tmp_path_factory.mktemp(name)
        phase.prepare(root)
        ended = made.phase(name, root)
        assert ended.code == 0, f"{name}: {ended.said}"
        phase.check(root, True)
        found[name] = ended.said.splitlines()[-1]
    return found


CASES = [(name, fault) for name, faults in CELLS.items() for fault in faults]


@pytest.mark.more
@pytest.mark.parametrize(("name", "fault"), CASES, ids=[f"{name}: {fault}" for name, fault in CASES])
def test_no_cell_is_silent_a_trace_or_without_a_path(made, expected, tmp_path, name, fault):
    phase = PHASES[name]
    phase.prepare(tmp_path)
    ended = made.phase(name, tmp_path, fault)
    assert "Traceback" not in ended.said, ended.said
    if ended.code == 0:
        last = ended.said.splitlines()[-1]
        fell_back = "note: passing over" in ended.said and "step-00000002" in ended.said
        assert last == expected[name] or (fell_back and name in ("resume", "export")), ended.said
    elif ended.code == 1:
        assert is_told(ended.said) or (fault.call == "thread" and "ulimit -u" in ended.said), ended.said
    else:
        assert ended.code == -9 and fault.kind.startswith("kill"), (ended.code, ended.said)
    phase.check(tmp_path, ended.code == 0)
    again = made.phase(name, tmp_path)
    if name == "export" and ended.code != 0 and (tmp_path / "final_model/r").is_dir():
        return  # it was there already, whole
    if name == "export" and ended.code == 0:
        assert "exists already" in again.said
        return
    assert again.code == 0 and again.said.splitlines()[-1] == expected[name], again.said
    phase.check(tmp_path, True)


def test_the_matrix_has_sixty_cells() -> None:
    assert len(CASES) >= 60 and set(CELLS) == set(PHASES)
