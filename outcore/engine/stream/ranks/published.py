"""Updates of the ranks: each tells the others when its own chunks of a part are up to date, and knows when all are."""

from __future__ import annotations

import threading
from collections.abc import Callable

from outcore.common.deadline import CLOSE_TIMEOUT_S
from outcore.engine.stream.ranks.host import UPDATED, RankHost
from outcore.flow.parts import Part
from outcore.optim import OptimizerPool

POLL_S = 5e-3
"""How often a rank with updates under way looks, though no work of the optimizer has ended, whether one has: its states
may have been on their way to the drive."""


class PublishedUpdates:
    """Called from one thread. `watch` starts an update on `pool`, `wait` ends when every rank's is over."""

    def __init__(self, host: RankHost, pool: OptimizerPool) -> None:
        self._host, self._group, self._pool = host, host.group, pool
        self._counts: dict[int, int] = {}
        self._open: list[tuple[Part, int, Callable[[], bool]]] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._publish, name="published-updates", daemon=True)
        self._thread.start()

    def watch(self, part: Part, has_ended: Callable[[], bool]) -> None:
        """An update of `part` has been submitted here. `has_ended` tells of this rank's chunks, and raises what went
        wrong; it is called on another thread."""
        self._counts[part.index] = self._counts.get(part.index, 0) + 1
        with self._changed:
            self._open.append((part, self._counts[part.index], has_ended))
            self._changed.notify()

    def is_done(self, part: Part) -> bool:
        """Whether every rank's last update of `part` is over."""
        return self._group.has(self._host.counter(UPDATED, part), self._counts.get(part.index, 0))

    def wait(self, part: Part) -> None:
        """Until it is. RankEnded, TimeoutError."""
        count = self._counts.get(part.index, 0)
        self._group.wait(self._host.counter(UPDATED, part), count, f"update of {part.name}")

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Publish nothing more."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _publish(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._closing)
                if self._closing:
                    return
                looked_at = sorted(self._open, key=lambda entry: entry[0].index)
            over: list[tuple[Part, int, Callable[[], bool]]] = []
            try:
                seen = self._pool.num_finished
                # In the order of the next forward, which is the optimizer's, so the first tells of all behind it.
                for entry in looked_at:
                    part, count, has_ended = entry
                    if not has_ended():
                        break
                    self._group.post(self._host.counter(UPDATED, part), count)
                    over.append(entry)
            except BaseException as error:  # the thread that waits here raises it too
                self._group.fail(error)
                return
            with self._changed:
                self._open = [entry for entry in self._open if entry not in over]
            # Not by looking often: who takes the interpreter's lock under an update, when all cores are busy, keeps
            # the training thread from it for milliseconds.
            self._pool.wait_for_more(seen, POLL_S)
