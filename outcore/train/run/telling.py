"""Why a run ends, in a paragraph for people and once; errors of libraries keep their trace."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import outcore
from outcore.common import explain_error
from outcore.common.output import say
from outcore.storage import ChangedBytes
from outcore.train.changes import explain
from outcore.train.process.random_state import explain_order
from outcore.train.run.job import RunJob

TOLD = (ValueError, RuntimeError, OSError, MemoryError)
"""Errors that end a run with a paragraph instead of a trace."""


def tell(error: BaseException, run: RunJob | None) -> None:
    """Why the run ends, on the screen and once; nothing of an error that `main` does not catch (its trace follows)."""
    if run is not None:
        if run.told is error or not run.tells:
            return
        run.told = error
    if isinstance(error, KeyboardInterrupt):
        words = "stopped at once; the last checkpoint is intact (--resume_from_checkpoint auto)"
        print(words, file=sys.stderr, flush=True)
    elif isinstance(error, TOLD):
        plain = plain_words(error, run) or explain_error(error, run.phase if run is not None else "starting")
        if plain is None and not _raised_by_us(error):
            traceback.print_exception(error)
        back = _back_to(run.saved()) if run is not None and _is_changed(error) else ""
        say(f"error: {plain or error}{back}")


def tell_at_exit(job: RunJob) -> None:
    """Have `tell` say why the run ends as an exit of `opened`: closing may have to wait for a drive that hangs."""
    job.opened.push(lambda kind, error, trace: tell(error, job) if error is not None else None)


def _is_changed(error: BaseException | None) -> bool:
    """Whether a drive that gave back other bytes is behind the error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # a failure handled while another was can make a circle of them
        if isinstance(error, ChangedBytes):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _back_to(saved: Path | None) -> str:
    if saved is None:
        return ". This run has saved none yet: begin it again, with another --nvme_offload_path"
    return f". Go back to {saved}: the same command with --resume_from_checkpoint auto, and another --nvme_offload_path"


def plain_words(error: BaseException, run: RunJob | None) -> RuntimeError | None:
    """The error in words for people, where it has others of its own."""
    full = explain(error, run.config, run.micro_batch_size, run.engine_name) if run is not None else None
    return full or explain_order(error)


def _raised_by_us(error: BaseException) -> bool:
    """True when the message was written here for people; an error from a library shows its traceback as well."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(outcore.__file__).parent)
