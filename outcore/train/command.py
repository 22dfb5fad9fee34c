"""Entry of train_model.py and `outcore train`: settings first, and torch only once they are right."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from outcore.common.output import STARTING, told_when_slow, watch_reader
from outcore.config import ConfigError
from outcore.train.configure import parse_config


def main(argv: Sequence[str] | None = None, *, began_s: float | None = None) -> int:
    """Train and return the exit code: that of `outcore.train.run.main`.

    A mistyped flag is told at once, not after the seconds that torch takes to import. `began_s`: time.perf_counter at
    the process's start; without it imports are not among the start's parts.
    """
    watch_reader(ends=False)  # a run must not end because nobody reads along
    try:
        config = parse_config(argv, "train_model.py" if argv is None else "outcore train")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    story = None
    with told_when_slow(STARTING):
        from outcore.train.run import run_config

        if config.method != "sft" and not config.plan:
            from outcore.train.methods import run_method as story  # which brings transformers' trainer along

    return run_config(config, began_s=began_s, story=story)
