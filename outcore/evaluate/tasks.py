"""Tasks as names and documents: what can be asked for, without the harness.

Documents of our own tasks, made from what every Python brings: the same on every machine with the same Python.

Endings: sentences of the standard library's docstrings, each cut in two; the wrong endings are those of other sentences
of similar length. Files: source of the library, cut to a size that a small machine scores in seconds. Sums: drawn from
a fixed seed.

Names of tasks: our own, which need nothing from a hub, and the harness's, which it takes seconds to index.

Whether lm-evaluation-harness is here, and how it is kept from the network."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import random
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from outcore.common.errors import need_packages
from outcore.common.files import write_json
from outcore.common.quantities import MB
from outcore.data.sources import EmbeddedSource, Record
from outcore.evaluate.settings import EvaluationError

DOCSTRING = re.compile(r'"""(.{60,4000}?)"""', re.DOTALL)
SENTENCE = re.compile(r"[A-Z][^.!?\n<>`|\\{}=_*]{60,200}[.!?]")
NUM_ENDINGS, NUM_FILES, NUM_SUMS = 1000, 40, 500
MAX_FILE_LETTERS = 6000
SEED = 20261124
Document = dict[str, Any]


@lru_cache(maxsize=1)
def _files() -> tuple[tuple[str, str], ...]:
    """(name, text) of the library's source files."""
    source = EmbeddedSource(total_bytes=8 * MB)
    return tuple((str(record.where), record.row["text"]) for record in source.records() if isinstance(record, Record))


def endings() -> list[Document]:
    """{"begins", "endings" [4], "right"}."""
    draws = random.Random(SEED)
    sentences = sorted({sentence for _, text in _files() for sentence in _sentences(text)})
    draws.shuffle(sentences)
    halves = [_cut(sentence.split()) for sentence in sentences]
    found = []
    for number, (begins, ending) in enumerate(halves[:NUM_ENDINGS]):
        others = [other for _, other in halves[number + 1 : number + 400] if abs(len(other) - len(ending)) <= 12]
        wrong = list(dict.fromkeys(other for other in others if other != ending))[:3]
        if len(wrong) < 3:
            continue
        right = draws.randrange(4)
        found.append({"begins": begins, "endings": [*wrong[:right], ending, *wrong[right:]], "right": right})
    return found


def files() -> list[Document]:
    """{"page"}: the beginnings of some source files, up to the end of a line."""
    draws = random.Random(SEED)
    chosen = [text for _, text in _files() if len(text) > 2000]
    draws.shuffle(chosen)
    return [{"page": text[: text.rfind("\n", 0, MAX_FILE_LETTERS) + 1] or text} for text in chosen[:NUM_FILES]]


def sums() -> list[Document]:
    """{"question", "answer"}."""
    draws = random.Random(SEED)
    found: dict[str, str] = {}
    while len(found) < NUM_SUMS + 50:
        a, b = draws.randrange(2, 100), draws.randrange(2, 100)
        minus = draws.random() < 0.4 and a > b
        found[f"{a} {'-' if minus else '+'} {b} ="] = str(a - b if minus else a + b)
    return [{"question": question, "answer": answer} for question, answer in found.items()]


def version_of(documents: list[Document]) -> str:
    """Name of these documents, with the Python whose library they were made of."""
    digest = hashlib.blake2b(json.dumps(documents).encode(), digest_size=4).hexdigest()
    return f"1-py{sys.version_info[0]}.{sys.version_info[1]}-{digest}"


def _sentences(text: str) -> Iterator[str]:
    for told in DOCSTRING.findall(text):
        for paragraph in told.split("\n\n"):
            yield from SENTENCE.findall(" ".join(paragraph.split()))


def _cut(words: list[str]) -> tuple[str, str]:
    middle = (len(words) + 1) // 2
    return " ".join(words[:middle]), " ".join(words[middle:])


def check_harness() -> None:
    """EvaluationError with the install line where lm-evaluation-harness is missing."""
    need_packages(("lm_eval",), "evaluation", "evaluate", EvaluationError)


def harness_version() -> str:
    """The installed version; '' for none."""
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        return ""


def stay_offline() -> None:
    """Have the hub's clients in this process use what they hold already: without a network they would try for minutes.
    Their own switch is an environment variable that they read when they are imported, which has happened."""
    import datasets.config
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True


Kind = Literal["own", "task", "group", "tag"]


@dataclass(frozen=True)
class OwnTask:
    """A task whose data this machine has already."""

    name: str
    words: str


OWN_TASKS: tuple[OwnTask, ...] = (
    OwnTask("outcore_endings", "multiple choice: how a sentence of Python's documentation goes on, among four endings"),
    OwnTask("outcore_stdlib", "perplexity: source of Python's standard library, whole files in rolling windows"),
    OwnTask("outcore_sums", "exact match: small sums, written out after five examples"),
)


@dataclass(frozen=True)
class TaskName:
    """One name that `tasks` takes."""

    name: str
    kind: Kind
    is_offline: bool
    words: str = ""


class TaskNames:
    """All names. The harness's are indexed once for each of its versions, in the background, and kept in `cache`."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._known = [TaskName(task.name, "own", True, task.words) for task in OWN_TASKS]
        self.is_complete = False
        self._lock = threading.Lock()
        self._indexing: threading.Thread | None = None

    def find(self, query: str = "", limit: int = 100) -> list[TaskName]:
        """Names that hold `query`, our own first. Starts the indexing when it has not been."""
        with self._lock:
            if not self.is_complete and self._indexing is None:
                self._indexing = threading.Thread(target=self._index, name="task names", daemon=True)
                self._indexing.start()
        words = query.lower()
        return [one for one in self._known if words in one.name.lower()][:limit]

    def wait(self, timeout_s: float = 300.0) -> None:
        """Block until all are known."""
        self.find()
        if self._indexing is not None:
            self._indexing.join(timeout_s)

    def _index(self) -> None:
        found = self._read() or self._ask()
        self._known += found
        self.is_complete = True

    def _read(self) -> list[TaskName]:
        try:
            kept = json.loads(self._cache.read_text(encoding="utf-8"))
            return [TaskName(**one) for one in kept["names"]] if kept["version"] == harness_version() else []
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def _ask(self) -> list[TaskName]:
        try:
            found = harness_names()
        except ImportError:
            return []
        try:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._cache, {"version": harness_version(), "names": [asdict(one) for one in found]})
        except OSError:
            pass  # it is only asked again next time
        return found


def harness_names() -> list[TaskName]:
    """Every name that the harness knows: groups and tags before tasks."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    by_kind: tuple[tuple[Kind, list[str]], ...] = (
        ("group", manager.all_groups),
        ("tag", manager.all_tags),
        ("task", manager.all_subtasks),
    )
    return [TaskName(name, kind, False) for kind, names in by_kind for name in names]
