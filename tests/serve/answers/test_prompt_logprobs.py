"""`prompt_logprobs` in vLLM's shape: equal to the model's own, and refused where it cannot be."""

import math
from typing import Any

import httpx
import pytest
import torch

from outcore.serve import prompt_scores


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
