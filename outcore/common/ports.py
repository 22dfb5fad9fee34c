"""TCP ports of this machine."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A TCP port that is free on the loopback interface now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
