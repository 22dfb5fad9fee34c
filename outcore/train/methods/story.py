"""A run by a method beside the loop's own: the same settings, folders, log and checkpoints, and a foreign trainer.

The model is loaded into RAM and streamed (`outcore.hf`); optimizer and schedule are those of every run: AdamW with its
states in RAM, clipped by the exact norm. A checkpoint holds what the trainer saves, under our manifest, and a resumed
run goes on to the same bits. DPO and KTO compare with the model as it was: where adapters are trained these are
switched off for it, else its log-probabilities are computed before the first step and kept."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainingArguments,
)

import outcore.hf
from outcore import __version__
from outcore.checkpoint import Checkpoint
from outcore.checkpoint.export import check_login, export_model, how_to_load, push
from outcore.common.quantities import counted, format_s
from outcore.config import ConfigError, ProcessFacts, RunSettings, read_deepspeed_file, resolve
from outcore.config.fields import is_address
from outcore.data import DataError
from outcore.data.chat import end_tokens_of, ensure_chat_template
from outcore.model import ModelSettings, Origin, resolve_source
from outcore.model.facts import set_end_tokens
from outcore.model.forward import Pooling, read_pooling, unwrap, write_pooling
from outcore.monitor import plot_loss
from outcore.runs import TakenRun, take_run
from outcore.train.changes import began_from, settle_changes, settle_materials
from outcore.train.configure.rooms import epoch_words, lora_alpha, model_settings_of, run_length, schedule_of
from outcore.train.configure.schedule import LrSchedule, RunLength
from outcore.train.methods import distill, heads
from outcore.train.methods.rewards import RewardError, check_batch, judge_of
from outcore.train.methods.rows import split_rows
from outcore.train.methods.table import METHODS, MethodKind, trl_classes
from outcore.train.process import StopRequest, seed_everything
from outcore.train.process.alone import (
    in_one_process,
    optimizer_of,
    rows_hash,
    save_as_ours,
    train_to_end,
    trained_numel,
)
from outcore.train.process.log import RunLog, open_log
from outcore.train.run.data import default_seq_length, load_data, load_tokenizer
from outcore.train.run.job import RunJob

NEVER = 1 << 30
"""A number of steps that no run has."""


def run_method(job: RunJob) -> int:
    """Train by the run's method; the process's exit code."""
    config, kind = job.config, METHODS[job.config.method]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    settings = resolve(config, read_deepspeed_file(config.deepspeed_config), ProcessFacts(job.device.precision))
    if world_size > 1 or settings.precision == "fp16":
        raise ConfigError(f"method {config.method}: it trains on one GPU, in bf16 or fp32. Use --precision bf16.")
    if config.push_to_hub is not None:
        job.say(f"the model will be uploaded to {config.push_to_hub}, as {check_login(config.push_to_hub)}")
    classes = trl_classes(kind) if kind.trainer else None
    if kind.rolls_out:
        if config.teacher is None:
            judge_of(config)
        check_batch(config, settings.train_batch_size)
    taken = take_run(config, job.say)
    assert taken.lock is not None
    job.opened.callback(taken.lock.release)
    job.opened.callback(taken.folder.remove_empty)
    taken.folder.make()
    seed_everything(config.seed)
    with job.opened, in_one_process():
        return _Story(job, kind, settings, taken).tell(classes)


@dataclass(frozen=True)
class _Material:
    """Tokenizer and rows that a run is trained on."""

    tokenizer: Any
    rows: tuple[list[Any], list[Any]]
    """(to train on, to evaluate on)."""
    length: int
    """Tokens of a row at most."""


@dataclass(frozen=True)
class _Pools:
    """Tokenizer of an embedder, saved with how the model pools."""

    tokenizer: Any
    pooling: Pooling
    model: Any

    def save_pretrained(self, folder: str) -> None:
        self.tokenizer.save_pretrained(folder)
        write_pooling(Path(folder), self.pooling, self.model.config.get_text_config().hidden_size)


class _Story:
    """One run."""

    def __init__(self, job: RunJob, kind: MethodKind, settings: RunSettings, taken: TakenRun) -> None:
        self.job, self.config, self.kind, self.settings, self.taken = job, job.config, kind, settings, taken
        self.folder = taken.folder
        self.checkpoint: Checkpoint | None = taken.checkpoint
        self.saved_path: Path | None = None
        self.origin: Origin | None = None
        self.pooling: Pooling = "mean"
        self.ends: list[int] = []
        """Tokens that end the answers of the data."""
        self.rollouts: Any = None
        """Answers of the model itself, where the method learns from them."""
        job.saved = lambda: self.saved_path

    def tell(self, classes: tuple[Any, Any] | None) -> int:
        job, config = self.job, self.config
        job.phase = "preparing tokenizer and data"
        length = config.seq_length or default_seq_length(config, self.settings.precision)
        model_settings = model_settings_of(config, self.settings.precision, length)
        tokenizer = load_tokenizer(config, model_settings, job.say, self.checkpoint)
        heads.settle_ends(tokenizer, ends_answers=bool(self.kind.trainer))
        below = began_from(config, model_settings.model_name_or_path, resolve_source(model_settings).config)
        materials = settle_materials(config, below, tokenizer, self.checkpoint, job.say)
        made_of = {kind: asdict(material) for kind, material in materials.items()}
        trained, held = self._rows(model_settings, tokenizer)
        first = trained[0]
        talk = next((first[name] for name in ("chosen", "completion") if isinstance(first.get(name), list)), None)
        if self.kind.rolls_out and not isinstance(first["prompt"], str):
            talk = [{"role": "assistant", "content": "."}]
        if talk is not None:
            if note := ensure_chat_template(tokenizer):
                job.say(note)
            self.ends = _end_of([*first["prompt"], *talk], tokenizer)
        if self.kind.rolls_out:
            trained = self._open_rollouts(model_settings, tokenizer, trained, length)
        job.say(f"data: {counted(len(trained), 'row')} to train on, {counted(len(held), 'row')} to evaluate on")
        labels, problem = self._labels(trained, held)
        if labels is not None:
            job.say(f"labels: {', '.join(f'{number} {name}' for number, name in labels.items())}")
        job.phase = "loading the model"
        name = model_settings.model_name_or_path
        self.pooling = config.pooling or (read_pooling(name) if name else None) or "mean"
        by_word = "words" in first
        seen = self.rollouts.see if self.rollouts is not None else lambda loaded: None
        model, self.origin = heads.method_model(
            model_settings, tokenizer, labels, problem, is_by_word=by_word, on_loaded=seen
        )
        job.say(f"model: {sum(p.numel() for p in model.parameters()):,} parameters, {trained_numel(model):,} trainable")
        outcore.hf.stream(model, quantize=model_settings.quantize, compile=config.compile)
        step_rows = self.settings.train_batch_size // (self.rollouts.answers if self.rollouts is not None else 1)
        steps = run_length(config, len(trained), step_rows, self.settings.gradient_accumulation_steps)
        if words := epoch_words(config, len(trained), step_rows):
            job.say(words)
        schedule = schedule_of(config, self.settings.file, self.settings.learning_rate, steps.total_steps)
        fingerprint = self._fingerprint(schedule, [trained, held], labels)
        if self.checkpoint is not None:
            for line in settle_changes(self.checkpoint, fingerprint, on_purpose=config.continue_with_changes):
                job.say(f"resume: {line}, as asked")
        with StopRequest() as stop:
            log = self._log(stop, steps, model)
            material = _Material(tokenizer, (trained, held), length)
            trainer = self._trainer(classes, model, material, steps, schedule, log, labels)
            state = {"fingerprint": fingerprint, "method": config.method, "made_of": made_of}
            save_as_ours(
                trainer, self.folder.checkpoints, state, keep=config.save_total_limit, saved=self._saved, say=job.say
            )
            return self._train(trainer, log, stop, steps, tokenizer)

    def _open_rollouts(self, model: ModelSettings, tokenizer: Any, rows: list[Any], length: int) -> list[Any]:
        """Have answers judged from here on; the rows whose prompts leave room for them."""
        from outcore.train.methods.on_policy import TeacherRewards
        from outcore.train.methods.rollouts import Rollouts  # which brings the inference engine along

        teacher = None
        if self.config.teacher is not None:
            self.job.phase = "loading the teacher"
            said_of = distill.reader(self._teacher(model, tokenizer), tokenizer, str(rows[0]["prompt"]))
            teacher = TeacherRewards(said_of)
            teacher.try_out()
        self.rollouts = Rollouts(self.config, tokenizer, self.job.say, teacher)
        self.rollouts.open(self.job.opened)
        rows = self.rollouts.fitting(rows, length)
        step_rows = self.settings.train_batch_size // self.rollouts.answers
        if len(rows) < step_rows:
            raise DataError(f"A step takes {counted(step_rows, 'prompt')}, and the data has {len(rows)}.")
        return rows

    def _loads(self) -> str:
        """Tell in words what loads the exported model."""
        if self.config.method == "embed" and self.config.lora_export != "adapter":
            what = {"mean": "the mean of a text's last hidden states", "last": "its last token's last hidden state"}
            return f"AutoModel.from_pretrained loads it: {what[self.pooling]} is its vector"
        return how_to_load(self.folder.export)

    def _saved(self, path: Path) -> None:
        self.saved_path = path

    def _rows(self, model: ModelSettings, tokenizer: Any) -> tuple[Any, Any]:
        """(rows to train on, rows to evaluate on)."""
        job, config = self.job, self.config
        if self.kind.rolls_out:
            config = replace(config, eval_strategy="no")  # the reward in the log is of prompts that were never answered
        if self.kind.read is not None:
            read = self.kind.read
            return split_rows(config, lambda is_evaluation: read(config, is_evaluation, job.say))
        config = replace(config, packing="off")
        is_file = str(config.teacher).lower().endswith(".parquet")
        teacher = self._teacher(model, tokenizer)
        data = load_data(config, model, tokenizer, None, job.say)
        self.ends = data.summary.end_tokens
        sets = [distill.student_rows(one) for one in (data.train, data.eval) if one is not None]
        if is_file:
            file = Path(str(config.teacher)).expanduser()
            said = [distill.taught_by_file(one, file, tokenizer, job) for one in sets]
        else:
            cache = Path(config.data_cache_dir).expanduser()
            said = [distill.taught(one, teacher, cache, job, tokenizer) for one in sets]
        return said[0], said[1] if len(said) > 1 and config.eval_strategy != "no" else []

    def _teacher(self, model: ModelSettings, tokenizer: Any) -> ModelSettings:
        """Settings of the teacher. ConfigError where it has other tokens than the student."""
        name = self.config.teacher
        found = replace(model, model_name_or_path=name, preset=None, config_file=None, lora=None, quantize=None)
        if not str(name).lower().endswith(".parquet") and not is_address(name):
            of_teacher = replace(self.config, model_name_or_path=name, tokenizer_name_or_path=None)
            if load_tokenizer(of_teacher, found, self.job.say).get_vocab() != tokenizer.get_vocab():
                raise ConfigError(f"teacher: {name} has other tokens than the student; they must be the same.")
        return found

    def _labels(self, trained: list[Any], held: list[Any]) -> tuple[dict[int, str] | None, str | None]:
        """(labels of the head, what transformers takes its problem for)."""
        if not self.kind.has_head:
            return None, None
        if self.kind.trainer:
            return {0: "score"}, None
        if "document" in trained[0]:
            return {0: "relevant"}, "multi_label_classification"  # one label, by itself: its loss is a sigmoid's
        labels = heads.label_names([*trained, *held])
        if len(labels) < 2:
            raise ConfigError(
                f"method classify: every row has the label {labels[0]!r}; there is nothing to tell apart."
            )
        return labels, None if "words" in trained[0] else "single_label_classification"

    def _fingerprint(self, schedule: LrSchedule, rows: Any, labels: Mapping[int, str] | None) -> dict[str, Any]:
        config = self.config
        same = ["method", "beta", "teacher", "matryoshka", "lora_r", "lora_dropout", "lora_target_modules", "use_dora"]
        same += ["num_generations", "max_completion_length", "reward_function"] if self.kind.rolls_out else []
        same += ["use_rslora", "quantize", "seed", "seq_length"]
        return {
            **{name: getattr(config, name) for name in same},
            "pooling": self.pooling if config.method == "embed" else None,
            "lora_alpha": lora_alpha(config),
            "labels": None if labels is None else list(labels.values()),
            "rows": rows_hash(rows) if self.kind.read is not None else None,
            "precision": self.settings.precision,
            "train_batch_size": self.settings.train_batch_size,
            "schedule": asdict(schedule),
        }

    def _log(self, stop: StopRequest, steps: RunLength, model: Any) -> RunLog:
        header = {
            "versions": {"outcore": __version__, "torch": torch.__version__},
            "machine": {"device": self.job.device.reason},
            "model": {"words": type(model).__name__, "trainable_params": trained_numel(model)},
            "plan": {"total_steps": steps.total_steps, "train_batch_size": self.settings.train_batch_size},
        }
        return open_log(self.config, self.taken, steps.total_steps, header, stop, self.job.opened, self.job.say)

    def _trainer(
        self,
        classes: tuple[Any, Any] | None,
        model: Any,
        material: _Material,
        steps: RunLength,
        schedule: LrSchedule,
        log: RunLog,
        labels: dict[int, str] | None,
    ) -> Any:
        tokenizer, rows, length = material.tokenizer, material.rows, material.length
        given: dict[str, Any] = {"processing_class": tokenizer}
        arguments = self._arguments(steps, has_evaluation=bool(rows[1]))
        if classes is not None:
            trainer, settings = classes
            arguments |= {"max_length": length, **self.kind.settings}
            if self.rollouts is not None:
                del arguments["max_length"]
                trainer, causal = self.rollouts.trainer_of(trainer), unwrap(model)
                arguments |= self.rollouts.arguments()
                given |= {"reward_funcs": self.rollouts.rewards, "rollout_func": self.rollouts}
                set_end_tokens(causal, tokenizer, [*self.ends, *end_tokens_of(causal, tokenizer)])
            arguments |= {"beta": self.config.beta} if self.config.beta is not None else {}
            if self.kind.has_reference and not self.config.lora_r:
                arguments["precompute_ref_log_probs"] = True
        else:
            trainer, settings = Trainer, TrainingArguments
            arguments |= {"remove_unused_columns": False, "label_names": ["labels"]}
            if self.config.method == "distill":
                trainer, given = heads.trainer_by(distill.distillation_loss), {"data_collator": distill.collate}
            elif self.config.method == "embed":
                width = model.config.get_text_config().hidden_size
                sizes = heads.vector_sizes(self.config.matryoshka, width)
                if len(sizes) > 1:
                    model.config.matryoshka_dimensions = sorted(sizes)  # vLLM reads it by this name, too
                loss = partial(heads.embedding_loss, self.pooling, sizes)
                trainer, given = heads.trainer_by(loss), {"data_collator": heads.Partners(tokenizer, length)}
            else:
                first = rows[0][0]
                numbers = {name: number for number, name in (labels or {}).items()}
                rows = tuple(heads.encoded(some, tokenizer, length, numbers) for some in rows)  # type: ignore[assignment]
                collate = DataCollatorForTokenClassification if "words" in first else DataCollatorWithPadding
                given = {"data_collator": collate(tokenizer), "compute_metrics": heads.accuracy}
        self.job.phase = "preparing the trainer"
        told = settings(**arguments)
        told._n_gpu = min(told.n_gpu, 1)  # transformers would spread the model over all GPUs that it sees
        sets = [datasets.Dataset.from_list(some) if isinstance(some, list) else some for some in rows]
        made: Any = trainer(
            model,
            args=told,
            train_dataset=sets[0],
            eval_dataset=sets[1] if rows[1] else None,
            callbacks=[log],
            optimizers=optimizer_of(model, self.settings, schedule),
            **given,
        )
        if classes is None:
            made.model_accepts_loss_kwargs = False  # the loss is a mean: a step's is that of its micro-batches
        kept = len(made.train_dataset)
        if cut := len(rows[0]) - kept:
            words = f"{counted(cut, 'row')} have no answer left within seq_length {length} tokens"
            if not kept:
                raise DataError(f"All {words}. Raise --seq_length, or shorten the prompts.")
            self.job.say(f"WARNING: {words}, and are left out")
        if self.kind.has_reference and "ref" in getattr(made.model, "peft_config", {}):
            made.model.delete_adapter("ref")  # these adapters are new: switched off they are the model as it was
        for shown in (PrinterCallback, ProgressCallback):
            made.remove_callback(shown)
        return made

    def _arguments(self, steps: RunLength, *, has_evaluation: bool) -> dict[str, Any]:
        config, settings = self.config, self.settings
        saves = config.save_strategy != "no"
        return {
            "output_dir": str(self.folder.checkpoints),
            "per_device_train_batch_size": settings.per_device_train_batch_size,
            "per_device_eval_batch_size": config.per_device_eval_batch_size or settings.per_device_train_batch_size,
            "gradient_accumulation_steps": settings.gradient_accumulation_steps,
            "max_steps": steps.total_steps,
            "max_grad_norm": 0.0,  # the optimizer clips
            "learning_rate": settings.learning_rate,
            "logging_steps": 1,
            "eval_strategy": "steps" if has_evaluation else "no",
            "eval_steps": steps.eval_steps or NEVER,
            "save_strategy": "steps" if saves else "no",
            "save_steps": steps.save_steps or NEVER,
            "seed": config.seed,
            "report_to": [],
            "disable_tqdm": True,
            "bf16": False,  # the model is of the run's type, as in our own loop
            "use_cpu": not self.job.device.has_cuda,
            "gradient_checkpointing": False,  # layers are computed again in any case
        }

    def _kept_before(self, trainer: Any) -> str:
        """Save the steps before one that cannot be gone; tell in words how to go on."""
        step = trainer.state.global_step
        if not step or self.config.save_strategy == "no":
            return "Mend it, or leave such prompts out by --on_bad_reward skip."
        if not str(self.saved_path or "").endswith(f"{step:08d}") and (
            self.checkpoint is None or self.checkpoint.step != step
        ):
            trainer.state.num_input_tokens_seen = self.rollouts.tokens_before
            if trainer.state.epoch.is_integer():  # a resumed run begins this epoch again
                torch.set_rng_state(self.rollouts.random_before)
            trainer._save_checkpoint(trainer.model, None)
        return (
            f"The {counted(step, 'step')} before are saved. Mend it, or add --on_bad_reward skip, and go on with the "
            "same command and --resume_from_checkpoint auto."
        )

    def _train(self, trainer: Any, log: RunLog, stop: StopRequest, steps: RunLength, tokenizer: Any) -> int:
        job, config, folder = self.job, self.config, self.folder
        job.phase = "training"
        began_s = time.perf_counter()
        if self.checkpoint is not None:
            job.say(f"resumed from {self.checkpoint.path} at step {self.checkpoint.step}")
        try:
            train_to_end(trainer, self.checkpoint, steps.total_steps)
        except RewardError as error:
            raise RewardError(f"{error} {self._kept_before(trainer)}") from error
        if (step := trainer.state.global_step) < steps.total_steps:
            saved = "saved. Go on with the same command and --resume_from_checkpoint auto" * bool(self.saved_path)
            job.say(f"stopped at step {step} of {steps.total_steps} and {saved or 'not saved (save_strategy no)'}")
            return stop.exit_code
        if trainer.eval_dataset is not None and log.evaluated_step < step:
            trainer.evaluate()
        if config.export:
            stop.finishing, job.phase = "finishing the export", "exporting the model"
            adapter_only = config.lora_export == "adapter"
            embeds = config.method == "embed"
            origin = None if self.kind.has_head or embeds else self.origin  # else its head is left out on purpose
            set_end_tokens(unwrap(trainer.model), tokenizer, self.ends, job.say)
            export_model(
                folder.export, trainer.model, lambda p: p.detach().cpu(), origin=origin, adapter_only=adapter_only,
                tokenizer=_Pools(tokenizer, self.pooling, trainer.model) if embeds else tokenizer,
            )  # fmt: skip
        plot_loss(folder.metrics, folder.logs / "loss.png", title=folder.name)
        words = f"done: {counted(step, 'step')} in {format_s(time.perf_counter() - began_s)}"
        if log.first is not None:
            words += f"; {log.first[0]} {log.first[1]:.3f} -> {log.last:.3f}"
        elif self.rollouts is not None:
            words += "; no answer was judged, so nothing was learned"
        job.say(words + f"; validation {log.eval_words}" * bool(log.last_eval))
        saved = f"\ncheckpoints:        {folder.checkpoints}" * (config.save_strategy != "no")
        job.say(f"log and loss curve: {folder.logs}{saved}")
        if config.export:
            job.say(f"model:              {folder.export}  ({self._loads()})")
            if config.push_to_hub is not None:
                job.say(f"uploaded: {push(folder.export, config.push_to_hub, folder.name)}")
        return 0


def _end_of(talk: list[dict[str, Any]], tokenizer: Any) -> list[int]:
    """The special token by which the chat template ends a conversation; [] where it ends it by none."""
    ids = tokenizer(tokenizer.apply_chat_template(talk, tokenize=False).rstrip(), add_special_tokens=False)["input_ids"]
    return [token for token in ids[-1:] if token in tokenizer.added_tokens_decoder]
