"""`outcore evaluations`: what was evaluated: list, show, diff, export, delete."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from outcore.common.journal import is_held
from outcore.common.output import show, tell_error
from outcore.config.commands import evaluations_flags
from outcore.evaluate.commands.evaluate import table_of
from outcore.evaluate.history import History, as_csv, as_table, diff_of, when
from outcore.evaluate.jobs import JOURNAL


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code."""
    args = evaluations_flags().parse_args(argv)
    history = History(args.history)
    try:
        return VERBS[args.verb](args, history)
    except KeyError as error:
        missing = f"there is no evaluation {error.args[0]!r} in {args.history}."
        return tell_error("evaluations", ValueError(missing))
    except (ValueError, OSError) as error:
        return tell_error("evaluations", error)


def _list(args: argparse.Namespace, history: History) -> int:
    records = [_shown(history, record) for record in history.all()]
    if args.json:
        print(json.dumps(records))
        return 0
    rows = [
        (record["id"], when(record["created_at"]), record["status"], record["model"], _first_score(record))
        for record in records
    ]
    print(as_table(rows, ("id", "when", "status", "model", "scores")) if rows else f"none in {args.history}")
    return 0


def _show(args: argparse.Namespace, history: History) -> int:
    record = _shown(history, history.get(args.id))
    samples = [
        one
        for task in dict.fromkeys(score["task"] for score in record["scores"])
        for one in (history.samples(record["id"], task, 0, args.samples) if args.samples else ())
    ]
    if args.json:
        print(json.dumps(record | {"samples": samples}))
        return 0
    print(f"{record['id']}  {record['status']}  {record['model']}  {when(record['created_at'])}")
    if record["error"]:
        show(f"error: {record['error']}\n")
    if record["seconds"]:
        print(f"{record['seconds']:.1f} s, of them {record['asking_s'] or 0:.1f} s in the model")
    for name in ("settings", "launch", "versions"):
        print(f"{name}: {json.dumps(record[name])}")
    print("\n".join(record["placement"]))
    if record["scores"]:
        print(table_of(record["scores"]))
    for one in samples:
        show(json.dumps(one, ensure_ascii=False) + "\n")
    return 0


def _diff(args: argparse.Namespace, history: History) -> int:
    found = diff_of(history, history.get(args.a), history.get(args.b))
    if args.json:
        print(json.dumps(found))
        return 0
    for name, (a, b) in found["settings"].items():
        print(f"{name}: {a} -> {b}")
    columns = ("task", "metric", "a", "b", "difference", "unit", "documents", "changed", "better", "worse", "p_value",
               "max_logprob_difference")  # fmt: skip
    rows = [[one[name] for name in columns] for one in found["tasks"]]
    print(as_table(rows, columns) if rows else "no metric is in both")
    return 0


def _export(args: argparse.Namespace, history: History) -> int:
    records = [history.get(name) for name in args.id] if args.id else history.all()
    if args.csv:
        text = as_csv(records)
    else:
        text = json.dumps([record | {"samples": history.samples(record["id"])} for record in records], indent=1) + "\n"
    if args.output is None:
        sys.stdout.write(text)
    else:
        args.output.write_text(text, encoding="utf-8")
    return 0


def _delete(args: argparse.Namespace, history: History) -> int:
    record = history.get(args.id)
    if is_held(history.folder_of(record["id"]) / JOURNAL):
        raise ValueError(f"{record['id']} is under way: end it first.")
    history.remove(record["id"])
    print(f"{record['id']} is forgotten")
    return 0


def _shown(history: History, record: dict[str, Any]) -> dict[str, Any]:
    """With "interrupted" for one that nobody works on any more."""
    is_open = record["status"] in ("queued", "running")
    if is_open and not is_held(history.folder_of(record["id"]) / JOURNAL):
        return record | {"status": "interrupted"}
    return record


def _first_score(record: dict[str, Any]) -> str:
    scores = record["scores"]
    words = [f"{score['task']} {score['metric']} {score['value']:.4g}" for score in scores[:2]]
    return ", ".join(words) + (f" and {len(scores) - 2} more" if len(scores) > 2 else "") or ", ".join(record["tasks"])


VERBS = {"list": _list, "show": _show, "diff": _diff, "export": _export, "delete": _delete}
