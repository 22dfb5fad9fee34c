"""Runs that learn from their own answers, killed again and again, also while they resume: in answers, rewards, passes,
updates, saves and at any moment. Metrics and weights are those of a run that nothing happened to."""

import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.forked import run_script
from tests.train.methods.test_rollouts import command, steps_of, write_files

STEPS = 5
LORA = ["--lora_r", "4", "--beta", "0.1"]
PLACES = {
    "answers": ("outcore.infer.engine", "InferenceEngine", "step", 40),
    "rewards": ("outcore.train.methods.rewards", "RewardProcess", "ask", 3),
    "passes": ("outcore.hf.visit", "LayerVisit", "backward", 24),
    "updates": ("torch.optim.lr_scheduler", "LambdaLR", "step", 4),
    "saves": ("", "", "", 40),
    "any moment": ("", "", "", 90),
}
"""Places of kills. Some are calls of a method: which call of how many is drawn. Others are files that are opened,
renamed or removed among the checkpoints, or tenths of a second."""
DYING = """
import importlib, os, signal, sys, threading, torch
from outcore.cli import main
place, (module, name, method), left, is_after, words = {job!r}
torch.set_num_threads(1)
def count():
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
if place == "saves":
    sys.addaudithook(lambda event, args: event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
                     and "checkpoints/r" in str(args[0]) and count())
elif place == "any moment":
    threading.Timer(left / 10, os.kill, (os.getpid(), signal.SIGKILL)).start()
elif place:
    kind = getattr(importlib.import_module(module), name)
    own = getattr(kind, method)
    def counted(*args, **kwargs):
        if not is_after:
            count()
        found = own(*args, **kwargs)
        if is_after:
            count()
        return found
    setattr(kind, method, counted)
os.chdir({folder!r})
sys.exit(main(words))
"""


@pytest.mark.usefixtures("one_thread")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kills", "flags"),
    [
        pytest.param(2, LORA, marks=pytest.mark.more, id="lora"),
        pytest.param(20, LORA, marks=pytest.mark.slow, id="lora, often"),
        pytest.param(20, [], marks=pytest.mark.slow, id="full, often"),
    ],
)
def test_no_kill_changes_a_bit(kills: int, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files()
    Path("rows.jsonl").write_text("\n".join(Path("rows.jsonl").read_text().splitlines()[:5]))  # three epochs
    draw, fell, lives = random.Random(kills), Counter[str](), 0

    def start(name: str, place: str = "") -> int:
        resumes = ["--resume_from_checkpoint", "auto"] * Path("checkpoints", name).exists()
        words = command(*flags, *resumes, "--run_name", name, "--save_total_limit", "2", steps=STEPS)
        *where, most = PLACES.get(place, ("", "", "", 1))
        job = (place, tuple(where), draw.randint(1, most), draw.random() < 0.5, words)
        Path("dying.py").write_text(DYING.format(job=job, folder=str(tmp_path)))
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return run_script(tmp_path / "dying.py", [], environ, tmp_path / "log")

    assert start("whole") == 0, Path("log").read_text()[-2000:]
    once, metrics = load_file("final_model/whole/model.safetensors"), steps_of("whole")
    while fell.total() < kills:
        name, lives = f"r{lives}", lives + 1
        place, code = "", -9
        while code == -9:
            place = draw.choice([*PLACES]) if fell.total() < kills else ""
            code = start(name, place)
            fell[place] += code == -9
        assert code == 0, f"{place}: {Path('log').read_text()[-2000:]}"
        again = load_file(f"final_model/{name}/model.safetensors")
        assert all(torch.equal(once[part], again[part]) for part in once), (name, fell)
        assert json.dumps(steps_of(name)) == json.dumps(metrics), (name, fell)
    print(f"{fell.total()} kills in {lives} lives: {dict(fell)}")
