"""Order in which the state ring reads chunks: tickets, chunks in slots, the place of reading ahead. No I/O, no threads.

Chunks of units that are ready (their gradient is complete) go first, the lowest unit before the others; while one of
them waits, nothing is read ahead. The slots left over take what the next updates will need, in the order of the pass,
whether or not the gradient or the norm is known. Some slots are kept for units that are ready, so that reading ahead
can never block them. It stops at a unit whose update of the step before is not over: its states are not on the drive.

A ring whose passes go to and fro (`turn`) need not let go of what the next pass takes first: the last chunks of a pass
stay in their slots, newer than the drive, and are neither written by this pass nor read by the next one. Each slot that
is kept saves two transfers an update. A few slots always flow, so what is not kept passes through them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outcore.optim import AdamWHyper
from outcore.sizing.ring import NEVER, kept_places
from outcore.states.placement import StateChunk, Updatable
from outcore.states.ring.slots import RingSlot

KEPT_SHARE = 4
"""One slot in this many, at least one, is never used for reading ahead: it is for chunks that are ready."""


class RingTicket:
    """One unit's update under way."""

    def __init__(self, unit: Updatable, grad: torch.Tensor | None, hyper: AdamWHyper, unread: list[StateChunk]) -> None:
        self.unit, self.grad, self.hyper = unit, grad, hyper
        self.unread = unread
        self.left = len(unread)
        self.done = threading.Event()
        """Set when its parameters may be read, or it will never be made (the ring is broken)."""


@dataclass
class ChunkPassage:
    """A chunk on its way through a slot."""

    chunk: StateChunk
    slot: RingSlot
    ticket: RingTicket | None = None
    """Update that waits for it; None: read ahead, its unit is not ready yet."""
    reads_left: int = 0
    is_leaving: bool = False
    """The chunk is being updated or written."""
    is_staying: bool = False
    """True while a chunk is updated that will stay in its slot once its writes have reached the drive."""
    is_kept: bool = False
    """The chunk stays in its slot for the next pass; its states are newer than those on the drive."""

    @property
    def is_read(self) -> bool:
        return not self.reads_left


class RingSchedule:
    """Decides which chunk is read next and which stay. `order`: the chunks as updates will need them. All calls from
    one thread.

    `worth`: of a chunk that keeps its slot (`sizing.ring`); only for a ring that turns, and where every unit becomes
    ready in every pass, because what is kept leaves when its unit is updated."""

    def __init__(
        self, order: Sequence[StateChunk], slots: Sequence[RingSlot], worth: Callable[[StateChunk], int] | None = None
    ) -> None:
        self._step = 1
        """-1 while passes go from the last unit to the first."""
        self._num_slots, self._turns = len(slots), worth is not None
        self._worths = {chunk.element_offset: worth(chunk) if worth is not None else NEVER for chunk in order}
        self._set_order(list(order))
        self._ahead = len(order)
        """Place in the order of what is read ahead next."""
        self._max_ahead = len(slots) - max(1, len(slots) // KEPT_SHARE)
        self._free = list(slots)
        self._passages: dict[int, ChunkPassage] = {}
        """Passages by `element_offset` of the chunk."""
        self._tickets: set[RingTicket] = set()
        self._ready: list[RingTicket] = []
        """Tickets with chunks that are in no slot yet, the lowest unit first (the highest in a pass back)."""

    def _set_order(self, order: list[StateChunk]) -> None:
        self._order = order
        self._place_after = {chunk.unit.index: place + 1 for place, chunk in enumerate(order)}
        places = kept_places([self._worths[chunk.element_offset] for chunk in order], self._num_slots)
        self._keeping = {order[place].element_offset for place in places}

    def turn(self) -> None:
        """The next pass goes the other way. No update may be under way."""
        assert not self._tickets, "a pass is not over"
        self._step = -self._step
        self._set_order(self._order[::-1])

    def keeps(self, chunk: StateChunk) -> bool:
        """Tell whether this pass leaves the chunk in its slot."""
        return chunk.element_offset in self._keeping

    def keep(self, passage: ChunkPassage) -> bool:
        """Keep the chunk whose update is over and it stays. True when its unit is ready again: it is to be updated
        at once."""
        passage.ticket, passage.is_leaving, passage.is_staying, passage.is_kept = None, False, False, True
        for ticket in self._ready:
            places = [place for place, chunk in enumerate(ticket.unread) if chunk is passage.chunk]
            if places:
                passage.ticket = ticket
                self._take_unread(ticket, places[0])
                return True
        return False

    @property
    def kept(self) -> list[ChunkPassage]:
        """Chunks that wait in their slots for the next pass, newer than the drive; not those whose unit is ready, which
        are about to be updated."""
        idle = (passage for passage in self._passages.values() if passage.ticket is None and not passage.is_leaving)
        return [passage for passage in idle if passage.is_kept]

    @property
    def is_empty(self) -> bool:
        return not (self._passages or self._tickets)

    @property
    def is_writing(self) -> bool:
        """Tell whether any chunk is being updated or written."""
        return any(passage.is_leaving for passage in self._passages.values())

    def read_ahead(self) -> None:
        """From the first chunk on."""
        self._ahead = 0

    def read_ahead_after(self, unit: Updatable) -> None:
        """From the chunk behind this unit's last one; a unit without any changes nothing."""
        self._ahead = self._place_after.get(unit.index, self._ahead)

    def stop_reading_ahead(self) -> None:
        self._ahead = len(self._order)

    def add(self, ticket: RingTicket) -> list[ChunkPassage]:
        """Add an update whose gradient is complete. Returns its chunks that are already in slots, or being read into
        one."""
        self._tickets.add(ticket)
        if self._turns:
            self.stop_reading_ahead()  # until the turn: the next pass begins with what this one keeps
        found: list[ChunkPassage] = []
        unread: list[StateChunk] = []
        for chunk in ticket.unread[:: self._step]:
            passage = self._passages.get(chunk.element_offset)
            if passage is None or passage.is_leaving:  # leaving: of the step before
                unread.append(chunk)
            else:
                passage.ticket = ticket
                found.append(passage)
        ticket.unread = unread
        if unread:
            self._ready.append(ticket)
            self._ready.sort(key=lambda ready: self._step * ready.unit.index)
        return found

    def next_read(self) -> ChunkPassage | None:
        """Choose the chunk to read now, with a slot that was free; None until something changes."""
        if not self._free:
            return None
        for ticket in self._ready:
            for number, chunk in enumerate(ticket.unread):
                if chunk.element_offset not in self._passages:
                    self._take_unread(ticket, number)
                    return self._enter(chunk, ticket)
        chunk = None if self._ready else self._next_ahead()
        return None if chunk is None else self._enter(chunk, None)

    def _take_unread(self, ticket: RingTicket, place: int) -> None:
        del ticket.unread[place]
        if not ticket.unread:
            self._ready.remove(ticket)

    def _next_ahead(self) -> StateChunk | None:
        if sum(passage.ticket is None or passage.is_staying for passage in self._passages.values()) >= self._max_ahead:
            return None
        not_done = {ticket.unit.index for ticket in self._tickets}
        while self._ahead < len(self._order):
            chunk = self._order[self._ahead]
            passage = self._passages.get(chunk.element_offset)
            if chunk.unit.index in not_done or (passage is not None and passage.is_leaving):
                return None  # of the step before: it is not written yet
            self._ahead += 1
            if passage is None:
                return chunk
        return None

    def _enter(self, chunk: StateChunk, ticket: RingTicket | None) -> ChunkPassage:
        passage = self._passages[chunk.element_offset] = ChunkPassage(chunk, self._free.pop(), ticket)
        return passage

    def leave(self, passage: ChunkPassage) -> None:
        """Note that its slot is free for another chunk."""
        del self._passages[passage.chunk.element_offset]
        self._free.append(passage.slot)

    def drop_unwanted(self) -> None:
        """Let go of what was read ahead and whose unit is not ready."""
        for passage in list(self._passages.values()):
            if passage.ticket is None and passage.is_read and not passage.is_kept and not passage.is_leaving:
                self.leave(passage)

    def count_down(self, ticket: RingTicket) -> None:
        """One more of its chunks is up to date; with the last one the ticket is done."""
        ticket.left -= 1
        if not ticket.left:
            self._tickets.discard(ticket)
            ticket.done.set()

    def abandon(self) -> None:
        """The ring is broken: no ticket is worked at any more, nobody waits for one."""
        for ticket in self._tickets:
            ticket.done.set()
        self._tickets.clear()
        self._ready.clear()
