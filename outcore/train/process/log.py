"""Log of a foreign trainer's steps as a run has it: lines of metrics.jsonl, the screen, checkpoints, stop on Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from transformers import TrainerCallback

from outcore.config import TrainConfig
from outcore.monitor import MetricsLog, RunProgress, make_loggers
from outcore.runs import TakenRun
from outcore.train.process.stop_request import StopRequest

OF_TRAINER = ("epoch", "step", "total_flos", "train_loss")
RENAMED: dict[str, str] = {"learning_rate": "lr", "num_tokens": "tokens"}
OF_ROLLOUTS = {
    "reward": "reward", "kl": "KL", "entropy": "entropy", "clip_ratio/region_mean": "clipped",
    "completions/mean_length": "length", "completions/clipped_ratio": "truncated", "mismatch": "mismatch",
}  # fmt: skip
"""Figures of a step with rollouts that people are told, by their names for people."""
SHOWN = ("loss", "accuracy", "rewards/accuracies", "rewards/margins")
"""Figures of an evaluation that people are told; metrics.jsonl has all."""


def open_log(
    config: TrainConfig, taken: TakenRun, total_steps: int, header: dict[str, Any], stop: StopRequest,
    opened: ExitStack, say: Callable[[str], None],
) -> RunLog:  # fmt: skip
    """The log of a run that begins, or goes on from its checkpoint; `opened` closes it."""
    folder, resumed = taken.folder, None if taken.checkpoint is None else taken.checkpoint.step
    metrics = MetricsLog(folder.metrics, resume_step=resumed, say=say)
    opened.callback(metrics.close)
    loggers = make_loggers(config.report_to, folder.logs, resume_step=resumed, say=say)
    opened.callback(loggers.close)
    progress = RunProgress(total_steps, first_step=resumed or 0, plain_every_steps=config.logging_steps)
    opened.callback(progress.close)
    header = {"run": folder.name, **header, "config": asdict(config)}
    metrics.write_header(header)
    loggers.log_header(header)
    return RunLog(metrics, progress, loggers, stop)


class RunLog(TrainerCallback):
    """Writes a run's log as our own loop does, and has the trainer save and end where a signal asks for it."""

    def __init__(self, metrics: MetricsLog, progress: RunProgress, loggers: Any, stop: StopRequest) -> None:
        self._metrics, self._progress, self._loggers, self._stop = metrics, progress, loggers, stop
        self.first: tuple[str, float] | None = None
        """The measure and its value in the first step; `last` is that in the last. It is the reward where answers are
        judged, whose loss is no measure, else the loss."""
        self.last = 0.0
        self.last_eval: dict[str, float] = {}
        self.evaluated_step = -1
        self._began_s = self._took_s = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._took_s = time.perf_counter() - self._began_s
        if self._stop.wanted() and state.global_step < state.max_steps:
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        said: dict[str, Any] = {
            name: value
            for name, value in (logs or {}).items()
            if name not in OF_TRAINER and not name.endswith(("_runtime", "_per_second"))
        }
        if not state.global_step or not said:
            return
        if "loss" in said:
            optimizer = getattr(others.get("optimizer"), "optimizer", others.get("optimizer"))
            norm = getattr(optimizer, "grad_norm", None)
            record: dict[str, Any] = {RENAMED.get(name, name): value for name, value in said.items()}
            record |= {"step": state.global_step, "step_s": self._took_s, "skipped": bool(said.get("skipped"))}
            record |= {"grad_norm": 0.0 if record["skipped"] else norm} if norm is not None else {}
            name = "reward" if "reward" in said else "loss"
            if said[name] is not None:  # as the reward of a step in which none was given
                self.first, self.last = self.first or (name, said[name]), said[name]
            self._metrics.write_step(record)
            self._loggers.log_step(record)
            told = [f"{word} {said[name]:.3g}" for name, word in OF_ROLLOUTS.items() if said.get(name) is not None]
            self._progress.update({**record, "told": told})
        elif "eval_loss" in said:
            self.last_eval = {name: value for name, value in said.items() if name.startswith("eval_")}
            self.evaluated_step = state.global_step
            record = {"step": state.global_step, **self.last_eval}
            self._metrics.write_eval(record)
            self._loggers.log_eval(record)
            self._progress.message(f"step {state.global_step}: validation {self.eval_words}")

    @property
    def eval_words(self) -> str:
        """The last evaluation, for people; '' before the first."""
        found = {name: self.last_eval.get(f"eval_{name}") for name in SHOWN}
        return ", ".join(f"{name} {value:.4f}" for name, value in found.items() if value is not None)
