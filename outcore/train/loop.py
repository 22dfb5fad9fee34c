"""The training loop: one readable loop in four blocks - step, evaluate, sample, save - over any engine.

Everything the run needs is handed in (`trainer_parts`); the loop owns the schedule, the data position and what is
written to disk. On Ctrl-C or SIGTERM the step is finished and saved. When a tier fills, the run stops with the tier and
the setting. A model whose last training or validation loss is not finite is never saved: it would take a good
checkpoint's place.

What the training loop is handed: the engine, the data, the schedule, how long the run is, and where it reports.

The best evaluation so far: which step had it, and how many evaluations since were no better.

What the model continues in a sample: the prompt of the user as the data would render it, or one of the data."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outcore.checkpoint import (
    Checkpoint,
    config_sha256,
    go_back_to,
    mend_export,
    open_checkpoint,
    save_checkpoint,
    step_folder,
)
from outcore.checkpoint.export import save_export_files
from outcore.common.quantities import counted
from outcore.config import TrainConfig
from outcore.data import IGNORE_INDEX, BatchStream, PreparedData
from outcore.engine.base import LOWER_RATE, Engine, MicroBatch, NonFiniteLossError, StepResult
from outcore.monitor import MetricsLog, RunProgress, Sampler, plot_loss
from outcore.monitor.metrics import StartupClock
from outcore.runs import RunFolder
from outcore.train.changes import TierFull
from outcore.train.configure.schedule import LrSchedule, RunLength
from outcore.train.process.random_state import load_random_state, save_random_state
from outcore.train.process.stop_request import StopRequest


@dataclass
class BestSoFar:
    """Lower is better. Its state goes into every checkpoint, so that a resumed run goes on counting."""

    metric: str = "eval_loss"
    patience: int | None = None
    """Evaluations in a row that were not better enough after which the run ends; None: it never does."""
    threshold: float = 0.0
    """Amount by which a value must be lower than the best before it not to count towards `patience`. A lower one by
    less is the best all the same."""
    step: int | None = None
    value: float = math.inf
    evaluations_since: int = 0

    def see(self, step: int, value: float) -> bool:
        """Take in an evaluation; True when it is the best so far."""
        is_enough = value < self.value - (self.threshold if self.step is not None else 0.0)
        self.evaluations_since = 0 if is_enough else self.evaluations_since + 1
        is_best = value < self.value
        if is_best:
            self.step, self.value = step, value
        return is_best

    @property
    def is_over(self) -> bool:
        """True when the run has waited long enough for a better one."""
        return self.patience is not None and self.evaluations_since >= self.patience

    @property
    def words(self) -> str:
        """Text for people: the best and where it was."""
        return f"step {self.step}, {self.metric} {self.value:.4f}"

    def state_dict(self) -> dict[str, Any]:
        """Collect what a checkpoint keeps."""
        return {"metric": self.metric, "step": self.step, "value": self.value, "since": self.evaluations_since}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint; another metric, or a checkpoint without one, starts anew."""
        if state and state.get("metric") == self.metric and state.get("step") is not None:
            self.step, self.value = int(state["step"]), float(state["value"])
            self.evaluations_since = int(state["since"])


@dataclass
class TrainerParts:
    """Parts that the loop works with."""

    config: TrainConfig
    folder: RunFolder
    engine: Engine
    stream: BatchStream
    eval_batches: Callable[[], Iterator[MicroBatch]] | None
    schedule: LrSchedule
    length: RunLength
    sampler: Sampler
    progress: RunProgress
    metrics: MetricsLog | None
    loggers: Any
    prompt_ids: list[int]
    decode: Callable[[list[int]], str]
    end_tokens: Collection[int]
    """Tokens at which a sample ends, as an answer does."""
    fingerprint: dict[str, Any]
    settings: dict[str, Any]
    """Saved with a checkpoint to tell what a resumed run has changed."""
    made_of: dict[str, Any]
    """Saved with a checkpoint to know its tokenizer and its base again."""
    warnings: Any
    """Turns a step's metrics into words for people, each once (`outcore.monitor.watches.run_warnings`)."""
    watches: tuple[Any, ...] = ()
    """Free space and memory, looked at every step; a verdict that says so stops the run after a save."""
    max_skips: int = 20
    best: BestSoFar | None = None
    """Which evaluation was the best, where the run keeps that model or stops early; None: it does neither."""
    keeps_data_position: bool = True
    """Whether a resumed run goes on in its data where the checkpoint was; not where the data was changed on purpose."""
    tokenizer: Any = None
    """Kept beside the weights of every checkpoint, so that it can be exported without the run; None: left out."""


DEFAULT_PROMPT = "def "
CHATS = ("messages", "sharegpt")


def sample_prompt(text: str | None, data: PreparedData, tokenizer: Any) -> list[int]:
    """Token ids. A chat's prompt goes through the chat template; without one of the user's own it is the beginning of
    an evaluation row, up to where the loss begins, and plain text gets a short start."""
    if text is not None:
        if data.summary.shape.startswith(CHATS) and getattr(tokenizer, "chat_template", None):
            turns = [{"role": "user", "content": text}]
            return list(
                tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
            )
        return tokenizer(text)["input_ids"]
    return _prompt_of_the_data(data) or tokenizer(DEFAULT_PROMPT)["input_ids"]


def _prompt_of_the_data(data: PreparedData) -> list[int]:
    """Tokens of the first row before the first that bears loss; [] of plain text, all of which does."""
    rows = data.eval if data.eval is not None else data.train
    batch = rows.batch([0])
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    first = next((index for index, label in enumerate(labels) if label != IGNORE_INDEX), 0)
    return ids[:first] if first > 1 else []


PICTURE_AFTER_S = 20.0
"""A save draws loss.png anew when it is older than this; the end of a run does in any case. Drawing takes 0.2 s."""
LATEST_STEPS = 1000
"""Steps whose seconds are kept, for later forecasts."""


class TrainingLoop:
    """Runs `TrainerParts` from a checkpoint, or from the beginning, to the end."""

    def __init__(self, parts: TrainerParts, clock: StartupClock) -> None:
        self.parts = parts
        self._clock: StartupClock | None = clock
        """Clock of the start, until the first step of this process is over, whose record has the start's parts."""
        self.step = 0
        self.tokens_seen = 0
        self.last_eval: dict[str, float] | None = None
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.steps_s: deque[float] = deque(maxlen=LATEST_STEPS)
        """Seconds of this process's latest steps."""
        self.num_steps = 0
        """Steps that this process took."""
        self.saved_step = -1
        self.saved_path: Path | None = None
        """The checkpoint of `saved_step`, saved or resumed from."""
        self.unsaved_because = ""
        """Why the last `save` wrote nothing."""
        self._doubt = ""
        """Reason against saving the model as it is, in words; '' for none."""
        self.is_main = parts.engine.rank == 0
        self._skips = 0
        self._drawn_s = time.monotonic()
        self._verdicts: list[Any] = []

    # --- the loop

    def run(self, stop: StopRequest) -> bool:
        """Train to the end; True when it was reached, False when a signal stopped the run (after saving)."""
        p = self.parts
        if full := self._full_tier():
            raise TierFull(f"{full} No step was taken.")
        batches = iter(p.stream)
        while self.step < p.length.total_steps and not self._is_over():
            self.train_one(batches)
            is_best = self.evaluate() if p.length.due(self.step, p.length.eval_steps) else False
            full = self._full_tier()
            stopping = stop.wanted() and self.step < p.length.total_steps  # after the last step a run ends as it would
            if stopping or full or is_best or p.length.due(self.step, p.length.save_steps):
                self.save()
            if stopping or full:
                self.plot()
            if full:
                saved = f"The run was saved at step {self.step} and can be resumed."
                raise TierFull(
                    f"{full} {saved if self.saved_step == self.step else f'Not saved: {self.unsaved_because}.'}"
                )
            if stopping:
                return False
            if p.length.due(self.step, p.length.sample_steps):
                self.sample()
        if self.step == p.length.total_steps:
            self.evaluate()
        if self._doubt:
            raise NonFiniteLossError(f"{self._doubt}, the run's last: {self._last_saved()}. To go on, {LOWER_RATE}.")
        if self.saved_step != self.step:
            self.save()
        self.sample()
        return True

    def _is_over(self) -> bool:
        """True when evaluations have not become better for as long as `early_stopping_patience` says."""
        best = self.parts.best
        if best is None or not best.is_over:
            return False
        by = f" by more than {best.threshold:g}; the best is" if best.threshold else " than"
        self.parts.progress.message(
            f"early stopping: {counted(best.evaluations_since, 'evaluation')} in a row were no better{by} that of "
            f"{best.words}"
        )
        return True

    def load_best(self) -> str:
        """Take back the weights of the best evaluation, for the export; words for people, '' when they are the last."""
        p = self.parts
        if p.best is None or p.best.step is None or p.best.step == self.step:
            return ""
        checkpoint = open_checkpoint(p.folder.checkpoints / step_folder(p.best.step))
        p.engine.load(checkpoint.path, checkpoint.trainer_state()["engine"])
        return f"the best model is exported: {p.best.words}; the last checkpoint is that of step {self.step}"

    def train_one(self, batches: Iterator[MicroBatch]) -> StepResult:
        """One optimizer step and its line in metrics.jsonl."""
        p = self.parts
        started_s = time.perf_counter()
        micro_batches = [next(batches) for _ in range(p.length.accumulation)]
        data_s = time.perf_counter() - started_s
        lr = p.schedule.lr(self.step)
        result = p.engine.train_step(micro_batches, lr)
        step_s = time.perf_counter() - started_s
        self.step += 1
        self.num_steps += 1
        self.steps_s.append(step_s)
        step_tokens = sum(batch["input_ids"].numel() for batch in micro_batches) * p.engine.world_size
        self.tokens_seen += step_tokens
        self._count_skip(result)
        self._doubt = "" if math.isfinite(result.loss) else f"the loss of step {self.step} is {result.loss}"
        self.first_loss = result.loss if self.first_loss is None else self.first_loss
        self.last_loss = result.loss
        record = {
            "step": self.step,
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "tokens": self.tokens_seen,
            "step_tokens": step_tokens,
            "loss_tokens": result.tokens,
            "step_s": step_s,
            "tokens_per_s": step_tokens / step_s,
            "skipped": result.skipped,
            "phase_s": {**result.phase_s, "data": data_s},
            **p.sampler.snapshot(_gpu_peak_bytes()),
        }
        if self._clock is not None:
            record["startup_s"] = self._clock.of_first_step(step_s)
            self._clock = None
        if result.aux_loss:
            record["aux_loss"] = result.aux_loss
        if p.metrics is not None:
            p.metrics.write_step(record)
        if self.is_main:
            p.loggers.log_step(record)
            p.progress.update(record)
            if result.said:
                p.progress.message(f"engine: {result.said}")
            for words in p.sampler.take_explanations():
                p.progress.message(f"note: {words}")
            for words in p.warnings.check(record, self._verdicts):
                p.progress.message(f"WARNING: {words}")
        return result

    def _full_tier(self) -> str | None:
        """Words of a watch that says stop; on several ranks all of them learn of it."""
        self._verdicts = [watch.check() for watch in self.parts.watches]
        words = [verdict.words for verdict in self._verdicts if verdict.must_stop]
        if self.parts.engine.world_size > 1:
            flag = torch.tensor(len(words), device=self.parts.engine.device)
            torch.distributed.all_reduce(flag)
            words = words or (["A drive or the RAM of another rank is full."] if int(flag) else [])
        return words[0] if words else None

    def _count_skip(self, result: StepResult) -> None:
        self._skips = self._skips + 1 if result.skipped else 0
        if self._skips >= self.parts.max_skips:
            raise NonFiniteLossError(
                f"{self._skips} steps in a row had gradients that overflow fp16, down to the smallest loss scale. "
                "Train in bf16 (--precision bf16) if the GPU has it, or lower --learning_rate."
            )

    def evaluate(self) -> bool:
        """Loss and perplexity on the evaluation set, into metrics.jsonl and on the screen; True when they are the best
        so far and the run keeps the best.

        NonFiniteLossError when the loss is not finite."""
        p = self.parts
        if p.eval_batches is None:
            return False
        p.progress.activity(f"evaluating at step {self.step}")
        result = p.engine.evaluate(p.eval_batches())
        perplexity = math.inf if result.loss >= 700 else math.exp(result.loss)
        self.last_eval = {"eval_loss": result.loss, "eval_perplexity": perplexity}
        if p.metrics is not None:
            p.metrics.write_eval({"step": self.step, **self.last_eval, "eval_tokens": result.tokens})
        if self.is_main:
            p.loggers.log_eval({"step": self.step, **self.last_eval})
            p.progress.message(
                f"step {self.step}: validation loss {result.loss:.4f}, perplexity {perplexity:.2f} "
                f"({result.tokens} tokens)"
            )
        if not result.tokens:
            return False
        self._doubt = ""
        if not math.isfinite(result.loss):
            raise NonFiniteLossError(
                f"the validation loss of step {self.step} is {result.loss}: {self._last_saved()}. To go on, "
                f"{LOWER_RATE}."
            )
        if p.best is None:
            return False
        value = self.last_loss if p.best.metric == "loss" else self.last_eval[p.best.metric]
        return value is not None and p.best.see(self.step, value)

    def _last_saved(self) -> str:
        before = f"; the last checkpoint is that of step {self.saved_step}"
        return "this model is not saved" + (before if self.saved_step > 0 else "")

    def sample(self) -> None:
        """A short greedy continuation, on the screen and in logs/<run>/samples.txt."""
        p = self.parts
        if not p.prompt_ids or p.config.sample_tokens == 0:
            return
        p.progress.activity(f"sampling at step {self.step}")
        ids = p.engine.sample(p.prompt_ids, p.config.sample_tokens, p.end_tokens)
        if self.is_main:
            prompt, text = p.decode(p.prompt_ids), p.decode(ids)
            with open(p.folder.logs / "samples.txt", "a", encoding="utf-8") as file:
                file.write(f"--- step {self.step}\n{prompt}>>>{text}\n")
            shown = (prompt[-60:] + ">>>" + text[:120]).replace("\n", "\\n")
            p.progress.message(f"step {self.step}: sample: {shown}")

    # --- checkpoints

    def save(self) -> None:
        """A checkpoint of everything, and the loss curve beside the log, unless that is new."""
        p = self.parts
        self.unsaved_because = "save_strategy no" if p.config.save_strategy == "no" else self._doubt
        if self.unsaved_because:
            if self._doubt and self.is_main:
                p.progress.message(f"WARNING: {self._doubt}: {self._last_saved()}")
            return
        p.progress.activity(f"saving step {self.step}")
        if p.metrics is not None:
            p.metrics.sync()
        self.saved_path = save_checkpoint(
            p.folder.checkpoints,
            self.step,
            self._write_state,
            needed_bytes=p.engine.facts().state_bytes,
            keep=p.config.save_total_limit,
            best_step=p.best.step if p.best is not None else None,
            is_writer=self.is_main,
            barrier=self._barrier,
            say=p.progress.message,
        )
        self.saved_step = self.step
        if time.monotonic() - self._drawn_s > PICTURE_AFTER_S:
            self.plot()

    def plot(self) -> None:
        """logs/<run>/loss.png from metrics.jsonl."""
        if not self.is_main or self.parts.metrics is None:
            return
        self._drawn_s = time.monotonic()
        try:
            plot_loss(self.parts.folder.metrics, self.parts.folder.logs / "loss.png", title=self.parts.folder.name)
        except OSError as error:  # the run and its checkpoints are worth more than its picture
            self.parts.progress.message(f"WARNING: loss.png could not be written: {error}")

    def _barrier(self) -> None:
        if self.parts.engine.world_size > 1:
            torch.distributed.barrier()

    def _write_state(self, folder: Path, on_file: Callable[[Path, int], None]) -> dict[str, Any]:
        p = self.parts
        engine_state = p.engine.save(folder, on_file)
        numbers, path, crc = save_random_state(folder, p.engine.rank)
        if self.is_main:
            on_file(path, crc)
            save_export_files(folder, p.engine.loaded.model, p.tokenizer)
        return {
            "config_sha256": config_sha256(p.fingerprint.get("model")),
            "tokens_seen": self.tokens_seen,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "best": p.best.state_dict() if p.best is not None else None,
            "engine": engine_state,
            "data": p.stream.state_dict(),
            "random": numbers,
            "world_size": p.engine.world_size,
            "fingerprint": p.fingerprint,
            "settings": p.settings,
            "made_of": p.made_of,
        }

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restore weights, optimizer, data position and random state; the next step is the one after the save."""
        p = self.parts
        state = checkpoint.trainer_state()
        p.engine.load(checkpoint.path, state["engine"])
        if p.keeps_data_position:
            p.stream.load_state_dict(state["data"])
        self.step = self.saved_step = int(state["step"])
        self.saved_path = checkpoint.path
        self.tokens_seen = int(state["tokens_seen"])
        self.first_loss, self.last_loss = state.get("first_loss"), state.get("last_loss")
        if p.best is not None:
            p.best.load_state_dict(state.get("best"))
        if self.is_main and checkpoint.damaged_export:
            p.progress.message(f"note: {checkpoint.damaged_export[0]} Configuration and tokenizer are written again.")
            try:
                checkpoint = mend_export(
                    checkpoint, lambda folder: save_export_files(folder, p.engine.loaded.model, p.tokenizer)
                )
            except OSError as error:  # the weights are there, and the next save has these files again
                p.progress.message(f"WARNING: {error}")
        if self.is_main and checkpoint.path.resolve().parent == p.folder.checkpoints.resolve():
            left_behind = [path.name for path in go_back_to(checkpoint)]
            if left_behind:
                p.progress.message(
                    f"note: {', '.join(left_behind)} of this run: left behind. From here on auto takes what is saved "
                    "on this way, and they are the first to be removed."
                )
        if not load_random_state(checkpoint.path, p.engine.rank, state["random"]):
            p.progress.message(
                f"note: the checkpoint was made with {state['world_size']} rank(s): rank {p.engine.rank} draws new "
                "dropout masks."
            )


def _gpu_peak_bytes() -> int | None:
    """The allocator's peak since the last call."""
    if not torch.cuda.is_available():
        return None
    peak_bytes = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak_bytes
