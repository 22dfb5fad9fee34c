"""A run with pictures, from the settings to the exported model.

The model stays transformers' own, streamed in place (`outcore.hf`), and its Trainer turns the steps, so that positions
of several axes, masks and what a tower adds between layers are as they are there. Settings that this way does not read
are refused, not ignored. The export is the whole model: what was not trained has the bytes it came with."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from outcore import hf
from outcore.checkpoint.export import how_to_load
from outcore.common import file_errors, finish_publishing, make_folder, publish_folder, remove_tree
from outcore.common.listing import write_checksums
from outcore.common.output import printable
from outcore.common.quantities import counted, format_count, format_gib, format_s
from outcore.config import ConfigError, ProcessFacts, RunSettings, TrainConfig, read_deepspeed_file, resolve
from outcore.data import DataError, weighted_source
from outcore.data.chat import read_template
from outcore.data.layout import IGNORE_INDEX
from outcore.data.look import data_settings_of
from outcore.data.pictures import PictureEncoder, PictureRow, picture_rows
from outcore.machine import available_ram_bytes
from outcore.model.adapters import linear_names
from outcore.model.facts import set_end_tokens
from outcore.runs import RunFolder, take_run
from outcore.train.changes import began_from, settle_changes, settle_materials
from outcore.train.configure.rooms import RunLength, choose_device, epoch_words, lora_alpha, run_length, schedule_of
from outcore.train.process import StopRequest
from outcore.train.process.alone import (
    batches_ahead,
    in_one_process,
    optimizer_of,
    rows_hash,
    save_as_ours,
    train_to_end,
)
from outcore.train.process.log import RunLog, open_log

READ = frozenset((
    "model_name_or_path", "trust_remote_code", "attn_implementation", "seq_length", "train_vision", "dataset",
    "dataset_config", "dataset_split", "data_format", "prompt_column", "completion_column", "messages_column",
    "chat_template", "streaming", "on_bad_row", "max_train_samples", "lora_r", "lora_alpha", "lora_dropout",
    "lora_target_modules", "use_rslora", "use_dora", "quantize", "lora_export", "per_device_train_batch_size",
    "gradient_accumulation_steps", "learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm",
    "lr_scheduler_type", "min_lr_ratio", "lr_decay_ratio", "warmup_ratio", "warmup_steps", "max_steps",
    "num_train_epochs", "seed", "run_name", "logging_steps", "save_steps", "save_strategy", "save_total_limit",
    "resume_from_checkpoint", "checkpoint_dir", "log_dir", "export_dir", "export", "deepspeed_config",
    "nvme_offload_path", "ram_budget_gib", "compile", "local_rank", "report_to", "continue_with_changes", "base_hash",
))  # fmt: skip
"""Settings that a run with pictures reads."""
SAME = (
    "train_vision", "lora_r", "lora_dropout", "lora_target_modules", "use_dora", "use_rslora", "quantize", "seed",
    "seq_length",
)  # fmt: skip
"""Settings that a resumed run has as the one that was saved."""
ROWS_FOR_ENDS = 64
"""Rows that are looked at for what ends their answers."""


def say(line: str) -> None:
    """A line on the screen."""
    print(printable(line), flush=True)


def train_vision(config: TrainConfig) -> int:
    """Train, save and export; the process's exit code."""
    _check(config)
    began_s, name = time.perf_counter(), str(config.model_name_or_path)
    device = choose_device(config)
    settings = resolve(config, read_deepspeed_file(config.deepspeed_config), ProcessFacts(device.precision, 1, 1))
    rows = [row for source in config.dataset for row in _rows(config, source)]
    length = run_length(config, len(rows), settings.train_batch_size, settings.gradient_accumulation_steps)
    with ExitStack() as opened:
        opened.enter_context(in_one_process())
        taken = take_run(config, say)
        folder, checkpoint = taken.folder, taken.checkpoint
        assert taken.lock is not None
        opened.callback(taken.lock.release)
        opened.callback(folder.remove_empty)
        if checkpoint is None and (old := list(folder.checkpoints.glob("checkpoint-*"))):
            raise ConfigError(
                f"{old[0]} was saved by an older version, whose checkpoints are not resumed: finish the run with that "
                "version, or choose another --run_name"
            )
        folder.make()
        model, encoder = _load(config, name)
        below = began_from(config, os.path.abspath(name) if os.path.isdir(name) else name, model.config)
        made_of = settle_materials(config, below, encoder.tokenizer, checkpoint, say)
        schedule = schedule_of(config, settings.file, settings.learning_rate, length.total_steps)
        fingerprint = {
            **{name: getattr(config, name) for name in SAME},
            "lora_alpha": lora_alpha(config),
            "rows": rows_hash([(row.example.messages, row.values) for row in rows]),
            "train_batch_size": settings.train_batch_size,
            "schedule": asdict(schedule),
        }
        if checkpoint is not None:
            for line in settle_changes(checkpoint, fingerprint, on_purpose=config.continue_with_changes):
                say(f"resume: {line}, as asked")
        say(f"data: {counted(len(rows), 'row')}, {counted(sum(len(row.values) for row in rows), 'picture')}")
        if _comes_again(config, settings, length, rows):
            hf.TowerOutputs(room_bytes := available_ram_bytes() // 4, evicts=False).keep_of(model)
            say(f"vision: later epochs reuse what the frozen tower made, up to {format_gib(room_bytes)} of RAM of it")
        if words := epoch_words(config, len(rows), settings.train_batch_size):
            say(words)
        ends = _answer_ends(encoder, rows[:ROWS_FOR_ENDS])
        stop = opened.enter_context(StopRequest())
        plan = {"total_steps": length.total_steps, "train_batch_size": settings.train_batch_size, "engine": "hf"}
        log = open_log(config, taken, length.total_steps, {"plan": plan}, stop, opened, say)
        trainer = _trainer(config, settings, length, model, rows, encoder, folder, log)
        state = {
            "fingerprint": fingerprint,
            "method": "train_vision",
            "made_of": {kind: asdict(material) for kind, material in made_of.items()},
        }
        save_as_ours(trainer, folder.checkpoints, state, keep=config.save_total_limit, saved=lambda path: None, say=say)
        if checkpoint is not None:
            say(f"resumed from {checkpoint.path} at step {checkpoint.step}")
        with batches_ahead(trainer):
            train_to_end(trainer, checkpoint, length.total_steps)
        if (step := trainer.state.global_step) < length.total_steps:
            saved = config.save_strategy != "no"
            words = "saved. Go on with the same command and --resume_from_checkpoint auto"
            say(f"stopped at step {step} of {length.total_steps} and {words if saved else 'not saved'}")
            return stop.exit_code
        saved = f"\ncheckpoints: {folder.checkpoints}" * (config.save_strategy != "no")
        say(f"done: {counted(step, 'step')} in {format_s(time.perf_counter() - began_s)}{saved}")
        stop.finishing = "finishing the export"
        if config.export:
            _export(config, name, model, encoder, folder.export, ends)
            say(f"model: {folder.export}  ({how_to_load(folder.export)})")
    return 0


def _check(config: TrainConfig) -> None:
    plain = TrainConfig()
    if config.method != plain.method:
        raise ConfigError(
            f"method {config.method}: this command trains pictures on answers alone. From your own code TRL's trainers "
            "train an image-text model that outcore.hf.stream returned (docs/vision.md)."
        )
    others = [n for n, value in vars(config).items() if n not in READ and value != getattr(plain, n)]
    if others:
        raise ConfigError(f"train_vision: runs with pictures do not read {', '.join(sorted(others))}; leave it out")
    if config.model_name_or_path is None:
        raise ConfigError("train_vision: name a trained image-text model, a folder or a hub id (--model_name_or_path)")
    if config.train_vision == "lora" and not config.lora_r:
        raise ConfigError("train_vision lora: give the adapters a rank (--lora_r 16), or train the tower whole (full)")
    if config.train_vision == "full" and config.lora_r and config.lora_export == "adapter":
        raise ConfigError("train_vision full: an adapter's file holds no tower; use --lora_export merged")


def _rows(config: TrainConfig, source: str) -> list[PictureRow]:
    weighted = weighted_source(source)
    if weighted.name == "embedded" or weighted.weight != 1.0:
        raise ConfigError(f"train_vision: {source}: name files with pictures (--dataset rows.jsonl), without weights")
    return picture_rows(data_settings_of(config, config.seq_length or 1024, "off"), weighted.name, say)


def _load(config: TrainConfig, name: str) -> tuple[Any, Any]:
    """The streamed model, with what is to be trained, and its encoder."""
    trust = config.trust_remote_code
    model = hf.load_image_text(name, trust_remote_code=trust, attention=config.attn_implementation)
    template = None if config.chat_template is None else read_template(config.chat_template)
    encoder = hf.encoder_of(name, model, max_tokens=config.seq_length, chat_template=template, trust_remote_code=trust)
    if model.dtype == torch.float16:
        _leave_fp16(config, name, model)
    vision = hf.vision_parameters(model)
    if not vision:
        raise ConfigError(f"{name}: nothing of it is known to see; transformers names no text model in it")
    for parameter_name, parameter in model.named_parameters():
        is_seen = parameter_name in vision
        parameter.requires_grad_(config.train_vision == "full" if is_seen else not config.lora_r)
    quantize = None if config.quantize == "none" else config.quantize
    nvme = config.nvme_offload_path.split(",") if config.nvme_offload_path else None
    ram_gib = config.ram_budget_gib if nvme else None
    hf.stream(model, quantize=quantize, nvme_offload_path=nvme, ram_gib=ram_gib, compile=config.compile)
    if config.lora_r:
        whole = {n: p for n, p in vision.items() if p.requires_grad}
        model = _adapted(config, model, vision)
        for parameter in whole.values():
            parameter.requires_grad_(True)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    seen = sum(p.numel() for p in vision.values())
    say(
        f"model: {name}, {type(model).__name__}, {format_count(trained)} parameters trained; its vision "
        f"({format_count(seen)}): {config.train_vision}"
    )
    return model, encoder


def _leave_fp16(config: TrainConfig, name: str, model: Any) -> None:
    """Compute a base that is published in fp16 in another type: its gradients would vanish without a loss scale. The
    export is merged into the published weights."""
    if not config.lora_r or config.train_vision == "full":
        raise ConfigError(
            f"{name} is published in fp16, which is not trained without a loss scale: train adapters (--lora_r 16 and "
            "--train_vision none or lora), or convert it to bf16"
        )
    kind = torch.bfloat16 if choose_device(config).precision == "bf16" else torch.float32
    say(f"precision: the published fp16 weights are computed in {str(kind).removeprefix('torch.')}")
    model.to(kind)


def _adapted(config: TrainConfig, model: Any, vision: dict[str, Any]) -> Any:
    """The model with adapters on the linear layers of its text, and under `lora` of its vision."""
    from peft import LoraConfig, get_peft_model

    names = linear_names(model)
    seeing = {name for name in names if any(p.startswith(f"{name}.") for p in vision)}
    if config.lora_target_modules not in ("auto", "all-linear"):
        wanted = config.lora_target_modules.split(",")
        names = [n for n in names if any(n == w or n.endswith(f".{w}") for w in wanted)]
    if config.train_vision != "lora":
        names = [name for name in names if name not in seeing]
    if not names:
        raise ConfigError(f"lora_target_modules {config.lora_target_modules}: no linear layer is called so")
    torch.manual_seed(config.seed)
    adapters = LoraConfig(
        r=config.lora_r,
        lora_alpha=lora_alpha(config),  # pyright: ignore[reportArgumentType]  # peft takes any number
        lora_dropout=config.lora_dropout,
        target_modules=names,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
    )
    return get_peft_model(model, adapters)


def _trainer(
    config: TrainConfig, settings: Any, length: RunLength, model: Any, rows: list[PictureRow], encoder: Any,
    folder: RunFolder, log: RunLog,
) -> Any:  # fmt: skip
    from transformers import PrinterCallback, Trainer, TrainingArguments

    schedule = schedule_of(config, settings.file, settings.learning_rate, length.total_steps)
    arguments = TrainingArguments(
        output_dir=str(folder.checkpoints),
        max_steps=length.total_steps,
        per_device_train_batch_size=settings.per_device_train_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        max_grad_norm=0.0,  # the optimizer clips, by the exact norm
        logging_steps=config.logging_steps,
        save_strategy=config.save_strategy,
        save_steps=length.save_steps or length.total_steps,
        seed=config.seed,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,  # batches that wait would hold it, and it is scarce
        use_cpu=not torch.cuda.is_available(),
    )
    arguments._n_gpu = 1  # the model streams through one; more would each want a copy
    trainer = Trainer(
        model,
        args=arguments,
        train_dataset=rows,  # type: ignore[arg-type]  # a list has a length and takes an index
        data_collator=_collator(encoder),
        optimizers=optimizer_of(model, settings, schedule),
        callbacks=[log],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _collator(encoder: Any) -> Callable[[list[PictureRow]], dict[str, torch.Tensor]]:
    def collate(rows: list[PictureRow]) -> dict[str, torch.Tensor]:
        talks, untrained = [row.conversation() for row in rows], [row.example.untrained for row in rows]
        return encoder.batch(talks, untrained, [row.where for row in rows])

    return collate


def _comes_again(config: TrainConfig, settings: RunSettings, length: RunLength, rows: list[PictureRow]) -> bool:
    """Whether the frozen tower will get the same pictures again, which they are only with the same company: a row by
    itself."""
    is_alone = config.train_vision == "none" and settings.per_device_train_batch_size == 1
    return is_alone and length.total_steps * settings.train_batch_size > len(rows)


def _answer_ends(encoder: PictureEncoder, rows: list[PictureRow]) -> set[int]:
    """Special tokens that end the rows' answers, of rows that can be read."""
    ends = set[int]()
    for row in rows:
        with suppress(DataError):  # said when its turn comes
            labels = encoder.batch([row.conversation()], [row.example.untrained], [row.where])["labels"][0]
            ends.add(int(labels[labels != IGNORE_INDEX][-1]))
    return ends & set(encoder.tokenizer.added_tokens_decoder)


def _export(config: TrainConfig, name: str, model: Any, encoder: Any, folder: Path, ends: set[int]) -> None:
    """Write the whole model with its processor, or the adapters alone. Adapters are merged into the model as it was
    published, so that a packed base loses nothing by it. What loads either ends its answers with `ends`."""
    from peft import PeftModel

    if config.lora_r and config.lora_export == "merged":
        whole = {
            n: p.detach() for n, p in model.get_base_model().named_parameters() if p.requires_grad and "lora_" not in n
        }
        base = hf.load_image_text(name, trust_remote_code=config.trust_remote_code)
        with torch.no_grad():
            for parameter_name, parameter in base.named_parameters():
                if parameter_name in whole:
                    parameter.copy_(whole[parameter_name])
        with TemporaryDirectory() as adapter:
            model.save_pretrained(adapter)
            model = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    plain = model.get_base_model() if hasattr(model, "peft_config") else model
    set_end_tokens(plain, encoder.tokenizer, ends, say)
    aside = folder.with_name(f".{folder.name}.part")
    with file_errors("exporting the model", folder):
        make_folder(folder.parent)
        finish_publishing(folder)
        remove_tree(aside)
        model.save_pretrained(aside)
        if plain.generation_config is not None:
            plain.generation_config.save_pretrained(aside)
        encoder.save(aside)
        write_checksums(aside, {})
        publish_folder(aside, folder)
