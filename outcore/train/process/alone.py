"""Other trainers, one process: what a launcher set for several does not reach them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import datasets
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def in_one_process() -> Iterator[None]:
    """Within this context trainers find no launcher's variables, for which they would wrap the model, and draw no bars
    of their own."""
    kept = {name: os.environ.pop(name) for name in LAUNCHER if name in os.environ}
    quiet = is_progress_bar_enabled(), not datasets.are_progress_bars_disabled()
    disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():  # an attribute's old name, which TRL and peft ask for
            warnings.filterwarnings("ignore", category=FutureWarning)
            yield
    finally:
        os.environ.update(kept)
        if quiet[0]:
            enable_progress_bar()
        if quiet[1]:
            datasets.enable_progress_bars()
