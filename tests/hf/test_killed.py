"""A process that is killed in the middle of a backward, inside a foreign trainer's loop or a method's run: what goes on
from its last checkpoint ends with the bits of a run that nobody killed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import outcore.hf
from outcore.cli import main
from outcore.monitor import read_metrics
from tests.forked import run_script
from tests.hf.callers import TRAINERS, pairs, tiny, tokenizer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.more(after=1)]
DYING = """
import os, signal
import torch
from outcore.hf.visit import LayerVisit
torch.set_num_threads(1)
own, left = LayerVisit.backward, [{backwards}]
def backward(visit, *args):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return own(visit, *args)
LayerVisit.backward = backward
"""
TRAINER = """
from pathlib import Path
from tests.hf.test_killed import trained
trained({which!r}, Path({folder!r}), {lora})
"""
COMMAND = """
import os
from outcore.cli import main
os.chdir({folder!r})
main({words})
"""


def dies(tmp_path: Path, script: str, backwards: int) -> None:
    """Run a script that is killed in that backward of a layer, counted from the first one."""
    (tmp_path / "dying.py").write_text(DYING.format(backwards=backwards) + script)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    code = run_script(tmp_path / "dying.py", [], environ, tmp_path / "log")
    assert code == -9, (tmp_path / "log").read_text()[-2000:]


def trained(which: str, out: Path, lora: bool, resume: bool = False) -> dict[str, torch.Tensor]:
    """Six steps by TRL, a checkpoint after every second."""
    model = outcore.hf.stream(tiny("gpt2", lora=lora, dropout=0.1))
    given = {"reference": tiny("gpt2")} if which == "dpo" and not lora else {}
    trainer = TRAINERS[which](model, out, 6, save_strategy="steps", save_steps=2, **given)
    trainer.train(resume_from_checkpoint=resume or None)
    return {name: p.clone() for name, p in trainer.model.state_dict().items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("which", "lora"),
    [
        ("dpo", True),
        ("sft", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("sft", True), ("dpo", False))),
    ],
)
def test_in_trls_loop(which: str, lora: bool, tmp_path: Path) -> None:
    num_layers = len(tiny("gpt2").transformer.h)
    folder = tmp_path / "killed"
    dies(tmp_path, TRAINER.format(which=which, folder=str(folder), lora=lora), 5 * 2 * num_layers - 1)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    resumed, whole = trained(which, folder, lora, resume=True), trained(which, tmp_path / "whole", lora)
    assert all(torch.equal(p, resumed[name]) for name, p in whole.items())


@pytest.mark.parametrize("flags", [["--lora_r", "4"], []], ids=["lora", "full"])
def test_in_a_run_by_a_method(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny()
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, pairs())))
    words = ["train", "model", "--method", "dpo", "--dataset", "rows.jsonl", "--seq_length", "32", "--max_steps", "6"]
    words += ["--report_to", "none", "--learning_rate", "0.01", "--save_steps", "2", "--grad_accum", "1", *flags]
    name = ["--run_name", "killed"]
    backwards = 5 * len(model.model.layers) - 1
    dies(tmp_path, COMMAND.format(folder=str(tmp_path), words=[*words, *name]), backwards)
    monkeypatch.chdir(tmp_path)  # now: what forks the child is to start where this repository is
    assert not list(Path("final_model").rglob("*.safetensors"))
    assert main([*words, *name, "--resume_from_checkpoint", "auto"]) == 0
    assert main([*words, "--run_name", "whole"]) == 0
    losses = [[step["loss"] for step in read_metrics(f"logs/{run}/metrics.jsonl").steps] for run in ("killed", "whole")]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    killed, whole = (load_file(f"final_model/{run}/model.safetensors") for run in ("killed", "whole"))
    assert all(torch.equal(tensor, killed[name]) for name, tensor in whole.items())
