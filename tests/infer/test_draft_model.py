"""A small model that guesses: nothing that is said changes, and it stops where guesses do not pay."""

import copy
from collections import Counter
from contextlib import closing

import pytest
import torch

from outcore.infer import Request, Sampling
from outcore.infer.opening import InferSettings, open_engine
from outcore.infer.passes import DraftModel
from outcore.infer.schedule import ScheduleLimits
from outcore.sizing.inference import PassSize
from tests.flow.models import tiny_loaded
from tests.infer.models import (
    TinyEngine,
    chance_of,
    distribution_of,
    greedy_by_transformers,
    prompts_of,
    save_tiny_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def alike(loaded, strength: float):
    """A model much like this one: its values with noise added."""
    other = copy.deepcopy(loaded)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter += strength * parameter.std() * torch.randn_like(parameter)
    return other


class Pair:
    """An engine whose answers a second, smaller one guesses; close it."""

    def __init__(self, strength: float = 0.05, vocab_size: int = 128, **more):
        self.loaded = tiny_loaded("llama", vocab_size=vocab_size)
        self.plain = copy.deepcopy(self.loaded.model).eval()
        more_rows = {"limits": ScheduleLimits(64, 512, 64, 256), "tiny": {"num_pages": 512, "call_tokens": 512}}
        self.small = TinyEngine("llama", loaded=alike(self.loaded, strength), speculates=False, **more_rows)
        self.large = TinyEngine("llama", loaded=self.loaded, **more_rows)
        self.drafts = self.large.engine.drafts = DraftModel(self.small.runner, self.small.cache, 16, vocab_size, **more)

    def close(self):
        self.large.close()
        self.small.close()


@pytest.fixture
def pair():
    made = []

    def make(**more):
        made.append(Pair(**more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def tokens_of(engine, requests):
    return {(a.request, a.choice): [c.token for c in a.tokens] for a in engine.generate(requests)}


@pytest.mark.more(after=1)
@pytest.mark.parametrize("strength", [0.0, 0.05, 3.0])
def test_greedy_answers_are_the_large_models_own(pair, strength):
    one = pair(strength=strength, is_deterministic=True)
    prompts = prompts_of(6)
    expected = [greedy_by_transformers(one.plain, prompt, 24) for prompt in prompts]
    before = one.large.engine.counts.passes
    assert one.large.greedy(prompts, 24) == expected
    counts = one.large.engine.counts
    assert counts.drafted > 40
    if strength == 0:  # the same model: every guess is right
        assert counts.accepted > 0.9 * counts.drafted and counts.passes - before < 15
    free = one.small.cache
    assert free.used_pages[0] == len(free.index)  # what ended holds nothing


@pytest.mark.more
def test_drawn_answers_are_the_same_and_have_the_large_models_distribution(pair):
    one, prompt = pair(strength=0.2, is_deterministic=True, vocab_size=8), (5, 2, 3)
    asked = {"temperature": 0.9, "top_p": 0.95}
    requests = [Request(f"s{i}", prompt, Sampling(**asked, seed=i, max_tokens=4), n=64) for i in range(12)]
    found = tokens_of(one.large.engine, requests)
    counts = one.large.engine.counts
    assert counts.drafted > len(found) / 2 and 0.1 < counts.accepted / counts.drafted < 0.95
    seen = Counter(tuple(tokens[:3]) for tokens in found.values())
    assert chance_of(seen, distribution_of(one.plain, prompt, 3, Sampling(**asked))) > 0.01
    more = [Request(f"p{i}", prompt, Sampling(frequency_penalty=0.4, max_tokens=20, seed=i)) for i in range(5)]
    found |= tokens_of(one.large.engine, more)
    one.large.engine.drafts = None
    one.large.cache.clear_prefixes()
    assert tokens_of(one.large.engine, [*requests, *more]) == found


def test_many_answers_are_guessed_for_some_at_a_time(pair, monkeypatch):
    one = pair(is_deterministic=True)
    requests = [Request(f"r{i}", (5, 2, 3 + i), Sampling(seed=i, max_tokens=6, ignore_eos=True)) for i in range(40)]
    sorted_rows, sort = [], torch.sort
    monkeypatch.setattr(torch, "sort", lambda rows, **how: sorted_rows.append(len(rows)) or sort(rows, **how))
    found = tokens_of(one.large.engine, requests)
    assert one.large.engine.counts.drafted > 40 and max(sorted_rows) == PassSize.DRAWN_ROWS
    one.large.engine.drafts = None
    one.large.cache.clear_prefixes()
    assert tokens_of(one.large.engine, requests) == found


def test_guesses_stop_where_they_do_not_pay_and_are_tried_again(pair):
    time = iter(range(10**9))
    one = pair(strength=5.0, clock=lambda: float(next(time)))  # a pass of the small model takes a second
    one.large.engine._clock = lambda: float(next(time)) / 10
    one.large.greedy(prompts_of(2), 60)
    drafts, counts = one.drafts, one.large.engine.counts
    assert drafts.acceptance < 0.3
    assert counts.drafted < 2 * 60  # of four for each token
    assert drafts._paused > 0
    for _ in range(drafts._paused - 1):
        assert drafts._how_many(one.large.scheduler.cost, 1) == 0
    assert drafts._how_many(one.large.scheduler.cost, 1) == 2


def test_no_room_in_the_small_model_is_no_harm(pair):
    one = pair(is_deterministic=True)
    one.small.cache.ledgers[0]._free = one.small.cache.ledgers[0]._free[:8]
    prompts = prompts_of(6)
    expected = [greedy_by_transformers(one.plain, prompt, 16) for prompt in prompts]
    assert one.large.greedy(prompts, 16) == expected


def test_opened_by_name(tiny_folder, tmp_path):
    folder, model, _ = tiny_folder
    said: list[str] = []
    settings = InferSettings(context=128, ram_gib=1, draft_model=str(folder), deterministic=True)  # not by seconds
    with closing(open_engine(str(folder), settings, said.append)) as opened:
        prompt = prompts_of(2, vocab=280)[0]
        request = Request("a", tuple(prompt), Sampling(temperature=0, max_tokens=20, ignore_eos=True))
        (answer,) = opened.engine.generate([request])
        assert [c.token for c in answer.tokens] == greedy_by_transformers(model, prompt, 20)
        assert answer.timings.accepted > 8 and any(line.startswith("draft model: ") for line in said)
    _, tokenizer = save_tiny_model(tmp_path / "other")
    tokenizer.add_tokens(["unheard-of"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="must share one tokenizer"):
        open_engine(str(tmp_path / "other"), InferSettings(context=128, ram_gib=1, draft_model=str(folder)))
    with pytest.raises(ValueError, match="does nothing with draft_tokens 0"):
        InferSettings(draft_model="a", draft_tokens=0)
