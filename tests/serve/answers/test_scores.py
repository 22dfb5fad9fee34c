"""Likelihoods over HTTP as clients that score by letters read them: lm-evaluation-harness's gguf client."""

import json

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from outcore.serve import ServeSettings
from tests.infer.models import save_tiny_model
from tests.serve.running import Running, send

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


def test_a_start_token_that_the_tokenizer_adds_is_none_of_the_texts_letters(tmp_path):
    _, tokenizer = save_tiny_model(tmp_path / "tiny")
    start, number = tokenizer.eos_token, tokenizer.eos_token_id
    tokenizer.add_special_tokens({"bos_token": start})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, number)]
    )
    tokenizer.save_pretrained(tmp_path / "tiny")
    running = Running(tmp_path / "tiny", ServeSettings(logs=tmp_path / "logs", name="tiny"))
    try:
        body = {"prompt": "The quick", "max_tokens": 1, "echo": True, "logprobs": 0}
        (choice,) = json.loads(send(running, "/v1/completions", body)[1])["choices"]
    finally:
        running.stop()
    assert choice["text"].startswith("The quick") and choice["logprobs"]["tokens"][0] == start
    assert choice["logprobs"]["text_offset"][:2] == [0, 0]


@pytest.mark.parametrize("count", [0, 2])
def test_echoed_and_drawn_tokens_are_told_alike(server, count):
    body = {"prompt": "The quick 你", "max_tokens": 6, "seed": 4, "echo": True, "logprobs": count}
    (choice,) = json.loads(send(server, "/v1/completions", body)[1])["choices"]
    told = choice["logprobs"]
    assert choice["text"].startswith("The quick 你") and told["top_logprobs"][0] is None
    for token, value, top in list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"]))[1:]:
        assert top[token] >= value and len(top) in (count, count + 1) and (count or top == {token: value})
    assert told["text_offset"] == sorted(told["text_offset"]) and max(told["text_offset"]) < len(choice["text"])
