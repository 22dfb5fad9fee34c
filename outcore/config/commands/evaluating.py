"""Flags of `outcore evaluate` and `outcore evaluations`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from outcore.config.commands.parser import CommandParser
from outcore.config.commands.running import MODEL_COMMON, add_model_flags

HISTORY = Path("logs/evaluations")
BY_ID = "its id, or the beginning of it"
AS_JSON = "as JSON"


def evaluate_flags() -> argparse.ArgumentParser:
    """All flags."""
    found = CommandParser(
        prog="outcore evaluate",
        common=(*MODEL_COMMON, "tasks", "limit", "num_fewshot", "apply_chat_template", "list_tasks", "new", "json"),
        description="Scores of a model of any size by lm-evaluation-harness. One that was killed goes on when the same "
        "command is given again, with the same scores in the end.",
    )
    add_model_flags(found)
    group = found.add_argument_group("what is asked")
    group.add_argument("--tasks", default="", help="names with commas: own tasks (outcore_...) and the harness's")
    group.add_argument("--limit", type=float, help="documents of each task; below 1: a share of them")
    group.add_argument("--num_fewshot", type=int, help="examples before each question (default: as the task says)")
    group.add_argument("--apply_chat_template", action="store_true", help="questions as a user's messages")
    group.add_argument("--system_instruction", help="who the model is told to be, with --apply_chat_template")
    group.add_argument("--gen_kwargs", default="{}", help="JSON: changes to the tasks' generation settings")
    group.add_argument("--seed", type=int, default=1234, help="key of few-shot examples and of drawn answers")
    group.add_argument("--include_path", help="folder with further tasks in the harness's YAML")
    group.add_argument("--offline", action="store_true", help="use only data sets that lie in the hub's cache")
    group.add_argument("--list_tasks", nargs="?", const="", metavar="PART", help="list names of tasks and end")
    group = found.add_argument_group("how it is kept and told")
    group.add_argument("--history", type=Path, default=HISTORY, help="the history (default: logs/evaluations)")
    group.add_argument("--new", action="store_true", help="begin anew, though an unfinished one could be gone on with")
    group.add_argument("--note_tokens", type=int, help="tokens of questions asked before their answers are noted")
    group.add_argument("--json", action="store_true", help="events as JSON lines on stdout, the record as the last one")
    group.add_argument("--api_key_file", type=Path, help="file with the server's key, where MODEL is a URL")
    group = found.add_argument_group("against Hugging Face")
    group.add_argument("--parity", action="store_true", help="run the harness's own backend too and compare documents")
    group.add_argument("--hf_batch_size", type=int, default=8, help="rows of the harness's backend (default: 8)")
    return found


def evaluations_flags() -> argparse.ArgumentParser:
    """All flags."""
    found = CommandParser(prog="outcore evaluations", description="What was evaluated, with which settings.")
    verbs = found.add_subparsers(dest="verb", required=True)

    def add(name: str, words: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=words, description=words)
        verb.add_argument("--history", type=Path, default=HISTORY, help="the history")
        return verb

    add("list", "all evaluations, newest first").add_argument("--json", action="store_true", help=AS_JSON)
    show = add("show", "one evaluation: scores, settings, layout")
    show.add_argument("id", help=BY_ID)
    show.add_argument("--json", action="store_true", help=AS_JSON)
    show.add_argument("--samples", type=int, default=0, metavar="N", help="with the first N documents of each task")
    diff = add("diff", "two evaluations: settings that differ, scores, changed answers, paired test")
    diff.add_argument("a", help=BY_ID)
    diff.add_argument("b", help=BY_ID)
    diff.add_argument("--json", action="store_true", help=AS_JSON)
    export = add("export", "evaluations as JSON or CSV on stdout, or in a file")
    export.add_argument("id", nargs="*", help="ids (default: all)")
    form = export.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="with every document (the default)")
    form.add_argument("--csv", action="store_true", help="a line for each score")
    export.add_argument("--output", type=Path, help="file to write (default: stdout)")
    add("delete", "forget an evaluation").add_argument("id", help=BY_ID)
    return found


def lists_tasks(argv: Sequence[str]) -> bool:
    """Whether the names of tasks are asked for, which needs no MODEL."""
    return any(arg == "--list_tasks" or arg.startswith("--list_tasks=") for arg in argv)
