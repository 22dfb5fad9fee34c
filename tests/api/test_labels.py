"""Models whose head classifies: labels, and documents in order, as transformers has them; from Python and over HTTP."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
import torch

import outcore
from outcore.data import train_byte_bpe
from tests.api.conftest import SMALL

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ["The quick brown fox", "dog", "a lazy dog jumps over the quick fox"]
CASES = [
    ("llama", 3, {}), ("gemma2", 1, {"head_dim": 16, "query_pre_attn_scalar": 16}), ("qwen3", 1, {"head_dim": 16}),
    ("mistral", 2, {"problem_type": "multi_label_classification"}), ("gpt2", 4, {}),
]  # fmt: skip
"""Family, labels, more; Gemma 2's language model caps its logits, which its classifier does not."""


def save(folder, family: str, labels: int, more: dict[str, Any]):
    """(model, tokenizer) of a tiny classifier, saved."""
    import transformers

    tokenizer = train_byte_bpe([" ".join(TEXTS) * 20], 512)
    config = transformers.AutoConfig.for_model(
        family, vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, num_labels=labels,
        pad_token_id=None, eos_token_id=tokenizer.eos_token_id, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


@torch.no_grad()
def expected(model, tokenizer, *texts) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([tokenizer(*texts)["input_ids"]])).logits[0]
    if len(logits) == 1 or model.config.problem_type == "multi_label_classification":
        return logits.sigmoid()
    return logits.softmax(0)


@pytest.mark.more(after=2)
@pytest.mark.parametrize(("family", "labels", "more"), CASES, ids=[case[0] for case in CASES])
def test_labels_are_transformers(family, labels, more, tmp_path):
    model, tokenizer = save(tmp_path, family, labels, more)
    with outcore.LLM(tmp_path, **SMALL) as llm:
        for text, output in zip(TEXTS, llm.classify(TEXTS), strict=True):
            probs = expected(model, tokenizer, text)
            torch.testing.assert_close(torch.tensor(output.outputs.probs), probs, atol=1e-5, rtol=1e-4)
            assert output.outputs.label == f"LABEL_{int(probs.argmax())}" and output.prompt == text
        with pytest.raises(ValueError, match="AutoModelForSequenceClassification loads it"):
            outcore.load(tmp_path)
        for ask in (llm.generate, llm.score, lambda text: list(llm.stream(text))):
            with pytest.raises(ValueError, match="gives labels to texts and writes none"):
                ask("The")
        if labels > 1:
            with pytest.raises(ValueError, match=f"tells {labels} labels apart"):
                llm.rerank("fox", TEXTS)
            return
        found = llm.rerank("fox", TEXTS)
    scores = [float(expected(model, tokenizer, "fox", text)) for text in TEXTS]
    assert [one.index for one in found] == sorted(range(3), key=lambda index: -scores[index])
    assert [one.relevance_score for one in found] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)
    assert found[0].document == TEXTS[found[0].index]


def test_a_language_model_has_no_labels(llm):
    for ask in (lambda: llm.classify("The"), lambda: llm.rerank("The", ["fox"])):
        with pytest.raises(ValueError, match="has no labels"):
            ask()


def test_a_head_of_several_matrices_is_refused(tmp_path):
    import transformers

    tokenizer = train_byte_bpe([" ".join(TEXTS) * 20], 512)
    config = transformers.AutoConfig.for_model(
        "roberta", vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2
    )
    config.num_attention_heads, config.intermediate_size = 2, 32
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises((ValueError, RuntimeError), match="not one matrix"):
        outcore.LLM(tmp_path)


def post(url: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]


def test_documents_are_ranked_over_http(tmp_path):
    model, tokenizer = save(tmp_path / "m", "qwen3", 1, {"head_dim": 16})
    scores = [float(expected(model, tokenizer, "fox", text)) for text in TEXTS]
    best = max(range(3), key=lambda index: scores[index])
    with outcore.serve(tmp_path / "m", port=0, block=False, name="m", logs=tmp_path / "logs", **SMALL) as server:
        found = post(
            server.url, "/v1/rerank", model="m", query="fox", documents=[TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
        )
        assert [one["relevance_score"] for one in found["results"]] == pytest.approx(
            sorted(scores, reverse=True), abs=1e-5
        )
        assert found["results"][0]["document"] == {"text": TEXTS[best]} and found["usage"]["total_tokens"] > 3
        few = post(server.url, "/rerank", query="fox", documents=TEXTS, top_n=1, return_documents=False)["results"]
        assert few == [{"index": best, "relevance_score": pytest.approx(scores[best], abs=1e-5)}]
        said = post(server.url, "/classify", input=TEXTS[:2])
        assert [one["label"] for one in said["data"]] == ["LABEL_0"] * 2 and said["data"][1]["num_classes"] == 1
        for path, body, words in (
            ("/rerank", {"query": 1, "documents": TEXTS}, "query must be a text"),
            ("/rerank", {"query": "x", "documents": []}, "documents must be"),
            ("/rerank", {"query": "x", "documents": ["y"], "top_n": 0}, "top_n is 0"),
            ("/classify", {"input": "x " * 600}, "more than"), ("/classify", {"model": "n", "input": "x"}, "not here"),
            ("/v1/completions", {"prompt": "x"}, "gives labels"), ("/v1/embeddings", {"input": 3}, "input must be"),
        ):  # fmt: skip
            assert words in post(server.url, path, **body)["message"]
