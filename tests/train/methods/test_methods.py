"""Methods as commands: runs with log, checkpoints and export like any other, by the trainers that the methods have."""

import copy
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

import outcore
from outcore.cli import main
from outcore.monitor import read_metrics
from outcore.runs import list_runs
from outcore.train.methods.table import METHODS
from tests.hf.callers import tiny, tokenizer

PAIRS = [{"prompt": f"hello {i}", "chosen": f" world {i} 1 2", "rejected": f" test {i} 5"} for i in range(24)]
ROWS: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("dpo", "kto", "orpo", "simpo", "reward"), PAIRS),
    "classify": [{"text": f"{'hello world' if i % 2 else 'a test'} {i}", "label": "ab"[i % 2]} for i in range(24)],
    "words": [
        {"tokens": ["hello", str(i), "world"], "ner_tags": ["O", "NUM", "O"] if i % 2 else ["O", "B-X", "I-X"]}
        for i in range(24)
    ],
    "rank": [{"query": f"hello {i}", "document": f"{'no' * (i % 2)} {i}", "label": i % 2} for i in range(24)],
    "embed": [{"query": f"hello {i}", "positive": f"world {i}"} for i in range(24)],
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    tiny().save_pretrained("model")
    tokenizer().save_pretrained("model")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(method: str, *flags: str, rows: str = "", steps: int = 3, name: str = "run") -> int:
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, ROWS[rows or method])))
    usual = [
        "--dataset",
        "rows.jsonl",
        *([] if "--max_length" in flags else ["--seq_length", "32"]),
        "--max_steps",
        str(steps),
        "--report_to",
        "none",
    ]
    usual += ["--learning_rate", "0.01", "--run_name", name, "--warmup_steps", "0"]
    return main(["train", "model", "--method", method, *usual, *flags])


@pytest.mark.more(after=4)
@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("dpo", ["--lora_r", "4"]),
        ("classify", []),
        ("embed", []),
        ("reward", ["--lora_r", "4"]),
        ("kto", []),
        ("dpo", []),
        ("dpo", ["--lora_r", "4", "--quantize", "nf4", "--lora_export", "adapter"]),
        ("orpo", ["--lora_r", "4"]),
        ("simpo", []),
    ],
)
def test_a_method_is_a_run_like_any_other(method: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert train(method, *flags) == 0
    assert "\ncheckpoints:        checkpoints/run\n" in capsys.readouterr().out
    metrics = read_metrics("logs/run/metrics.jsonl")
    assert [step["step"] for step in metrics.steps] == [1, 2, 3]
    assert all(step["grad_norm"] > 0 and step["lr"] > 0 for step in metrics.steps)
    assert metrics.evals and metrics.evals[-1]["step"] == 3
    assert not Path("final_model/run/chat_template.jinja").exists(), "rows of texts need none"
    if method == "classify":
        assert metrics.steps[0]["loss"] == pytest.approx(math.log(2), rel=0.2), "a mean, not a sum of micro-batches"
    (run,) = list_runs(Path("checkpoints"), Path("logs"), Path("final_model"))
    assert (run.state, run.step, run.total_steps) == ("finished", 3, 3)
    if "adapter" in flags:
        assert Path("final_model/run/adapter_model.safetensors").is_file()
        return
    kind = AutoModelForSequenceClassification if method in ("reward", "classify") else AutoModelForCausalLM
    was, now = tiny().state_dict(), kind.from_pretrained("final_model/run").state_dict()
    assert any(not torch.equal(was[name], tensor) for name, tensor in now.items() if name in was)


NUMBERS = [{"prompt": 7, "chosen": 100 + i, "rejected": f"not {i}"} for i in range(24)]
JUDGED = [{"prompt": "hello", "completion": 4, "label": i % 2 > 0} for i in range(24)]


@pytest.mark.parametrize(
    ("method", "rows"), [(m, NUMBERS) for m in ("dpo", "kto", "orpo", "simpo", "reward")] + [("kto", JUDGED)]
)
def test_numbers_in_rows_are_said_to_be_written_as_text(method: str, rows: list[Any], capfd: Any, monkeypatch) -> None:
    monkeypatch.setitem(ROWS, method, rows)
    assert train(method, "--eval_dataset", "not-there.jsonl") == 2  # read after the rows to train on
    said = capfd.readouterr()
    for column in rows[0].keys() & {"prompt", "chosen", "completion"}:
        numbers = isinstance(rows[0][column], int)
        assert (f"column '{column}' are written as text (24 rows)" in said.out + said.err) == numbers


@pytest.mark.parametrize(
    ("method", "end"), [(m, None) for m in (*METHODS, "sft")] + [(m, "<bos>") for m in ("kto", "embed", "grpo")]
)
def test_a_tokenizer_without_an_end_of_text_is_said_or_has_its_separator(
    method: str, end: str | None, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows no padding either, with which TRL's and transformers' collators would raise."""
    words = copy.deepcopy(tokenizer())
    words.eos_token = words.pad_token = None
    words.sep_token = end
    words.save_pretrained("model")
    rows = ROWS.get(method, [{"prompt": "hello", "completion": " world"}] * 24)
    monkeypatch.setitem(ROWS, method, rows)
    flags = {"distill": ["--teacher", "none.parquet"]}.get(method, [])
    if METHODS.get(method) and METHODS[method].rolls_out:
        Path("judge.py").write_text("def length(completions, **_):\n    return [float(len(a)) for a in completions]")
        by = ["--teacher", "model"] if method == "on_policy_distill" else ["--reward_function", "judge.py:length"]
        flags = [*by, "--num_generations", "4", "--max_completion_length", "8"]
    code = train(method, *flags, steps=1)
    if end is None:
        assert code == 2 and "the tokenizer has no end-of-text token (eos_token)" in capfd.readouterr().err
    else:
        assert code == 0, capfd.readouterr().err


def test_dpo_learns_as_trl_does_on_the_plain_model() -> None:
    """Optimizer, schedule, clipping and a reference whose log-probabilities are computed before: the same losses."""
    import trl
    from datasets import Dataset

    assert train("dpo", "--eval_fraction", "0", "--batch_size", "24", "--grad_accum", "1") == 0
    reference, plain = tiny(), tiny()
    arguments = trl.DPOConfig(  # pyright: ignore[reportPrivateImportUsage]
        "trl", max_steps=3, per_device_train_batch_size=24, gradient_accumulation_steps=1, learning_rate=0.01,
        max_length=32, use_cpu=True, bf16=False, report_to=[], save_strategy="no", weight_decay=0.01, logging_steps=1,
    )  # fmt: skip
    trainer = trl.DPOTrainer(  # pyright: ignore[reportPrivateImportUsage]
        plain, reference, arguments, train_dataset=Dataset.from_list(PAIRS), processing_class=tokenizer()
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [step["loss"] for step in read_metrics("logs/run/metrics.jsonl").steps] == pytest.approx(losses, rel=1e-4)


@pytest.mark.more(after=1)
@pytest.mark.parametrize("flags", [["--lora_r", "4"], []])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("dpo", *flags, name="whole", steps=4) == 0
    from outcore.train.process import StopRequest

    asked = iter([False, True])
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "wanted", lambda self: next(asked, False))
        patch.setattr(StopRequest, "exit_code", 143)
        assert train("dpo", *flags, name="parts", steps=4) == 143
    assert [run.state for run in list_runs(Path("checkpoints"), Path("logs"), Path("final_model"))] == [
        "stopped", "finished",
    ]  # fmt: skip
    assert train("dpo", *flags, "--resume_from_checkpoint", "auto", name="parts", steps=4) == 0
    shutil.rmtree("final_model/parts")  # as where it is killed between its last save, within an epoch, and its export
    assert train("dpo", *flags, "--resume_from_checkpoint", "auto", name="parts", steps=4) == 0
    steps = [[step["loss"] for step in read_metrics(f"logs/{name}/metrics.jsonl").steps] for name in ("whole", "parts")]
    assert steps[0] == steps[1]
    whole, parts = (load_file(f"final_model/{name}/model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())


def test_conversations_and_bad_rows_are_read_as_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")

    def talk(words: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": "hello " * 6}, {"role": "assistant", "content": words}]

    ROWS["talks"] = [{"chosen": talk(f"world {i}"), "rejected": talk(f"test {i}")} for i in range(12)]
    assert train("dpo", "--lora_r", "4", "--max_length", "8", rows="talks", name="short") == 2
    assert "All 11 rows have no answer left within seq_length 8" in capsys.readouterr().err
    assert train("dpo", "--lora_r", "4", "--max_length", "64", rows="talks") == 0
    ROWS["talks"].append({"chosen": talk("world"), "rejected": talk("world")})
    assert train("dpo", "--lora_r", "4", rows="talks", name="bad") == 2
    assert "rows.jsonl, line 13" in capsys.readouterr().err
    assert (
        train("dpo", "--lora_r", "4", "--on_bad_row", "skip", "--max_length", "64", rows="talks", name="skipped") == 0
    )


def test_half_a_letter_is_a_bad_row(capsys: pytest.CaptureFixture[str]) -> None:
    ROWS["halved"] = [*PAIRS, {**PAIRS[0], "rejected": " a\ud83d"}]
    assert train("dpo", rows="halved") == 2
    assert "rows.jsonl, line 25: a text contains half of a surrogate pair" in capsys.readouterr().err


def test_a_label_and_its_number_are_one_output() -> None:
    ROWS["mixed"] = [{"text": f"hello {i}", "label": [1, "1", 2][i % 3]} for i in range(12)]
    assert train("classify", rows="mixed", steps=1) == 0
    assert json.loads(Path("final_model/run/config.json").read_text())["id2label"] == {"0": "1", "1": "2"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--packing", "on"], "packing: method dpo has no such setting"),
        (["--state_format", "split"], "state_format: method dpo has no such setting"),
        (["--lora_r", "4", "--quantize", "nf4"], "--lora_export adapter"),
        (["--teacher", "model"], "go together"),
        (["--pooling", "last"], "pooling: method dpo makes no vectors"),
    ],
)
def test_what_a_method_has_not_is_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("dpo", *flags) == 2
    assert words in capsys.readouterr().err
    assert not Path("checkpoints").exists()


@pytest.mark.more(after=1)
@pytest.mark.parametrize("flags", [[], ["--lora_r", "4"]], ids=["full", "lora"])
def test_words_of_a_text_get_labels(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The label of a word stands at its last token: as transformers' own model and loss see them."""
    assert train("classify", *flags, rows="words", steps=30) == 0
    assert "AutoModelForTokenClassification.from_pretrained loads it" in capsys.readouterr().out
    steps = read_metrics("logs/run/metrics.jsonl").steps
    assert steps[0]["loss"] == pytest.approx(math.log(4), rel=0.2) and steps[-1]["loss"] < 0.8
    model = AutoModelForTokenClassification.from_pretrained("final_model/run").eval()
    assert model.config.id2label == {0: "B-X", 1: "I-X", 2: "NUM", 3: "O"}
    ids = tokenizer()("hello 5 world", return_tensors="pt")
    with torch.no_grad():
        found = model(**ids).logits[0].argmax(-1).tolist()
    assert found[ids.char_to_token(0, 4)] == 3, "the last token of hello"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"tokens": ["a", "b"], "labels": ["O"]}, "there are 2 tokens, and each must have one label"),
        ({"tokens": ["a", ""], "labels": ["O", "O"]}, "tokens must be a list of words"),
        ({"tokens": ["a"], "labels": [1.5]}, "texts or whole numbers"),
        ({"text": "hello", "label": "O"}, "Give one kind alone"),
    ],
)
def test_words_with_odd_labels_are_refused(row: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    ROWS["odd"] = [*ROWS["words"], row]
    assert train("classify", rows="odd") == 2
    assert words in capsys.readouterr().err


def test_what_was_trained_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """A reranker's order is that of transformers' classifier over pairs; an embedder's vectors are means of it."""
    assert train("classify", rows="rank") == 0
    found = AutoModelForSequenceClassification.from_pretrained("final_model/run").eval()
    with outcore.LLM("final_model/run") as llm:
        ranked = llm.rerank("hello 1", ["world 1", "test 2"])
    with torch.no_grad():
        scores = [
            found(**tokenizer()("hello 1", text, return_tensors="pt")).logits.item() for text in ("world 1", "test 2")
        ]
    for one in ranked:
        assert one.relevance_score == pytest.approx(1 / (1 + math.exp(-scores[one.index])), abs=1e-4)
    assert train("embed", name="vectors") == 0
    assert "AutoModelForSequenceClassification.from_pretrained loads it" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained("final_model/vectors").eval()
    with outcore.LLM("final_model/vectors") as llm:
        vector = torch.tensor(llm.embed(["hello world"])[0].outputs.embedding)
    with torch.no_grad():
        mean = model.base_model(**tokenizer()("hello world", return_tensors="pt")).last_hidden_state[0].mean(0)
    torch.testing.assert_close(vector, mean / mean.norm(), atol=1e-4, rtol=1e-3)


def test_a_student_learns_what_its_teacher_says(capsys: pytest.CaptureFixture[str]) -> None:
    """A teacher is asked once; a student that is its own teacher has nothing to learn."""
    torch.manual_seed(5)
    teacher = tiny()
    for parameter in teacher.parameters():
        parameter.data.mul_(2.0)
    teacher.save_pretrained("teacher")
    tokenizer().save_pretrained("teacher")
    ROWS["distill"] = [{"prompt": f"hello {i}", "completion": f" world {i} 1 2"} for i in range(80)]
    assert train("distill", "--teacher", "teacher", steps=16) == 0
    losses = [step["loss"] for step in read_metrics("logs/run/metrics.jsonl").steps]
    assert losses[-1] < 0.7 * losses[0]
    chunks = sorted(Path(".cache/data/taught").rglob("chunk-*.parquet"))
    assert len(chunks) == 3, "two of the rows to train on, one of those to evaluate on"
    stamps = [chunk.stat().st_mtime_ns for chunk in chunks]
    chunks[0].write_bytes(b"")
    capsys.readouterr()
    assert train("distill", "--teacher", "teacher", name="again", steps=16) == 0
    assert "1 chunks of 64 are left" in capsys.readouterr().out
    assert [chunk.stat().st_mtime_ns for chunk in chunks[1:]] == stamps[1:]
    assert [step["loss"] for step in read_metrics("logs/again/metrics.jsonl").steps] == losses
    assert train("distill", "--teacher", "model", name="itself", steps=1) == 0
    assert read_metrics("logs/itself/metrics.jsonl").steps[0]["loss"] < 1e-5
    for path in Path("model").iterdir():  # another teacher of the same name
        Path("teacher", path.name).write_bytes(path.read_bytes())
    assert train("distill", "--teacher", "teacher", name="other", steps=1) == 0
    assert read_metrics("logs/other/metrics.jsonl").steps[0]["loss"] < 1e-5


def test_a_student_learns_from_a_file_of_scores_as_from_its_teacher(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(5)
    teacher = tiny()
    for parameter in teacher.parameters():
        parameter.data.mul_(2.0)
    teacher.save_pretrained("teacher")
    tokenizer().save_pretrained("teacher")
    ROWS["distill"] = [{"prompt": f"hello {i}", "completion": f" world {i} 1 2"} for i in range(20)]
    flags = ["--precision", "fp32"]
    assert train("distill", "--teacher", "teacher", *flags) == 0
    scored = ["--input", "rows.jsonl", "--top_k", "32", "--output", "said.parquet", "--precision", "fp32"]
    assert main(["score", "teacher", *scored, "--context", "64"]) == 0
    shutil.rmtree("teacher")
    assert train("distill", "--teacher", "said.parquet", *flags, name="file") == 0
    losses = [[step["loss"] for step in read_metrics(f"logs/{run}/metrics.jsonl").steps] for run in ("run", "file")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and len(set(losses[0])) == 3
    capsys.readouterr()
    ROWS["distill"][3]["completion"] = " other"
    assert train("distill", "--teacher", "said.parquet", *flags, name="rows") == 2
    assert "says nothing of row" in capsys.readouterr().err
    Path("said.parquet").write_bytes(Path("said.parquet").read_bytes()[:-20])
    assert train("distill", "--teacher", "said.parquet", *flags, name="cut") == 2
    assert "cut short" in capsys.readouterr().err
