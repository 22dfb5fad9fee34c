"""DeepSpeed is needed by its own engine alone."""

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["deepspeed"] = None
import outcore.api.trainer, outcore.engine.decide, outcore.ui.app
import outcore.train.methods, outcore.train.run, outcore.train.vision
"""


def test_everything_else_is_imported_without_it():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
