"""What a `with` block closes at its end, however it ends."""

from __future__ import annotations

from typing import Self


class Closing:
    """Adds `with` to a class that has `close`."""

    def close(self) -> object:
        """Give back what is held. Safe to call twice."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
