"""The engine's decision about a run and the planner's forecast of exactly that run, before data or a weight is read."""

from __future__ import annotations

from pathlib import Path

import torch

from outcore.checkpoint import Checkpoint
from outcore.common import file_errors
from outcore.config import ConfigError, RunSettings
from outcore.engine.base import Decision, Engine, Host
from outcore.engine.decide import decide, open_engine
from outcore.machine import available_ram_bytes, detect_os
from outcore.model import ModelSettings, resolve_source
from outcore.model.trial import aux_coefficient
from outcore.plan.run import Forecast, Forecaster, drive_performance, write_combined_measured
from outcore.train.run.data import load_tokenizer
from outcore.train.run.job import RunJob
from outcore.train.run.space import kept_on_drive
from outcore.train.run.telling import tell_at_exit


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
