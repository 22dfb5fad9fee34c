"""Settings and sampling from the flags that all commands which run a model share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outcore.common.classes import same_named
from outcore.common.diagnostics import DiagnosticLog
from outcore.common.output import say
from outcore.config.commands import SAMPLING_FLAGS
from outcore.infer.opening import AgainstPlan, InferSettings, OpenedModel
from outcore.infer.requests import Sampling, own_defaults, sampling_of


def settings_of(args: argparse.Namespace, *, deterministic: bool = False) -> InferSettings:
    """ValueError for what cannot be."""
    said = {
        **same_named(InferSettings, args, "share_prefixes", "deterministic", "scores_only", "adapters"),
        "nvme_path": tuple(Path(path) for path in args.nvme_path),
        "pin_memory": args.pin_memory == "true",
        "share_prefixes": not args.no_prefix_sharing,
        "prefix_path": None if args.prefix_path is None else Path(args.prefix_path),
        "deterministic": deterministic,
    }
    return InferSettings(**said)


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Collect the sampling fields that flags set."""
    found = {name: getattr(args, name) for name, _, _ in SAMPLING_FLAGS if getattr(args, name) is not None}
    if args.stop:
        found["stop"] = args.stop
    return found


def sampling_from(opened: OpenedModel, given: Mapping[str, Any]) -> Callable[[int], Sampling]:
    """For a prompt of so many tokens: the model's own defaults, then what was said. Where nobody said how long the
    answer may be, it may be as long as the context leaves room for."""
    found = sampling_of(given, own_defaults(opened.found.loaded.model, Sampling()))
    if "max_tokens" in given:
        return lambda prompt_tokens: found
    return lambda prompt_tokens: found.fitting(prompt_tokens, opened.engine.max_tokens)


def tell_plan(told: AgainstPlan, command: str) -> None:
    """Compare what the passes took with the plan: in words, and as an event in logs/diagnostics."""
    if words := told.words():
        say(words)
    DiagnosticLog(Path("logs/diagnostics")).note(f"{command} ended", **told.facts())


def check_output(output: Path, source: Path) -> None:
    """ValueError for an output that cannot be written, or would replace what is read."""
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder. Name a file in it.")
    if output.exists() and not output.is_file():
        raise ValueError(f"--output {output} is no ordinary file, and would be replaced by one. Name another.")
    if output.exists() and output.samefile(source):
        raise ValueError("--output is the file of --input, which it would replace. Name another.")
