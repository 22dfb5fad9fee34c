"""Likelihoods over HTTP as clients that score by letters read them: lm-evaluation-harness's gguf client."""

import json

import pytest
import torch

from tests.serve.running import send

pytestmark = pytest.mark.usefixtures("one_thread")
ASKED = [("The quick", " brown fox"), ("你好, \U0001f389 fox", " jumps"), ("你", "好")]


@pytest.mark.parametrize(("context", "continuation"), ASKED)
def test_a_harness_that_counts_letters_reads_the_score_of_the_continuation(server, tiny_folder, context, continuation):
    gguf = pytest.importorskip("lm_eval.models.gguf")
    _, model, tokenizer = tiny_folder
    ids, length = tokenizer(context + continuation)["input_ids"], len(tokenizer(context)["input_ids"])
    with torch.no_grad():
        wanted = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
    places = range(length, len(ids))
    ((score, is_greedy),) = gguf.GGUFLM(server.url).loglikelihood(
        [type("Asked", (), {"args": (context, continuation)})], disable_tqdm=True
    )
    assert score == pytest.approx(sum(float(wanted[i - 1, ids[i]]) for i in places), abs=1e-3)
    assert is_greedy == all(int(wanted[i - 1].argmax()) == ids[i] for i in places)


@pytest.mark.parametrize("count", [0, 2])
def test_echoed_and_drawn_tokens_are_told_alike(server, count):
    body = {"prompt": "The quick 你", "max_tokens": 6, "seed": 4, "echo": True, "logprobs": count}
    (choice,) = json.loads(send(server, "/v1/completions", body)[1])["choices"]
    told = choice["logprobs"]
    assert choice["text"].startswith("The quick 你") and told["top_logprobs"][0] is None
    for token, value, top in list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"]))[1:]:
        assert top[token] >= value and len(top) in (count, count + 1) and (count or top == {token: value})
    assert told["text_offset"] == sorted(told["text_offset"]) and max(told["text_offset"]) < len(choice["text"])
