"""Without a network the hub's clients try again for half a minute before they say so: asked once here, they say it at
once, and what is in the local cache is still found. A name that is not there is often that of a run or folder here."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from outcore.common.words import did_you_mean

TIMEOUT_S = 3.0
RUN_FOLDERS = (Path("final_model"), Path("checkpoints"))
"""Places of finished and of unfinished models by default, a folder for each run."""
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
    if any(name and name.count("/") == 1 and not Path(name).expanduser().exists() for name in names):
        ask_hub_once(say, answers)


def ask_hub_once(say: Callable[[str], None], answers: Callable[[], bool] = hub_answers) -> None:
    """Put the hub's clients into their offline mode where it cannot be reached."""
    if os.environ.get("HF_HUB_OFFLINE") or answers():
        return
    say("no way to the hub from here: only what is in the local cache is used")
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):  # read when they were imported
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # pyright: ignore[reportAttributeAccessIssue]


def near_models(name: str) -> str:
    """' Did you mean ...?' of the runs here and of the folders and GGUF files beside `name`; '' when none is close."""
    path = Path(name).expanduser()
    runs = [run.name for folder in RUN_FOLDERS for run in _inside(folder) if run.is_dir()]
    beside = [other.name for other in _inside(path.parent) if other.is_dir() or other.suffix.lower() == ".gguf"]
    return did_you_mean(path.name, [*runs, *beside])


def _inside(folder: Path) -> list[Path]:
    with suppress(OSError):  # not there, or not to be read: nothing to propose
        return list(folder.iterdir())
    return []
