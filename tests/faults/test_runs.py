"""The whole matrix and 1,000 kills over whole runs, with `slow`; `runs.py` is the same as a command."""

import os

import pytest

from tests.faults.runs import main

JOBS = max(1, (os.cpu_count() or 2) // 2)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("engine", ["stream", "deepspeed"])
@pytest.mark.parametrize("what", ["matrix", "kills"])
def test_no_cell_is_silent_and_no_kill_loses_anything(what: str, engine: str) -> None:
    count = ["--count", "1000" if engine == "stream" else "200"] if what == "kills" else []
    assert main([what, "--engine", engine, "--jobs", str(JOBS), *count]) == 0
