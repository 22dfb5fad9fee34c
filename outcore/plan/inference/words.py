"""A plan of inference for people and as data, with what one change would give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from outcore.common.quantities import format_gib, format_s
from outcore.common.words import own_command
from outcore.plan.inference.needs import state_bytes_of
from outcore.plan.inference.place import plan_inference
from outcore.plan.inference.speed import InferencePlan
from outcore.sizing.inference import PRESETS
from outcore.sizing.states import QUANTIZED

STREAMS = (1, 8, 64, 256)
CONTEXTS = (1024, 32768)
PROMPT_TOKENS = 512


FOR_ONE = "--aim latency"
"""Change that is made for one answer: named before another that gives no more than a tenth beyond it."""
LOSES = 10.0
"""Times as fast for one answer, from which another aim is named though many answers gain nothing by it."""


@dataclass(frozen=True)
class Tried:
    """The plan with one thing changed."""

    words: str
    plan: InferencePlan
    is_packed: bool = False
    """Whether it packs the weights, which costs quality."""

    @property
    def alone(self) -> float:
        """Tokens a second of one answer, without a hit among experts."""
        return self.plan.tokens_per_s(1, 1024)


def _tried(plan: InferencePlan, **asked: Any) -> Iterator[Tried]:
    """What can be changed of how the model is run."""
    tried: dict[str, dict[str, Any]] = {f"--aim {name}": {"preset": name} for name in PRESETS}
    if asked.get("quantize", "none") == "none" and plan.shape.matrices:
        for name, size in QUANTIZED.items():
            tried[f"--quantize {name} ({size.bits:g} bits: {size.quality})"] = {"quantize": name}
    tried["--kv_format int8"] = {"kv_format": "int8"}
    if asked.get("context") is None or asked["context"] > 2048:
        tried["--context 2048"] = {"context": 2048}
    for words, change in tried.items():
        try:
            yield Tried(words, plan_inference(plan.shape, plan.hardware, **{**asked, **change}), "quantize" in change)
        except ValueError:
            continue


def changes(plan: InferencePlan, **asked: Any) -> list[str]:
    """What one change would give, where it gives at least a tenth to many answers; packed weights also if they give it
    to one, another aim if it gives one much more."""
    now, alone, found = plan.tokens_per_s(64, 1024), plan.tokens_per_s(1, 1024), []
    for change in _tried(plan, **asked):
        rate, one = change.plan.tokens_per_s(64, 1024), change.alone
        is_said = change.is_packed or one >= LOSES * alone
        if rate >= 1.1 * now or (is_said and one >= 1.1 * alone):
            size = format_gib(sum(part.size_bytes for part in change.plan.placement.parts))
            weights = f"{size} of weights, " if change.is_packed else ""
            weights += f"{one:,.1f} tokens/s at 1 answer instead of {alone:,.1f}, " if is_said else ""
            found.append(f"{change.words}: {weights}{rate:,.1f} tokens/s at 64 answers instead of {now:,.1f}")
    return found


def _of_one(plan: InferencePlan, **asked: Any) -> list[str]:
    """One answer's speed, and the change that helps it most, if that gives a tenth."""
    alone, first_s = plan.tokens_per_s(1, 1024), plan.first_token_s(PROMPT_TOKENS)
    rate = _range(plan, 1, 1024)
    lines = [
        f"one answer: {rate} tokens/s, its first word after {format_s(first_s)} ({PROMPT_TOKENS} tokens of prompt)"
    ]
    best = max(_tried(plan, **asked), key=lambda change: change.alone * (1.1 if change.words == FOR_ONE else 1.0))
    if best.alone >= 1.1 * alone:
        lines.append(f"what helps it most: {best.words}, {best.alone:,.1f} tokens/s ({best.alone / alone:.1f} x)")
    return lines


def words_of(plan: InferencePlan, **asked: Any) -> list[str]:
    """The plan, for people."""
    placement = plan.placement
    lines = [f"{plan.shape.name} on {plan.hardware.name}", *_of_one(plan, **asked), *placement.lines()]
    one = plan.decode(1, 1024)
    terms = ", ".join(f"{name} {format_s(value)}" for name, value in {**one.terms, **one.between}.items())
    lines.append(f"a pass for one answer: {format_s(one.seconds)} ({terms}); {one.binding} binds")
    lengths = sorted({PROMPT_TOKENS, 8192, placement.context_tokens})
    first = [f"{n:,} tokens {format_s(plan.first_token_s(n))}" for n in lengths if n <= placement.context_tokens]
    lines.append(f"first word after a prompt of {', '.join(first)}")
    for context in CONTEXTS:
        if plan.shape.max_positions is not None and context > plan.shape.max_positions:
            continue
        most = plan.most_streams(context)
        if not most:
            lines.append(f"{context:,} tokens of context do not fit: keys and values need more room")
            continue
        rates = ", ".join(f"{n}: {_range(plan, n, context)}" for n in STREAMS)
        lines.append(f"tokens/s at {context:,} tokens of context, by answers at once: {rates} (room for {most:,})")
    if placement.experts is not None:
        lines.append("the lower rates are those without a hit, the higher ones with all experts chosen on the device")
    most = plan.kv.most_tokens(placement.kv_bytes, placement.chunk_tokens)
    limits = [limit for limit in (most, plan.shape.max_positions) if limit is not None]
    full = f"{min(limits):,} tokens" if limits else "not limited by them"
    seen = [f"{layers} layers see {window:,} tokens only" for window, layers in plan.shape.windows if window]
    lines.append(
        f"keys and values: {format_gib(plan.kv.token_bytes)} a token{''.join(f' ({words})' for words in seen)}; "
        f"the longest context is {full}"
    )
    if plan.shape.states is None:
        lines.append("recurrent states are not counted: this model keeps them where they cannot be seen before it runs")
    if not plan.hardware.is_cpu and not plan.hardware.compute_tflops:
        lines.append("the GPU's rate is not known: passes of many tokens may take longer (--tflops)")
    lines += [f"change {change}" for change in changes(plan, **asked)]
    if nominal := plan.hardware.nominal:
        rates = ", ".join(f"{name.removesuffix('_gb_per_s')} {rate:g}" for name, rate in nominal.items())
        lines.append(f"nominal, not measured: {rates} GB/s; {own_command('probe')} measures them")
    return lines


def _range(plan: InferencePlan, streams: int, context: int) -> str:
    """Tokens a second, from no hit to nothing but hits where experts come as they are chosen."""
    rates = [plan.tokens_per_s(streams, context, hit_rate) for hit_rate in plan.hit_rates]
    return " to ".join(f"{rate:,.1f}" for rate in rates)


def to_json(plan: InferencePlan) -> dict[str, Any]:
    """The plan as data, without what does not fit."""
    placement, one = plan.placement, plan.decode(1, 1024)
    return {
        "model": plan.shape.name,
        "machine": plan.hardware.name,
        "nominal_gb_per_s": plan.hardware.nominal,
        "preset": placement.preset.name,
        "bytes": {home: placement.bytes_at(home) for home in ("vram", "ram", "nvme")},
        "vram_bytes": placement.vram_bytes,
        "kv": {"home": placement.kv_home, "bytes": placement.kv_bytes, "token_bytes": plan.kv.token_bytes},
        "state_bytes": None if plan.shape.states is None else state_bytes_of(plan.shape, plan.itemsize),
        "context_tokens": placement.context_tokens,
        "first_token_s": {
            str(n): plan.first_token_s(n) for n in (PROMPT_TOKENS, 8192) if n <= placement.context_tokens
        },
        "tokens_per_s": {
            str(c): {str(n): plan.tokens_per_s(n, c) for n in STREAMS}
            for c in CONTEXTS
            if plan.most_streams(c) and c <= (plan.shape.max_positions or c)
        },
        "tokens_per_s_by_hit_rate": {str(rate): plan.tokens_per_s(1, 1024, rate) for rate in plan.hit_rates},
        "pass": {"terms_s": {**one.terms, **one.between}, "binds": one.binding},
    }
