"""A run's own shared-memory buffer goes as soon as its ranks have opened it, nobody else's."""

import os
import signal
import subprocess
import sys

import pytest

from outcore.common.os_layer import SHARED_MEMORY, remove_own_buffer


def test_only_this_ranks_buffer_of_this_run_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    start = f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1"
    for name in ("29500_0", "29500_1", "29501_0"):
        (tmp_path / f"{start}_{name}").touch()
    remove_own_buffer(0, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{start}_29500_1", f"{start}_29501_0"}
    remove_own_buffer(0, tmp_path)
    monkeypatch.delenv("MASTER_PORT")
    remove_own_buffer(1, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.more
@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no shared memory by name on this system")
def test_a_killed_run_leaves_no_buffer():
    code = """
import os, signal
from pathlib import Path
from outcore.engine.deepspeed.build import init_process_group
init_process_group(False, -1)
import deepspeed
name = f"deepspeed_allreduce_buffer_{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_0"
print(deepspeed.comm.comm.cdb.shm_comm_op is not None, name in Path("/proc/self/maps").read_text(), name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == -signal.SIGKILL, done.stderr
    built, mapped, name = done.stdout.split()[-3:]
    assert built == mapped  # DeepSpeed did make one, where its extension is built
    assert not (SHARED_MEMORY / name).exists()
