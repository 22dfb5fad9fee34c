"""`outcore.Trainer`: our training loop from a Python program, with the settings of `outcore train`.

    result = outcore.Trainer(outcore.TrainConfig(preset="tiny", max_steps=20), dataset=rows).train()
    print(result.last_loss, result.export)

Rows of Python become a file of JSON lines under the run's cache of data, named by its content: so they are read,
cached, resumed and recorded as any data is."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outcore.common import explain_error, make_folder
from outcore.config import TrainConfig, checked
from outcore.model import named_model
from outcore.monitor.metrics import Metrics, read_metrics
from outcore.train.configure import check_reports, parse_config
from outcore.train.run import Ready, plain_words, run, start, train_to_end

Rows = Iterable[Mapping[str, Any] | str]
"""Rows of any of the shapes that files may have; a text is a row of plain text. A `datasets.Dataset` is such rows."""


@dataclass(frozen=True)
class TrainResult:
    """Result of a run."""

    run: str
    """Name of the run, by which `outcore watch`, `chat` and `export` take it."""
    finished: bool
    """False where Ctrl-C stopped it: what was trained is saved, and `resume_from_checkpoint="auto"` goes on."""
    steps: int
    first_loss: float | None
    last_loss: float | None
    evaluation: Mapping[str, float] | None
    """Figures of the last evaluation: eval_loss, eval_perplexity."""
    logs: Path
    """Folder with metrics.jsonl, plan.json and loss.png."""
    checkpoint: Path | None
    """The last one that was saved."""
    export: Path | None
    """Folder of the finished model, for `from_pretrained` and `outcore.LLM`; None where none was written."""

    @property
    def metrics(self) -> Metrics:
        """Every step and evaluation, read from the log."""
        return read_metrics(self.logs / "metrics.jsonl")


class Trainer:
    """A run to be. `config`: settings, or a YAML file with them; `dataset`, `eval_dataset`: rows in place of those that
    it names. ValueError for settings and rows that cannot be."""

    def __init__(
        self,
        config: TrainConfig | str | os.PathLike[str],
        *,
        dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
    ) -> None:
        if isinstance(config, TrainConfig):
            found = check_reports(checked(TrainConfig, vars(config), named_model))
        else:
            found = parse_config(["--config", os.fspath(config)])
        if found.plan:
            raise ValueError("plan: a run that is only planned is outcore.plan(...).")
        folder = Path(found.data_cache_dir).expanduser() / "rows"
        if dataset is not None:
            if found.dataset != TrainConfig.dataset:
                raise ValueError("dataset is given twice: leave out the rows, or the setting.")
            found = replace(found, dataset=(str(rows_file(dataset, folder)),))
        if eval_dataset is not None:
            if found.eval_dataset is not None:
                raise ValueError("eval_dataset is given twice: leave out the rows, or the setting.")
            found = replace(found, eval_dataset=str(rows_file(eval_dataset, folder)))
        self.config = found

    def train(self) -> TrainResult:
        """Train, evaluate, save and export, telling what `outcore train` tells. Ctrl-C ends the step, saves and
        returns. ValueError or RuntimeError, in words; checkpoints are intact then."""
        found: list[TrainResult] = []

        def to_end(ready: Ready) -> int:
            code = train_to_end(ready)
            found.append(_result(ready, finished=code == 0))
            return code

        job = start(self.config)
        job.tells = False
        try:
            run(job, to_end)
        except Exception as error:
            if (words := plain_words(error, job)) is not None:
                raise words from error
            if isinstance(error, ValueError | RuntimeError) or not (told := explain_error(error, job.phase)):
                raise
            raise RuntimeError(told) from error
        return found[0]


def _result(ready: Ready, *, finished: bool) -> TrainResult:
    trainer, folder = ready.trainer, ready.context.folder
    export = folder.export if finished and ready.job.config.export else None
    evaluation = trainer.last_eval
    losses = trainer.first_loss, trainer.last_loss
    return TrainResult(
        folder.name, finished, trainer.step, *losses, evaluation, folder.logs, trainer.saved_path, export
    )


def rows_file(rows: Rows, folder: Path) -> Path:
    """The rows as a file of JSON lines, named by its content. ValueError for what is no row."""
    if isinstance(rows, str | os.PathLike | Mapping):
        hint = "Name a file in the config's dataset; of a dictionary of splits give one."
        raise ValueError(f"dataset is a {type(rows).__name__}, but must be rows. {hint}")
    make_folder(folder)
    digest, aside, count = hashlib.sha256(), folder / f".rows-{os.getpid()}", 0
    try:
        with open(aside, "wb") as file:
            for count, row in enumerate(rows, 1):
                line = _line(count, row)
                digest.update(line)
                file.write(line)
        if not count:
            raise ValueError("dataset has no rows.")
        return aside.replace(folder / f"rows-{digest.hexdigest()[:12]}.jsonl")
    finally:
        aside.unlink(missing_ok=True)


def _line(number: int, row: Any) -> bytes:
    entry = {"text": row} if isinstance(row, str) else row
    if not isinstance(entry, Mapping):
        raise ValueError(f"row {number} is a {type(row).__name__}, but must be a text or a mapping of columns.")
    try:
        return json.dumps(dict(entry), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"row {number} holds what JSON has no form for: {error}. Give texts, numbers and lists."
        ) from error
