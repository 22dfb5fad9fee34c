"""`outcore.Trainer`, `load`, `plan` and `serve` from a program, and the example scripts as they stand."""

import json
import runpy
import shutil
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import outcore
from outcore import cli
from tests.api.conftest import SMALL
from tests.forked import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = [{"prompt": f"{a} + {b} is", "completion": f" {a + b}"} for a in range(9) for b in range(9)]
EXAMPLES = sorted((ROOT / "examples/python_api").glob("*.py"))


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def settings(model: Path, **more) -> dict:
    fast = {"seq_length": 32, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    return {"model_name_or_path": str(model), "sample_steps": 0, "report_to": "none", **fast, **more}


def test_a_run_from_python_is_the_commands_run(tiny, tmp_path, capsys):
    said = settings(tiny[0], run_name="mine")
    result = outcore.Trainer(outcore.TrainConfig(**said), dataset=ROWS, eval_dataset=ROWS[:8]).train()
    assert result.finished and result.steps == 4 and result.run == "mine" and result.evaluation
    assert result.first_loss is not None and result.export == Path("final_model/mine")
    assert [step["step"] for step in result.metrics.steps] == [1, 2, 3, 4]
    assert result.checkpoint and result.checkpoint.is_dir() and (result.logs / "loss.png").is_file()
    for name, rows in (("rows", ROWS), ("eval", ROWS[:8])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [f"--{name}={value}" for name, value in settings(tiny[0], run_name="theirs").items()]
    assert cli.main(["train", *flags, "--dataset", "rows.jsonl", "--eval_dataset", "eval.jsonl"]) == 0
    mine, theirs = (load_file(f"final_model/{name}/model.safetensors") for name in ("mine", "theirs"))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine | theirs)
    capsys.readouterr()
    Path("run.yaml").write_text("".join(f"{name}: {value}\n" for name, value in said.items()) + "dataset: rows.jsonl\n")
    more = outcore.Trainer("run.yaml").config
    assert more.dataset == ("rows.jsonl",) and more.max_steps == 4


BAD_ROWS = [
    ([], "no rows"), ("rows.jsonl", "dataset is a str"), ({"train": ROWS}, "of a dictionary of splits give one"),
    ([{"text": b"x"}], "row 1 holds what JSON has no form for"), (["a", 3], "row 2 is a int"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "words"), BAD_ROWS)
def test_what_is_no_row_is_refused_before_anything_is_made(rows, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        outcore.Trainer(outcore.TrainConfig(preset="tiny"), dataset=rows)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_cannot_be_trained_is_an_exception_and_nothing_is_printed(tiny, capsys):
    for said, words in (
        ({"learning_rate": -1}, "learning_rate: must be above 0"), ({"preset": 3, "engine": "stram"}, "'stram'"),
        ({"plan": True}, "outcore.plan"), ({"quantize": "nf4"}, "lora_r 16"), ({"report_to": "wandbb"}, "wandb"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            outcore.Trainer(outcore.TrainConfig(**said))
    with pytest.raises(ValueError, match="given twice"):
        outcore.Trainer(outcore.TrainConfig(dataset=("x.jsonl",)), dataset=ROWS)
    with pytest.raises(ValueError, match="unknown setting 'learning_rat'"):
        Path("run.yaml").write_text("learning_rat: 1\n")
        outcore.Trainer("run.yaml")
    for said, words in (({"model_name_or_path": "no-such"}, "no-such"), ({"dataset": "no.jsonl"}, r"no\.jsonl")):
        with pytest.raises((ValueError, RuntimeError), match=words):
            outcore.Trainer(outcore.TrainConfig(**settings(tiny[0], **said))).train()
    assert "error" not in capsys.readouterr().err


def test_a_run_on_another_thread_leaves_signals_alone(tiny):
    found = []
    trainer = outcore.Trainer(outcore.TrainConfig(**settings(tiny[0], max_steps=2)), dataset=["The quick fox. "] * 40)
    thread = threading.Thread(target=lambda: found.append(trainer.train()))
    thread.start()
    thread.join(300)
    assert found[0].steps == 2


def test_a_model_is_loaded_by_any_name(tiny):
    folder, theirs, tokenizer = tiny
    ids = torch.tensor([tokenizer("The quick brown")["input_ids"]])
    model, own = outcore.load(folder, precision="fp32")
    assert own("The quick brown")["input_ids"] == ids[0].tolist() and all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(model(input_ids=ids).logits, theirs(input_ids=ids).logits)
    expected = theirs.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
    said = settings(folder, run_name="lora", lora_r=4, lora_export="adapter", precision="fp32")
    result = outcore.Trainer(outcore.TrainConfig(**said), dataset=ROWS).train()
    for name in ("lora", "checkpoints/lora"):
        adapted, _ = outcore.load(name, precision="fp32")
        with outcore.LLM(name, **SMALL, precision="fp32") as llm:
            expected = llm.score("The quick brown")[0].token_logprobs
        logits = adapted(input_ids=ids).logits[0].log_softmax(-1).detach()
        found = [float(logits[at, token]) for at, token in enumerate(ids[0, 1:])]
        assert found == pytest.approx(expected, abs=1e-4)
    assert result.export == Path("final_model/lora")


def test_what_ram_does_not_hold_is_not_loaded(tiny, monkeypatch):
    monkeypatch.setattr("outcore.api.loading.available_ram_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"are free\. outcore\.LLM answers"):
        outcore.load(tiny[0])


def test_plans_are_the_commands(tiny, capsys):
    laptop = {"machine": "rtx4070-laptop"}
    flags = ["--machine", "rtx4070-laptop"]
    found = outcore.plan("llama-8b", lora_r=16, **laptop)
    assert cli.main(["plan", "--model", "llama-8b", "--lora_r", "16", *flags, "--json"]) == 0
    details = json.loads(capsys.readouterr().out)
    assert (
        found.fits
        and found.seconds == details["plan"]["time_s"]["step_s"]
        and json.loads(json.dumps(found.details)) == details
    )
    assert found.command == details["command"] and found.bytes["vram"] > 2**30 and found.tokens_per_s
    assert "Where every byte lives" in str(found)
    short = outcore.plan("llama-70b", **laptop)
    assert not short.fits and "Too small" in str(short)
    answers = outcore.plan("llama-8b", infer=True, quantize="nf4", aim="latency", **laptop)
    assert cli.main(["plan", "--infer", "llama-8b", "--quantize", "nf4", "--aim", "latency", *flags]) == 0
    assert (
        str(answers) == capsys.readouterr().out.strip() and answers.fits and answers.seconds and answers.command == ""
    )
    none = outcore.plan("llama-70b", infer=True, vram_gib=1, ram_gib=3, **laptop)
    assert not none.fits and none.seconds == float("inf") and "does not fit" in str(none)
    for said, words in (({"lora_rr": 1}, "unknown setting 'lora_rr'"), ({"aim": "latency"}, "aim is about answers")):
        with pytest.raises(ValueError, match=words):
            outcore.plan("llama-8b", **said, **laptop)


def test_a_server_beside_the_program(tiny):
    before = sys.getswitchinterval()
    with outcore.serve(tiny[0], port=0, block=False, name="mine", max_answer_tokens=8, **SMALL) as server:
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as reply:
            assert json.load(reply)["data"][0]["id"] == "mine"
        with pytest.raises(RuntimeError, match="cannot be opened"):
            outcore.serve(tiny[0], port=int(server.url.rpartition(":")[2]), block=False)
    server.close()
    assert sys.getswitchinterval() == before
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{server.url}/v1/models", timeout=5)
    for said, words in (({"prt": 1}, "unknown setting 'prt'"), ({"host": "0.0.0.0"}, "api_key")):
        with pytest.raises(ValueError, match=words):
            outcore.serve(tiny[0], block=False, **said)


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(script, tiny, capsys, monkeypatch):
    shutil.copytree(tiny[0], "MODEL")
    monkeypatch.setattr(sys, "argv", [script.name, "MODEL"])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip() and len(script.read_text().splitlines()) <= 20
