"""The engine's decision about a run and the planner's forecast of exactly that run, before data or a weight is read.

Room on the drives to which a run writes: what they must keep free, asked before the start and watched."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from outcore.checkpoint import SPACE_MARGIN_BYTES, Checkpoint
from outcore.common import file_errors
from outcore.common.files import nearest_existing
from outcore.common.quantities import ELEMENT_BYTES, format_gb
from outcore.config import ConfigError, RunSettings, TrainConfig
from outcore.engine.base import Decision, Engine, Host
from outcore.engine.decide import decide, open_engine
from outcore.machine import available_ram_bytes, detect_os
from outcore.model import ModelSettings, resolve_source
from outcore.model.trial import aux_coefficient
from outcore.monitor.watches import SpaceWatch
from outcore.plan import Plan
from outcore.plan.run import Forecast, Forecaster, drive_performance, write_combined_measured
from outcore.runs import RunFolder
from outcore.train.changes import TierFull
from outcore.train.run.data import load_tokenizer
from outcore.train.run.job import RunJob
from outcore.train.run.telling import tell_at_exit

SPACE_RESERVE_BYTES = 1 << 30
"""Free space below which a run saves and stops: a drive that fills up takes the whole system with it."""


def kept_on_drive(config: TrainConfig, nvme_path: str | None) -> int:
    """Checkpoints that the run keeps on the drive to which it offloads, or on the only one; 0: none."""
    if config.save_strategy == "no":
        return 0
    drives = {os.stat(nearest_existing(path)).st_dev for path in (config.checkpoint_dir, nvme_path) if path is not None}
    return config.save_total_limit if len(drives) == 1 else 0


def export_bytes(config: TrainConfig, total: int, trainable: int, precision: str) -> int:
    """Bytes of the exported model with this many parameters; 0: none is written."""
    exported = trainable if config.lora_r and config.lora_export == "adapter" else total
    return exported * ELEMENT_BYTES[precision] if config.export else 0


def space_reserves(
    config: TrainConfig, folder: RunFolder, nvme_path: str | None, checkpoint_bytes: int, exported_bytes: int
) -> dict[Path, int]:
    """Free bytes that each folder to which the run writes must keep: a checkpoint's, the export's, or a little.

    What is offloaded to `nvme_path` has all its space from the start."""
    reserves = {folder.logs: SPACE_RESERVE_BYTES}
    if nvme_path:
        reserves[Path(nvme_path)] = SPACE_RESERVE_BYTES
    saved_bytes = 0 if config.save_strategy == "no" else checkpoint_bytes
    for path, n_bytes in ((folder.checkpoints, saved_bytes), (folder.export.parent, exported_bytes)):
        if n_bytes:
            reserves[path] = max(SPACE_RESERVE_BYTES, n_bytes + SPACE_MARGIN_BYTES, reserves.get(path, 0))
    return reserves


def check_drives(config: TrainConfig, folder: RunFolder, plan: Plan | None, precision: str) -> None:
    """TierFull, before anything is loaded, when a checkpoint or the finished model will have no room. `plan` None: the
    model cannot be counted, so that the drives are looked at before the first step only."""
    if plan is None:
        return
    exported = export_bytes(config, plan.params, plan.trainable_params, precision)
    verdict = SpaceWatch(space_reserves(config, folder, None, plan.checkpoint_bytes, exported)).check()
    if verdict.must_stop:
        saved = 0 if config.save_strategy == "no" else plan.checkpoint_bytes
        raise TierFull(
            f"{verdict.words} Of this run a checkpoint takes {format_gb(saved)} (--checkpoint_dir DIR moves it) and "
            f"the finished model {format_gb(exported)} (--export_dir DIR, or --no_export); --log_dir DIR moves its "
            "logs. Nothing was loaded."
        )


class Planned:
    """The engine's decision and the forecast of it, on one host and for one model."""

    def __init__(
        self,
        job: RunJob,
        settings: RunSettings,
        model: ModelSettings,
        name: str,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.job, self.settings, self.model = job, settings, model
        self.host = Host(
            job.device.has_cuda,
            available_ram_bytes(),
            name,
            job.config.local_rank,
            detect_os(Path("/")).is_wsl2,
            write_combined_measured() if job.device.has_cuda else None,
        )
        with file_errors("preparing the tokenizer", job.config.data_cache_dir):
            self.tokenizer = load_tokenizer(job.config, model, job.say, checkpoint)
        num_gpus = settings.world_size
        self.forecaster = Forecaster(model, self.tokenizer, has_cuda=self.host.has_cuda, num_gpus=num_gpus)

    def decide(self, checkpoint: Checkpoint | None = None) -> Decision:
        """The engine's decision. An open cut is settled first: as it was in `checkpoint`, else by forecast."""
        if self.settings.cut_is_open:
            micro, why = self._cut(checkpoint)
            self.settings = self.settings.cut(micro, f"auto: {why}")
            of = self.settings.gradient_accumulation_steps
            self.job.say(f"micro-batch auto: {of} of {micro} row(s) a step and process ({why})")
        decision = decide(self.settings, self.model, self.host, self.tokenizer, self.job.say)
        self._settle(decision)
        return decision

    def _cut(self, checkpoint: Checkpoint | None) -> tuple[int, str]:
        """(rows of a micro-batch, why), on all ranks alike. A resumed run keeps its cut, and so its bits."""
        settings, usual = self.settings, self.settings.per_device_train_batch_size
        saved = checkpoint.trainer_state().get("settings", {}) if checkpoint else {}
        was = saved.get("per_device_train_batch_size")
        if was and usual * settings.gradient_accumulation_steps % was == 0:
            return was, "as in the checkpoint"
        if self.model.model_module is None and aux_coefficient(resolve_source(self.model, self.tokenizer)):
            return usual, "the experts' balancing loss is of a micro-batch, so another cut would be another loss"
        decision = decide(settings, self.model, self.host, self.tokenizer, lambda line: None)
        found = self.forecaster.best_cut(settings, decision.layout, kept_on_drive(self.job.config, decision.nvme_path))
        decision.forget()
        if settings.world_size > 1:  # free memory differs by a few bytes between ranks: rank 0's counts
            shared = [found]
            torch.distributed.broadcast_object_list(shared, src=0)
            found = shared[0]
        return found

    def _settle(self, decision: Decision) -> None:
        if self.job.config.trace and not decision.draws_timeline:
            decision.forget()
            raise ConfigError(
                f"trace: a timeline is recorded by the streaming engine only, and this run is {decision.name}'s "
                f"({decision.reason}). Leave --trace out, or use --engine stream."
            )
        self.job.engine_name = decision.name
        self.job.micro_batch_size = self.settings.per_device_train_batch_size

    def forecast(self, decision: Decision) -> Forecast:
        kept = kept_on_drive(self.job.config, decision.nvme_path)
        return self.forecaster.of(decision.settings, decision.layout, kept)

    def check(self, decision: Decision) -> None:
        """ConfigError, on all ranks alike, for a run that cannot fit; with fit_check warn a line instead.

        What the forecast only leaves free (the page cache's and the desktop's reserve, room for an evaluation) does not
        count: a run is refused when its own bytes do not fit."""
        say, forecast = self.job.say, self.forecast(decision)
        why = forecast.why_not(decision.shortage)
        if forecast.beside is not None and forecast.beside.is_slower:
            say(f"WARNING: {forecast.beside.words()}")
        if proposal := self.forecaster.packed_base(forecast):
            say(proposal)
        if why and forecast.plan is not None:
            change = self.forecaster.change_that_fits(forecast)
            say(f"what would fit: {change}" if change else "no single change that was tried makes it fit this machine")
        if self.settings.world_size > 1:  # available RAM differs by a few bytes between ranks: rank 0's counts
            shared = [why]
            torch.distributed.broadcast_object_list(shared, src=0)
            why = shared[0]
        if why and self.job.config.fit_check == "warn":
            say(f"WARNING: {why}")
        elif why:
            raise ConfigError(
                f"{why} The same command with --plan shows where every byte goes; --fit_check warn tries it all the "
                "same."
            )

    def open(self, decision: Decision) -> tuple[Engine, Decision]:
        job = self.job
        if decision.nvme_path is not None and job.is_main:
            self._say_if_slow(decision.nvme_path)
        engine, decision = open_engine(decision, self.model, self.host, self.tokenizer, job.say, self.check)
        job.opened.callback(engine.close)
        tell_at_exit(job)
        self._settle(decision)
        return engine, decision

    def _say_if_slow(self, folder: str) -> None:
        try:
            warnings = drive_performance(folder)["warnings"]
        except OSError as error:  # the run itself tells what it cannot write
            warnings = [f"how fast {folder} is could not be measured: {error}"]
        for warning in warnings:
            self.job.say(warning)
