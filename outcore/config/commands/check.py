"""Parsers of all the `outcore` commands, without torch: a mistyped one is refused before seconds of imports."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from outcore.config.commands.evaluating import evaluate_flags, evaluations_flags, lists_tasks
from outcore.config.commands.files import data_flags, export_flags, models_flags, runs_flags, verify_flags, watch_flags
from outcore.config.commands.running import chat_flags, generate_flags, score_flags
from outcore.config.commands.serving import serve_flags, start_flags, ui_flags

FLAGS: Mapping[str, Callable[[], argparse.ArgumentParser]] = MappingProxyType(
    {
        "generate": generate_flags,
        "chat": chat_flags,
        "score": score_flags,
        "evaluate": evaluate_flags,
        "evaluations": evaluations_flags,
        "serve": serve_flags,
        "start": start_flags,
        "ui": ui_flags,
        "data": data_flags,
        "runs": runs_flags,
        "export": export_flags,
        "verify": verify_flags,
        "watch": watch_flags,
        "models": models_flags,
    }
)
"""Command -> its parser."""


def check_flags(command: str, argv: Sequence[str]) -> None:
    """Leave with code 2 for a wrong command line, with 0 for `--help`; the command itself parses what is right."""
    argv = argv[: argv.index("--")] if command == "start" and "--" in argv else argv  # behind it: the client's own
    if command in FLAGS and not (command == "evaluate" and lists_tasks(argv)):
        FLAGS[command]().parse_args(argv)
