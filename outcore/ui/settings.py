"""Settings of the panels: how they are reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outcore.config.commands import DEFAULT_UI_PORT
from outcore.serve import check_hosts, is_loopback

ONE_READER = "latency"
"""Preset that panels load a model with unless told otherwise: one person reads the answers."""


@dataclass(frozen=True)
class UiSettings:
    """Address of the panels, and who may use them. ValueError for what is not safe or cannot be."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_UI_PORT
    tokens: tuple[str, ...] = ()
    """Whoever has one of them may do everything."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which browsers ask for the panels, beside the address that they reach."""
    allowed_folders: tuple[Path, ...] = ()
    """Folders that panels may name beside the one in which they are started, also those whose code is run."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}, but must be from 0 to 65535.")
        if not is_loopback(self.host) and not self.tokens:
            raise ValueError(
                f"host {self.host} can be reached from other machines, and whoever reaches the panels can start "
                "programs here: give --token_file FILE. 127.0.0.1 is for this machine alone."
            )
        check_hosts(self.allowed_hosts)
        if any(len(token) < 8 for token in self.tokens):
            raise ValueError("a token has fewer than 8 letters. Use a longer one.")

    @property
    def own_host(self) -> str:
        """Address where this machine itself reaches the panels."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "localhost": "127.0.0.1"}.get(self.host, self.host)
        return f"[{host}]" if ":" in host else host
