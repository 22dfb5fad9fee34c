"""What the ranks of one host share: memory that all of them map, and a board on which each says how far it is."""

from outcore.staging.shared.board import Alone, RankEnded, RankGroup, Ranks
from outcore.staging.shared.memory import Exchange, SharedHomes, SharedSegment, shared_bytes
