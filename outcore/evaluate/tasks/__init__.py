"""Tasks as names and documents: what can be asked for, without the harness."""

from outcore.evaluate.tasks.documents import Document, endings, files, sums, version_of
from outcore.evaluate.tasks.installed import INSTALL, check_harness, harness_version, stay_offline
from outcore.evaluate.tasks.names import OWN_TASKS, OwnTask, TaskName, TaskNames

__all__ = [
    "INSTALL",
    "OWN_TASKS",
    "Document",
    "OwnTask",
    "TaskName",
    "TaskNames",
    "check_harness",
    "endings",
    "files",
    "harness_version",
    "stay_offline",
    "sums",
    "version_of",
]
