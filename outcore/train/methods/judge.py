"""A process that judges answers: the user's function runs here, so that it may hang or crash and the run lives on.

    python judge.py FILE.py:NAME SECONDS

A line of JSON in holds the function's arguments; a line out is {"rewards": [...], "tried": [...]} or {"error": "..."}.
What the function prints goes to stderr, and its stdin is empty. It imports nothing of ours: it starts in milliseconds
and takes little memory. There is no sandbox for it: the function may do whatever its user may. Code in answers has
one (outcore/apart/sandbox.py)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import queue
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TextIO

Judge = Callable[..., Sequence[Any]]


def text_of(completion: Any) -> str:
    """Text of an answer: a text, or a list of one message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


@cache
def task_rows(task: str, size: int, seed: int) -> Any:
    """Rows of one of reasoning-gym's tasks, made from the seed."""
    return importlib.import_module("reasoning_gym").create_dataset(task, size=size, seed=seed)


def reasoning_gym(completions: Sequence[Any], task: Any, size: Any, seed: Any, index: Any, **_: Any) -> list[float]:
    """Score by the task's own verifier: what stands between <answer> and </answer>, or the whole answer."""
    extract = importlib.import_module("reasoning_gym.utils").extract_answer
    found = []
    for said, *of_row in zip(completions, task, size, seed, index, strict=True):
        text, rows = text_of(said), task_rows(*of_row[:3])
        found.append(float(rows.score_answer(extract(text) or text.strip(), entry=rows[of_row[3]])))
    return found


def math_verify(completions: Sequence[Any], answer: Any, **_: Any) -> list[float]:
    """Score 1 where an answer's formula means the row's `answer`."""
    verifier = importlib.import_module("math_verify")
    return [
        float(verifier.verify(verifier.parse(str(gold)), verifier.parse(text_of(said))))
        for said, gold in zip(completions, answer, strict=True)
    ]


class CodeJudge:
    """Scores 1 where an answer's Python code, its last block, passes its row's `tests` within `timeout_s` seconds for
    all answers. ValueError for a row without tests."""

    def __init__(self, is_apart: bool, timeout_s: float) -> None:
        if sys.platform != "linux":
            raise RuntimeError("the sandbox is made of Linux's namespaces, which are not here")
        sandbox = _module("sandbox", Path(__file__).parents[2] / "apart" / "sandbox.py")
        self._sandbox, self._timeout_s = sandbox.Sandbox(is_apart), timeout_s
        self.tried: list[str] = []
        """Words for what answers of the last call reached for in vain."""
        if not self._sandbox.judge("def one():\n    return 1", ["assert one() == 1"], None, timeout_s).passes:
            raise RuntimeError("the sandbox runs no code here")

    def __call__(self, completions: Sequence[Any], entry_point: Any = None, **columns: Any) -> list[float]:
        found, wall_s = list[float](), 0.9 * self._timeout_s / len(completions)
        given = next((columns[name][0] for name in ("tests", "test_list", "test") if columns.get(name)), None)
        tests, name = [given] if isinstance(given, str) else given, entry_point[0] if entry_point else None
        if not tests or not all(isinstance(test, str) for test in tests):
            raise ValueError("the row has no tests (column tests, test_list or test: a text, or a list of texts)")
        if not name and any(test.startswith("def check(") or "\ndef check(" in test for test in tests):
            raise ValueError("the row's tests are a function check, and no entry_point says what it gets")
        self.tried = []
        for place, said in enumerate(map(text_of, completions), start=1):
            blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", said, re.DOTALL)
            passes, tried = self._sandbox.judge(blocks[-1] if blocks else said, tests, name, wall_s)
            found.append(float(passes))
            self.tried += [f"answer {place} tried the {what}" for what in tried]
        return found


BUILT_IN: dict[str, tuple[Judge, str]] = {
    "reasoning_gym": (reasoning_gym, "reasoning_gym"),
    "math_verify": (math_verify, "math_verify"),
}
"""Judges of ours by name, with the module that they need."""


def load(name: str, timeout_s: float) -> Judge:
    """Find the function."""
    if name in ("code", "code_without_sandbox"):
        return CodeJudge(name == "code", timeout_s)
    if name in BUILT_IN:
        importlib.import_module(BUILT_IN[name][1])
        return BUILT_IN[name][0]
    file, _, function = name.rpartition(":")
    path = Path(file).expanduser().resolve()
    sys.path.insert(0, str(path.parent))
    module = _module("rewards_of_user", path)
    if not hasattr(module, function):
        raise AttributeError(f"{path.name} has no function {function}")
    return getattr(module, function)


def _module(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(name: str, timeout_s: float) -> None:
    """Judge what comes. There is no end but the run's."""
    asked, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    lines = queue.SimpleQueue[str]()
    threading.Thread(target=_listen, args=(asked, lines), daemon=True).start()
    with contextlib.suppress(ValueError):
        sys.path.remove(str(Path(__file__).parent))  # its files are no modules of the function's

    def reply(**said: Any) -> None:
        print(json.dumps(said), file=replies, flush=True)

    try:
        judge = load(name, timeout_s)
    except BaseException as error:
        reply(error=_words(error))
        threading.Event().wait()  # the run ends this process when it has read why
        return
    reply(rewards=[], tried=[])
    while True:
        try:
            found = judge(**json.loads(lines.get()))
            rewards = [None if one is None else float(one) for one in found]
        except Exception as error:
            reply(error=_words(error))
        else:
            reply(rewards=rewards, tried=judge.tried if isinstance(judge, CodeJudge) else [])


def _listen(asked: TextIO, lines: queue.SimpleQueue[str]) -> None:
    for line in asked:
        lines.put(line)
    # The run is gone, perhaps killed: a function that hangs must not outlive it.
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _words(error: BaseException) -> str:
    """Name the error and the line where it was raised, so short that it can be read."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in last)
    words = " ".join(str(error).encode(errors="replace").decode().split())
    return f"{type(error).__name__}: {words[:500]}{'...' * (len(words) > 500)}{where}"


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(sys.argv[1], float(sys.argv[2]))
