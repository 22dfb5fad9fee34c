"""`outcore train --train_vision`: equal to plain PyTorch, resumed, exported whole, refused in words."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from outcore.cli import main
from outcore.data import DataSettings
from outcore.data.pictures import PictureEncoder, load_processor, picture_rows
from tests import tiny_vision
from tests.tiny_vision import picture

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and four rows with one picture or two."""
    folder = tmp_path_factory.mktemp("vision")
    tiny_vision.save(folder / "model")
    rows = []
    for number, color in enumerate(("red", "blue", "green", "white")):
        (folder / f"{color}.png").write_bytes(picture(color, (20 + 9 * number, 30)))
        pictures = [f"{color}.png", "red.png"][: 1 + number % 2]
        rows.append({"prompt": "hello " * number, "completion": f"test {color}", "images": pictures})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def train(made: Path, tmp_path: Path, *more: str) -> int:
    places = [word for name in ("checkpoint", "log", "export") for word in (f"--{name}_dir", str(tmp_path / name))]
    told = ["--model", str(made / "model"), "--dataset", str(made / "rows.jsonl"), "--run_name", "seen", *places]
    batch = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--weight_decay", "0"]
    rate = ["--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--warmup_steps", "0", "--max_grad_norm", "1"]
    return main(["train", *told, *batch, *rate, *more])


def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    return load_file(tmp_path / "export" / "seen" / "model.safetensors")


def _plain(made: Path, steps: int) -> dict[str, torch.Tensor]:
    """The same steps on the plain model: all rows are one step's, so that their order says nothing."""
    model: Any = AutoModelForImageTextToText.from_pretrained(made / "model")
    processor = load_processor(str(made / "model"))
    encoder = PictureEncoder(processor, [model.config.image_token_id])
    rows = picture_rows(DataSettings(), str(made / "rows.jsonl"), print)
    batch = encoder.batch([row.conversation() for row in rows], [()] * 4, [row.where for row in rows])
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, eps=1e-4)
    for _ in range(steps):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
    return dict(model.state_dict())


def test_three_full_steps_end_where_plain_pytorch_ends(made, tmp_path):
    assert train(made, tmp_path, "--train_vision", "full", "--max_steps", "3", "--adam_epsilon", "1e-4") == 0
    plain, ours = _plain(made, 3), AutoModelForImageTextToText.from_pretrained(tmp_path / "export" / "seen")
    far = {name: (tensor - plain[name]).abs().max().item() for name, tensor in ours.state_dict().items()}
    assert max(far.values()) < 2e-6, far
    lines = [json.loads(line) for line in (tmp_path / "log" / "seen" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("step") for line in lines[1:]] == [1, 2, 3] and lines[3]["loss"] < lines[1]["loss"]


def test_a_frozen_tower_is_exported_byte_for_byte_and_a_resumed_run_ends_alike(made, tmp_path, capsys):
    told = ("--train_vision", "none", "--lora_r", "4", "--save_steps", "2")
    assert train(made, tmp_path / "whole", *told, "--max_steps", "4") == 0
    source, found = load_file(made / "model" / "model.safetensors"), weights(tmp_path / "whole")
    assert list(source) == list(found)
    changed = {name for name in source if not torch.equal(source[name], found[name])}
    assert changed and all("language_model" in name for name in changed)
    assert train(made, tmp_path / "cut", *told, "--max_steps", "4", "--export", "false") == 0
    saved = tmp_path / "cut" / "checkpoint" / "seen"
    next((saved / "step-00000004").rglob("optimizer.pt")).unlink()
    assert train(made, tmp_path / "cut", *told, "--max_steps", "4", "--resume_from_checkpoint", "auto") == 0
    said = capsys.readouterr().out
    assert "optimizer.pt" in said and "resumed from" in said and "at step 2" in said, said
    assert all(torch.equal(tensor, found[name]) for name, tensor in weights(tmp_path / "cut").items())


@pytest.mark.parametrize("told", [("--train_vision", "none", "--lora_r", "4"), ("--train_vision", "full")])
def test_a_run_that_is_stopped_saves_and_goes_on_to_the_same_bits(told, made, tmp_path, capsys, monkeypatch):
    assert train(made, tmp_path / "whole", *told, "--max_steps", "3") == 0
    read = PictureEncoder.batch

    def stopping(self: PictureEncoder, talks: list[Any], *given: Any) -> Any:
        if len(talks) == 2 and next(batches) == 3:  # of the second step; single rows are read before the first
            os.kill(os.getpid(), signal.SIGTERM)
        return read(self, talks, *given)

    batches = itertools.count(1)
    with monkeypatch.context() as patch:
        patch.setattr(PictureEncoder, "batch", stopping)
        assert train(made, tmp_path / "parts", *told, "--max_steps", "3") == 128 + signal.SIGTERM
    out = capsys.readouterr().out
    assert "of 3 and saved. Go on with" in out and not (tmp_path / "parts" / "export").exists()
    assert train(made, tmp_path / "parts", *told, "--max_steps", "3", "--resume_from_checkpoint", "auto") == 0
    one, two = (
        [json.loads(line) for line in (tmp_path / part / "log" / "seen" / "metrics.jsonl").read_text().splitlines()]
        for part in ("whole", "parts")
    )
    assert [s["loss"] for s in one if "loss" in s] == [s["loss"] for s in two if "loss" in s]
    found = weights(tmp_path / "whole")
    assert all(torch.equal(tensor, found[name]) for name, tensor in weights(tmp_path / "parts").items())


@pytest.mark.parametrize("how", ["lora", "full"])
def test_the_tower_learns_beside_adapters_over_a_packed_base(how, made, tmp_path):
    told = ("--train_vision", how, "--lora_r", "4", "--quantize", "int8", "--max_steps", "2")
    assert train(made, tmp_path, *told) == 0
    source, found = load_file(made / "model" / "model.safetensors"), weights(tmp_path)
    changed = {name for name in source if not torch.equal(source[name], found[name])}
    assert any("vision_tower" in name for name in changed) and any("language_model" in name for name in changed)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--packing", "on"), "do not read packing"),
        (("--method", "dpo", "--lora_r", "4"), "method dpo: this command trains pictures on answers alone"),
        (("--train_vision", "lora"), "give the adapters a rank"),
        (("--dataset", "embedded"), "name files with pictures"),
        (("--train_vision", "full", "--lora_r", "4", "--lora_export", "adapter"), "holds no tower"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(more, words, made, tmp_path, capsys):
    assert train(made, tmp_path, "--train_vision", "none", *more) == 2
    assert words in " ".join(capsys.readouterr()) and not (tmp_path / "export").exists()


def test_an_adapter_alone_and_the_merged_run_answer_alike(made, tmp_path, capsys):
    answers = []
    for kind in ("merged", "adapter"):
        told = ("--train_vision", "lora", "--lora_r", "4", "--max_steps", "2", "--lora_export", kind)
        assert train(made, tmp_path / kind, *told) == 0
        capsys.readouterr()
        asked = ["--image", str(made / "red.png"), "--prompt", "hello", "--temperature", "0", "--max_tokens", "6"]
        assert main(["generate", str(tmp_path / kind / "export" / "seen"), *asked]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and answers[0].strip()
    assert not (tmp_path / "adapter" / "export" / "seen" / "model.safetensors").exists()


def test_other_ways_to_train_do_not_pass_over_the_pictures(made, tmp_path, capsys):
    from outcore.train.run import main as run

    told = ["--model", str(made / "model"), "--dataset", str(made / "rows.jsonl"), "--train_vision", "none"]
    places = [word for name in ("checkpoint", "log", "export") for word in (f"--{name}_dir", str(tmp_path / name))]
    assert run([*told, *places, "--lora_r", "4"], goal=lambda ready: 0) == 2
    assert "only `outcore train` trains on pictures" in " ".join(capsys.readouterr())


def test_a_base_in_fp16_is_exported_in_fp16_and_not_trained_whole_in_it(made, tmp_path, capsys):
    seen = tmp_path / "seen"
    seen.mkdir()
    for file in made.iterdir():
        if file.is_file():
            (seen / file.name).write_bytes(file.read_bytes())
    AutoModelForImageTextToText.from_pretrained(made / "model").half().save_pretrained(seen / "model")
    tiny_vision.processor().save_pretrained(seen / "model")
    told = ("--train_vision", "none", "--max_steps", "2")
    assert train(seen, tmp_path, *told) == 2 and "published in fp16" in " ".join(capsys.readouterr())
    assert not (tmp_path / "checkpoint" / "seen").exists()
    assert train(seen, tmp_path, *told, "--lora_r", "4") == 0
    source, found = load_file(seen / "model" / "model.safetensors"), weights(tmp_path)
    assert {tensor.dtype for tensor in found.values()} == {torch.float16}
    assert all(torch.equal(source[name], found[name]) for name in source if "vision" in name)


def test_pictures_for_a_text_model_are_refused(made, tmp_path, capsys):
    from tests.hf.callers import tiny, tokenizer

    tiny("llama").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text((made / "rows.jsonl").read_text())
    for file in made.glob("*.png"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert train(tmp_path, tmp_path, "--train_vision", "none", "--lora_r", "4") == 2
    assert "takes no pictures: llama is a model of text alone" in " ".join(capsys.readouterr())


def _odd(folder: Path) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """(rows that are trained, rows that are not, by the words of their refusal), with their pictures in the folder."""
    frames, exif, asked = [Image.new("RGB", (20, 20), c) for c in ("red", "blue")], Image.Exif(), {"completion": "test"}
    exif[0x0112] = 6
    frames[0].save(folder / "moves.gif", save_all=True, append_images=frames[1:])
    Image.new("1", (9000, 9000)).save(folder / "huge.png")
    (folder / "cmyk.jpg").write_bytes(picture((0, 255, 255, 0), kind="JPEG", mode="CMYK"))
    (folder / "turned.jpg").write_bytes(picture("green", (40, 20), "JPEG", exif=exif))
    (folder / "red.png").write_bytes(picture())
    (folder / "cut.png").write_bytes(picture()[:-30])
    good = [{**asked, "prompt": "hello", "images": [name]} for name in ("moves.gif", "cmyk.jpg", "turned.jpg")]
    good.append({**asked, "prompt": "no picture", "images": []})
    return good, {
        "there is no file": {**asked, "prompt": "hello", "images": ["gone.png"]},
        "damaged or cut off": {**asked, "prompt": "hello", "images": ["cut.png"]},
        "9,000 x 9,000 pixels": {**asked, "prompt": "hello", "images": ["huge.png"]},
        "2 places for pictures, and there is 1": {**asked, "prompt": "<image> or <image>", "images": ["red.png"]},
        "1 place for pictures, and there are 2": {**asked, "prompt": "<image>", "images": ["red.png", "red.png"]},
    }


def test_a_bad_row_ends_the_run_by_name_or_is_left_out_and_odd_pictures_are_trained(made, tmp_path, capsys):
    good, bad = _odd(tmp_path)
    told = ("--train_vision", "none", "--lora_r", "4", "--max_steps", "1", "--export", "false")
    for words, row in bad.items():
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [good[0], row])))
        assert train(made, tmp_path, *told, "--dataset", str(tmp_path / "rows.jsonl")) == 2
        said = " ".join(capsys.readouterr())
        assert "rows.jsonl, line 2" in said and words in said, said
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*bad.values(), *good])))
    assert train(made, tmp_path, *told, "--dataset", str(tmp_path / "rows.jsonl"), "--on_bad_row", "skip") == 0
    said = " ".join(capsys.readouterr())
    assert "left out: 5 rows" in said and "the first of 2 frames" in said and "data: 8 rows, 9 pictures" in said
