"""`outcore evaluate MODEL --tasks a,b`: scores of a model of any size, on this machine or by a running server.

An evaluation that a running server does with the model it has loaded: created, watched and fetched over HTTP.

What the commands print for people."""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outcore.common.classes import same_named
from outcore.common.output import say, tell_error
from outcore.common.quantities import counted
from outcore.config.commands import HISTORY, evaluate_flags, lists_tasks
from outcore.evaluate.asking import Cancelled
from outcore.evaluate.history import History, as_table
from outcore.evaluate.jobs import Event, Job, subject_of, unfinished_or_new
from outcore.evaluate.settings import EvaluationError, EvaluationSettings
from outcore.evaluate.tasks import OWN_TASKS, TaskNames, check_harness, stay_offline
from outcore.infer.commands import settings_of
from outcore.infer.opening import open_engine

TIMEOUT_S, LOOK_EVERY_S = 60.0, 0.5
MOST_FAILURES = 3
UNFINISHED = ("queued", "running")
Record = dict[str, Any]


def evaluate_remotely(
    url: str, key: str, settings: EvaluationSettings, *, resume: bool, listener: Callable[[Record], None]
) -> Record:
    """The record in the end. EvaluationError in the server's words, RuntimeError when it cannot be reached."""
    base = url.rstrip("/").removesuffix("/v1") + "/v1/evaluations"
    given = {name: value for name, value in settings.as_json().items() if value not in (None, {})}
    record = _asked(base, key, given | {"resume": resume})
    mine = f"{base}/{record['id']}"
    record = _watched(mine, key, listener)
    if record["status"] == "failed":
        raise EvaluationError(f"the server says: {record['error']}")
    return record


def _open(url: str, key: str, body: Record | None = None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        try:
            words = json.loads(error.read())["error"]["message"]
        except (ValueError, KeyError, TypeError):
            words = str(error)
        hint = " Give --api_key_file." if error.code == 401 else ""
        raise EvaluationError(f"{url} says {error.code}: {words}{hint}") from error
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"{url} cannot be reached ({error}). Start `outcore serve MODEL`, or check the address."
        ) from error


def _asked(url: str, key: str, body: Record | None = None) -> Record:
    with _open(url, key, body) as reply:
        return json.loads(reply.read())


def _watched(url: str, key: str, listener: Callable[[Record], None]) -> Record:
    """The record once the evaluation has ended; the listener hears of each change before."""
    told, failures = None, 0
    while True:
        try:
            record = _asked(url, key)
        except RuntimeError as error:
            failures += 1
            if failures > MOST_FAILURES:
                raise RuntimeError(f"{error} The evaluation goes on when the server is back.") from error
        else:
            failures = 0
            if record["progress"] != told:
                told = record["progress"]
                listener({"time": time.time(), "event": "progress", **told})
            if record["status"] not in UNFINISHED:
                listener({"time": time.time(), "event": record["status"], **record["progress"]})
                return record
        time.sleep(LOOK_EVERY_S)


def say_event(event: dict[str, Any]) -> None:
    """One event, in a line."""
    kind = event["event"]
    if kind in ("stage", "progress"):
        left = f", {event['left_s']:.0f} s left" if event.get("left_s") else ""
        documents = (
            f" {event['documents_done']:,} of {counted(event['documents'], 'document')}" if event["documents"] else ""
        )
        say(f"{event['task'] or 'suite'}: {event['stage']}{documents}{left}")
    elif kind == "score":
        error = "" if event["stderr"] is None else f" ± {event['stderr']:.4f}"
        say(f"{event['task']}: {event['metric']} {event['value']:.6g}{error}")
    elif event.get("message"):
        say(f"{kind}: {event['message']}")


def table_of(scores: Sequence[dict[str, Any]]) -> str:
    """Scores in columns."""
    rows = [
        (s["task"], s["version"], s["metric"], s["filter"], s["documents"], float(s["value"]), s["stderr"])
        for s in scores
    ]
    return as_table(rows, ("task", "version", "metric", "filter", "documents", "value", "stderr"))


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code."""
    args_list = sys.argv[1:] if argv is None else argv
    if lists_tasks(args_list):
        return _list_tasks(args_list)
    args = evaluate_flags().parse_args(args_list)
    try:
        settings = evaluation_settings(args)
        if args.model.startswith(("http://", "https://")):
            return _remote(args, settings)
        check_harness()
        if args.offline:
            stay_offline()
        return _local(args, settings)
    except KeyboardInterrupt:
        say("stopped; the same command goes on")
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        return tell_error("evaluate", error)


def evaluation_settings(args: argparse.Namespace) -> EvaluationSettings:
    """Settings from the command line. Raises EvaluationError for an impossible value."""
    try:
        gen_kwargs = json.loads(args.gen_kwargs)
    except ValueError:
        raise EvaluationError(f"gen_kwargs is {args.gen_kwargs!r}, but must be a JSON object.", "gen_kwargs") from None
    limit = args.limit
    limit = int(limit) if limit is not None and limit == int(limit) else limit
    said = same_named(EvaluationSettings, args)
    return EvaluationSettings.from_fields({**said, "limit": limit, "gen_kwargs": gen_kwargs})


def _local(args: argparse.Namespace, settings: EvaluationSettings) -> int:
    history = History(args.history)
    history.check_writable()
    if args.parity and args.compile == "auto":
        args.compile = "off"  # the operations that the other backend runs; fused ones keep more digits between them
    from outcore.evaluate.harness import load_tasks, only_score  # imports the harness

    tasks = load_tasks(settings, trust_remote_code=args.trust_remote_code)  # before the weights: a wrong name is told
    infer = settings_of(args, deterministic=True)
    opened = open_engine(args.model, infer.for_scoring() if only_score(tasks) else infer, say)
    try:
        subject = subject_of(opened, args.model)
        record = unfinished_or_new(history, subject, settings, resume=not args.new)
        say(f"evaluation {record['id']} in {args.history}")
        job = Job(history, record, subject, _listener(args), tasks)
        reference = None
        if args.parity:
            from outcore.evaluate.parity import reference_of

            reference = reference_of(opened, subject.answerer.max_length, args)
        try:
            record = job.run()
        except Cancelled:
            return 130
    finally:
        opened.close()
    _show(args, record | {"scores": job.scores})
    return _parity(reference, settings, job) if reference is not None else 0


def _parity(reference: Any, settings: EvaluationSettings, job: Job) -> int:
    """Compare a finished job with the harness's own backend, its model being closed: 1 when a score differs."""
    from outcore.evaluate.parity import compare_with_reference, save_parity

    ours = (job.scores, job.samples, job.record["asking_s"])
    parity = compare_with_reference(reference, settings, ours, say)
    print(parity.words())
    say(f"kept in {save_parity(parity, job.folder)}")
    return 0 if parity.is_equal else 1


def _remote(args: argparse.Namespace, settings: EvaluationSettings) -> int:
    if args.parity:
        raise EvaluationError("--parity needs the model here: name it instead of a server.", "parity")
    key = args.api_key_file.read_text(encoding="utf-8").split()[0] if args.api_key_file else ""
    record = evaluate_remotely(args.model, key, settings, resume=not args.new, listener=_listener(args))
    _show(args, record)
    return 0 if record["status"] == "completed" else 1


def _listener(args: argparse.Namespace) -> Any:
    def tell_json(event: Event) -> None:
        print(json.dumps(event), flush=True)

    return tell_json if args.json else say_event


def _show(args: argparse.Namespace, record: dict[str, Any]) -> None:
    print(json.dumps(record) if args.json else table_of(record["scores"]), flush=True)


def _list_tasks(argv: list[str]) -> int:
    found = argparse.ArgumentParser(prog="outcore evaluate")
    found.add_argument("--list_tasks", nargs="?", const="", default="")
    found.add_argument("--history", type=Path, default=HISTORY)
    args, _ = found.parse_known_args(argv)
    try:
        check_harness()
        names = TaskNames(args.history / "task_names.json")
        names.wait()
        known = names.find(args.list_tasks, 1_000_000)
    except ValueError as error:
        return tell_error("evaluate", error)
    width = max(len(task.name) for task in OWN_TASKS)
    for one in known:
        print(f"{one.kind:<5}  {one.name:<{width}}  {one.words}".rstrip())
    return 0
