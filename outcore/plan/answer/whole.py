"""How long a whole run is and when it ends: of the steps that were asked for, or of the epochs of data whose size is
known before it is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from outcore.common.quantities import format_gb, format_s
from outcore.config import TrainConfig
from outcore.plan.record import Plan

BYTES_PER_TOKEN = 4
"""English text takes about so many, by vocabularies of 32,000 to 152,000 entries; JSON's names count in, too."""
PACKED_FILES = (".parquet", ".arrow", ".gz", ".bz2", ".xz", ".zst")
"""Files whose size says little of their text's."""


@dataclass(frozen=True)
class WholeRun:
    """All steps of a run, without its evaluations, samples and checkpoints."""

    steps: int
    """0: not known before the data is read."""
    step_s: float
    basis: str = ""
    """What an estimate of the steps rests on."""

    @property
    def seconds(self) -> float:
        return self.steps * self.step_s

    def words(self, now: datetime | None = None) -> str:
        """Hours and the end, if it begins now."""
        if not self.steps:
            return (
                f"The whole run: {format_s(self.step_s)} a step; how many steps {self.basis} take is known when the "
                "data is read, and told at the run's start."
            )
        about = f" (about: {self.basis})" if self.basis else ""
        return (
            f"The whole run: {self.steps:,} steps{about}, {format_s(self.seconds)}; begun now it ends on "
            f"{self._end(now):%a %d %b %Y at %H:%M}. Evaluations, samples and checkpoints come on top."
        )

    def to_dict(self) -> dict[str, Any] | None:
        """Plain JSON values; None where the steps are not known."""
        if not self.steps:
            return None
        ends = self._end(None).isoformat(timespec="minutes")
        return {"steps": self.steps, "seconds": self.seconds, "ends": ends, "basis": self.basis}

    def _end(self, now: datetime | None) -> datetime:
        return (now or datetime.now().astimezone()) + timedelta(seconds=min(self.seconds, 1e10))


def whole_run(config: TrainConfig, plan: Plan) -> WholeRun | None:
    """The whole run of these settings; None where neither steps, epochs nor data were named."""
    step_s = plan.time.step_s
    if config.max_steps > 0:
        return WholeRun(config.max_steps, step_s)
    usual = TrainConfig.dataset, TrainConfig.num_train_epochs
    if (config.dataset, config.num_train_epochs) == usual:
        return None
    epochs = f"{config.num_train_epochs:g} epoch{'s' * (config.num_train_epochs != 1)}"
    size_bytes = _size_bytes(config.dataset)
    if size_bytes is None or config.packing == "off":
        return WholeRun(0, step_s, epochs)
    tokens = config.num_train_epochs * size_bytes / BYTES_PER_TOKEN
    steps = max(1, math.ceil(tokens / plan.tokens_per_step))
    return WholeRun(steps, step_s, f"{epochs} of {format_gb(size_bytes)}, {BYTES_PER_TOKEN} bytes a token")


def _size_bytes(dataset: tuple[str, ...]) -> float | None:
    """Bytes of the data that an epoch sees; None where they are not plain files here."""
    from outcore.data import weighted_source  # torch, which plans without data do not wait for

    total = 0.0
    for source in map(weighted_source, dataset):
        path = Path(source.name).expanduser()
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        if not all(file.is_file() and file.suffix not in PACKED_FILES for file in files):
            return None
        total += source.weight * sum(file.stat().st_size for file in files)
    return total or None
