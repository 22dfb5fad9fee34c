"""Which experts stay and which are read, and when, by choices made up here: nothing is computed."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outcore.flow.experts import ExpertCache
from outcore.flow.experts.form import stack
from outcore.flow.parts import Part, SlabLayout
from outcore.flow.trace import Stalls
from outcore.staging.pool import SmallCopies

CPU = torch.device("cpu")


class Reads:
    """Stands for the lanes: says what was asked for, which is there at once."""

    is_from_drive = False

    def __init__(self):
        self.lane, self.seen, self.afters = SimpleNamespace(streams=SimpleNamespace(now=lambda: "event")), [], []

    def submit(self, part, start, stop, out, *, after):
        self.seen.append((part.index, start // (stop - start)))
        self.afters.append(after)
        return self

    def wait_stream(self):
        pass


def cache_of(num_layers, num_experts, num_slots, group, in_ram=None) -> Any:
    parts, values = {}, torch.nn.Parameter(torch.zeros(num_experts, 2, 128), requires_grad=False)
    for layer in range(num_layers):
        part = Part(layer, f"layer {layer} experts", SlabLayout([("w", values)]), [[]], [values])
        parts[layer] = stack(part)
    return ExpertCache(parts, cast(Any, Reads()), num_slots, group, CPU, Stalls(CPU), in_ram)


def run_pass(cache, choices, calls=1):
    """Reads and hits of a pass in which each layer chooses so."""
    before, hits = len(cache._ranges.seen), cache.counts.hits
    for layer, experts in enumerate(choices):
        for _ in range(calls):
            computed = [expert for group, _ in cache.groups(layer, experts) for expert in group]
            assert sorted(computed) == sorted(experts)
    return cache._ranges.seen[before:], cache.counts.hits - hits


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "num_slots", "group"),
    [(1, 8, 5, 2), (3, 8, 15, 1), (4, 16, 40, 4), (6, 32, 50, 8), (12, 64, 400, 16), (5, 8, 4, 2), (48, 128, 1600, 32)],
)
def test_passes_that_ask_for_all_find_what_slots_can_hold(num_layers, num_experts, num_slots, group):
    cache, total = cache_of(num_layers, num_experts, num_slots, group), num_layers * num_experts
    everything = [list(range(num_experts))] * num_layers
    run_pass(cache, everything)
    # Two groups pass through: one is computed while the other comes. The least recently used hits nothing at all.
    stays = num_slots if num_layers == 1 else num_slots - 2 * max(1, min(group, num_slots // 8))
    for _ in range(3):
        reads, hits = run_pass(cache, everything)
        assert hits >= stays
        assert max(Counter(reads).values(), default=0) <= 1
        assert len(reads) == total - hits


def test_what_a_drive_would_have_to_give_again_stays():
    everything, few = [list(range(16))] * 6, [[0, 1, 14], [2, 3, 13], [4, 12, 15], [5], [6], [7]]
    cache = cache_of(6, 16, 40, 2, in_ram=dict.fromkeys(range(6), 12))
    cache.fill()
    for choices in (everything, few, everything, everything):
        reads, hits = run_pass(cache, choices)
        assert hits and not [key for key in reads if key[1] >= 12]


@pytest.mark.parametrize("calls", [2, 4])
def test_a_prompt_in_several_calls_reads_each_expert_once(calls):
    cache, everything, reads = cache_of(4, 16, 28, 4), [list(range(16))] * 4, []
    for _ in range(3):
        reads, hits = run_pass(cache, everything, calls)
        assert max(Counter(reads).values()) == 1 and len(reads) <= 4 * 16
        assert hits >= 4 * 16 * (calls - 1)
    assert len(reads) < 4 * 16 - 4  # some were there since the last pass


def test_the_next_group_is_on_its_way_while_one_is_computed():
    cache, seen = cache_of(3, 16, 20, 4), None
    for _ in range(2):
        for layer in range(3):
            left, seen = set(range(16)), cache._ranges.seen
            for group, _ in cache.groups(layer, list(range(16))):
                left.difference_update(group)
                begun = set(cache._table)
                if left:  # of what is to be computed next, a group is there or was asked for
                    assert sum((layer, expert) in begun for expert in left) >= min(len(left), 2)
                elif layer < 2 and cache._uses.is_last_call:
                    assert sum(key[0] == layer + 1 for key in seen[-4:]) >= 2


def traces(num_layers=6, num_experts=64, of_token=8, tokens=150):
    """(name, choices by token and layer): skewed, drifting, and alike from token to token."""
    draw = random.Random(0)
    for name, skew, drift, repeats in (
        ("even", 0.0, 0, 0.0), ("skewed", 0.8, 0, 0.0), ("drifting", 1.0, 25, 0.0), ("alike", 0.5, 0, 0.4),
        ("very alike", 0.0, 0, 0.8),
    ):  # fmt: skip
        weights = [1 / (rank + 1) ** skew for rank in range(num_experts)]
        orders, last, found = [], [[] for _ in range(num_layers)], []
        for token in range(tokens):
            if not orders or (drift and token % drift == 0):
                orders = [draw.sample(range(num_experts), num_experts) for _ in range(num_layers)]
            for layer, order in enumerate(orders):
                chosen = dict.fromkeys(expert for expert in last[layer] if draw.random() < repeats)
                while len(chosen) < of_token:
                    chosen[draw.choices(order, weights)[0]] = None
                last[layer] = list(chosen)
            found.append([list(chosen) for chosen in last])
        yield name, found


def hits_of_least_recent(trace, num_slots):
    held, hits = OrderedDict(), 0
    for token in trace:
        for layer, experts in enumerate(token):
            for key in [(layer, expert) for expert in experts]:
                hits += key in held
                held[key] = None
                held.move_to_end(key)
            while len(held) > num_slots:
                held.popitem(last=False)
    return hits


@pytest.mark.more(after=1)
@pytest.mark.parametrize("num_slots", [64, 120, 220])
def test_single_tokens_hit_no_less_than_by_the_least_recently_used(num_slots):
    ours = others = 0
    for name, trace in traces():
        cache = cache_of(6, 64, num_slots, 16)
        for token in trace:
            run_pass(cache, token)
        theirs = hits_of_least_recent(trace, num_slots)
        assert cache.counts.hits >= 0.99 * theirs, name
        ours, others = ours + cache.counts.hits, others + theirs
    assert ours > 1.01 * others


def test_a_prompt_in_between_leaves_what_tokens_choose_often():
    cache, often = cache_of(4, 32, 48, 4), [[1, 2, 3, 4]] * 4
    for _ in range(10):
        run_pass(cache, often)
    run_pass(cache, [list(range(32))] * 4)
    assert run_pass(cache, often)[1] == 16


def test_a_slot_that_is_still_being_filled_for_nobody_gets_another_expert_behind_that():
    cache = cache_of(2, 32, 8, 2)
    cache.fill()
    assert cache._ranges.afters == ["event"] * 8  # once the slots were made
    run_pass(cache, [[20, 21]])
    assert cache._ranges.afters[8:] == [None] * 2  # behind what is queued by now, those reads among it


def test_slots_follow_what_tokens_choose_between_passes():
    """Few experts at a time, and the table names a slot only when what it names has had a pass to come."""
    often = torch.tensor([[7, 8, 9, 10]] * 4)
    cache, copies = cache_of(4, 32, 20, 4), SmallCopies(CPU)
    cache.fill()
    for number in range(12):
        cache.settle(copies)
        where, read = cache.where_now.clone(), len(cache._ranges.seen)
        assert torch.equal(cache.where, where) and int((where >= 0).sum()) <= 20
        places = where[where >= 0].tolist()
        assert len(set(places)) == len(places)
        assert all(cache._keys[place] == (row, expert) for row, expert, place in located(where))
        cache.used()
        cache.adapt(often, where, 3)
        assert len(cache._ranges.seen) - read <= 3
        if number > 6:
            assert (where.gather(1, often) >= 0).all()
    assert cache.counts.hits < cache.counts.asked == 12 * 16
    run_pass(cache, [list(range(32))] * 4)
    cache.settle(copies)
    cache.settle(copies)
    assert all(cache._keys[place] == (row, expert) for row, expert, place in located(cache.where))


def test_what_has_only_just_been_asked_for_is_not_waited_for():
    cache, copies, found = cache_of(1, 32, 8, 2), SmallCopies(CPU), []
    for expert in (7, 8, 9):
        cache.adapt(torch.tensor([[expert]]), cache.where_now.clone(), 1)
        cache.settle(copies)
        found.append([number for _, number, _ in located(cache.where)])
    assert found == [[], [7], [7, 8]]


def located(where):
    return [(row, expert, int(where[row, expert])) for row, expert in (where >= 0).nonzero().tolist()]
