"""What methods with heads train, asked over HTTP: the numbers are those that transformers and sentence-transformers
compute of the exported folder."""

import json
import math
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from outcore.serve import ServeSettings
from tests.forked import ROOT
from tests.hf.callers import tokenizer
from tests.serve.running import Running, send
from tests.train.methods.test_methods import here, train  # noqa: F401

RUN = "final_model/run"


@contextmanager
def served() -> Iterator[Any]:
    """(path, body) -> (status, reply) by a server of the exported model."""
    run, logs = Path(RUN).resolve(), Path("served").resolve()
    with chdir(ROOT):  # the server's own processes start where the package is
        running = Running(run, ServeSettings(logs=logs, name="run"), context=64)

    def ask(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, reply = send(running, path, body)
        return status, json.loads(reply)

    try:
        yield ask
    finally:
        running.stop()


def vector_of(text: str, pooling: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(RUN).eval()
    with torch.no_grad():
        hidden_TH = model.base_model(**tokenizer()(text, return_tensors="pt")).last_hidden_state[0]
    return hidden_TH.mean(0) if pooling == "mean" else hidden_TH[-1]


def scores_of(*texts: str) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(RUN).eval()
    encode: Any = tokenizer()
    with torch.no_grad():
        return model(**encode(*texts, return_tensors="pt")).logits[0].tolist()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedder_pools_as_it_was_trained_and_may_be_cut(pooling: str) -> None:
    assert train("embed", "--pooling", pooling, "--matryoshka", "16", steps=1) == 0
    whole = vector_of("hello world", pooling)
    sizes = json.loads(Path(RUN, "config.json").read_text())["matryoshka_dimensions"]
    assert sizes[0] == 16 and sizes[-1] == len(whole) and len(sizes) > 1
    with served() as ask:
        for size in (None, 16):
            asked = {"input": "hello world"} | ({"dimensions": size} if size else {})
            status, reply = ask("/v1/embeddings", asked)
            assert status == 200
            found, cut = torch.tensor(reply["data"][0]["embedding"]), whole[:size]
            torch.testing.assert_close(found, cut / cut.norm(), atol=1e-4, rtol=1e-3)
        status, reply = ask("/v1/embeddings", {"input": "hello", "dimensions": 17})
        assert status == 400 and "may be cut to 16," in reply["error"]["message"]


def test_sentence_transformers_opens_an_embedder_and_gives_its_vectors() -> None:
    st: Any = pytest.importorskip("sentence_transformers")
    assert train("embed", "--pooling", "last", steps=1) == 0
    whole = vector_of("hello world", "last")
    found = torch.tensor(st.SentenceTransformer(RUN, device="cpu").encode("hello world"))
    torch.testing.assert_close(found, whole / whole.norm(), atol=1e-5, rtol=1e-4)


def test_an_embedder_goes_on_as_its_base_pools() -> None:
    """Without --pooling; a way that is not here is refused."""
    assert train("embed", "--pooling", "last", steps=1) == 0
    Path("model/1_Pooling").mkdir()
    said = Path(RUN, "1_Pooling/config.json").read_text()
    Path("model/1_Pooling/config.json").write_text(said)
    assert train("embed", name="again", steps=1) == 0
    assert Path("final_model/again/1_Pooling/config.json").read_text() == said
    Path("model/1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    with pytest.raises(ValueError, match="pools by cls"):
        Running("model", ServeSettings(logs=Path("served")))


def test_a_classifier_labels_by_http() -> None:
    assert train("classify", steps=1) == 0
    scores = torch.tensor(scores_of("hello world 5")).softmax(0).tolist()
    with served() as ask:
        status, reply = ask("/classify", {"input": "hello world 5"})
    assert status == 200
    assert reply["data"][0]["probs"] == pytest.approx(scores, abs=1e-4)
    assert reply["data"][0]["label"] == "ab"[scores.index(max(scores))]


def test_a_reranker_ranks_by_http() -> None:
    assert train("classify", rows="rank", steps=1) == 0
    documents = ["world 1", "test 2 no", "a 3"]
    wanted = [1 / (1 + math.exp(-scores_of("hello 1", document)[0])) for document in documents]
    with served() as ask:
        status, reply = ask("/v1/rerank", {"query": "hello 1", "documents": documents})
    assert status == 200
    found = {one["index"]: one["relevance_score"] for one in reply["results"]}
    assert [found[at] for at in range(3)] == pytest.approx(wanted, abs=1e-4)
    assert list(found) == sorted(found, key=lambda at: -wanted[at])


def test_a_reward_model_scores_by_http() -> None:
    assert train("reward", steps=1) == 0
    (score,) = scores_of("hello 1 world")
    with served() as ask:
        status, reply = ask("/classify", {"input": "hello 1 world"})
    assert status == 200
    assert reply["data"][0]["probs"] == pytest.approx([1 / (1 + math.exp(-score))], abs=1e-4)
