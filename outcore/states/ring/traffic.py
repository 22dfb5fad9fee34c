"""Reads and writes of the state ring: each moves parts of one chunk, and its end is told to the driver thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outcore.states.ring.slots import Stretch
from outcore.storage import Transfer, gather


class RingTraffic:
    """`report(event)`: have the driver thread call `event`. All methods are called on that thread."""

    def __init__(self, report: Callable[[Callable[[], None]], None]) -> None:
        self._report = report
        self._under_way = 0
        self.read_bytes = self.written_bytes = 0
        """So far."""

    @property
    def is_idle(self) -> bool:
        """Whether the drive uses no slot's memory."""
        return not self._under_way

    def read(self, name: str, parts: Sequence[Stretch], then: Callable[[], None]) -> None:
        """Fill `parts` of the chunk `name`; `then` on the driver thread once all is well, else its failure there.

        Raises when one of them cannot be submitted; `then` is not called then.
        """
        self.read_bytes += self._start(f"read of {name}", [part.submit_read for part in parts], then)

    def write(self, name: str, parts: Sequence[Stretch], then: Callable[[], None]) -> None:
        """Bring `parts` to the drive; otherwise as `read`."""
        self.written_bytes += self._start(f"write of {name}", [part.submit_write for part in parts], then)

    def _start(self, what: str, submits: Sequence[Callable[[], Transfer]], then: Callable[[], None]) -> int:
        """When one is refused those before it are waited for all the same: their memory is the drive's until they end.
        Returns bytes."""
        transfers: list[Transfer] = []
        try:
            for submit in submits:
                transfers.append(submit())
        except BaseException:
            self._watch(what, transfers, lambda: None)
            raise
        self._watch(what, transfers, then)
        return sum(transfer.n_bytes for transfer in transfers)

    def _watch(self, what: str, transfers: Sequence[Transfer], then: Callable[[], None]) -> None:
        self._under_way += 1

        def ended(whole: Transfer) -> None:
            self._under_way -= 1
            if whole.error is not None:
                raise whole.error
            then()

        gather(transfers, what).add_done_callback(lambda whole: self._report(lambda: ended(whole)))
