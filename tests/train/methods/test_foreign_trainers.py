"""Runs by trainers that are not ours (`--method`, `--train_vision`): what every run promises holds for them too."""

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outcore.cli import main
from tests import tiny_vision
from tests.hf.callers import tiny, tokenizer
from tests.train.jobs import REPOSITORY, fresh_env

pytestmark = pytest.mark.usefixtures("one_thread")
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
SEEN_TURNS = tiny_vision.TEMPLATE.replace("<eos>", "<|im_end|>")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A text model and an image-text model whose chats end otherwise than their texts, and rows for both."""
    monkeypatch.chdir(tmp_path)
    words = copy.deepcopy(tokenizer())  # which is cached
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    words.chat_template = TURNS
    words.save_pretrained("text")
    model = tiny()
    model.resize_token_embeddings(len(words))
    model.generation_config.eos_token_id = words.eos_token_id
    model.save_pretrained("text")
    seen = tiny_vision.processor()
    seen.tokenizer.add_special_tokens({"additional_special_tokens": ["<picture>", "<|im_end|>"]})
    seen.chat_template = SEEN_TURNS
    tiny_vision.model(seen).save_pretrained("seen")
    seen.save_pretrained("seen")
    Path("red.png").write_bytes(tiny_vision.picture("red"))
    talk = [{"role": "user", "content": "hello"}]
    said = [[{"role": "assistant", "content": word}] for word in ("world", "test")]
    pairs = [{"prompt": talk, "chosen": said[0], "rejected": said[1]}] * 12
    Path("text.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    rows = [{"prompt": "hello", "completion": "test", "images": ["red.png"]}] * 4
    Path("seen.jsonl").write_text("\n".join(map(json.dumps, rows)))
    yield


WAYS = {"text": ["--method", "dpo", "--report_to", "none"], "seen": ["--train_vision", "none"]}


def command(kind: str, *more: str) -> list[str]:
    usual = ["--dataset", f"{kind}.jsonl", "--seq_length", "64", "--max_steps", "2", "--save_steps", "1"]
    usual += ["--warmup_steps", "0", "--learning_rate", "1e-2", "--run_name", "r"]
    return ["train", kind, *WAYS[kind], *usual, *more]


def change(folder: str) -> None:
    file = Path(folder, "model.safetensors")
    save_file({name: value * 1.5 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})


def stopped_after_a_step() -> None:
    shutil.rmtree("checkpoints/r/step-00000002")


@pytest.mark.more(after=1)
@pytest.mark.parametrize("kind", WAYS)
def test_a_base_that_changed_is_refused(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(kind, "--lora_r", "4")) == 0
    stopped_after_a_step()
    change(kind)
    again = command(kind, "--lora_r", "4", "--resume_from_checkpoint", "auto", "--continue_with_changes")
    assert main(again) == 1
    assert f"{kind} has changed since: the adapter was trained over other weights" in capsys.readouterr().err
    assert not Path("checkpoints/r/step-00000002").exists()


def test_what_answers_are_compared_with_is_the_same_without_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("text")) == 0
    stopped_after_a_step()
    change("text")
    assert main(command("text", "--resume_from_checkpoint", "auto")) == 1
    assert "text has changed since" in capsys.readouterr().err


@pytest.mark.parametrize("kind", WAYS)
def test_another_tokenizer_is_refused(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(kind)) == 0
    stopped_after_a_step()
    file = Path(kind, "tokenizer.json")
    numbered = json.loads(file.read_text())
    vocab = numbered["model"]["vocab"]
    one, other = [name for name, number in vocab.items() if number > 100][:2]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(numbered))
    assert main(command(kind, "--resume_from_checkpoint", "auto", "--continue_with_changes")) == 1
    assert "its token ids mean other pieces" in capsys.readouterr().err


@pytest.mark.more(after=1)
@pytest.mark.parametrize("kind", WAYS)
def test_other_settings_of_a_resumed_run_are_refused(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(kind, "--lora_r", "4")) == 0
    stopped_after_a_step()
    assert main(command(kind, "--lora_r", "2", "--resume_from_checkpoint", "auto")) == 1
    assert "made with lora_r 4, this run has 2" in capsys.readouterr().err


@pytest.mark.more(after=1)
@pytest.mark.parametrize("kind", WAYS)
def test_an_adapter_alone_is_merged_afterwards(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(kind, "--lora_r", "4")) == 0
    whole = load_file("final_model/r/model.safetensors")
    shutil.rmtree("checkpoints")
    shutil.rmtree("logs")
    shutil.rmtree("final_model")
    assert main(command(kind, "--lora_r", "4", "--lora_export", "adapter")) == 0
    capsys.readouterr()
    assert main(["export", "r", "--merge"]) == 0
    kinds = {"text": "AutoModelForCausalLM", "seen": "AutoModelForImageTextToText"}
    assert f"final_model/r-merged  ({kinds[kind]}.from_pretrained loads it)" in capsys.readouterr().out
    merged = load_file("final_model/r-merged/model.safetensors")
    assert merged.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in merged.items())
    assert Path("final_model/r-merged/processor_config.json").exists() == (kind == "seen")


@pytest.mark.parametrize("kind", WAYS)
def test_a_checkpoint_of_theirs_says_what_becomes_of_it(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(kind, "--no_export")) == 0
    asked = [["export", "r"], ["export", "r", "--merge"], ["generate", "r", "--prompt", "hello"], ["serve", "r"]]
    for argv in asked:
        assert main(argv) in (1, 2)
        said = capsys.readouterr().err
        assert "whose checkpoints only its trainer reads. Let the run come to its end" in said, said


@pytest.mark.more(after=2)
@pytest.mark.parametrize("how", [[], ["--lora_r", "4"], ["--lora_r", "4", "--lora_export", "adapter"]])
@pytest.mark.parametrize("kind", WAYS)
def test_an_export_stops_where_its_chats_end(kind: str, how: list[str]) -> None:
    assert main(command(kind, *how, "--max_steps", "1")) == 0
    vocab = json.loads(Path(kind, "tokenizer.json").read_text())["added_tokens"]
    (end,) = [token["id"] for token in vocab if token["content"] == "<|im_end|>"]
    told = json.loads(Path("final_model/r/generation_config.json").read_text())["eos_token_id"]
    assert isinstance(told, list) and end in told and len(told) == 2


@pytest.mark.more
@pytest.mark.parametrize("kind", WAYS)
def test_no_library_talks_between_the_lines(kind: str) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "outcore.cli", *command(kind, "--lora_r", "4")],
        env=fresh_env(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1"), cwd=os.getcwd(), capture_output=True, text=True,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    ours = (
        "precision:",
        "device:",
        "data:",
        "model:",
        "step ",
        "done:",
        "log and loss curve:",
        "checkpoints:",
        "answers end",
    )
    strange = [line for line in (child.stdout + child.stderr).splitlines() if line and not line.startswith(ours)]
    assert not strange


TEXT_ALONE = {
    "train": ["--dataset", "seen.jsonl", "--lora_r", "4"],
    "train --method": ["--method", "dpo", "--dataset", "text.jsonl", "--lora_r", "4"],
    "train --plan": ["--plan", "--dataset", "seen.jsonl"],
    "score": ["--input", "texts.jsonl"],
}


@pytest.mark.parametrize("name", TEXT_ALONE)
def test_an_image_text_model_is_refused_by_commands_of_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At once, with what to do: no engine was chosen, no file made."""
    Path("texts.jsonl").write_text(json.dumps({"text": "hello world"}))
    assert main([name.partition(" ")[0], "seen", *TEXT_ALONE[name]]) == 2
    said = "".join(capsys.readouterr())
    assert "is an image-text model" in said and "--train_vision none, lora or full" in said
    assert "engine:" not in said and not any(Path(folder).exists() for folder in ("checkpoints", "logs"))


@pytest.mark.parametrize("kind", ["seen", "sft"])
def test_rows_of_two_shapes_in_a_file_are_named(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    pair = {"prompt": "hello", "completion": "test"}
    talk = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "test"}]}
    images = {"images": ["red.png"]} if kind == "seen" else {}
    Path("mixed.jsonl").write_text("\n".join(json.dumps(row | images) for row in (pair, pair, talk)))
    asked = command("seen") if kind == "seen" else ["train", "text", "--seq_length", "64", "--max_steps", "1"]
    assert main([*asked, "--dataset", "mixed.jsonl"]) in (1, 2)
    said = capsys.readouterr().err
    assert "mixed.jsonl, line 1: the row is prompt_completion (from prompt, completion)" in said
    assert "Give each shape a file of its own" in said


def test_an_embedder_says_what_loads_it(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"query": f"hello {i}", "positive": f"world {i}"} for i in range(8)]
    Path("text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(command("text", "--method", "embed", "--max_steps", "1")) == 0
    said = capsys.readouterr().out
    assert "AutoModel.from_pretrained loads it: the mean of a text's last hidden states is its vector" in said


@pytest.mark.parametrize("kind", WAYS)
def test_epochs_that_do_not_divide_are_said(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    epochs = ["--max_steps", "-1", "--num_train_epochs", "2", "--batch_size", "3", "--grad_accum", "1"]
    rows = Path(f"{kind}.jsonl").read_text().splitlines()
    Path(f"{kind}.jsonl").write_text("\n".join(rows[:4]))
    assert main(command(kind, "--eval_strategy", "no", *epochs) if kind == "text" else command(kind, *epochs)) == 0
    assert "epochs: 2 x 4 rows are 3 steps of 3" in capsys.readouterr().out


@pytest.mark.more(after=2)
@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("what", ["rows", "lora_alpha"])
def test_other_rows_or_scales_of_a_resumed_run_are_refused(
    kind: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(kind, "--lora_r", "4", "--lora_alpha", "8")) == 0
    stopped_after_a_step()
    if what == "rows":
        rows = Path(f"{kind}.jsonl")
        rows.write_text(rows.read_text().replace("hello", "other"))
    again = command(kind, "--lora_r", "4", "--lora_alpha", "8" if what == "rows" else "64")
    assert main([*again, "--resume_from_checkpoint", "auto"]) == 1
    assert what in capsys.readouterr().err
    if what == "rows":
        assert main([*again, "--resume_from_checkpoint", "auto", "--continue_with_changes"]) == 0
        assert "resume: rows " in capsys.readouterr().out


@pytest.mark.parametrize("kind", WAYS)
def test_a_base_that_went_during_the_run_costs_no_export(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import Trainer

    train = Trainer.train

    def gone(self: Trainer, **how: object) -> object:
        found = train(self, **how)  # type: ignore[arg-type]
        Path(kind).rename("elsewhere")
        return found

    monkeypatch.setattr(Trainer, "train", gone)
    more = ["--lora_r", "4", "--lora_export", "adapter"] if kind == "seen" else ["--lora_r", "4"]
    assert main(command(kind, *more)) == 0, capsys.readouterr().err
    assert any(Path("final_model/r").glob("*.safetensors"))
    if kind == "text":
        assert "is gone" in caplog.text


def test_a_row_that_is_too_long_ends_no_run_that_did_not_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    rows = Path("seen.jsonl").read_text().splitlines()
    long = json.loads(rows[0]) | {"completion": "test " * 300}
    Path("seen.jsonl").write_text("\n".join([*rows * 4, json.dumps(long)]))
    said = command("seen", "--lora_r", "4", "--max_steps", "1", "--per_device_train_batch_size", "1")
    assert main([*said, "--gradient_accumulation_steps", "1"]) == 0, capsys.readouterr().err
    assert Path("final_model/r/model.safetensors").is_file()


def test_checkpoints_of_an_older_version_are_not_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    Path("checkpoints/r/checkpoint-2").mkdir(parents=True)
    assert main(command("seen", "--lora_r", "4", "--resume_from_checkpoint", "auto")) == 2
    assert "older version" in capsys.readouterr().err
    assert not Path("final_model/r").exists()


def test_an_embedder_is_published_with_its_pooling(monkeypatch: pytest.MonkeyPatch) -> None:
    from outcore.checkpoint.export import model as export

    seen = []
    publish = export.publish_folder
    monkeypatch.setattr(
        export,
        "publish_folder",
        lambda aside, final: (seen.append(sorted(p.name for p in aside.iterdir())), publish(aside, final)),
    )
    Path("partners.jsonl").write_text(
        "\n".join(json.dumps({"query": f"hello {i}", "positive": "world"}) for i in range(8))
    )
    said = ["train", "text", "--method", "embed", "--dataset", "partners.jsonl", "--max_steps", "1", "--run_name", "r"]
    assert main([*said, "--seq_length", "32", "--report_to", "none", "--pooling", "last"]) == 0
    assert "1_Pooling" in seen[0] and "last" in Path("final_model/r/1_Pooling/config.json").read_text()
