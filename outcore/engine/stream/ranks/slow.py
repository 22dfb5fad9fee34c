"""Which rank the others wait for, step after step: seconds for the log, and a word when one rank holds up the run."""

from __future__ import annotations

import logging

from outcore.staging.shared import Ranks

logger = logging.getLogger(__name__)

STEPS = 10
"""So many steps in a row make a slow rank; one may have read data or met another program."""
SHARE = 0.2
"""Share of a step that this rank waited for the same other one."""


class SlowRank:
    """Sees every step of this rank."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._before = list(ranks.waited_s)
        self._collectives_before: dict[str, float] = {}
        self.collective_s: dict[str, float] = {}
        """Seconds of the last step in each collective: `collective_update`, ..."""
        self.waited_s: dict[str, float] = {}
        """Seconds of the last step that this rank waited for each other one: `waited_rank_1`, ..."""
        self._last, self._in_a_row = -1, 0
        self._named: set[int] = set()

    def step(self, step_s: float) -> float:
        """Seconds of this step in which this rank waited for others. Logs a rank that is slow, once."""
        waited = [now - before for now, before in zip(self._ranks.waited_s, self._before, strict=True)]
        self._before = list(self._ranks.waited_s)
        self.waited_s = {f"waited_rank_{n}": s for n, s in enumerate(waited) if n != self._ranks.rank}
        now = dict(self._ranks.collective_s)
        spent = {kind: seconds - self._collectives_before.get(kind, 0.0) for kind, seconds in now.items()}
        self.collective_s = {f"collective_{kind.replace(' ', '_')}": seconds for kind, seconds in spent.items()}
        self._collectives_before = now
        slowest = max(range(len(waited)), key=waited.__getitem__)
        is_slow = waited[slowest] > SHARE * step_s
        self._in_a_row = self._in_a_row + 1 if is_slow and slowest == self._last else int(is_slow)
        self._last = slowest
        if self._in_a_row >= STEPS and slowest not in self._named:
            self._named.add(slowest)
            logger.warning(
                "rank %d is slow: rank %d waited for it %.0f %% of each of the last %d steps, mostly in: %s. Look at "
                "its GPU's clock, temperature and link (nvidia-smi -q -d PERFORMANCE), and at what else runs there",
                slowest,
                self._ranks.rank,
                100 * waited[slowest] / step_s,
                STEPS,
                max(spent, key=spent.__getitem__, default="?"),
            )
        return sum(waited)
