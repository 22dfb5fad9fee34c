"""A run as it lies on disk: its folders and names, and the lock of the one process that writes it."""

from outcore.runs.claim import TakenRun, take_run, take_run_together
from outcore.runs.folder import RunFolder, default_name, folder_of, next_name
from outcore.runs.listing import RunState, delete, list_runs
from outcore.runs.lock import RunInUse, RunLock, holder_of, lock_path
