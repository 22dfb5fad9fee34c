"""Memory and messages that the ranks of one host share: memory that all of them map, and a board on which each says how
far it is."""

from outcore.staging.shared.board import (
    Alone,
    Exchange,
    RankEnded,
    RankGroup,
    Ranks,
    SharedHomes,
    SharedSegment,
    shared_bytes,
)
