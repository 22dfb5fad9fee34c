"""`prompt_logprobs` in vLLM's shape: equal to the model's own, and refused where it cannot be."""

import json
import math
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from outcore.serve import prompt_scores
from tests.infer.models import save_tiny_model
from tests.waiting import until

CHAT = [{"role": "user", "content": "The quick brown fox. " * 40}]


def wanted(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float(), -1)


def same(entries: list[Any], ids: list[int], model: Any, tokenizer: Any, top: int) -> None:
    """Whether the entries are what the model says: each token's own, then the likeliest ones."""
    logprobs_TV = wanted(model, ids)
    assert len(entries) == len(ids) and entries[0] is None
    for place, entry in enumerate(entries[1:]):
        logprobs_V, token = logprobs_TV[place], ids[place + 1]
        order = logprobs_V.argsort(descending=True).tolist()
        assert next(iter(entry)) == str(token)
        assert {int(one) for one in entry} == {token, *order[:top]}
        for one, told in entry.items():
            assert told["logprob"] == pytest.approx(float(logprobs_V[int(one)]), abs=1e-4)
            assert told["rank"] == order.index(int(one)) + 1
            assert told["decoded_token"].strip() == tokenizer.decode([int(one)]).strip()


@pytest.mark.parametrize("top", [0, 1, 5])
def test_completions_of_token_ids(server: Any, tiny_folder: Any, top: int) -> None:
    _, model, tokenizer = tiny_folder
    texts = [tokenizer("The quick brown fox")["input_ids"], tokenizer("lazy dog")["input_ids"], [5]]
    body = {"prompt": texts, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top}
    found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    for ids, choice in zip(texts, found["choices"], strict=True):
        same(choice["prompt_logprobs"], ids, model, tokenizer, top)


def test_a_chat_has_those_of_its_whole_prompt(server: Any, tiny_folder: Any) -> None:
    _, model, tokenizer = tiny_folder
    body = {"messages": [{"role": "user", "content": "The quick fox"}], "max_tokens": 1, "prompt_logprobs": 2}
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
    told = found["prompt_logprobs"]
    assert len(told) == found["usage"]["prompt_tokens"]
    ids = [int(next(iter(entry))) for entry in told[1:]]
    firsts = [first for first in range(model.config.vocab_size) if math.isclose(
        float(wanted(model, [first])[0, ids[0]]), told[1][str(ids[0])]["logprob"], abs_tol=1e-4)]  # fmt: skip
    assert firsts
    same(told, [firsts[0], *ids], model, tokenizer, 2)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"prompt_logprobs": -1}, "must be a whole number from 0 to"),
        ({"prompt_logprobs": 10**9}, "must be a whole number from 0 to"),
        ({"prompt_logprobs": True}, "must be a whole number from 0 to"),
        ({"prompt_logprobs": "5"}, "must be a whole number from 0 to"),
        ({"prompt_logprobs": [5]}, "must be a whole number from 0 to"),
        ({"prompt_logprobs": 1, "stream": True}, "does not go with stream: true"),
        ({"prompt_logprobs": 5, "n": 3}, "log-probabilities, and an answer has 20 at most"),
    ],
)
def test_what_cannot_be_is_refused(
    server: Any, path: str, more: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scores, "MOST_ENTRIES", 20)
    body = {"prompt": "The quick brown fox", "messages": [{"role": "user", "content": "The quick fox"}]}
    body = {name: body[name] for name in (["prompt"] if path == "completions" else ["messages"])}
    found = httpx.post(f"{server.url}/v1/{path}", json=body | {"temperature": 1.0} | more, timeout=120)
    assert found.status_code == 400 and words in found.json()["error"]["message"]
    assert found.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_large_answer_is_written_once_its_tokens_are_there_piece_by_piece_and_beside_the_loop(
    server: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A million numbers took the loop 1.8 s, and 400 MiB for as long as the answers waited in the queue."""
    counts, seen, sizes = server.service.opened.engine.counts, set(), []
    before, text_of, dumps = counts.answer_tokens, prompt_scores.text_of, json.dumps

    def noted_text(*given: Any) -> str:
        seen.add((threading.current_thread().name, counts.answer_tokens - before, server.service.num_under_way))
        return text_of(*given)

    def noted_dumps(*given: Any, **more: Any) -> str:
        sizes.append(len(found := dumps(*given, **more)))
        return found

    monkeypatch.setattr(prompt_scores, "text_of", noted_text)
    monkeypatch.setattr(prompt_scores, "ENTRIES_A_PLACE", 500)
    monkeypatch.setattr(json, "dumps", noted_dumps)
    asked = {"prompt": [[5, 6, 7] * 20] * 4} if path == "completions" else {"messages": CHAT}
    body = asked | {"max_tokens": 2, "ignore_eos": True, "prompt_logprobs": 50}
    found = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=120)
    usage = found.json()["usage"]
    assert len(found.content) > 500_000 and max(sizes) < 10_000
    assert seen == {("writer_0", usage["completion_tokens"], usage["prompt_tokens"] * 51 // 500)}


def test_an_answer_keeps_its_places_until_its_client_has_read_it(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked for 30 MB and read none of it held them, with all places free for the next such request."""
    monkeypatch.setattr(prompt_scores, "text_of", lambda *given: "x" * 1000)
    body = json.dumps({"prompt": [[5, 6, 7] * 20] * 4, "max_tokens": 1, "prompt_logprobs": 100}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        said = client.recv(100)
        assert said.startswith(b"HTTP/1.1 200")
        assert server.service.num_under_way == 4
        while more := client.recv(1 << 20):
            said += more
    until(lambda: not server.service.num_under_way)
    assert len(json.loads(said.partition(b"\r\n\r\n")[2])["choices"]) == 4


@pytest.mark.more
def test_trl_distills_from_this_server_as_from_a_teacher_in_its_process(
    server: Any, tiny_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainers unmodified. With all tokens asked for, the loss over a server's is the whole divergence."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from trl.experimental import server_distillation
    from trl.generation import vllm_client

    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)  # its client asks, and speaks HTTP alone here
    _, teacher, tokenizer = tiny_folder
    rows = datasets.Dataset.from_dict({"prompt": ["The quick", "lazy dog", "brown fox", "the dog"]})
    common: dict[str, Any] = {
        "beta": 0.0, "max_steps": 3, "per_device_train_batch_size": 2, "max_completion_length": 8, "seed": 3,
        "learning_rate": 1e-2, "report_to": "none", "logging_steps": 1, "save_strategy": "no", "use_cpu": True,
        "gradient_checkpointing": False, "bf16": False,
    }  # fmt: skip
    losses = []
    for name in ("server", "local"):
        student, _ = save_tiny_model(tmp_path / name, seed=7)
        if name == "server":
            args: Any = server_distillation.ServerDistillationConfig(
                str(tmp_path), teacher_model_server_url=server.url, loss_top_k=len(tokenizer), loss_add_tail=False,
                **common,
            )  # fmt: skip
            trainer: Any = server_distillation.ServerDistillationTrainer(
                student, args, train_dataset=rows, processing_class=tokenizer
            )
        else:
            trainer = trl.DistillationTrainer(
                student, teacher_model=teacher, args=trl.DistillationConfig(str(tmp_path), **common),
                train_dataset=rows, processing_class=tokenizer,
            )  # fmt: skip
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert len(losses[0]) == 3 and len(set(losses[0])) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
