"""The guide's tables, generated so that they cannot drift: the planner's own output between markers in its document.

`outcore plan --guide` writes them, `--guide --check` and a default test compare. They depend on nothing but the code:
shipped profile of the reference laptop, presets, default settings.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from outcore.common.quantities import format_count, format_gb, format_gib, format_s
from outcore.model import preset_shape
from outcore.plan.answer.largest import Largest, largest_models
from outcore.plan.choose import PlanAnswer, choose_or_change
from outcore.plan.hardware import Hardware
from outcore.plan.profile import load_hardware
from outcore.plan.record import Plan
from outcore.plan.request import RunRequest

MACHINE = "rtx4070-laptop"
MODELS = ("llama-1b", "llama-3b", "llama-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "llama-70b")
DOCUMENT = Path("docs/planning.md")
BEGIN, END = "<!-- begin: outcore plan --guide -->", "<!-- end: outcore plan --guide -->"


def guide_text() -> str:
    """The tables as Markdown."""
    hardware = load_hardware(MACHINE)
    lines = [
        f"Machine: {hardware.words()}. Rates are nominal. Rows of 1,024 tokens, 8 rows a step, clipping at 1.0, two "
        "checkpoints kept. Every figure is a forecast; `stream` is planned, not measured on this laptop.",
        "",
        "Full training, lossless states (`split`):",
        "",
        *_table([_answer(name, RunRequest(), hardware, 0) for name in MODELS]),
        "",
        "Full training, compact states (`split8`: 8-bit moments, opt-in) without clipping:",
        "",
        *_table(
            [
                _answer(name, RunRequest(engine="stream", state_format="split8", max_grad_norm=0.0), hardware, 0)
                for name in MODELS
            ]
        ),
        "",
        "LoRA, rank 16 on every linear layer:",
        "",
        *_table([_answer(name, RunRequest(), hardware, 16) for name in MODELS]),
        "",
        "Largest model of a Llama-like family that fits, checkpoints on another drive. Beyond 70 B this rests on "
        "layers computed in tiles and is arithmetic, not experience: nothing of that size was run.",
        "",
        "| training | largest | where it lives | s/step | tokens/s |",
        "|---|---:|---|---:|---:|",
        *[_largest_row(row) for row in largest_models(hardware)],
    ]
    return "\n".join(lines)


def _largest_row(row: Largest) -> str:
    plan = row.plan
    if plan is None:
        return f"| {row.kind} | none fits | | | |"
    cells = (row.kind, format_count(plan.params), plan.offload, format_s(plan.time.step_s), f"{plan.tokens_per_s:.0f}")
    return f"| {' | '.join(cells)} |"


def _answer(name: str, request: RunRequest, hardware: Hardware, lora_r: int) -> PlanAnswer:
    shape = preset_shape(name)
    return choose_or_change(shape.with_lora(lora_r) if lora_r else shape, request, hardware)


def _table(answers: list[PlanAnswer]) -> list[str]:
    lines = [
        "| model | how | VRAM | RAM | NVMe | s/step | tokens/s | written/step | drive rating lasts |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for answer in answers:
        plan, size = answer.plan, format_count(answer.plan.params)
        if plan.fits:
            lines.append(f"| {plan.model} ({size}) | {plan.title} | {_figures(plan)} |")
        elif answer.smallest_change is None:
            lines.append(f"| {plan.model} ({size}) | does not fit, nor does any change that was tried | | | | | | | |")
        else:
            change = answer.smallest_change
            words = f"does not fit as asked; fits with: {change.words} ({change.plan.title})"
            lines.append(f"| {plan.model} ({size}) | {words} | {_figures(change.plan)} |")
    return lines


def _figures(plan: Plan) -> str:
    states = sum(p.size_bytes for p in plan.parts if p.tier == "nvme" and p.name != "checkpoints")
    days = plan.drive_life_days
    cells = (
        format_gib(plan.used_bytes("vram")),
        format_gib(plan.tier("ram").used_bytes),
        format_gb(states) if states else "-",
        format_s(plan.time.step_s),
        f"{plan.tokens_per_s:.0f}",
        format_gb(plan.drive_written_bytes_per_step) if plan.drive_written_bytes_per_step else "-",
        f"{plan.drive_life_steps:,.0f} steps, {days:,.0f} days" if days is not None else "-",
    )
    return " | ".join(cells)


def replace_between_markers(text: str, tables: str) -> str:
    """The document with the tables between its markers; ValueError when the markers are missing."""
    start, end = text.find(BEGIN), text.find(END)
    if start < 0 or end < start:
        raise ValueError(f"the document has no '{BEGIN}' ... '{END}' lines: put them where the tables belong")
    return f"{text[: start + len(BEGIN)]}\n{tables}\n{text[end:]}"


@dataclasses.dataclass(frozen=True)
class GuideState:
    """Whether the document holds what the planner says now."""

    path: Path
    is_current: bool
    text: str


def guide_state(path: Path = DOCUMENT) -> GuideState:
    """Compare the document with the planner's output. OSError / ValueError when it cannot be read or has no markers."""
    before = path.read_text(encoding="utf-8")
    after = replace_between_markers(before, guide_text())
    return GuideState(path, before == after, after)
