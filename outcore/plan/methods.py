"""Forecast of a method beside the loop's own, by the bytes that cross and the products that are computed.

The layers stream as `outcore.hf` streams them: forward, backward with recomputation, and one forward more for a
reference (adapters off). Embedding and head stay on the device, two layers' weights beside them, of each text what one
layer computes, and of a micro-batch its logits. Each token of a model's own answers is a pass over the layers; keys and
values stay until the update. It is loaded in 16 bits, then packed; states are fp32. Not fitted to measured runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from outcore.common.quantities import GB, counted, format_gib, format_s
from outcore.config.fields import ROLLED
from outcore.plan import constants as k
from outcore.plan.hardware import Hardware
from outcore.plan.inference.needs import kv_of, state_bytes_of
from outcore.plan.profile import RunRequest
from outcore.plan.terms import step_flops
from outcore.sizing.shape import ModelShape
from outcore.sizing.streaming import READ_HEAD_TOKENS, READ_ROWS, ROLLOUT_PASS_TOKENS, layers_that_stay, token_bytes

MICRO_BATCH, ACCUMULATION = 2, 4
SIDES: Mapping[str, int] = MappingProxyType(dict.fromkeys(("classify", "distill", "pictures", *ROLLED), 1))
"""Texts of a row; of other methods two: chosen and rejected, query and partner, an answer and another row's."""
REFERENCE = ("dpo", "kto")
STATE_BYTES = 16
"""fp32 master, two moments and a gradient."""
GRADIENTS = 4
"""A layer's gradients on the device at once (outcore.hf.stack)."""
LOGITS: Mapping[str, int] = MappingProxyType({"dpo": 3, "kto": 3, "orpo": 3, "simpo": 3, "distill": 8})
"""Copies of a micro-batch's logits, in the layers' type: themselves, their log-softmax, which autograd keeps (of a
distillation in fp32), and gradients. Other methods' heads have few outputs. Counted, not measured."""
READ_LOGITS_BYTES = 10
"""Bytes of a logit that a teacher computes: itself, in fp32, and its log-softmax."""


@dataclass(frozen=True)
class RolloutSize:
    """Answers that a model gives while it is trained."""

    answers: int
    """Answers to each prompt."""
    answer_tokens: int
    refers: bool
    """Whether it is compared with the model as it was."""
    reader: ModelShape | None = None
    """Model on this machine that reads the answers: a teacher. None: none, or behind an address."""


@dataclass(frozen=True)
class MethodPlan:
    """A forecast of one method on one machine."""

    method: str
    fits: bool
    vram_bytes: int
    ram_bytes: int
    step_s: float
    step_tokens: int
    words: tuple[str, ...]
    rollout_s: float = 0.0
    """Part of the step in which the model answers."""
    reader_bytes: int = 0
    """Weights of the model that reads its answers."""
    reader_s: float = 0.0
    """Part of the step in which that model reads."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Reader:
    """A frozen model beside the trained one, which reads the answers of a step through its streamed layers, or none."""

    weight_bytes: int = 0
    """Weights, in RAM."""
    device_bytes: int = 0
    """VRAM for the whole run: embedding and head (in RAM on a CPU, like all weights), and two layers' buffers."""
    reading_bytes: int = 0
    """VRAM while it reads: hidden states of a pass's rows, what a layer computes of one, and logits."""
    seconds: float = 0.0
    words: str = "  its teacher is behind an address: its seconds are not counted"

    @classmethod
    def of(cls, shape: ModelShape, request: RunRequest, hardware: Hardware, seq: int, answers: int) -> Reader:
        """Count what reading `answers` texts takes, each of `seq` tokens with its prompt."""
        e, rows = request.element_bytes, min(answers, READ_ROWS)
        ends_bytes = 0 if hardware.is_cpu else e * (shape.embedding_params + shape.head_params)
        features = sum(map(sum, shape.layer_matrices)) / shape.num_layers
        reading_bytes = seq * (2 * e * rows * shape.hidden_size + token_bytes(features, shape.hidden_size, e))
        flops = step_flops(shape, request, seq, answers * seq)
        compute_s = hardware.compute_s(flops.forward, 0.0, flops.attention_forward)
        crossed_bytes = -(-answers // READ_ROWS) * e * sum(shape.layer_params)
        link_s = 0.0 if hardware.is_cpu else crossed_bytes / (hardware.h2d_gb_per_s * GB)
        weight_bytes, seconds = e * shape.base_params, max(compute_s, link_s)
        words = f"  its teacher {shape.name} lies in RAM beside it ({format_gib(weight_bytes)}), and reads each step's "
        words += f"{counted(answers, 'answer')} in {format_s(seconds)}"
        reading_bytes += READ_HEAD_TOKENS * READ_LOGITS_BYTES * shape.vocab_size
        return cls(weight_bytes, ends_bytes + 2 * e * max(shape.layer_params), reading_bytes, seconds, words)


def plan_method(
    method: str, shape: ModelShape, request: RunRequest, hardware: Hardware, rolled: RolloutSize | None = None
) -> MethodPlan:
    """Plan one step of a method, and say what of the machine it takes. `rolled`: of methods whose model answers.
    ValueError where a row has no room for an answer, or a step not for whole prompts."""
    e, layers = request.element_bytes, shape.num_layers
    seq = request.seq_length or min(1024, shape.max_positions or 1024)
    micro, accumulation = request.micro_batch or MICRO_BATCH, request.accumulation or ACCUMULATION
    texts = micro * SIDES.get(method, 2)
    tokens = texts * seq
    seeing_bytes = e * shape.seeing_params
    plain_bytes = e * shape.base_params + seeing_bytes
    packed_bytes = plain_bytes - shape.saved_bytes(e)
    layer_bytes = e * max(shape.layer_params) - shape.layer_saved_bytes(e)
    ends_bytes = e * (shape.embedding_params + shape.head_params)
    features = sum(map(sum, shape.layer_matrices)) / layers
    text_bytes = seq * (each_bytes := token_bytes(features, shape.hidden_size, e))
    trained_layer = 0 if shape.lora_r else GRADIENTS * e * max(shape.layer_params) + ends_bytes
    logits_bytes = LOGITS.get(method, 0) * e * tokens * shape.vocab_size
    reserve = hardware.gpu_context_bytes + k.VRAM_RESERVE_BYTES
    reads = rolled.reader if rolled is not None else None
    reader = Reader.of(reads, request, hardware, seq, micro * accumulation) if reads is not None else Reader()
    fixed = ends_bytes + 2 * layer_bytes + reserve + reader.device_bytes
    kv_bytes, turns, stays, rollout_s = 0, 1, 0, 0.0
    if rolled is not None:
        free_bytes = hardware.ram_bytes if hardware.is_cpu else max(2, hardware.vram_bytes - fixed)
        kv_bytes = _kept_bytes(shape, request, rolled, seq, micro * accumulation)
        turns = min(micro * accumulation, -(-kv_bytes // (free_bytes // 2)))  # others wait (train.methods.rollouts)
        if not hardware.is_cpu:  # which has them at home
            stays = layers_that_stay([layer_bytes] * layers, free_bytes, kv_bytes // turns, each_bytes)
        rollout_s = turns * _rollout_s(shape, request, hardware, rolled, layer_bytes, stays)
    answering_bytes = kv_bytes // turns + stays * layer_bytes
    vram = fixed + max(text_bytes + logits_bytes + trained_layer, answering_bytes, reader.reading_bytes)
    hidden_bytes = tokens * shape.hidden_size * e * layers
    loading = plain_bytes + packed_bytes * bool(shape.quantize)
    ram = max(loading, packed_bytes + STATE_BYTES * shape.trainable_params + hidden_bytes) + reader.weight_bytes
    flops = step_flops(shape, replace(request, activation_checkpointing=True), seq, tokens)
    refers = (method in REFERENCE or (rolled is not None and rolled.refers)) and shape.lora_r > 0
    more = refers + (method == "rloo")  # which asks for its answers' log-probabilities once more
    compute_s = hardware.compute_s(
        flops.forward * (1 + more) + flops.backward, 0.0, flops.attention + more * flops.attention_forward
    )
    crossed = layer_bytes * layers * (2 + more) + (0 if shape.lora_r else e * sum(shape.layer_params))
    link_s = 0.0 if hardware.is_cpu else crossed / (hardware.h2d_gb_per_s * GB)
    update_s = hardware.update_s("fp32", shape.trainable_params)
    step_s = accumulation * max(compute_s, link_s) + update_s + rollout_s + reader.seconds
    vram, ram = (0, ram + vram) if hardware.is_cpu else (vram, ram)
    short = [
        f"{name}: {format_gib(used)} of {format_gib(there)}"
        for name, used, there in (("VRAM", vram, hardware.vram_bytes), ("RAM", ram, hardware.ram_bytes))
        if used > there
    ]
    why = "arithmetic" if compute_s >= link_s else "the link"
    words = [
        f"{method}, {shape.name} on {hardware.name}: " + (f"does not fit ({'; '.join(short)})" if short else "fits"),
        f"  VRAM {format_gib(vram)} of {format_gib(hardware.vram_bytes)}, RAM {format_gib(ram)} of "
        f"{format_gib(hardware.ram_bytes)} (the model is loaded in {8 * e} bits first)",
    ]
    if rolled is not None:
        waits = f" in {turns} turns, for which there is room" if turns > 1 else ""
        prompts = counted(texts * accumulation // rolled.answers, "prompt")
        words.append(
            f"  rollouts: {rolled.answers} answers of {rolled.answer_tokens} tokens to each of {prompts} of "
            f"{seq - rolled.answer_tokens}: {format_s(rollout_s)} of the step, {format_gib(kv_bytes)} of keys and "
            f"values{waits}, and {counted(stays, 'layer')} that stay for all passes, freed before the update; judging "
            "is not counted"
        )
    if method == "on_policy_distill":
        words.append(reader.words)
    if logits_bytes:
        words.append(f"  of it {format_gib(logits_bytes)} are logits; --batch_size 1 has fewest")
    words.append(
        f"  a step of {accumulation} x {texts} texts of {seq:,} tokens: {format_s(step_s)}, of it "
        f"{format_s(update_s)} for the update; {why} is the limit; not fitted to measured runs"
    )
    if seeing_bytes:
        tower = f"  its tower and projector ({format_gib(seeing_bytes)}) are frozen in RAM"
        words.append(f"{tower}; what they compute is not counted")
    if refers:
        words.append("  its reference is the model with the adapters switched off: one forward more")
    elif method in REFERENCE:
        words.append("  its reference's log-probabilities are computed once, before the first step")
    found = method, not short, vram, ram, step_s, accumulation * tokens, tuple(words), rollout_s
    return MethodPlan(*found, reader.weight_bytes, reader.seconds)


def _kept_bytes(shape: ModelShape, request: RunRequest, rolled: RolloutSize, seq: int, answers: int) -> int:
    """Bytes of keys and values of a step's answers, all at once and each as long as it may be. ValueError where there
    is no room for a prompt, or answers are not of whole prompts."""
    prompt = seq - rolled.answer_tokens
    if state_bytes_of(shape, request.element_bytes):
        raise ValueError(f"{shape.name} keeps recurrent states: it is not answered with while it is trained.")
    if prompt < 1:
        raise ValueError(f"max_completion_length {rolled.answer_tokens} leaves no room for a prompt within {seq}.")
    if answers % rolled.answers:
        raise ValueError(f"a step of {answers} answers is not of whole prompts of {rolled.answers} (num_generations).")
    kept = answers // rolled.answers * prompt + answers * rolled.answer_tokens
    return kept * kv_of(shape, request.element_bytes).token_bytes


def _rollout_s(
    shape: ModelShape, request: RunRequest, hardware: Hardware, rolled: RolloutSize, layer_bytes: int, stays: int
) -> float:
    """Seconds of a step's answers, of which `stays` layers' weights cross once and the others' in each pass."""
    seq = request.seq_length or min(1024, shape.max_positions or 1024)
    answers = (request.micro_batch or MICRO_BATCH) * (request.accumulation or ACCUMULATION)
    read = answers // rolled.answers * (seq - rolled.answer_tokens)
    rate = hardware.dram_gb_per_s if hardware.is_cpu else hardware.h2d_gb_per_s
    travel_s, memory = layer_bytes * (shape.num_layers - stays) / (rate * GB), hardware.device_memory_gb_per_s
    read_s = 0.0 if memory is None else layer_bytes * shape.num_layers / (memory * GB)

    def passes_s(tokens: int, passes: int) -> float:
        flops = step_flops(shape, request, seq, tokens)
        compute_s = hardware.compute_s(flops.forward, 0.0, flops.attention_forward)
        return max(compute_s, passes * travel_s, passes * read_s)

    writing_s = rolled.answer_tokens * passes_s(answers, 1)
    brought_s = stays * layer_bytes / (rate * GB)
    return brought_s + passes_s(read, -(-read // ROLLOUT_PASS_TOKENS)) + writing_s
