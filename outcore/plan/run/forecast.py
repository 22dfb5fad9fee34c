"""The plan of this run on this machine: the planner asked about what was really chosen, not about what it would choose.

Written to plan.json and to the header of metrics.jsonl of every run, so that forecast and measurement can be compared;
printed by `--plan`. A forecast never stops a run: a machine profile that is missing, of another machine or damaged
means data-sheet rates and a sentence, a model that the planner cannot count means no forecast and a sentence.

What a run takes from the machine profile while it is fresh: rates of the drive behind a folder (else measured), and
whether write-combined memory is worth it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outcore.common.files import newest
from outcore.common.quantities import MIB, format_gib, format_s
from outcore.config import RunSettings, TrainConfig
from outcore.flow.parts import run_shape
from outcore.machine import Machine, detect_machine, drive_of
from outcore.machine.offload import slow_drive_warning
from outcore.model import ModelSettings
from outcore.plan.answer.advice import BesideOne, advise, beside_one, packed_words
from outcore.plan.answer.show import WholeRun, show, whole_run
from outcore.plan.choose import Change, PlanAnswer, best_stage, best_stream, choose_or_change, stream_refusal
from outcore.plan.deepspeed.forecast import plan_deepspeed
from outcore.plan.hardware import LINKS, Hardware, Overrides
from outcore.plan.learned import LEAST_STEPS, last_time, remember
from outcore.plan.profile import MEASURED_PROFILE, STAGES, RunRequest, differs, load_hardware
from outcore.plan.record import Plan
from outcore.plan.stream.memory import plan_stream
from outcore.sizing.layouts import DeepSpeedLayout, StreamLayout
from outcore.sizing.shape import ModelShape
from outcore.sizing.streaming import NOT_SLOWER_SHARE
from outcore.staging import NvmePerformance, check_nvme_performance, performance

Layout = StreamLayout | DeepSpeedLayout
NEARLY_EQUAL = 1.01
"""Forecasts of seconds this near to each other do not tell two cuts of a step apart."""


def run_hardware(
    has_cuda: bool,
    num_gpus: int = 1,
    *,
    measured: Path = MEASURED_PROFILE,
    detect: Callable[[], Machine] = detect_machine,
) -> Hardware:
    """This machine as the run finds it: capacities of now, measured rates where there are some. Never refuses a
    profile: what is wrong with it is among the notes, and data-sheet rates take its place."""

    def visible() -> Machine:
        machine = detect()
        return machine if has_cuda else replace(machine, gpus=())

    overrides = Overrides(num_gpus=num_gpus if has_cuda else 1)
    return load_hardware(None, overrides, allow_nominal=True, measured=measured, detect=visible)


def run_request(settings: RunSettings, layout: Layout, seq_length: int, kept: int) -> RunRequest:
    """The run's settings as the planner takes them. `kept`: checkpoints on the drive of offloaded states; 0: none."""
    return RunRequest(
        seq_length=seq_length,
        micro_batch=settings.per_device_train_batch_size,
        accumulation=settings.gradient_accumulation_steps,
        state_format=settings.state_format if isinstance(layout, StreamLayout) else None,
        optimizer=settings.optimizer,
        precision=settings.precision,
        activation_checkpointing=settings.activation_checkpointing,
        max_grad_norm=settings.max_grad_norm,
        save_total_limit=max(1, kept),
        checkpoints_elsewhere=not kept,
    )


def plan_layout(shape: ModelShape, request: RunRequest, hardware: Hardware, layout: Layout) -> Plan:
    """The plan of exactly this layout, by the engine that it is of."""
    assert request.seq_length is not None
    if isinstance(layout, StreamLayout):
        return plan_stream(shape, request, hardware, request.seq_length, layout)
    return plan_deepspeed(shape, request, hardware, request.seq_length, layout)


def too_small(plan: Plan) -> str:
    """Which memory the run's own bytes overflow and by how much; '' when they fit."""
    said = []
    for words, tier, tiers in (("VRAM", "vram", ("vram",)), ("RAM", "ram", ("ram", "pinned"))):
        needed_bytes = plan.expected_bytes(*tiers)
        there_bytes = next((use.capacity_bytes for use in plan.tiers if use.tier == tier), needed_bytes)
        if needed_bytes > there_bytes:
            said.append(
                f"{words}: {format_gib(needed_bytes)} needed, {format_gib(there_bytes)} there, "
                f"{format_gib(needed_bytes - there_bytes)} short"
            )
    return "; ".join(said)


@dataclass(frozen=True)
class Forecast:
    """A run's plan, or why there is none."""

    plan: Plan | None
    hardware: Hardware | None
    problem: str = ""
    asked: Mapping[str, Any] | None = None
    """Arguments of `plan_layout` as plain values: enough to ask a later planner the same."""
    beside: BesideOne | None = None
    """Forecast of the same tokens on one GPU, where the plan is of several."""

    def to_dict(self) -> dict[str, Any] | None:
        """For plan.json; None without a plan."""
        if self.plan is None or self.hardware is None:
            return None
        return {
            **self.plan.to_dict(),
            "rates": self.hardware.sources,
            "machine_notes": list(self.hardware.notes),
            "asked": self.asked,
        }

    def of_steps(self, steps: int) -> str:
        """Tell in words how long so many steps take; '' without a plan."""
        return "" if self.plan is None else WholeRun(steps, self.plan.time.step_s).words()

    def why_not(self, shortage: str) -> str:
        """Why the run cannot be: what its engine lacks, or what the plan overflows; '' when it can, or when the
        planner cannot count its model."""
        if shortage:
            return shortage
        short = too_small(self.plan) if self.plan is not None else ""
        return f"this run does not fit this machine: {short}." if short else ""

    def measured_links(self) -> dict[str, float]:
        """GB/s of this machine's links that the probe measured, by name; {} when it never did."""
        if self.hardware is None:
            return {}
        rates = {name: getattr(self.hardware, name) for name in LINKS if self.hardware.sources.get(name) == "measured"}
        if "drive_read_gb_per_s" in rates and self.hardware.drive_mixed_gb_per_s:
            rates["drive_mixed_gb_per_s"] = self.hardware.drive_mixed_gb_per_s
        return rates

    def learn(self, steps_s: Sequence[float], run: str, *, is_ahead: bool = False) -> str:
        """Keep how long the run's steps took (the first one compiles and allocates) beside what was forecast. In words,
        how far that is from it; '' where it is near, or there were too few steps. `is_ahead`: updates began ahead of
        the norm."""
        if self.plan is None or self.hardware is None or len(steps_s) <= LEAST_STEPS:
            return ""
        try:
            time = self.plan.time_whole if is_ahead and self.plan.time_whole else self.plan.time
            return remember(replace(self.plan, time=time), statistics.median(steps_s[1:]), run, self.hardware)
        except OSError as error:  # the run is whole without it
            return f"how long a step took could not be kept for the next forecast: {error}"

    def header(self) -> dict[str, Any] | None:
        """The few figures that a reader of metrics.jsonl compares."""
        if self.plan is None:
            return None
        plan = self.plan
        return {
            "fits": plan.fits,
            "vram_bytes": plan.expected_bytes("vram"),
            "rss_bytes": plan.expected_bytes("ram", "pinned"),
            "drive_read_bytes_per_step": plan.drive_read_bytes_per_step,
            "drive_written_bytes_per_step": plan.drive_written_bytes_per_step,
            "step_s": plan.time.step_s,
            "terms_s": plan.time.terms_s,
            "checkpoint_bytes": plan.checkpoint_bytes,
        }


class Forecaster:
    """Looks at model and machine before memory is spent, and plans when the engine's settings are known.

    Whatever goes wrong in a forecast must not stop the run it is about: it becomes `Forecast.problem`."""

    def __init__(self, settings: ModelSettings, tokenizer: Any, *, has_cuda: bool, num_gpus: int = 1) -> None:
        self._settings = settings
        self._known: tuple[ModelShape, Hardware] | None = None
        self.problem = ""
        try:
            self._known = run_shape(settings, tokenizer), run_hardware(has_cuda, num_gpus)
        except Exception as error:
            self.problem = _words(error)

    def of(self, settings: RunSettings, layout: Layout, kept: int) -> Forecast:
        """The plan of the run as its engine decided it. `kept`: as in `run_request`."""
        if self._known is None:
            return Forecast(None, None, self.problem)
        shape, hardware = self._known
        try:
            request = run_request(settings, layout, self._settings.seq_length, kept)
            plan = plan_layout(shape, request, hardware, layout)
            if taught := last_time(plan, hardware):
                plan = replace(plan, notes=(*plan.notes, taught))
            if beside := beside_one(shape, request, hardware, plan):
                plan = replace(plan, notes=(*plan.notes, beside.words()))
            asked = {"shape": shape, "request": request, "layout": layout, "hardware": hardware}
            return Forecast(plan, hardware, asked={name: asdict(value) for name, value in asked.items()}, beside=beside)
        except Exception as error:
            return Forecast(None, None, _words(error))

    def best_cut(self, settings: RunSettings, layout: Layout, kept: int) -> tuple[int, str]:
        """The micro-batch in which the step's rows are forecast fastest, of those that fit this machine; of nearly
        equal ones that nearest to the usual. And why, in words."""
        usual = settings.per_device_train_batch_size
        if self._known is None:
            return usual, self.problem
        rows, plans = usual * settings.gradient_accumulation_steps, dict[int, Plan]()
        for micro in (n for n in range(1, rows + 1) if rows % n == 0):
            cut = replace(layout, micro_batch=micro, accumulation=rows // micro)
            plan = self.of(settings.cut(micro, ""), cut, kept).plan
            if plan is not None and (micro <= usual or plan.compute_known):
                plans[micro] = plan
        fitting = {micro: plan for micro, plan in plans.items() if plan.fits}
        if not fitting:
            return min(plans, key=lambda micro: plans[micro].shortage, default=usual), "none is forecast to fit"
        fastest_s = min(plan.time.step_s for plan in fitting.values())
        near = [one for one, plan in fitting.items() if plan.time.step_s <= NEARLY_EQUAL * fastest_s]
        micro = min(near, key=lambda one: abs(one - usual))
        slowest = max(fitting, key=lambda one: fitting[one].time.step_s)
        return micro, (
            f"{rows} rows of a step, forecast at {format_s(plans[micro].time.step_s)}; micro-batches of {slowest} at "
            f"{format_s(plans[slowest].time.step_s)}"
        )

    def show(self, forecast: Forecast, config: TrainConfig) -> None:
        """Print a forecast that has a plan: tiers, seconds, what limits it, every ZeRO stage beside it, and the length
        of the whole run with these settings."""
        assert self._known is not None and forecast.plan is not None
        shape, hardware = self._known
        answer = beside_others(shape, request_of(forecast, save_total_limit=2), forecast.plan, hardware)
        request = request_of(forecast, save_total_limit=1)
        advice = advise(shape, request, hardware, forecast.plan)
        whole = whole_run(config, forecast.plan)
        show(answer, advice, hardware, run_it="the same command without --plan", whole=whole)

    def packed_base(self, forecast: Forecast) -> str:
        """Tell what a packed base would save; '' where it neither spares the drive nor makes the run fit."""
        if self._known is None or forecast.plan is None:
            return ""
        request = request_of(forecast, save_total_limit=2)
        return packed_words(self._known[0], request, self._known[1], forecast.plan)

    def change_that_fits(self, forecast: Forecast) -> str:
        """Name the change that makes a run fit that does not; '' when none that was tried does."""
        assert self._known is not None and forecast.plan is not None
        shape, hardware = self._known
        change = _change(shape, forecast.plan, hardware, request_of(forecast, save_total_limit=2))
        return change.words if change else ""


def beside_others(shape: ModelShape, request: RunRequest, plan: Plan, hardware: Hardware) -> PlanAnswer:
    """The run's plan among the best plans of every stage and engine, and what would fit when it does not."""
    stages = {stage: best_stage(shape, request, hardware, plan.seq_length, stage) for stage in STAGES}
    can_stream = not stream_refusal(shape, request, hardware)
    stream = best_stream(shape, request, hardware, plan.seq_length) if can_stream else None
    change = None if plan.fits else _change(shape, plan, hardware, request)
    return PlanAnswer(plan, "As this run's settings say.", stages, stream, change)


def _change(shape: ModelShape, plan: Plan, hardware: Hardware, request: RunRequest) -> Change | None:
    """The planner's own way of running the model where that fits, else the mildest change that does."""
    open_request = replace(request, micro_batch=None, accumulation=None)
    other = choose_or_change(shape, open_request, hardware)
    if other.plan.fits:
        return Change(f"the planner's own choice: {other.plan.flags}", other.plan)
    return other.smallest_change


def request_of(forecast: Forecast, save_total_limit: int) -> RunRequest:
    """The run's settings as a request that leaves engine and homes open."""
    assert forecast.plan is not None and forecast.asked is not None
    run = RunRequest(**forecast.asked["request"])
    states = forecast.plan.state_format
    return replace(run, state_format=states, save_total_limit=save_total_limit, checkpoints_elsewhere=False)


def _words(error: Exception) -> str:
    return f"no forecast for this run: {error or type(error).__name__}"


FRESH_S = 30 * 86400.0
"""Age up to which the profile's rates of a drive count as today's."""


def drive_performance(
    folder: str | Path, *, measured: Path = MEASURED_PROFILE, now_s: float | None = None
) -> NvmePerformance:
    """Rates of the drive under `folder`: from the profile where it is at most 30 days old and has this drive, else
    measured now, which writes up to 64 MiB there and takes at most two seconds. OSError: it cannot be written."""
    drive = drive_of(folder)
    profile = _fresh_profile(measured, now_s)
    for known in profile.drives if profile is not None else ():
        if (known.mount_point, known.device) == (drive.mount_point, drive.device):
            read, write = known.read_gb_per_s, known.write_gb_per_s
            if read is not None and write is not None:
                return performance(folder, read, write, [slow_drive_warning(folder, read, write)])
    return check_nvme_performance(folder, test_bytes=64 * MIB, max_s=2.0)


def write_combined_measured(
    *, measured: Path = MEASURED_PROFILE, now_s: float | None = None, here: Machine | None = None
) -> bool | None:
    """Whether write-combined memory measured no slower on this machine; None without a fresh profile that says so."""
    profile = _fresh_profile(measured, now_s)
    share = None if profile is None or profile.links is None else profile.links.write_combined_share
    if profile is None or share is None or differs(here or detect_machine(), profile):
        return None
    return share >= NOT_SLOWER_SHARE


def _fresh_profile(measured: Path, now_s: float | None) -> Machine | None:
    """The profile where it is at most 30 days old and can be read."""
    measured = newest(measured)
    try:
        age_s = (time.time() if now_s is None else now_s) - measured.stat().st_mtime
        return Machine.load(measured) if age_s <= FRESH_S else None
    except (OSError, ValueError):
        return None
