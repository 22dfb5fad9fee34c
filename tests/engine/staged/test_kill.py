"""A killed run with its states on NVMe resumes bit by bit from the last complete checkpoint, wherever the blow fell."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.staged.jobs import environment
from tests.engine.stream.runs.job import SMALL_MODEL, write_corpus
from tests.forked import run_script

CHILD = Path(__file__).with_name("kill_child.py")
STEPS = 6
BLOWS = [("update", 20), ("save", 6), ("gradient", 60)]
"""In the first steps' updates; in the first save after two steps; while gradients go to the drive."""


def train(
    root: Path, moment: str = "never", count: int = 0, *, on_nvme: bool = True, more: tuple[str, ...] = ()
) -> int:
    """One process; its exit code."""
    data = write_corpus(root.parent)
    argv = ["--engine", "deepspeed", "--dataset", str(data), "--seq_length", "32", "--run_name", "r"]
    argv += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--precision", "bf16"]
    argv += ["--sample_tokens", "0", "--eval_steps", "0", "--report_to", "none", "--no_export"]
    argv += ["--max_steps", str(STEPS), "--save_steps", "2", "--save_total_limit", "9"]
    argv += ["--resume_from_checkpoint", "auto", f"--data_cache_dir={root.parent / 'cache'}"]
    argv += [f"--{name}_dir={root / name}" for name in ("checkpoint", "log", "export")]
    argv += ["--config_overrides", SMALL_MODEL, "--zero_stage", "zero3"]
    if on_nvme:
        argv[-1:] = ["infinity", "--nvme_offload_path", str(root / "nvme"), "--max_in_cpu_gb", "0", "--strict_offload"]
    argv += more
    root.mkdir(exist_ok=True)
    return run_script(CHILD, [moment, str(count), *argv], environment(), root / "log.txt")


def final_states(root: Path) -> dict[str, torch.Tensor]:
    folder = root / "checkpoint" / "r" / f"step-{STEPS:08d}"
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if not file.name.startswith("rng"):
            found |= {f"{file.name.split('-')[0]}:{name}": value for name, value in load_file(file).items()}
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Six steps in RAM without interruption."""
    root = tmp_path_factory.mktemp("straight") / "run"
    assert train(root, on_nvme=False) == 0, (root / "log.txt").read_text()[-3000:]
    return final_states(root)


def die_and_resume(
    root: Path, blows: list[tuple[str, int]], straight: dict[str, torch.Tensor], more: tuple[str, ...] = ()
) -> int:
    """How many of the blows fell before the run was over."""
    fell = 0
    for moment, count in blows:
        code = train(root, moment, count, more=more)
        assert code in (0, -signal.SIGKILL), (root / "log.txt").read_text()[-3000:]
        fell += code != 0
    assert train(root, more=more) == 0, (root / "log.txt").read_text()[-3000:]
    found = final_states(root)
    assert found.keys() == straight.keys() and len(found) > 10
    for name, value in found.items():
        assert torch.equal(value, straight[name]), name
    assert not list((root / "checkpoint" / "r").glob(".step-*")), "a half-written checkpoint is left"
    return fell


@pytest.mark.more
def test_killed_in_update_save_and_gradient(tmp_path: Path, straight: dict[str, torch.Tensor]) -> None:
    """With gradients on the drive, beside states and parameters; at random moments they are in RAM."""
    assert die_and_resume(tmp_path / "run", BLOWS, straight, ("--nvme_offload_gradients", "true")) == len(BLOWS)
