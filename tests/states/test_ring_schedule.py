"""Which chunk the state ring reads next, told by its bookkeeping alone: no drive, no threads."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.optim import SPLIT
from outcore.sizing.ring import FLOWING_SLOTS, slot_count
from outcore.states.placement import StateChunk
from outcore.states.ring.schedule import RingSchedule, RingTicket


def chunks_of(unit, count):
    owner = SimpleNamespace(index=unit)
    return [StateChunk(owner, i * 256, i * 256 + 256, (unit * 100 + i) * 256, SPLIT) for i in range(count)]


class Ring:
    """A schedule over units of so many chunks each, and what a ring would do with it."""

    def __init__(self, counts, num_slots, worth=None):
        self.units = [chunks_of(unit, count) for unit, count in enumerate(counts)]
        order = [chunk for chunks in self.units for chunk in chunks]
        self.schedule = RingSchedule(order, [SimpleNamespace() for _ in range(num_slots)], worth)

    def ready(self, unit):
        chunks = self.units[unit]
        ticket = RingTicket(SimpleNamespace(index=unit), None, None, list(chunks))
        return ticket, self.schedule.add(ticket)

    def reads(self):
        found = []
        while (passage := self.schedule.next_read()) is not None:
            found.append(passage)
        return found


def names(passages):
    return [(passage.chunk.unit.index, passage.chunk.start // 256) for passage in passages]


def test_ready_units_go_before_reading_ahead_the_lowest_first():
    ring = Ring([2, 2, 2, 2], num_slots=8)
    ring.schedule.read_ahead()
    ring.ready(3)
    ring.ready(1)
    passages = ring.reads()
    assert names(passages) == [(1, 0), (1, 1), (3, 0), (3, 1), (0, 0), (0, 1)]
    assert [passage.ticket is None for passage in passages] == [False] * 4 + [True] * 2


def test_a_unit_that_is_ready_later_but_lower_goes_first():
    ring = Ring([1, 3, 3], num_slots=2)
    ring.ready(2)
    first = ring.reads()
    ring.ready(1)
    assert names(first) == [(2, 0), (2, 1)] and not ring.reads()
    ring.schedule.leave(first[0])
    assert names(ring.reads()) == [(1, 0)]


@pytest.mark.parametrize(("num_slots", "ahead"), [(1, 0), (2, 1), (4, 3), (7, 6), (8, 6), (24, 18)])
def test_kept_slots_are_never_used_for_reading_ahead(num_slots, ahead):
    ring = Ring([30, 30], num_slots)
    ring.schedule.read_ahead()
    assert names(ring.reads()) == [(0, place) for place in range(ahead)]
    ring.ready(1)
    assert names(ring.reads()) == [(1, place) for place in range(num_slots - ahead)]


def test_reading_ahead_stops_at_a_unit_of_the_step_before():
    ring = Ring([1, 2, 1], num_slots=8)
    ticket, _ = ring.ready(1)
    written = ring.reads()
    for passage in written:
        passage.is_leaving = True
    ring.schedule.read_ahead()
    assert names(ring.reads()) == [(0, 0)]
    ring.schedule.leave(written[0])
    ring.schedule.count_down(ticket)
    assert not ring.reads()  # its other chunk is not up to date
    ring.schedule.count_down(ticket)
    assert ticket.done.is_set()
    assert names(ring.reads()) == [(1, 0)]  # the other one is, but not on the drive yet
    ring.schedule.leave(written[1])
    assert names(ring.reads()) == [(1, 1), (2, 0)]


def test_reading_ahead_goes_on_after_a_unit_that_was_passed_and_ends_when_told():
    ring = Ring([2, 2, 0, 2], num_slots=4)
    assert not ring.reads()  # no step has begun
    ring.schedule.read_ahead()
    ring.schedule.read_ahead_after(SimpleNamespace(index=0))
    ring.schedule.read_ahead_after(SimpleNamespace(index=2))  # has no chunks here
    passages = ring.reads()
    assert names(passages) == [(1, 0), (1, 1), (3, 0)]
    ring.schedule.stop_reading_ahead()
    ring.schedule.drop_unwanted()
    assert ring.schedule.is_empty and not ring.reads()


def test_what_was_read_ahead_is_not_read_again():
    ring = Ring([3, 1], num_slots=3)
    ring.schedule.read_ahead()
    ahead = ring.reads()
    ticket, found = ring.ready(0)
    assert names(ahead) == names(found) == [(0, 0), (0, 1)]
    assert all(passage.ticket is ticket for passage in ahead)
    assert names(ring.reads()) == [(0, 2)]
    ring.schedule.drop_unwanted()
    assert not ring.schedule.is_empty  # they are wanted


def test_a_chunk_being_written_is_read_again_only_when_it_has_left():
    ring = Ring([1, 1], num_slots=4)
    before, _ = ring.ready(1)
    (written,) = ring.reads()
    written.is_leaving = True
    ring.schedule.count_down(before)
    after, found = ring.ready(1)
    ring.schedule.read_ahead()
    assert not found and not ring.reads()  # nothing is read ahead while a ready unit waits
    ring.schedule.leave(written)
    again, ahead = ring.reads()
    assert names([again, ahead]) == [(1, 0), (0, 0)] and again.ticket is after


def test_an_abandoned_ring_keeps_nobody_waiting():
    ring = Ring([3], num_slots=2)
    ticket, _ = ring.ready(0)
    (first, _) = ring.reads()
    ring.schedule.abandon()
    assert ticket.done.is_set()
    ring.schedule.leave(first)
    for _ in range(3):
        ring.schedule.count_down(ticket)  # what was under way still reports
    assert not ring.reads()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_every_chunk_passes_once_a_step_and_nothing_blocks(counts, num_slots, random):
    """Three steps: units become ready and chunks come back in any order, writes go on under the next step."""
    ring, passing = Ring(counts, num_slots), []
    everything = sorted(chunk.element_offset for chunks in ring.units for chunk in chunks)
    for _ in range(3):
        ring.schedule.read_ahead()
        waiting = list(range(len(counts)))
        tickets, updated = [], []
        while waiting or not all(ticket.done.is_set() for ticket in tickets):
            passing += ring.reads()
            assert len({passage.chunk.element_offset for passage in passing}) == len(passing) <= num_slots
            moves = [*waiting, *(passage for passage in passing if passage.ticket is not None)]
            move = random.choice(moves)  # none left: the ring is blocked
            if move in waiting:
                waiting.remove(move)
                tickets.append(ring.ready(move)[0])
            elif move.is_leaving:
                passing.remove(move)
                ring.schedule.leave(move)
            else:
                move.is_leaving = True
                updated.append(move.chunk.element_offset)
                ring.schedule.count_down(move.ticket)
        assert sorted(updated) == everything
    ring.schedule.stop_reading_ahead()
    for passage in passing:
        if passage.is_leaving:
            ring.schedule.leave(passage)
    ring.schedule.drop_unwanted()
    assert ring.schedule.is_empty


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 3), st.randoms(
    use_true_random=False,
))  # fmt: skip
def test_passes_to_and_fro_keep_their_ends_and_nothing_blocks(counts, num_slots, every, random):
    """Four passes; units become ready and writes end in any order. What one pass keeps the next does not read."""
    ring = Ring(counts, num_slots, lambda chunk: chunk.element_offset // 256 % every == 0)
    everything = sorted(chunk.element_offset for chunks in ring.units for chunk in chunks)
    ring.schedule.read_ahead()
    passing, kept = [], set()
    for number in range(4):
        waiting, tickets, updated, read = list(range(len(counts))), [], [], []
        while waiting or not all(ticket.done.is_set() for ticket in tickets):
            arrived = ring.reads()
            read += [passage.chunk.element_offset for passage in arrived]
            passing += arrived
            assert len({passage.chunk.element_offset for passage in passing}) == len(passing) <= num_slots
            move = random.choice([*waiting, *(p for p in passing if p.ticket is not None)])  # none: blocked
            if move in waiting:
                waiting.remove(move)
                tickets.append(ring.ready(move)[0])
            elif not move.is_leaving:
                move.is_leaving, move.is_kept = True, False
                updated.append(move.chunk.element_offset)
                ring.schedule.count_down(move.ticket)
            else:
                end_of_write(ring, passing, move)
        assert sorted(updated) == everything and (not number or not kept & set(read))
        for passage in [passage for passage in passing if passage.is_leaving]:
            end_of_write(ring, passing, passage)
        kept = {passage.chunk.element_offset for passage in ring.schedule.kept}
        worth = [offset for offset in everything if offset // 256 % every == 0]
        most = num_slots - 1
        assert kept == set(() if not most else worth[-most:] if number % 2 == 0 else worth[:most])
        ring.schedule.turn()
        ring.schedule.read_ahead()
        arrived = ring.reads()
        passing += arrived
        assert not kept & {passage.chunk.element_offset for passage in arrived}


def end_of_write(ring, passing, passage):
    if ring.schedule.keeps(passage.chunk):
        assert not ring.schedule.keep(passage)
    else:
        passing.remove(passage)
        ring.schedule.leave(passage)


def after_a_pass():
    """A ring of two units of one chunk, both up to date; the chunk that is kept, not yet told so."""
    ring = Ring([1, 1], 2, lambda chunk: True)
    first = [ring.ready(unit)[0] for unit in (0, 1)]
    low, high = ring.reads()
    for passage, ticket in zip((low, high), first, strict=True):
        passage.is_leaving = True
        ring.schedule.count_down(ticket)
    ring.schedule.leave(low)
    return ring, high


def test_a_kept_chunk_whose_unit_is_ready_again_goes_on_at_once():
    """Its parameters were still being written when the next pass began."""
    ring, high = after_a_pass()
    ring.schedule.turn()
    again, found = ring.ready(1)
    assert not found and not ring.reads()
    assert ring.schedule.keep(high) and high.ticket is again
    assert not ring.schedule.next_read()


def test_a_chunk_that_will_stay_leaves_no_slot_for_reading_ahead():
    """Its parameters are still being written when the pass turns: the slot that is left is for units that are ready."""
    ring = Ring([1, 1, 1], 2, lambda chunk: chunk.unit.index == 1)
    tickets = [ring.ready(unit)[0] for unit in range(3)]
    passages = ring.reads()
    ring.schedule.leave(passages[0])
    passages += ring.reads()
    ring.schedule.leave(passages[2])
    assert names(passages) == [(0, 0), (1, 0), (2, 0)] and ring.schedule.keeps(passages[1].chunk)
    passages[1].is_leaving = passages[1].is_staying = True
    for ticket in tickets:
        ring.schedule.count_down(ticket)
    ring.schedule.turn()
    ring.schedule.read_ahead()
    assert not ring.reads()
    assert not ring.schedule.keep(passages[1]) and not ring.reads()


def test_what_waits_for_its_gradient_is_not_let_go():
    """A flush takes to the drive what is kept, not what is about to be updated in its slot."""
    ring, high = after_a_pass()
    assert not ring.schedule.keep(high) and ring.schedule.kept == [high]
    ring.schedule.turn()
    _, found = ring.ready(1)
    assert found == [high] and not ring.schedule.kept


@given(st.lists(st.integers(1, 48), min_size=1, max_size=400), st.integers(0, 1 << 14), st.integers(1, 1024))
def test_a_ring_takes_no_more_memory_than_its_chunks(sizes, ring_bytes, max_slots):
    """A model of many small weights beside a large one would get a slot of the large one's size for each."""
    slot_bytes = max(sizes)
    count = slot_count(len(sizes), sum(sizes), slot_bytes, ring_bytes, max_slots)
    assert count <= min(max_slots, len(sizes)) and count * slot_bytes <= ring_bytes
    assert count <= FLOWING_SLOTS or (count - 1) * slot_bytes < sum(sizes)
    if (count + 1) * slot_bytes <= min(ring_bytes, sum(sizes)):
        assert count >= min(max_slots, len(sizes))
