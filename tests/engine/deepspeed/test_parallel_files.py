"""Files with tensor parallel ranks: DeepSpeed takes them as they are, and trains what one rank trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outcore.common.ports import free_port
from outcore.config.deepspeed_file import read_deepspeed_file
from tests.config.shipped import ROOT, parallel, shipped, text
from tests.refused import refused

CHILD = Path(__file__).with_name("parallel_child.py")
FILES = [name for name in shipped() if "_tp" in name]


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_what_the_command_makes_and_our_engines_refuse_it(name):
    path = ROOT / "config" / name
    assert path.read_text() == text(shipped()[name]), "run: python -m tests.config.shipped --write"
    refused(ValueError, r"tensor_parallel.*scripts that call DeepSpeed themselves", lambda: read_deepspeed_file(path))


def test_pipeline_stages_are_refused_as_deepspeed_refuses_them():
    refused(ValueError, "pipeline takes ZeRO-1 at most", lambda: parallel(2, 2))
    engine = pytest.importorskip("deepspeed").runtime.pipe.engine
    assert "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism" in Path(engine.__file__).read_text()


def losses(path: Path, world_size: int, port: int) -> list[list[float]]:
    """What each rank printed."""
    children = []
    for rank in range(world_size):
        ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
        environ = {**os.environ, **{k: str(v) for k, v in ours.items()}, "MASTER_ADDR": "127.0.0.1"}
        environ |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
        children.append(
            subprocess.Popen(
                [sys.executable, str(CHILD), str(path)],
                env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    said = [child.communicate(timeout=900)[0] for child in children]
    assert all(child.returncode == 0 for child in children), "\n".join(one[-3000:] for one in said)
    return [json.loads(line[7:]) for one in said for line in one.splitlines() if line.startswith("LOSSES ")]


@pytest.mark.slow
def test_two_ranks_that_share_each_layer_train_as_one(tmp_path):
    path = ROOT / "config" / "deepspeed_zero3_tp2_pp1.json"
    content = json.loads(path.read_text())
    del content["tensor_parallel"]
    (tmp_path / "one.json").write_text(text(content))
    (one,) = losses(tmp_path / "one.json", 1, free_port())
    first, second = losses(path, 2, free_port())
    assert first == second and first == pytest.approx(one, rel=5e-3)
    assert all(last < start for last, start in zip(first[-4:], first[:4], strict=True))  # the same rows again
