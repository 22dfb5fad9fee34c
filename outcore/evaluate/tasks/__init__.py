"""Tasks as names and documents: what can be asked for, without the harness."""

from outcore.evaluate.tasks.documents import Document, endings, files, sums, version_of
from outcore.evaluate.tasks.names import (
    INSTALL,
    OWN_TASKS,
    OwnTask,
    TaskName,
    TaskNames,
    check_harness,
    harness_version,
    stay_offline,
)
