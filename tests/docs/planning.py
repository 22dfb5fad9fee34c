"""Tables of docs/planning.md, made by the planner between markers: `python -m tests.docs.planning` writes them.

They depend on nothing but the code: shipped profile of the reference laptop, presets, default settings. The largest
model that a machine trains, by kind of training: search over a family of Llama shapes, width h in steps of 256, h/128
heads of 128, 8 key-value heads, feed-forward 3.5 h, one layer per 128 of width (32 at 4,096 and 64 at 8,192, about the
published shapes), vocabulary 128,256, untied."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from outcore.common.quantities import format_count, format_gb, format_gib, format_rate, format_s
from outcore.model import preset_shape
from outcore.plan.choose import PlanAnswer, best_stage, best_stream, choose_or_change, seq_length_of
from outcore.plan.hardware import Hardware
from outcore.plan.profile import RunRequest, load_hardware
from outcore.plan.record import Plan
from outcore.sizing.shape import ModelShape, shape_from_fields
from tests.forked import ROOT

STEP = 256
WIDEST = 32768

KINDS: tuple[tuple[str, str, str | None, int], ...] = (
    ("GPU only (stage none)", "none", None, 0),
    ("DeepSpeed, optimizer in RAM (zero2)", "zero2", None, 0),
    ("DeepSpeed, all in RAM (zero3)", "zero3", None, 0),
    ("DeepSpeed, NVMe (infinity)", "infinity", None, 0),
    ("stream, RAM only, lossless", "stream-ram", "split", 0),
    ("stream, RAM only, 8-bit moments", "stream-ram", "split8", 0),
    ("stream, RAM and NVMe, lossless", "stream", "split", 0),
    ("stream, LoRA r 16, RAM only", "stream-ram", "split", 16),
    ("stream, LoRA r 16, RAM and NVMe", "stream", "split", 16),
)
"""(words, how, state format, rank of adapters)."""


@dataclass(frozen=True)
class Largest:
    """The largest model of one kind of training; None when not even the smallest of the family fits."""

    kind: str
    plan: Plan | None


def family_shape(hidden: int) -> ModelShape:
    """The member of the family with this width (a multiple of 128)."""
    fields = {
        "vocab_size": 128256,
        "hidden_size": hidden,
        "num_hidden_layers": max(1, hidden // 128),
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": min(8, hidden // 128),
        "head_dim": 128,
        "intermediate_size": 7 * hidden // 2,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }
    return shape_from_fields(f"llama-h{hidden}", "llama", fields)


def largest_models(hardware: Hardware) -> list[Largest]:
    """One row per kind of training. Checkpoints are taken to go to another drive. Cost: about 60 plans a row."""
    return [Largest(words, _largest(hardware, how, fmt, rank)) for words, how, fmt, rank in KINDS]


def _largest(hardware: Hardware, how: str, fmt: str | None, rank: int) -> Plan | None:
    stream = how.startswith("stream")
    machine = dataclasses.replace(hardware, nvme_free_bytes=0) if how == "stream-ram" else hardware
    engine, stage = ("stream", None) if stream else ("deepspeed", how)
    request = RunRequest(engine=engine, zero_stage=stage, state_format=fmt, checkpoints_elsewhere=True)

    def plan(steps: int) -> Plan | None:
        shape = family_shape(STEP * steps)
        shape = shape.with_lora(rank) if rank else shape
        if stream:
            found = best_stream(shape, request, machine, seq_length_of(shape, request))
        else:
            found = best_stage(shape, request, machine, seq_length_of(shape, request), how)
        return found if found.fits else None

    low, high = 0, WIDEST // STEP  # low fits (0: nothing does), high + 1 is not tried
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if plan(middle) else (low, middle - 1)
    return plan(low) if low else None


MACHINE = "rtx4070-laptop"
MODELS = ("llama-1b", "llama-3b", "llama-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "llama-70b")
PAGE = ROOT / "docs/planning.md"
BEGIN, END = "<!-- begin: python -m tests.docs.planning -->", "<!-- end: python -m tests.docs.planning -->"


def tables() -> str:
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
    cells = (
        row.kind,
        format_count(plan.params),
        plan.offload,
        format_s(plan.time.step_s),
        format_rate(plan.tokens_per_s),
    )
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
        format_rate(plan.tokens_per_s),
        format_gb(plan.drive_written_bytes_per_step) if plan.drive_written_bytes_per_step else "-",
        f"{plan.drive_life_steps:,.0f} steps, {days:,.0f} days" if days is not None else "-",
    )
    return " | ".join(cells)


def page() -> str:
    """The whole page as the planner would have it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
