"""Greedy answers equal transformers' generate, token for token: ragged prompts, with and without guesses."""

from __future__ import annotations

from contextlib import closing

import pytest

from outcore.flow import StreamUnsupported
from outcore.infer.opening.check import way_of
from outcore.sizing.inference import AttentionLimits
from tests.flow.models import needs, tiny_loaded
from tests.infer.models import TinyEngine, greedy_by_transformers, prompts_of

pytestmark = pytest.mark.usefixtures("one_thread")
PAGED = ["llama", "gemma3_text", "gpt2", "mixtral", "qwen3", "mistral", "gemma2", "gpt_oss", "gpt_neox", "qwen3_moe"]
MORE_PAGED = ["qwen2", "phi", "granite", "cohere", "olmo2", "opt", "phi3", "stablelm", "deepseek_v3", "smollm3"]
WHOLE = ["bloom", "falcon"]


def check(family: str, way: str) -> None:
    loaded = tiny_loaded(family)
    prompts, count = prompts_of(), 14
    expected = [greedy_by_transformers(loaded.model.eval(), prompt, count) for prompt in prompts]
    with closing(TinyEngine(family, way, loaded=loaded)) as tiny:
        assert tiny.greedy(prompts, count) == expected
        if way == "paged":
            assert tiny.engine.counts.drafted > 0
            tiny.engine.speculates = False
            tiny.cache.clear_prefixes()
            assert tiny.greedy(prompts, count) == expected
        assert all(used == 0 for used in tiny.cache.used_pages) or tiny.cache.index


@pytest.mark.more(after=4)
@pytest.mark.parametrize("family", [pytest.param(name, marks=needs(name)) for name in PAGED])
def test_in_shared_rows(family):
    check(family, "paged")


@pytest.mark.parametrize("family", [pytest.param(name, marks=needs(name)) for name in WHOLE])
def test_with_the_models_own_cache(family):
    check(family, "whole")


def test_how_a_model_runs_is_found_by_trying():
    assert way_of(tiny_loaded("llama")) == ("paged", "")
    way, why = way_of(tiny_loaded("bloom"))
    assert (way == "whole" and "alibi" in why) or "attention" in why
    with pytest.raises(StreamUnsupported, match="keeps conv1d_state within itself"):
        way_of(tiny_loaded("recurrent_gemma"))


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param(name, marks=needs(name)) for name in MORE_PAGED])
def test_more_in_shared_rows(family):
    check(family, "paged")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_long_prompts_in_pieces(family):
    """A chunk that sees too much for one product: what is before it a few pages at a time, then its own."""
    loaded = tiny_loaded(family)
    prompt = [3 + i % 50 for i in range(45)]
    expected = greedy_by_transformers(loaded.model.eval(), prompt, 6)
    one = TinyEngine(family, loaded=loaded, tiny={"limits": AttentionLimits(scores=64, gathered=1024)})
    assert one.greedy([prompt], 6) == [expected]
    one.close()
