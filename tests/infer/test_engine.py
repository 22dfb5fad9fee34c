"""The engine: answers do not depend on company, guesses, room or order; what is cancelled or late ends at once."""

import dataclasses
import threading
from collections import Counter
from contextlib import closing
from typing import Any

import pytest
import torch

from outcore.common.errors import EngineError
from outcore.infer import Request, Sampling
from outcore.infer.opening import InferSettings, open_engine
from outcore.infer.schedule import Drafter, ScheduleLimits
from outcore.sizing.inference import PassSize
from tests.flow.models import tiny_loaded
from tests.infer.models import TinyEngine, chance_of, distribution_of, greedy_by_transformers, prompts_of
from tests.refused import failing, refused

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def tiny():
    """A function that makes engines and closes them in the end."""
    made = []

    def make(**more) -> TinyEngine:
        made.append(TinyEngine("llama", **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_model_that_gives_no_numbers_is_an_error(tiny, temperature):
    loaded = tiny_loaded("llama")
    with torch.no_grad():
        loaded.model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    sampling = Sampling(temperature=temperature, max_tokens=4)
    engine = tiny(loaded=loaded).engine
    [answer] = engine.generate([Request("a", (1, 2, 3), sampling)])
    assert answer.finish == "error" and "NaN" in answer.error and not answer.tokens
    texts: list[Any] = []
    engine.submit_texts([[1, 2, 3]], 1, texts.append)
    engine.submit_embeddings([[1, 2, 3]], texts.append)
    engine.step()
    assert ["NaN" in str(told) for told in texts] == [True, True]
    with pytest.raises(EngineError, match="NaN"):
        engine.score([[1, 2, 3]])


def tokens_of(engine, requests) -> dict[tuple[str, int], list[int]]:
    return {(a.request, a.choice): [c.token for c in a.tokens] for a in engine.generate(requests)}


def test_many_answers_of_a_pass_are_each_chosen_as_alone(tiny):
    """More than are looked at together, the likeliest of some and drawn ones with likelihoods."""
    most = PassSize.LIKELIEST_ROWS + 6
    one = tiny(limits=ScheduleLimits(2 * most, 4 * most, 64, 0), speculates=False, tiny={"num_pages": 4 * most})
    asked = [Sampling(temperature=n % 2, seed=n, logprobs=2 * (n % 2) or None, max_tokens=2) for n in range(2 * most)]
    requests = [Request(f"{n}", (n % 100 + 2, 3), sampling) for n, sampling in enumerate(asked)]
    together = {answer.request: [t.token for t in answer.tokens] for answer in one.engine.generate(requests)}
    for n in (*range(4), *range(2 * most - 4, 2 * most)):
        [alone] = one.engine.generate([requests[n]])
        assert together[f"{n}"] == [t.token for t in alone.tokens]


def test_answers_that_lose_their_pages_begin_again(tiny):
    loaded = tiny_loaded("llama")
    prompts = prompts_of(14)
    expected = [greedy_by_transformers(loaded.model.eval(), prompt, 20) for prompt in prompts]
    one, waiting = tiny(loaded=loaded, limits=ScheduleLimits(14, 128, 32, 16)), []
    one.engine.observers.append(lambda *_: waiting.append([s.num_prompt for s in one.scheduler.waiting]))
    assert one.greedy(prompts, 20) == expected
    assert one.scheduler.num_preempted > 0
    lengths = [len(prompt) for prompt in prompts]
    assert all(order == lengths[14 - len(order) :] for order in waiting), "who came first goes on first"


@pytest.mark.parametrize(("count", "drafted"), [(2, 0), (3, 1)])
def test_the_last_token_is_not_guessed(tiny, monkeypatch, count, drafted):
    """The pass that checks the guess before it gives it."""
    monkeypatch.setattr(Drafter, "propose", lambda self, tokens, most, worth: [5] * most)
    one = tiny()
    one.greedy([[2, 3, 4] * 4], count)
    assert one.engine.counts.drafted == drafted


@pytest.mark.more(after=1)
@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0.9}, {"temperature": 1.3, "top_p": 0.8}, {"top_k": 3}, {"top_k": 5, "top_p": 0.9}],
    ids=str,
)
def test_guesses_change_neither_text_nor_distribution_of_what_is_drawn(tiny, asked):
    """1,536 answers to a prompt that repeats, each of a seed of its own, with a guess in most passes."""
    loaded, prompt = tiny_loaded("llama", vocab_size=8), (2, 3, 4, 2, 3, 4, 2)
    expected = distribution_of(loaded.model.eval(), prompt, 3, Sampling(**asked))
    other = distribution_of(loaded.model, prompt, 3, Sampling(**{"temperature": 1.0, **asked, "top_p": 0.6}))
    one = tiny(loaded=loaded, limits=ScheduleLimits(256, 1024, 256, 512), tiny={"num_pages": 2048, "call_tokens": 1024})
    requests = [Request(f"a{i}", prompt, Sampling(**asked, max_tokens=4, seed=i), n=128) for i in range(12)]
    found = tokens_of(one.engine, requests)
    assert one.engine.counts.accepted > 100
    seen = Counter(tuple(tokens[:3]) for tokens in found.values())
    assert chance_of(seen, expected) > 0.01 > 1e-9 > chance_of(seen, other)
    one.engine.speculates = False
    one.cache.clear_prefixes()
    assert tokens_of(one.engine, requests) == found


def test_several_answers_to_one_prompt_differ_and_come_again(tiny):
    one = tiny()
    request = Request("n", (5, 6, 7), Sampling(max_tokens=8, seed=3), n=3)
    first = tokens_of(one.engine, [request])
    assert len(first) == 3 and len({tuple(t) for t in first.values()}) == 3
    assert tokens_of(one.engine, [request]) == first


def test_how_answers_end(tiny):
    one = tiny()
    plain = Sampling(temperature=0, max_tokens=12)
    ((_, tokens),) = tokens_of(one.engine, [Request("a", (9, 8, 7), plain)]).items()
    third = tokens[2]
    first_at = tokens.index(third)
    (ended,) = one.engine.generate(
        [Request("b", (9, 8, 7), Sampling(temperature=0, max_tokens=12, stop_token_ids=(third,)))]
    )
    assert ended.finish == "stop" and ended.stop == third and len(ended.tokens) == first_at + 1
    word = chr(0x4E00 + tokens[3])
    (ended,) = one.engine.generate([Request("c", (9, 8, 7), Sampling(temperature=0, max_tokens=12, stop=(word,)))])
    assert ended.stop == word and word not in ended.text
    least = Sampling(temperature=0, max_tokens=12, min_tokens=9, stop_token_ids=(third,))
    (ended,) = one.engine.generate([Request("d", (9, 8, 7), least)])
    assert len(ended.tokens) >= 9
    late = Sampling(temperature=0, max_tokens=12, min_tokens=9, stop=(word,))
    (ended,) = one.engine.generate([Request("e", (9, 8, 7), late)])
    assert len(ended.tokens) >= 9 and len(ended.text) >= 8 and word in ended.text
    assert ended.timings.total_s >= ended.timings.first_token_s > 0


def test_an_answer_knows_its_passes_waits_and_pages(tiny):
    one = tiny(speculates=False, waited_s=lambda: {"nvme": 0.5, "pcie": 0.25})
    requests = [Request(n, (9, 8, 7), Sampling(temperature=0, max_tokens=m)) for n, m in (("short", 2), ("long", 6))]
    times = {answer.request: answer.timings for answer in one.engine.generate(requests)}
    for name, passes in (("short", 2), ("long", 6)):
        assert times[name].passes == passes
        assert times[name].waited_s == {"nvme": 0.5 * passes, "pcie": 0.25 * passes}
    assert times["long"].pages == 2 and times["short"].pages == 1  # of four tokens; the last one is never stored


def test_what_is_cancelled_or_late_ends(tiny):
    one = tiny()
    ended = {}
    long = Sampling(temperature=0, max_tokens=200)

    def watch(name, **more):
        one.engine.submit(Request(name, (3, 4, 5), long, **more), None, lambda a: ended.setdefault(name, a))

    watch("cancelled")
    watch("late", deadline_s=1e-9)
    watch("goes on")
    one.engine.step()
    one.engine.cancel("cancelled")
    one.engine.cancel("unknown")
    one.engine.step()
    assert ended["cancelled"].finish == "cancelled"
    assert ended["late"].finish == "error" and "not finished within" in ended["late"].error
    assert "goes on" not in ended and one.engine.num_running == 1
    one.engine.cancel_all()
    one.engine.step()
    assert ended["goes on"].finish == "cancelled" and one.scheduler.is_idle


def test_higher_priority_comes_first(tiny):
    one = tiny(limits=ScheduleLimits(1, 64, 16, 0))
    order = []
    for name, priority in (("first", 0), ("low", 0), ("high", 5)):
        request = Request(name, (3, 4), Sampling(temperature=0, max_tokens=3), priority=priority)
        one.engine.submit(request, None, lambda a: order.append(a.request))
    while one.engine.step():
        pass
    assert order.index("high") < order.index("low")


def test_a_pass_that_fails_ends_its_answers_and_the_next_one_runs(tiny, monkeypatch):
    one = tiny()
    ended = []
    run = one.runner.run
    monkeypatch.setattr(one.runner, "run", failing(RuntimeError("the link is gone")))
    one.engine.submit(Request("a", (3, 4), Sampling(max_tokens=3)), None, ended.append)
    with pytest.raises(RuntimeError):
        one.engine.step()
    assert ended[0].finish == "error" and "the link is gone" in ended[0].error and one.scheduler.is_idle
    monkeypatch.setattr(one.runner, "run", run)
    assert len(tokens_of(one.engine, [Request("b", (3, 4), Sampling(max_tokens=3))])["b", 0]) == 3


def test_a_request_that_cannot_begin_ends_and_others_are_answered(tiny, monkeypatch):
    """It stayed in the queue with no pages, and every pass failed by it until its time was over."""
    one, ended = tiny(), list[Any]()
    prompt = tuple(range(2, 42))
    expected = tokens_of(one.engine, [Request("first", prompt, Sampling(temperature=0, max_tokens=3))])["first", 0]
    cache, use, wrong = one.scheduler.cache, one.scheduler.cache._use, [RuntimeError("states of another shape")]

    def used(*given):
        use(*given)
        if wrong:
            raise wrong.pop()

    monkeypatch.setattr(cache, "_use", used)
    before = cache.used_pages
    for name in "ab":
        one.engine.submit(Request(name, prompt, Sampling(temperature=0, max_tokens=3)), None, ended.append)
    while one.engine.step():
        pass
    assert [(answer.request, answer.finish) for answer in ended] == [("a", "error"), ("b", "length")]
    assert "states of another shape" in ended[0].error and one.scheduler.is_idle and cache.used_pages == before
    assert [chosen.token for chosen in ended[1].tokens] == expected


@pytest.mark.parametrize("prompt_tokens", [2, 40], ids=["its last token", "a piece of its prompt"])
def test_what_cannot_be_trusted_ends_answers_untold(tiny, prompt_tokens):
    verify, ended, told = failing(RuntimeError("no results")), [], []
    one = tiny(limits=ScheduleLimits(4, 16, 16, 16), verify=verify)
    prompt = tuple(range(2, 2 + prompt_tokens))
    one.engine.submit(Request("a", prompt, Sampling(temperature=0, max_tokens=1)), told.append, ended.append)
    with pytest.raises(RuntimeError):
        one.engine.step()
    assert [answer.error for answer in ended] == ["RuntimeError: no results"] and one.scheduler.is_idle
    assert not any(piece.tokens for piece in told)


def test_a_signal_cancels_wherever_it_comes(tiny):
    """Ctrl-C in a chat comes to the thread that runs passes, also while it takes notes."""
    one, ended = tiny(), []
    one.engine.submit(Request("a", (5,), Sampling(max_tokens=50)), None, ended.append)

    def interrupted():
        with one.engine._wake:
            one.engine.cancel("a")

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and one.engine.step() and [answer.finish for answer in ended] == ["cancelled"]


def test_refused(tiny):
    one = tiny()
    for request, word in (
        (Request("a", (1, 999)), "vocabulary"),
        (Request("b", (1,), Sampling(max_tokens=10_000)), "together more"),
        (Request("c", (1,), Sampling(logit_bias={500: 1})), "logit_bias"),
    ):
        with pytest.raises(ValueError, match=word):
            one.engine.submit(request)
    refused(ValueError, "no tokens", lambda: Request("d", ()))
    refused(ValueError, "no tokens", lambda: one.engine.score([[]]))


def test_deterministic_answers_do_not_depend_on_company(tiny_folder):
    settings = InferSettings(context=128, ram_gib=1, deterministic=True, chunk_tokens=16, page_tokens=16)
    with closing(open_engine(str(tiny_folder[0]), settings)) as opened:
        sampling = Sampling(temperature=1.0, max_tokens=16, seed=4, logprobs=0, ignore_eos=True)
        wanted = Request("wanted", tuple(prompts_of(2, vocab=250)[1] * 2), sampling)
        (alone,) = opened.engine.generate([wanted])
        opened.engine.scheduler.cache.clear_prefixes()
        others = [Request(f"o{i}", tuple(p), sampling) for i, p in enumerate(prompts_of(8, seed=7, vocab=250))]
        found = {a.request: a for a in opened.engine.generate([*others[:4], wanted, *others[4:]])}
        assert found["wanted"].tokens == alone.tokens  # with every log-probability, bit by bit


def test_deterministic_answers_do_not_depend_on_what_was_asked_before(tiny_folder):
    """Keys in 8 bits: those of a prompt that is read at once are rounded as those of a beginning that is found."""
    settings = InferSettings(context=128, ram_gib=1, deterministic=True, page_tokens=8, kv_format="int8")
    with closing(open_engine(str(tiny_folder[0]), settings)) as opened:
        sampling = Sampling(temperature=1.0, max_tokens=16, seed=4, logprobs=0, ignore_eos=True)
        asked = [Request(f"{i}", tuple(range(2, 60)), sampling) for i in range(2)]
        first, second = (next(opened.engine.generate([request])) for request in asked)
        assert second.timings.cached_tokens == 56
        assert [token.token for token in first.tokens] == [token.token for token in second.tokens]
        assert [token.logprob for token in first.tokens] == pytest.approx([t.logprob for t in second.tokens], abs=2e-5)


def test_a_pass_that_only_reads_is_over_before_it_is_asked_how_long_it_took(monkeypatch):
    """It ends in no logits, which all other passes are waited for by."""
    seen = []
    monkeypatch.setattr("outcore.infer.engine.wait_for", lambda at, what: seen.append("waited"))
    asked = lambda: seen.append("asked") or {}  # noqa: E731
    one = TinyEngine("llama", limits=ScheduleLimits(2, 16, 16, 0), waited_s=asked)
    one.greedy([list(range(2, 42))], 2)
    one.close()
    assert seen == ["waited", "asked", "waited", "asked", "asked", "asked"]


def test_texts_of_several_passes_are_told_apart():
    one, texts = TinyEngine("llama"), prompts_of(8)
    together = one.runner.score(texts)
    assert [len(scores) for scores in together] == [len(text) - 1 for text in texts]
    one.runner.limits = dataclasses.replace(one.runner.limits, call_tokens=20, score_tokens=24)
    for one_by_one, of_text in zip(one.runner.score(texts, 3), together, strict=True):
        assert [s.logprob for s in one_by_one] == [pytest.approx(s.logprob, abs=1e-5) for s in of_text]
        assert [s.top[0][0] for s in one_by_one] == [s.top[0][0] for s in of_text]
        assert all(len(s.top) == 3 and s.top[0][1] == max(value for _, value in s.top) for s in one_by_one)
    one.close()


def test_a_pass_that_fails_after_an_answer_got_its_last_token_ends_it_once():
    failures = [EngineError("the card is gone")]

    def waited_s():
        if failures:
            raise failures.pop()
        return {}

    one, told = TinyEngine("llama", speculates=False, waited_s=waited_s), []
    try:
        one.engine.submit(Request("a", (2, 3), Sampling(temperature=0, max_tokens=1)), on_answer=told.append)
        refused(EngineError, "the card is gone", one.engine.step)
        assert [(answer.request, answer.finish) for answer in told] == [("a", "length")] and not one.engine.num_running
        (after,) = one.engine.generate([Request("b", (2, 3), Sampling(temperature=0, max_tokens=2))])
        assert after.finish == "length" and len(after.tokens) == 2
    finally:
        one.close()


def test_texts_take_turns_with_answers_and_those_of_nobody_are_not_scored(tiny, monkeypatch):
    """Texts of clients that had gone away were all scored, before the next token of any answer."""
    monkeypatch.setattr("outcore.infer.passes.texts.PORTION_TOKENS", 8)
    one, told, sizes = tiny(), list[Any](), list[list[int]]()
    score = one.runner.score
    texts = [[3, 4, 5], [6, 7, 8, 9], [3] * 20, [4, 5]]
    expected = [value for scores in score(texts, 2) for value in scores.logprobs.tolist()]

    def noted(texts, num_top):
        sizes.append([len(text) for text in texts])
        return score(texts, num_top)

    monkeypatch.setattr(one.runner, "score", noted)
    one.engine.submit(Request("a", (3, 4), Sampling(max_tokens=20, ignore_eos=True)))
    one.engine.submit_texts([[3, 4]] * 8, 2, told.append, lambda: False)
    one.engine.submit_texts([], 2, told.append)
    one.engine.submit_texts(texts, 2, told.append)
    passes = []
    while len(told) < 2:
        assert one.engine.step()
        passes.append(one.engine.counts.answer_tokens)
    assert sizes == [[3, 4], [20], [2]] and passes == [1, 2, 3] and told[0] == []
    assert [value for scores in told[1] for value in scores.logprobs.tolist()] == pytest.approx(expected)
