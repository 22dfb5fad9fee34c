"""The answer as people read it: rich tables for the terminal, plain values for `--json`.

How long a whole run is and when it ends: of the steps that were asked for, or of the epochs of data whose size is
known before it is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from outcore.common.quantities import GB, GIB, counted, format_count, format_gb, format_gib, format_rate, format_s
from outcore.config import TrainConfig
from outcore.plan.answer.advice import Advice, shortage_words
from outcore.plan.choose import PlanAnswer
from outcore.plan.hardware import Hardware
from outcore.plan.record import TIER_WORDS, TIERS, Plan

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
    """Basis of estimated steps, in words (epochs, bytes of data); '' for a number that was set."""

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
            f"The whole run: {counted(self.steps, 'step')}{about}, {format_s(self.seconds)}; begun now it ends on "
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


if TYPE_CHECKING:
    from rich.console import Console, RenderableType

STREAM_NOTE = "stream: forecast compared with runs on servers (docs/planning.md), with no laptop"
LAUNCH_NOTE = "steps this short are bound by kernel launches, which are not modelled: a lower bound"
SHORT_STEP_S = 0.2


def plan_notes(plan: Plan) -> list[str]:
    """List the notes to show beside a plan."""
    notes = list(plan.notes)
    if plan.engine == "stream":
        notes.insert(0, STREAM_NOTE)
    if plan.time.step_s < SHORT_STEP_S:
        notes.append(LAUNCH_NOTE)
    if not plan.compute_known:
        notes.append("the GPU's compute rate is not known: the step time is a lower bound")
    return notes


def to_json(answer: PlanAnswer, advice: Advice, hardware: Hardware) -> dict[str, Any]:
    """The whole answer as plain JSON values."""
    change = answer.smallest_change
    return {
        "model": answer.plan.model,
        "params": answer.plan.params,
        "trainable_params": answer.plan.trainable_params,
        "machine": hardware.name,
        "fits": answer.plan.fits,
        "reason": answer.reason,
        "constraint": advice.constraint,
        "change": advice.change,
        "change_gain": advice.gain,
        "smallest_change": {"words": change.words, "plan": change.plan.to_dict()} if change else None,
        "plan": answer.plan.to_dict(),
        "flags": answer.plan.flags,
        "stages": {name: plan.to_dict() for name, plan in answer.stages.items()},
        "stream": answer.stream.to_dict() if answer.stream else None,
        "rates": hardware.sources,
        "notes": [*plan_notes(answer.plan), *hardware.notes],
    }


def show(
    answer: PlanAnswer,
    advice: Advice,
    hardware: Hardware,
    *,
    run_it: str,
    whole: WholeRun | None = None,
    file: IO[str] | None = None,
) -> None:
    """Print the answer. `run_it`: the command that makes the plan a run; `whole`: how long all of it is."""
    from rich.console import Console

    console = Console(file=file, highlight=False)
    plan = answer.plan
    on = f" on {', '.join(plan.lora_targets)}" if plan.lora_targets else ""
    adapters = f", {format_count(plan.trainable_params)} trainable (LoRA r {plan.lora_r}{on})" if plan.lora_r else ""
    console.print(f"[bold]{plan.model}[/bold]: {format_count(plan.params)} parameters{adapters}")
    console.print(hardware.words())
    verdict = "[bold green]fits[/]" if plan.fits else "[bold red]does not fit[/]"
    console.print(f"\n{verdict}: {plan.title}. {answer.reason}")
    if not plan.fits:
        console.print(f"Too small: {shortage_words(plan)}")
        change = answer.smallest_change
        if change:
            console.print(f"Smallest change that fits: [bold]{change.words}[/] -> {_outcome(change.plan)}")
        else:
            console.print("No single change that was tried makes it fit this machine.")
        if advice.packed:
            console.print(advice.packed)
    else:
        console.print(advice.words())
    console.print()
    console.print(_tiers(plan))
    console.print(_step(plan))
    if whole is not None:
        console.print(whole.words())
    _wear(console, plan)
    console.print()
    console.print(_stages(answer))
    if plan.fits:  # unwrapped: a line to copy
        console.print(f"Run it: {run_it}", soft_wrap=True, markup=False)
    for note in (*plan_notes(plan), *hardware.notes):
        console.print(f"- {note}")
    console.print("All bytes and times are forecasts; the constants and their sources: outcore/plan/constants.py")


def _outcome(plan: Plan) -> str:
    return f"{plan.title}, {format_s(plan.time.step_s)} a step, {format_rate(plan.tokens_per_s)} tokens/s"


def _tiers(plan: Plan) -> RenderableType:
    from rich.table import Table

    table = Table(title="Where every byte lives", title_justify="left")
    for column in ("tier", "part", "bytes", "of"):
        table.add_column(column, justify="right" if column in ("bytes", "of") else "left")
    for tier in TIERS:
        amount = format_gb if tier == "nvme" else format_gib
        parts = sorted((p for p in plan.parts if p.tier == tier), key=lambda p: -p.size_bytes)
        if not parts:
            continue
        for index, part in enumerate(parts):
            table.add_row(TIER_WORDS[tier] if index == 0 else "", part.name, amount(part.size_bytes), "")
        use = plan.tier(tier)
        label = {"ram": "total with pinned", "nvme": "total, states x 1.5"}.get(tier, "total")
        style = "red" if use.short_bytes else "bold"
        table.add_row("", label, amount(use.used_bytes), amount(use.capacity_bytes), style=style, end_section=True)
    return table


def _step(plan: Plan) -> RenderableType:
    from rich.table import Table

    title = (
        f"A step: {plan.tokens_per_step:,} tokens ({plan.micro_batch} x {plan.accumulation} rows of "
        f"{plan.seq_length}), {format_s(plan.time.step_s)}, {format_rate(plan.tokens_per_s)} tokens/s"
    )
    table = Table(title=title, title_justify="left")
    names = {
        "compute_s": "compute", "h2d_s": "to GPU", "d2h_s": "from GPU", "drive_read_s": "drive read",
        "drive_write_s": "drive write", "cpu_optimizer_s": "CPU update", "host_overhead_s": "host",
    }  # fmt: skip
    for name in names.values():
        table.add_column(name, justify="right")
    table.add_column("left by overlap", justify="right", style="bold")
    table.add_row(*(format_s(plan.time.terms_s[name]) for name in names), format_s(plan.time.exposed_s))
    return table


def _wear(console: Console, plan: Plan) -> None:
    saved = f"Checkpoint: {format_gb(plan.checkpoint_bytes)}, about {format_s(plan.checkpoint_s)} to write."
    if not plan.uses_drive:
        console.print(f"{saved} Nothing else is written to the drive.")
        return
    text = (
        f"{saved} Drive: {format_gb(plan.drive_read_bytes_per_step)} read and "
        f"{format_gb(plan.drive_written_bytes_per_step)} written per step"
    )
    if plan.drive_written_bytes_per_step:
        text += f", {format_gb(plan.written_bytes_per_day)} written per day"
    if plan.drive_life_steps is not None and plan.drive_life_days is not None:
        text += f"; its rating lasts {plan.drive_life_steps:,.0f} steps ({plan.drive_life_days:,.0f} days)"
    console.print(f"{text}.")


def _stages(answer: PlanAnswer) -> RenderableType:
    from rich import box
    from rich.table import Table

    title = "Every ZeRO stage (VRAM, RAM in GiB; NVMe in GB, checkpoints too)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("stage", "where", "VRAM", "RAM", "NVMe", "s/step", "speed", "short"):
        left = column in ("stage", "where", "short")
        table.add_column(column, justify="left" if left else "right", min_width=16 if column == "where" else None)
    rows = [*answer.stages.items(), *([("stream", answer.stream)] if answer.stream else [])]
    fastest = max((plan.tokens_per_s for _, plan in rows if plan.fits), default=0.0)
    for name, plan in rows:
        drive_bytes = plan.tier("nvme").used_bytes
        table.add_row(
            name,
            plan.offload,
            f"{plan.used_bytes('vram') / GIB:.1f}",
            f"{plan.tier('ram').used_bytes / GIB:.1f}",
            f"{drive_bytes / GB:,.0f}" if drive_bytes else "-",
            format_s(plan.time.step_s),
            f"{plan.tokens_per_s / fastest:.2f}" if plan.fits and math.isfinite(fastest) else "-",
            ", ".join(TIER_WORDS[use.tier] for use in plan.short_tiers),
            style="" if plan.fits else "dim",
        )
    return table
