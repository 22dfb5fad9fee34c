"""Words that people typed: names in a list, and the nearest of the spellings that are known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

_CLONE = Path(__file__).resolve().parents[2]
_SCRIPTS = {"setup": "setup.py", "probe": "gds_optimizer.py", "train": "train_model.py"}


def own_command(name: str, num_gpus: int | str = 1) -> str:
    """Text that starts a command: its script, `python gds_optimizer.py`, in a clone; `outcore probe` where pip
    installed. Several GPUs have a process each."""
    script = _SCRIPTS[name]
    has_script = (_CLONE / script).is_file()
    if num_gpus != 1:
        started = f"torchrun --nproc_per_node={num_gpus} -m outcore {name}"  # needs no DeepSpeed
        return f"deepspeed --num_gpus={num_gpus} {script}" if has_script else started
    return f"python {script}" if has_script else f"outcore {name}"


def names_of(text: str | None) -> tuple[str, ...]:
    """The names in a comma-separated value, in its order."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def nearest(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.5) -> list[str]:
    """The closest known spellings, best first, whatever their case; none below `cutoff` (0: anything, 1: equal)."""
    by_lower = {name.lower(): name for name in known}
    return [by_lower[name] for name in difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=cutoff)]


def did_you_mean(word: str, known: Iterable[str], count: int = 3) -> str:
    """' Did you mean ...?', or '' when nothing is close."""
    close = nearest(word, known, count)
    return f" Did you mean {', '.join(map(repr, close))}?" if close else ""
