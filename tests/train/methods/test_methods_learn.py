"""What methods teach a small model of random weights, judged by rows that it has not seen."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from outcore.cli import main
from outcore.monitor import read_metrics
from tests.hf.callers import tiny, tokenizer

pytestmark = pytest.mark.slow
DRAW = random.Random(3)
KINDS = ("hello world", "this is", "numbers test")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    tiny("qwen3").save_pretrained("model")
    tokenizer().save_pretrained("model")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def noise() -> str:
    return " ".join(str(DRAW.randint(1, 99)) for _ in range(3))


def learn(method: str, rows: list[dict[str, Any]], *flags: str) -> None:
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows[:-60])))
    Path("held.jsonl").write_text("\n".join(map(json.dumps, rows[-60:])))
    usual = ["--dataset", "rows.jsonl", "--eval_dataset", "held.jsonl", "--seq_length", "48", "--report_to", "none"]
    usual += ["--run_name", "run", "--learning_rate", "0.003", "--batch_size", "16", "--grad_accum", "1"]
    assert main(["train", "model", "--method", method, *usual, *flags]) == 0


def last_evaluation() -> dict[str, float]:
    return read_metrics("logs/run/metrics.jsonl").evals[-1]


@pytest.mark.parametrize("flags", [[], ["--lora_r", "8"]])
def test_a_classifier_labels_nine_of_ten(flags: list[str]) -> None:
    rows = [{"text": f"{noise()} {KINDS[i % 3]} {noise()}", "label": KINDS[i % 3]} for i in range(660)]
    DRAW.shuffle(rows)
    learn("classify", rows, "--max_steps", "150", *flags)
    assert last_evaluation()["eval_accuracy"] >= 0.9
    with outcore.LLM("final_model/run") as llm:
        found = llm.classify([row["text"] for row in rows[-60:]])
    assert sum(one.outputs.label == row["label"] for one, row in zip(found, rows[-60:], strict=True)) >= 54


def test_a_reward_model_tells_nine_of_ten_pairs() -> None:
    rows = [{"prompt": noise(), "chosen": f" hello {noise()}", "rejected": f" test {noise()}"} for _ in range(460)]
    learn("reward", rows, "--max_steps", "100")
    assert last_evaluation()["eval_accuracy"] >= 0.9


def test_dpo_moves_the_margin() -> None:
    rows = [{"prompt": noise(), "chosen": f" hello {noise()}", "rejected": f" test {noise()}"} for _ in range(260)]
    learn("dpo", rows, "--max_steps", "40", "--lora_r", "8")
    evaluations = read_metrics("logs/run/metrics.jsonl").evals
    margins = [one["eval_rewards/margins"] for one in evaluations]
    assert margins == sorted(margins) and margins[-1] > 0.5 and evaluations[-1]["eval_rewards/accuracies"] >= 0.9


def test_an_embedder_finds_partners_better_than_before() -> None:
    """nDCG of 60 held-out queries, each with one partner among all 60."""

    def row(number: int) -> dict[str, str]:
        return {"query": f"hello {number}", "positive": f"this is world {number}"}

    numbers = list(range(100, 1000))
    DRAW.shuffle(numbers)
    rows = [row(number) for number in numbers]

    def ndcg(model: str) -> float:
        with outcore.LLM(model) as llm:
            queries, partners = (
                torch.tensor([one.outputs.embedding for one in llm.embed([row[name] for row in rows[-60:]])])
                for name in ("query", "positive")
            )
        cosines = queries @ partners.T
        ranks = (cosines >= cosines.diagonal().unsqueeze(1)).sum(1)
        return sum(1 / math.log2(1 + rank) for rank in ranks.tolist()) / 60

    before = ndcg("model")
    learn("embed", rows, "--max_steps", "300")
    after = ndcg("final_model/run")
    assert after >= before + 0.1, (before, after)
