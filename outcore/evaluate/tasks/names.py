"""Names of tasks: our own, which need nothing from a hub, and the harness's, which it takes seconds to index.

Whether lm-evaluation-harness is here, and how it is kept from the network."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from outcore.common.files import write_json
from outcore.evaluate.settings import EvaluationError

INSTALL = "pip install -r requirements/evaluate.txt"


def check_harness() -> None:
    """EvaluationError with the install line where lm-evaluation-harness is missing."""
    if importlib.util.find_spec("lm_eval") is None:
        raise EvaluationError(f"evaluation needs lm-evaluation-harness, which is not installed: {INSTALL}")


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
