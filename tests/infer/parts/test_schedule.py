"""What passes are filled with: prompts beside answers in chunks of even cost."""

from __future__ import annotations

import pytest

from outcore.infer.passes.rows import lay_out
from outcore.infer.requests import Request, Sampling
from outcore.infer.schedule import ScheduleLimits, scheduler
from outcore.sizing.inference import (
    RowCost,
    pairs,
)
from tests.flow.models import tiny_loaded
from tests.infer.models import TinyEngine, greedy_by_transformers

COST = RowCost(context_tokens=64.0)


@pytest.mark.parametrize("start, count, window", [(0, 1, None), (5, 7, None), (0, 9, 4), (2, 9, 4), (30, 3, 4)])
def test_pairs_are_counted_as_one_by_one(start, count, window):
    one_by_one = sum(min(start + i + 1, window or 10**9) for i in range(count))
    assert pairs(start, count, window) == one_by_one


def test_the_longest_chunk_within_a_cost():
    cost = RowCost(10.0, ((None, 0.5), (4, 0.5)))
    for start in (0, 3, 50):
        most = cost.most(start, 20.0, 100)
        assert cost.of(start, most) <= 20 < cost.of(start, most + 1)
    assert cost.most(10**6, 20.0, 100) == 0
    assert RowCost().most(10**6, 20.0, 100) == 20


@pytest.mark.parametrize("whole_chunks", [False, True])
def test_passes_cost_the_same_while_an_answer_waits_for_them(whole_chunks):
    limits = ScheduleLimits(4, 48, 16, 0, whole_chunks=whole_chunks, row_cost=COST)
    long, short = list(range(2, 127)) + list(range(2, 77)), [5, 6, 7]
    loaded = tiny_loaded("llama", max_position_embeddings=512)
    expected = greedy_by_transformers(loaded.model.eval(), long, 4)
    tiny = TinyEngine("llama", limits=limits, speculates=False, loaded=loaded)
    sizes: list[tuple[int, int, float]] = []

    def passed(works, seconds):
        read = [work for work in works if work.sequence.request.name == "long" and work.start < len(long)]
        if read:
            sizes.append(
                (len(works) - len(read), sum(w.count for w in read), sum(COST.of(w.start, w.count) for w in works))
            )

    tiny.engine.observers.append(passed)
    try:
        requests = [
            Request(name, tuple(prompt), Sampling(temperature=0, max_tokens=count), priority=priority)
            for name, prompt, count, priority in (("short", short, 24, 1), ("long", long, 4, 0))
        ]
        tiny.engine.submit(requests[0])
        tiny.engine.step()
        found = {answer.request: answer for answer in tiny.engine.generate(requests[1:])}
        beside = [(tokens, cost) for others, tokens, cost in sizes if others]
        assert sum(tokens for tokens, _ in beside) == len(long)
        if whole_chunks:
            assert all(tokens % 16 == 0 or tokens == len(long) % 16 for tokens, _ in beside)
        else:
            full = beside[:-1]
            assert all(44 <= cost <= 48 for _, cost in full)
            assert [t for t, _ in full] == sorted((t for t, _ in full), reverse=True) and full[0][0] > 2 * full[-1][0]
        assert [chosen.token for chosen in found["long"].tokens] == expected
        sizes.clear()
        tiny.cache.clear_prefixes()
        list(tiny.engine.generate(requests[1:]))
        assert [tokens for _, tokens, _ in sizes] == [48] * 4 + [8]  # alone: as few passes as there can be
    finally:
        tiny.close()


def test_who_asks_for_little_waits_for_no_long_prompt():
    limits = ScheduleLimits(8, 32, 16, 0)
    tiny = TinyEngine("llama", limits=limits, speculates=False, max_position_embeddings=512)
    known, seen = tuple(range(2, 98)), []
    tiny.engine.observers.append(
        lambda works, seconds: seen.append([(w.sequence.request.name, w.count) for w in works])
    )
    sampling = Sampling(temperature=0, max_tokens=2)
    try:
        list(tiny.engine.generate([Request("known", known, sampling)]))
        for name in ("long", "longer"):
            tiny.engine.submit(Request(name, tuple(range(100, 20, -1)) * 3, sampling))
        tiny.engine.step()
        seen.clear()
        tiny.engine.submit(Request("short", (5, 6, 7), sampling))
        tiny.engine.submit(Request("continued", (*known, 4, 5), sampling))
        tiny.engine.step()
        read = dict(seen[0])
        assert read["short"] == 3 and read["continued"] == 2, "both at once, with what was known left out"
        assert sum(count for name, count in seen[0] if name == "long") == 27, "a long one goes on in half of the pass"
        list(tiny.engine.generate([]))
        names = [name for works in seen for name, _ in works]
        assert max(at for at, name in enumerate(names) if name == "continued") < names.index("longer")
    finally:
        tiny.close()


def test_long_prompts_have_their_turn(monkeypatch):
    limits = ScheduleLimits(1, 32, 16, 0)
    tiny, sampling = (
        TinyEngine("llama", limits=limits, max_position_embeddings=512),
        Sampling(temperature=0, max_tokens=1),
    )
    started = []
    tiny.engine.observers.append(lambda works, seconds: started.extend(w.sequence.request.name for w in works))
    try:
        tiny.engine.submit(Request("first", (5,) * 40, sampling))
        tiny.engine.step()
        tiny.engine.submit(Request("long", (6,) * 40, sampling))
        tiny.engine.submit(Request("soon", (7,), sampling))
        tiny.engine.step()
        monkeypatch.setattr(scheduler, "AHEAD_S", 0.0)  # as if the long one had come so much earlier
        tiny.engine.submit(Request("late", (8,), sampling))
        list(tiny.engine.generate([]))
        assert list(dict.fromkeys(started)) == ["first", "soon", "long", "late"]
    finally:
        tiny.close()


def test_calls_of_fixed_sizes_hold_prompts_or_answers():
    """However prompts are cut, whatever was found and given up: a token's call has its own kind and size."""
    limits = ScheduleLimits(8, 64, 16, 8, fixed_rows=8, is_deterministic=True)
    loaded = tiny_loaded("llama", max_position_embeddings=512)
    prompts = [list(range(2 + at, 2 + at + count)) for at, count in enumerate((3, 40, 1, 21, 16, 17, 33, 2))]
    prompts += [prompts[1] + [9, 9], [*prompts[3][:12], 5]]
    expected = [greedy_by_transformers(loaded.model.eval(), prompt, 12) for prompt in prompts]
    tiny = TinyEngine("llama", limits=limits, loaded=loaded, tiny={"num_pages": 30})
    rows, guesses = [], []

    def passed(works, seconds):
        for work in works:
            ends = work.start + work.count
            assert work.start >= work.sequence.num_prompt or ends <= work.sequence.num_prompt
        for call in lay_out(works, 16, 8, is_by_place=True):
            kinds = {work.start >= work.sequence.num_prompt for work, _ in call.works}
            assert len(kinds) == 1 and call.padded_rows == (8 if kinds == {True} else 16) >= call.num_rows
            rows.append((call.padded_rows, call.num_rows))
        guesses.append(sum(work.num_drafts for work in works))

    tiny.engine.observers.append(passed)
    try:
        assert tiny.greedy(prompts, 12) == expected
        assert tiny.scheduler.num_preempted > 0, "answers' tokens were computed again"
        assert (16, 16) in rows and 0 < max(guesses) < 8
        shared = list(tiny.cache.index.all())
        known = [tuple(prompt) for prompt in prompts]
        assert shared and all(
            any(page.tokens == p[i : i + 4] for p in known for i in range(0, len(p), 4)) for page in shared
        )
    finally:
        tiny.close()


def test_who_is_being_read_is_not_starved_by_who_came_later(monkeypatch):
    """Brief prompts keep coming, and all that is left of the pages is what two passes of them take."""
    monkeypatch.setattr(scheduler, "AHEAD_S", 0.0)
    tiny = TinyEngine("llama", limits=ScheduleLimits(8, 32, 16, 0), speculates=False, tiny={"num_pages": 34})
    sampling, told = Sampling(temperature=0, max_tokens=2), []
    try:
        tiny.engine.submit(Request("long", tuple(range(2, 122)), sampling), on_answer=told.append)
        for number in range(20):
            for part in range(2):
                prompt = tuple((7 * number + 31 * part + at) % 120 + 2 for at in range(6))
                tiny.engine.submit(Request(f"{number} {part}", prompt, sampling))
            tiny.engine.step()
        assert [answer.request for answer in told] == ["long"]
    finally:
        tiny.close()
