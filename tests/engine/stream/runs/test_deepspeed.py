"""The two engines themselves: they agree step by step, and each goes on from the other's checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("deepspeed_child.py")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["none", "zero3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_engines_agree_and_resume_each_others_checkpoints(tmp_path, stage, precision):
    ours = ("MASTER_PORT", "MASTER_ADDR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")
    env = {key: value for key, value in os.environ.items() if key not in ours}
    done = subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path), stage, precision],
        capture_output=True,
        text=True,
        timeout=500,
        env={**env, "PYTHONPATH": str(CHILD.parents[4])},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "engines agree" in done.stdout
