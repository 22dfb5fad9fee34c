"""Tables of a pass of prompts' chunks beside single tokens: what the kernel is told, against the pages themselves."""

import random
from types import SimpleNamespace

import pytest
import torch

from outcore.infer.cache import SequencePages
from outcore.infer.cache.tables import MixedTables
from outcore.infer.passes.graphs import mixed_size
from outcore.infer.schedule import Work
from outcore.staging.pool import SmallCopies

PAGE, TILE = 4, 6


def a_pass(draw, windows):
    """Works over pages of their own; pages that a window has passed are given back (-1)."""
    free = draw.sample(range(5000), 3000)
    works = []
    for _ in range(draw.randint(1, 9)):
        start = draw.choice([0, 0, 1, PAGE, draw.randint(1, 300)])
        tokens = tuple(draw.randrange(100) for _ in range(draw.choice([1, 1, 2, draw.randint(1, 60)])))
        tables = []
        for window in windows:
            passed = 0 if window is None else max(0, start - window + 1) // PAGE
            tables.append([-1] * passed + [free.pop() for _ in range(passed, -(-(start + len(tokens)) // PAGE))])
        is_last = draw.random() < 0.7
        drafts = draw.randint(0, len(tokens) - 1) if is_last and start else 0
        works.append(
            Work(SimpleNamespace(pages=SequencePages(tables, draw.randrange(3))), start, tokens, drafts, is_last)
        )
    return works


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_stored_and_sees_its_own_pages(seed):
    draw = random.Random(seed)
    windows = draw.choice([[None], [None, 7], [16, None]])
    size = tables = None
    for _ in range(3):  # the same tables again: nothing of the pass before may be left
        works = a_pass(draw, windows)
        size = size or mixed_size([*works, *a_pass(draw, windows)], TILE, PAGE)
        tables = tables or MixedTables(size, windows, PAGE, SmallCopies(torch.device("cpu")))
        if sum(work.count for work in works) > size.rows or mixed_size(works, TILE, PAGE).wanted > size.wanted:
            continue
        tables.fill(works)
        tables.work_out()
        of_row = [(work, work.start + at) for work in works for at in range(work.count)]
        count = len(of_row)
        assert tables.ids[0, :count].tolist() == [token for work in works for token in work.tokens]
        assert tables.positions[0, :count].tolist() == [position for _, position in of_row]
        assert tables.adapters.tolist() == [work.pages.adapter for work, _ in of_row] + [0] * (size.rows - count)
        ends = [sum(w.count for w in works[: i + 1]) for i in range(len(works))]
        wanted = [row for work, end in zip(works, ends) for row in range(end - work.num_wanted, end)]
        assert tables.wanted[: len(wanted)].tolist() == wanted and not tables.wanted[len(wanted) :].any()
        for group, window in enumerate(windows):
            slots = [work.pages.tables[group][p // PAGE] * PAGE + p % PAGE for work, p in of_row]
            assert tables.slots[group].tolist() == slots + [-1] * (size.rows - count)
            covered = []
            for facts, most in ((tables.singles[group], 1), (tables.tiles[group], TILE)):
                for row, tokens, position, first_key, table in facts.T.tolist():
                    covered += range(row, row + tokens)
                    assert tokens <= most
                    for at in range(row, row + tokens):
                        work, own = of_row[at]
                        assert own == position + at - row
                        assert (most == 1) == (work.start > 0 and work.count <= size.most_single)
                        for key in range(0 if window is None else max(0, own - window + 1), own + 1):
                            page = tables.pages[group][table + (key - first_key) // PAGE]
                            assert page == work.pages.tables[group][key // PAGE]
            assert sorted(covered) == list(range(count))


def test_what_no_size_holds_has_none():
    def works(*spans):
        pages = SimpleNamespace(pages=SequencePages([[0] * 10_000]))
        return [Work(pages, start, (0,) * count) for start, count in spans]

    assert mixed_size(works((0, 4096)), TILE, PAGE).rows == 4096
    assert mixed_size(works((0, 4097)), TILE, PAGE) is None
    assert mixed_size(works((0, 64), *[(5, 1)] * 385), TILE, PAGE) is None
    assert mixed_size(works((0, 64), (65_536, 1)), TILE, PAGE) is None
    assert mixed_size(works(*[(0, 8)] * 65), TILE, PAGE) is None
    assert mixed_size(works((0, 64), *[(9000, 1)] * 80), TILE, 64) is None  # the stretches of its single tokens
