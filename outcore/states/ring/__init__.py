"""States on a drive, past the CPU optimizer and back, in slots of RAM."""

from outcore.states.ring.ring import BEFORE_ALL_UNITS, RingSize, StateRing
from outcore.states.ring.schedule import RingTicket
