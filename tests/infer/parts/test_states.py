"""Recurrent and hybrid models: greedy answers equal transformers' generate, however prompts are cut and shared."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from outcore.infer.cache import SequenceStates
from outcore.infer.opening import InferSettings, open_engine
from outcore.infer.opening.check import way_of
from outcore.infer.schedule import Drafter, ScheduleLimits
from outcore.sizing.inference import InferenceLimits, InferenceNeeds, KvSize, LayerSize
from tests.flow.models import needs, tiny_loaded
from tests.infer.models import TinyEngine, greedy, greedy_by_transformers, opening, prompts_of, save_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
CONV = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
FIELDS = {
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": MIXED,
    "lfm2": CONV,
}
STATES = ["mamba2", "qwen3_next", "lfm2", "olmo_hybrid"]
MORE_STATES = ["bamba", "granitemoehybrid", "falcon_h1", "qwen3_5_text", "kimi_linear", "bailing_hybrid", "lfm3"]
STEPS = ["mamba", "jamba"]
MORE_STEPS = ["falcon_mamba", "nemotron_h"]
ALONE = ("mamba", "mamba2", "falcon_mamba")
COUNT = 14


def loaded_of(family: str):
    return tiny_loaded(family, attention="eager" if family in ALONE else None, **FIELDS.get(family, {}))


def expected_of(loaded, prompts) -> list[list[int]]:
    return [greedy_by_transformers(loaded.model.eval(), prompt, COUNT) for prompt in prompts]


def guess(monkeypatch, answers: dict[int, list[int]], wrong_at: int) -> None:
    """Have drafters propose the next tokens of the answer behind the prompt of this length, one of them wrong."""

    def propose(self, tokens, most, *more):
        length = max(n for n in answers if n <= len(tokens))
        known = len(tokens) - length
        found = answers[length][known : known + min(most, 5)]
        return [(t + 1) % 100 if known + at == wrong_at else t for at, t in enumerate(found)]

    monkeypatch.setattr(Drafter, "propose", propose)


def check(family: str, way: str, monkeypatch) -> None:
    loaded = loaded_of(family)
    prompts = prompts_of()
    expected = expected_of(loaded, prompts)
    with closing(TinyEngine(family, way, loaded=loaded)) as tiny:
        assert tiny.greedy(prompts, COUNT) == expected
        assert tiny.greedy(prompts, COUNT) == expected, "beginnings are shared now"
        assert (tiny.engine.counts.cached_tokens > 0) == (way == "states")
        tiny.cache.clear_prefixes()
        if way == "states":
            for number, wrong_at in ((1, 7), (3, 0), (4, 3)):  # a guess of the middle, the first, several rounds
                with monkeypatch.context() as patch:
                    guess(patch, {len(prompts[number]): expected[number]}, wrong_at)
                    before = tiny.engine.counts.accepted
                    assert tiny.greedy([prompts[number]], COUNT) == [expected[number]]
                    assert tiny.engine.counts.accepted > before
        assert all(used == 0 for used in tiny.cache.used_pages) or tiny.cache.index


@pytest.mark.more(after=1)
@pytest.mark.parametrize("family", [pytest.param(name, marks=needs(name)) for name in STATES])
def test_states_beside_pages(family, monkeypatch):
    check(family, "states", monkeypatch)


@pytest.mark.more(after=1)
@pytest.mark.parametrize("family", [pytest.param(name, marks=needs(name)) for name in STEPS])
def test_prompts_in_one_piece(family, monkeypatch):
    check(family, "steps", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param(name, marks=needs(name)) for name in MORE_STATES])
def test_more_states_beside_pages(family, monkeypatch):
    check(family, "states", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param(name, marks=needs(name)) for name in MORE_STEPS])
def test_more_prompts_in_one_piece(family, monkeypatch):
    check(family, "steps", monkeypatch)


def test_the_way_is_found_by_trying():
    assert way_of(loaded_of("mamba2"))[0] == "states"
    way, why = way_of(loaded_of("mamba"))
    assert way == "steps" and "states: a tiny copy gives other logits" in why


def test_a_beginning_is_shared_from_the_place_where_prompts_part():
    """The first prompt leaves its states at its last page, the second where it leaves the first, the third begins
    there."""
    loaded, generator = loaded_of("mamba2"), torch.Generator().manual_seed(3)
    own = [torch.randint(2, 128, (n,), generator=generator).tolist() for n in (18, 7, 9, 5)]
    prompts = [own[0] + tail for tail in own[1:]]
    expected = expected_of(loaded, prompts)
    tiny = TinyEngine("mamba2", "states", loaded=loaded)
    assert tiny.cache.snapshots is not None
    cached = []
    for prompt, answer in zip(prompts, expected, strict=True):
        assert tiny.greedy([prompt], COUNT) == [answer]
        cached.append(tiny.engine.counts.cached_tokens)
    assert cached == [0, 0, 16], "pages of 4 tokens: 16 of the 18 are whole"
    again = own[0] + own[1] + [5, 6, 7]
    assert tiny.greedy([again], COUNT) == expected_of(loaded, [again])
    assert tiny.engine.counts.cached_tokens == 16 + 24, "where the first prompt's last page ended"
    assert len(tiny.cache.snapshots) == 4
    tiny.cache.clear_prefixes()
    assert len(tiny.cache.snapshots) == 0
    tiny.close()


def test_sequences_that_lose_their_pages_compute_their_states_again(monkeypatch):
    loaded = loaded_of("qwen3_next")
    prompts = prompts_of(6)
    expected = expected_of(loaded, prompts)
    tiny = TinyEngine("qwen3_next", "states", loaded=loaded, limits=ScheduleLimits(6, 24, 8, 8))
    spare = [ledger.take(ledger.num_free - 22) for ledger in tiny.cache.ledgers]
    assert tiny.greedy(prompts, COUNT) == expected
    assert tiny.scheduler.num_preempted > 0 and spare
    tiny.close()


def test_texts_are_scored_each_by_itself():
    loaded = loaded_of("mamba2")
    texts = prompts_of()
    tiny = TinyEngine("mamba2", "states", loaded=loaded)
    for text, scores in zip(texts, tiny.engine.score(texts), strict=True):
        with torch.no_grad():
            logprobs = loaded.model(input_ids=torch.tensor([text])).logits[0].float().log_softmax(-1)
        plain = [float(logprobs[at, token]) for at, token in enumerate(text[1:])]
        assert scores == pytest.approx(plain, abs=1e-4)
    tiny.close()


def test_states_step_back_to_what_was_remembered():
    class Layer:
        def __init__(self) -> None:
            self.recurrent_states = {0: torch.zeros(1, 3)}
            self.has_previous_state = {0: True}

    states = SequenceStates({4: Layer()}, length=7)
    assert states.size_bytes == 12
    states.remember()
    states.layers[4].recurrent_states[0].add_(1)
    states.length = 9
    assert states.step_back() == 7 == states.length
    assert not states.layers[4].recurrent_states[0].any()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    model, _ = save_tiny_model(folder, family="lfm2", layer_types=CONV["layer_types"])
    return folder, [greedy_by_transformers(model, prompt, COUNT) for prompt in prompts_of(4, vocab=280)]


@pytest.mark.more(after=1)
@pytest.mark.parametrize("settings", [{}, {"chunk_tokens": 16, "page_tokens": 4}])
def test_a_hybrid_model_opened_by_name(hybrid, settings):
    folder, expected = hybrid
    with opening(folder, **settings) as opened:
        assert opened.way == "states"
        assert any("recurrent states" in line for line in opened.placement.lines())
        for _ in range(2):
            assert greedy(opened.engine, prompts_of(4, vocab=280), COUNT, ignore_eos=True) == expected
        cached = opened.engine.counts.cached_tokens
        assert cached > 0 or not settings


def test_what_a_hybrid_model_cannot_is_said(hybrid, tmp_path):
    with pytest.raises(ValueError, match="states, which are kept in RAM"):
        open_engine(str(hybrid[0]), InferSettings(context=128, ram_gib=1, prefix_path=tmp_path))
    with pytest.raises(ValueError, match="cannot step back"):
        open_engine(str(hybrid[0]), InferSettings(context=128, ram_gib=1, draft_model=str(hybrid[0])))


def test_processes_that_share_ram_share_the_room_for_copies():
    needs, limits = InferenceNeeds((), KvSize(()), LayerSize(64, 128, ()), 64, 2), InferenceLimits(None, 100_000)
    for processes, copies in ((1, 50), (2, 25), (4, 12)):
        found, left = needs.with_snapshots(100, limits, processes)
        assert found.num_snapshots == copies and left.ram_bytes == 100_000 - processes * copies * 100
