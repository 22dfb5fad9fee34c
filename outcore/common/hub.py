"""Without a network the hub's clients try again for half a minute before they say so: asked once here, they say it at
once, and what is in the local cache is still found."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

TIMEOUT_S = 3.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
"""Variables of proxies: where one of them is set, the way to the hub is not ours to try."""


def hub_answers() -> bool:
    """Whether a connection to the hub can be made; True where a proxy is in between."""
    from huggingface_hub import constants

    if any(os.environ.get(name) for name in PROXIES):
        return True
    address = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), TIMEOUT_S).close()
    except OSError:
        return False
    return True


def stay_offline(
    names: Iterable[str | None], say: Callable[[str], None], answers: Callable[[], bool] = hub_answers
) -> None:
    """Put the hub's clients into their offline mode where one of the names is the hub's and it cannot be reached."""
    on_hub = [name for name in names if name and name.count("/") == 1 and not Path(name).expanduser().exists()]
    if os.environ.get("HF_HUB_OFFLINE") or not on_hub or answers():
        return
    say("no way to the hub from here: only what is in the local cache is used")
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):  # read when they were imported
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # pyright: ignore[reportAttributeAccessIssue]
