"""Pages: nobody reads another's, beginnings are shared and verified, windows give back, room is made."""

import random
import time

import pytest
import torch

from outcore.infer.cache import (
    ROOT,
    CacheSettings,
    GroupPlan,
    KvCache,
    KvMemory,
    KvShape,
    KvStore,
    OutOfPages,
    PageLedger,
)
from outcore.infer.cache.tables import RowMasks, RowTables
from outcore.staging.pool import SmallCopies

CPU = torch.device("cpu")


def cache_of(*groups: tuple[int | None, int], page_tokens: int = 4, **more) -> KvCache:
    plans = tuple(GroupPlan(window, pages) for window, pages in groups)
    return KvCache(CacheSettings(plans, page_tokens, torch.float32, **more))


def test_pages_are_never_given_twice():
    ledger, held, random_ = PageLedger(20), [], random.Random(1)
    for _ in range(500):
        if random_.random() < 0.5 and ledger.num_free:
            held.append(ledger.take(random_.randint(1, ledger.num_free)))
        elif held:
            ledger.give_back(held.pop(random_.randrange(len(held))))
        pages = [page for some in held for page in some]
        assert len(pages) == len(set(pages)) == 20 - ledger.num_free
    with pytest.raises(OutOfPages):
        ledger.take(21)


def test_beginnings_are_shared_and_the_last_token_is_not():
    cache = cache_of((None, 16))
    first = cache.open(list(range(12)))
    cache.extend(first, 12)
    cache.settle(first, list(range(12)), 12)
    assert cache.open(list(range(8))).num_cached == 4  # the eighth token must be computed
    second = cache.open([*range(9), 99])
    assert second.num_cached == 8 and second.tables[0] == first.tables[0][:2]
    assert cache.open([1, *range(1, 12)]).num_cached == 0
    cache.close(first)
    assert cache.open(list(range(12))).num_cached == 8


def test_a_collision_is_a_miss(monkeypatch):
    from outcore.infer.cache import prefix

    monkeypatch.setattr(prefix, "key_of", lambda parent, tokens: b"same")
    cache = cache_of((None, 16))
    first = cache.open([1] * 5)
    cache.extend(first, 5)
    cache.settle(first, [1] * 5, 5)
    assert cache.open([2] * 5).num_cached == 0


def test_room_is_made_of_beginnings_that_nobody_uses():
    cache = cache_of((None, 4))
    first = cache.open(list(range(16)))
    cache.extend(first, 16)
    cache.settle(first, list(range(16)), 16)
    second = cache.open([50] * 4)
    with pytest.raises(OutOfPages):
        cache.extend(second, 4)
    cache.close(first)
    cache.extend(second, 8)
    assert cache.counts.evicted_pages == 2
    assert cache.open(list(range(16))).num_cached == 8  # the beginning of the chain stays longest


def told(cache, tokens, *, is_minor=False):
    """A prompt that is read and gone; how many of its tokens were known."""
    sequence = cache.open(tokens)
    sequence.is_minor = is_minor
    cache.extend(sequence, len(tokens))
    cache.settle(sequence, tokens, len(tokens))
    cache.close(sequence)
    return sequence.num_cached


def test_a_chain_that_was_forgotten_does_not_go_on_behind_another():
    """Its parent may come back by an equal text; what stands further back belongs behind what was forgotten."""
    cache, tokens = cache_of((None, 32)), list(range(16))
    first = cache.open(tokens)
    cache.extend(first, 16)
    cache.settle(first, tokens, 4)
    cache.clear_prefixes()
    cache.settle(first, tokens, 8)  # its parent is gone: not offered
    second = cache.open(tokens[:5])
    cache.extend(second, 5)
    cache.settle(second, tokens[:5], 4)  # the parent is back
    cache.settle(first, tokens, 16)
    assert cache.open([*tokens[:4], *tokens[8:12], 99]).num_cached == 4
    assert cache.open([*tokens, 99]).num_cached == 4


@pytest.mark.parametrize("is_minor", [False, True])
def test_titles_do_not_evict_a_conversation(is_minor):
    """It was asked for again, and they were not; where they are known as minor, nor what it said last."""
    cache = cache_of((None, 16))
    talk = list(range(40))
    assert [told(cache, talk[:33]), told(cache, talk)] == [0, 32]
    for number in range(20):
        told(cache, [100 * number + 100] * 16, is_minor=is_minor)
    assert cache.open([*talk, 0]).num_cached >= (40 if is_minor else 32)


def test_a_conversation_that_is_over_makes_room_for_a_new_one():
    cache = cache_of((None, 20))
    for _ in range(3):
        told(cache, list(range(80)))
    new = list(range(1000, 1040))
    told(cache, new)
    for length in (44, 48, 52, 56):
        before, new = len(new), [*new, *range(2000 + length, 2004 + length)]
        assert told(cache, new) >= before - 8  # what it said last may have gone
        told(cache, [length * 100 + 5000] * 12)


def test_what_goes_for_a_long_text_is_found_as_quickly_among_many_others():
    def took_s(others: int) -> float:
        index = cache_of((None, 4)).index
        assert index is not None
        for number in range(others):
            index.add(ROOT, [number] * 4, (0,))
        first, _ = index.add(ROOT, [-1] * 4, (1,))
        second, _ = index.add(first, [-1] * 4, (2,))
        times = []
        for _ in range(5):
            began_s = time.perf_counter()
            found = index.deepest(lambda page: page.key == first)
            times.append(time.perf_counter() - began_s)
            assert [page.key for page in found] == [second, first]
        return min(times)

    assert took_s(20_000) < 20 * took_s(100), "each page of the index was looked at for every page that goes"


def test_windows_give_pages_back():
    cache = cache_of((None, 30), (6, 4), shares_prefixes=False)
    sequence = cache.open([])
    for length in range(1, 101):
        cache.extend(sequence, length)
        cache.settle(sequence, [0] * length, length)
        assert cache.used_pages[1] <= 3
    assert cache.used_pages[0] == 25
    cache.close(sequence)
    assert cache.used_pages == [0, 0]


@pytest.mark.parametrize("kv_format, error", [("same", 0.0), ("int8", 0.02)])
def test_what_is_written_is_read(kv_format, error):
    store = KvStore(KvShape(2, 8, 6), 5, 4, torch.float32, KvMemory(CPU), kv_format)
    torch.manual_seed(0)
    keys, values = torch.randn(6, 2, 8), torch.randn(6, 2, 6)
    slots = torch.tensor([12, 13, 14, 15, 4, 5])  # page 3, then page 1
    store.write(keys, values, slots)
    found = store.read(torch.tensor([3, 1]), CPU)
    assert (found[0][:6] - keys).abs().max() <= error and (found[1][:6] - values).abs().max() <= error
    assert store.size_bytes == 5 * 4 * KvShape(2, 8, 6).token_bytes(torch.float32, kv_format)


def test_a_bias_follows_the_tables_at_the_same_address():
    cache = cache_of((None, 8), (3, 8))
    tables = RowTables(2, (2, 2), cache.windows, 4, SmallCopies(CPU), RowMasks(64, CPU))
    pages = cache.open(range(6))
    cache.extend(pages, 6)
    kept = [tables.bias(group, 3, torch.bfloat16) for group in (0, 1)]
    for position in (2, 5):
        tables.fill([(pages, position, 7)])
        tables.work_out()
        for group, (bias, seen) in enumerate(zip(kept, tables.seen, strict=True)):
            assert tables.bias(group, 3, torch.bfloat16) is bias
            assert seen.any() and torch.equal(bias == 0, seen.expand(-1, -1, 3, -1))
            assert bias[bias != 0].isneginf().all()
