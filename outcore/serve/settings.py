"""Settings of a server: how it is reached and what it lets pass."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from outcore.common.quantities import MIB

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^][:/@\s]+)(?::\d{1,5})?")


@dataclass(frozen=True)
class ServeSettings:
    """ValueError for what is not safe or cannot be."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    insecure: bool = False
    """Listen on other addresses without a key."""
    name: str = ""
    """Name of the model over HTTP."""
    max_queue: int = 512
    """Requests under way at most; more get 429."""
    max_body_bytes: int = 16 * MIB
    max_answer_tokens: int = 4096
    """Tokens of one answer at most, and where a request does not say."""
    request_timeout_s: float = 600.0
    logs: Path = Path("logs/serve")
    record_text: bool = False
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients ask for this server, beside the address that they reach."""
    allowed_folders: tuple[Path, ...] = ()
    """Folders that requests may name, also those whose code is run; without one, none."""
    unload_after_s: float = 300.0
    """A further model that nobody asked for so long is closed."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}, but must be from 0 to 65535.")
        if not is_loopback(self.host) and not self.api_keys and not self.insecure:
            raise ValueError(
                f"host {self.host} can be reached from other machines: give --api_key_file FILE, or --insecure if "
                "anyone may use it. 127.0.0.1 is for this machine alone."
            )
        if any(len(key) < 8 for key in self.api_keys):
            raise ValueError("an API key has fewer than 8 letters. Use a longer one.")
        for name in ("max_queue", "max_body_bytes", "max_answer_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        check_hosts(self.allowed_hosts)
        for name in ("unload_after", "request_timeout"):
            if not (seconds := getattr(self, f"{name}_s")) > 0:
                raise ValueError(f"{name} is {seconds}, but must be above 0.")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def name_of(host: str) -> str:
    """The name in `name`, `name:port` or `[address]:port`, in small letters; '' for what is none of them."""
    match = _HOST.fullmatch(host.lower())
    return match[1].strip("[]") if match else ""


def check_hosts(hosts: tuple[str, ...]) -> None:
    """ValueError for one that no browser would send as the name of a server."""
    for host in hosts:
        if not host or name_of(host) != host:
            raise ValueError(f"allowed_host is {host!r}, but must be a name alone, in small letters.")


def listen(host: str, port: int) -> socket.socket:
    """The address, taken before anything slow begins. RuntimeError with what to do when another program has it."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise RuntimeError(
            f"{host}:{port} cannot be opened ({error.strerror}). Another program is there, or this command runs "
            "already: use that one, or choose another --port."
        ) from error
    return listening


def read_keys(path: Path) -> tuple[str, ...]:
    """Keys of a file, one a line. ValueError for none."""
    keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not keys:
        raise ValueError(f"{path} holds no keys: write one a line.")
    return keys
