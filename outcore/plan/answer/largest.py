"""The largest model that a machine trains, by kind of training: search over a family of Llama shapes with the planner.

The family: width h in steps of 256, h/128 heads of 128, 8 key-value heads, feed-forward 3.5 h, one layer per 128 of
width (32 at 4,096 and 64 at 8,192, about the published shapes), vocabulary 128,256, untied.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from outcore.plan.choose import best_stage, best_stream, seq_length_of
from outcore.plan.hardware import Hardware
from outcore.plan.record import Plan
from outcore.plan.request import RunRequest
from outcore.sizing.shape import ModelShape, shape_from_fields

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


def largest_models(hardware: Hardware, request: RunRequest | None = None) -> list[Largest]:
    """One row per kind of training. Checkpoints are taken to go to another drive. Cost: about 60 plans a row."""
    base = dataclasses.replace(request or RunRequest(), checkpoints_elsewhere=True)
    return [Largest(words, _largest(hardware, base, how, fmt, rank)) for words, how, fmt, rank in KINDS]


def _largest(hardware: Hardware, base: RunRequest, how: str, fmt: str | None, rank: int) -> Plan | None:
    stream = how.startswith("stream")
    machine = dataclasses.replace(hardware, nvme_free_bytes=0) if how == "stream-ram" else hardware
    request = dataclasses.replace(
        base,
        engine="stream" if stream else "deepspeed",
        zero_stage=None if stream else how,
        state_format=fmt,
    )

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
