"""Choosing what the user leaves open, and saying so when nothing fits.

Every layout worth considering is planned (a few hundred, microseconds each) and the fastest that fits is taken; of
plans within a few per cent the one that writes less to the drive. When none fits, the one that is short by least is
shown, and requests are changed one at a time, mildest first, until one fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from outcore.common.quantities import GIB
from outcore.plan import constants as k
from outcore.plan.deepspeed.forecast import OFFLOADS, plan_deepspeed
from outcore.plan.deepspeed.memory import STAGE_NUMBER
from outcore.plan.hardware import Hardware
from outcore.plan.profile import STAGES, RunRequest
from outcore.plan.record import Plan
from outcore.plan.stream.memory import TILES, plan_stream
from outcore.sizing.engine_rule import why_not_muon, why_not_stream
from outcore.sizing.layouts import DeepSpeedLayout, Residency, Staged, StreamLayout
from outcore.sizing.shape import ModelShape
from outcore.sizing.streaming import RAM_RESERVE_BYTES, RESIDENT_BYTES, STAGING_BYTES

MICRO_BATCHES = (8, 4, 2, 1)
NO_REASON_TO_SPILL = 1.05
"""A plan that is slower by less than this and writes less to the drive is preferred."""

STREAMED = {None: None, "auto": None, "ram": Residency(), "nvme": Residency(0, 0)}
"""Residency that was asked for -> RAM budgets of the streaming engine; None: what fits."""
ON_DRIVE = {None: (False, True), "auto": (False, True), "ram": (False,), "nvme": (True,)}
"""Whether a ZeRO stage may be the one that uses the drive, by residency."""


@dataclass(frozen=True)
class Change:
    """A request changed in one thing, and the plan it leads to."""

    words: str
    plan: Plan


@dataclass(frozen=True)
class PlanAnswer:
    """Result of `choose`."""

    plan: Plan
    """The recommendation; when it does not fit, the one that is short by least."""
    reason: str
    stages: dict[str, Plan]
    """Best plan of each ZeRO stage of DeepSpeed (`none` ... `infinity`)."""
    stream: Plan | None
    """Best plan of the streaming engine; None where it cannot be used."""
    smallest_change: Change | None = None
    """When nothing fits: the mildest change that does, if any."""


def choose(shape: ModelShape, request: RunRequest, hardware: Hardware) -> PlanAnswer:
    """Plan every engine and stage that the request leaves open and recommend one. ValueError for contradictions."""
    seq_length = seq_length_of(shape, request)
    refusal = stream_refusal(shape, request, hardware)
    if request.engine == "stream" and refusal:
        raise ValueError(f"engine stream cannot be used: {refusal}. Use engine deepspeed or auto.")
    stages = {stage: best_stage(shape, request, hardware, seq_length, stage) for stage in STAGES}
    stream = best_stream(shape, request, hardware, seq_length) if not refusal else None
    open_plans = [
        plan
        for stage, plan in stages.items()
        if request.zero_stage in (None, stage) and (stage == "infinity") in ON_DRIVE[request.residency]
    ]
    if only := _only_streamed(shape, request, hardware):
        if stream is None or request.engine == "deepspeed":
            cannot = f", and it cannot take this run: {refusal}" if refusal else ""
            instead = "Take a checkpoint in 16 bits" if shape.is_published_packed else f"Leave {only.split()[0]} out"
            raise ValueError(f"{only}{cannot}. {instead}.")
        open_plans = [stream]
    elif request.engine != "deepspeed" and stream is not None:
        only = request.engine == "stream" or request.zero_stage is not None or stream.fits  # what train_model.py takes
        open_plans = [stream] if only else [*open_plans, stream]
    if not open_plans:
        raise ValueError(
            f"residency {request.residency} and zero_stage {request.zero_stage} contradict each other: leave out one."
        )
    best = _best(open_plans)
    return PlanAnswer(best, _reason(best, stages, request, refusal), stages, stream)


def _only_streamed(shape: ModelShape, request: RunRequest, hardware: Hardware) -> str:
    """Name what of this run DeepSpeed does not have; '' for nothing. ValueError for what Muon does not do."""
    if shape.quantize:
        name = "the checkpoint's" if shape.is_published_packed else "quantize"
        return f"{name} {shape.quantize}: only the streaming engine keeps a packed base"
    if request.optimizer != "muon":
        return ""
    if why := why_not_muon(ranks=hardware.num_gpus, is_frozen=shape.lora_r > 0, state_format=request.format):
        raise ValueError(why)
    return "optimizer muon: only the streaming engine has it"


def choose_or_change(shape: ModelShape, request: RunRequest, hardware: Hardware) -> PlanAnswer:
    """`choose`, and when nothing fits the smallest change that does."""
    answer = choose(shape, request, hardware)
    if answer.plan.fits:
        return answer
    for words, changed_shape, changed in mild_changes(shape, request):
        try:
            plan = choose(changed_shape, changed, hardware).plan
        except ValueError:  # the change contradicts an explicit setting
            continue
        if plan.fits:
            return dataclasses.replace(answer, smallest_change=Change(words, plan))
    return answer


def mild_changes(shape: ModelShape, request: RunRequest) -> Iterator[tuple[str, ModelShape, RunRequest]]:
    """Requests changed in one thing (the last: in several), mildest first: words, shape, request."""
    replace = dataclasses.replace
    if not request.checkpoints_elsewhere:
        if request.save_total_limit > 1:
            yield "keep one checkpoint: --save_total_limit 1", shape, replace(request, save_total_limit=1)
        yield "checkpoints on another drive: --checkpoint_dir", shape, replace(request, checkpoints_elsewhere=True)
    for rows, times in smaller_micro_batches(request.micro_batch or 1):
        words, smaller = f"--per_device_train_batch_size {rows}", replace(request, micro_batch=rows)
        if request.accumulation is not None:
            words += f" --gradient_accumulation_steps {times * request.accumulation}"
            smaller = replace(smaller, accumulation=times * request.accumulation)
        yield f"smaller micro-batches: {words}", shape, smaller
    if not request.activation_checkpointing:
        yield (
            "recompute activations: --activation_checkpointing true",
            shape,
            replace(request, activation_checkpointing=True),
        )
    if request.optimizer == "muon":
        words = "AdamW, whose updates take no GPU memory: --optimizer adamw"
        yield words, shape, replace(request, optimizer="adamw")
    if request.state_format is None and request.precision == "bf16" and not shape.lora_r:
        for words, name in (("8-bit moments", "split8"), ("8-bit moments and masters of 24 bits", "fp24_m8")):
            yield f"{words} (opt-in): --state_format {name}", shape, replace(request, state_format=name)
    if request.clips and not shape.lora_r:
        yield (
            "no clipping, so gradients need not be kept: --max_grad_norm 0",
            shape,
            replace(request, max_grad_norm=0.0),
        )
    if shape.lora_r and not shape.quantize and shape.matrices:
        yield "a base packed in 4 bits: --quantize nf4", shape.packed("nf4"), request
    seq_length = seq_length_of(shape, request)
    for divisor in (2, 4, 8):
        if seq_length // divisor >= 128:
            shorter = seq_length // divisor
            yield f"shorter rows: --seq_length {shorter}", shape, replace(request, seq_length=shorter)
    if not shape.lora_r and shape.lora_dims:
        adapted = shape.with_lora(16)
        yield "adapters instead of full training: --lora_r 16", adapted, replace(request, state_format=None)
        yield (
            "adapters, rows of 256 and checkpoints on another drive: --lora_r 16 --seq_length 256 --checkpoint_dir",
            adapted,
            replace(request, state_format=None, seq_length=min(256, seq_length), checkpoints_elsewhere=True),
        )
    for words, smaller in _smaller_models(shape):
        yield words, smaller, request


def smaller_micro_batches(rows: int) -> Iterator[tuple[int, int]]:
    """(rows, how many times as many of them) that keep the batch, from nearly as large ones down to one row."""
    return ((rows // times, times) for times in range(2, rows + 1) if rows % times == 0)


def _smaller_models(shape: ModelShape) -> Iterator[tuple[str, ModelShape]]:
    from outcore.model import PRESETS, resolve_shape

    known = sorted(PRESETS.values(), key=lambda preset: -preset.num_parameters)
    for preset in known:
        if preset.num_parameters < shape.base_params and preset.model_type == shape.model_type:
            smaller = resolve_shape(
                preset.name,
                lora_target_modules=",".join(shape.lora_targets) or "auto",
                use_dora=shape.use_dora,
                modules_to_save=shape.modules_to_save,
            )
            yield f"a smaller model: {preset.name}", smaller.with_lora(shape.lora_r) if shape.lora_r else smaller


def seq_length_of(shape: ModelShape, request: RunRequest) -> int:
    """The rows' length, checked against the model's positions."""
    if request.seq_length is None:
        return min(k.DEFAULT_SEQ_LENGTH, shape.max_positions or k.DEFAULT_SEQ_LENGTH)
    if shape.max_positions is not None and request.seq_length > shape.max_positions:
        raise ValueError(
            f"seq_length is {request.seq_length}, but {shape.name} knows {shape.max_positions} positions. "
            f"Set --seq_length {shape.max_positions} or less."
        )
    return request.seq_length


def stream_refusal(shape: ModelShape, request: RunRequest, hardware: Hardware) -> str:
    """Why the streaming engine cannot take this run; '' when it can."""
    return why_not_stream(hardware.num_gpus, request.zero_stage, is_encoder_decoder=shape.is_encoder_decoder)


def batches(request: RunRequest) -> list[tuple[int, int]]:
    """(micro-batch, accumulation) pairs to try; the global batch is kept when one of them was left open."""
    if request.micro_batch and request.accumulation:
        return [(request.micro_batch, request.accumulation)]
    if request.micro_batch:
        return [(request.micro_batch, -(-k.DEFAULT_GLOBAL_BATCH // request.micro_batch))]
    if request.accumulation:
        return [(micro, request.accumulation) for micro in MICRO_BATCHES if micro <= k.DEFAULT_MICRO_BATCH]
    return [(micro, k.DEFAULT_GLOBAL_BATCH // micro) for micro in MICRO_BATCHES]


def best_stage(shape: ModelShape, request: RunRequest, hardware: Hardware, seq_length: int, stage: str) -> Plan:
    """The best plan of one ZeRO stage: least offload and largest micro-batch that fit, whatever is faster. DeepSpeed
    packs no base."""
    shape = dataclasses.replace(shape, quantize="")
    plans = [
        plan_deepspeed(
            shape,
            request,
            hardware,
            seq_length,
            DeepSpeedLayout(stage, optimizer, params, micro, accumulation, staged),
        )
        for optimizer, params in OFFLOADS[stage]
        for micro, accumulation in batches(request)
        for staged in _staged(stage, optimizer, request, hardware)
    ]
    # A budget that holds everything is zero3 under another name.
    return _best([plan for plan in plans if plan.ram_budget_bytes is None or plan.uses_drive])


def _staged(stage: str, optimizer: str, request: RunRequest, hardware: Hardware) -> list[Staged | None]:
    """List ways to move what is offloaded: whole to the drive, or within a budget that leaves no RAM idle."""
    if STAGE_NUMBER[stage] < 3 or optimizer == "none":
        return [None]
    staging = request.staging_bytes or STAGING_BYTES
    whole = Staged(request.format, staging_bytes=staging)
    if stage != "infinity":
        return [whole]
    budget = (hardware.ram_bytes - RAM_RESERVE_BYTES) // GIB * GIB
    return [whole, dataclasses.replace(whole, ram_budget_bytes=budget)] if budget > 0 else [whole]


def best_stream(shape: ModelShape, request: RunRequest, hardware: Hardware, seq_length: int) -> Plan:
    """The best plan of the streaming engine, which compiles layers on a GPU only."""
    compiled = not hardware.is_cpu
    return _best(
        [
            plan_stream(
                shape,
                request,
                hardware,
                seq_length,
                StreamLayout(
                    micro,
                    accumulation,
                    home,
                    compiled=compiled,
                    tiling=tiling,
                    resident_bytes=RESIDENT_BYTES,
                    ahead_bytes=None,
                    residency=STREAMED[request.residency],
                ),
            )
            for tiling in ("auto", "off")
            for micro, accumulation in batches(request)
            for home in ("vram", "ram", "nvme")
        ]
    )


def _best(plans: list[Plan]) -> Plan:
    """The fastest that fits (first of equals); nearly as fast and easier on the drive wins. None fits: least short."""
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return min(plans, key=lambda plan: (plan.shortage, plan.time.step_s))
    fastest = min(fitting, key=lambda plan: plan.time.step_s / plan.tokens_per_step)
    limit = NO_REASON_TO_SPILL * fastest.time.step_s / fastest.tokens_per_step
    near = [plan for plan in fitting if plan.time.step_s / plan.tokens_per_step <= limit]
    return min(near, key=lambda plan: (plan.drive_written_bytes_per_step, _moved_from_default(plan), plan.time.step_s))


def _moved_from_default(plan: Plan) -> tuple[bool, bool, int, int]:
    """Whole units before tiles, no flag for tiles before one, plain before offloaded, deepspeed_config.json's
    micro-batch before others."""
    in_tiles = plan.part_bytes("vram", TILES) > 0
    offloaded = sum(home != "VRAM" for home in plan.homes.values())
    return in_tiles, plan.tiling != "auto", offloaded, abs(plan.micro_batch - k.DEFAULT_MICRO_BATCH)


def _reason(best: Plan, stages: dict[str, Plan], request: RunRequest, refusal: str) -> str:
    if not best.fits:
        return "Nothing that was left open fits this machine."
    if request.zero_stage is not None or request.engine != "auto":
        asked = " and ".join(
            f"{name} {value}"
            for name, value in (("engine", request.engine), ("zero_stage", request.zero_stage))
            if value not in ("auto", None)
        )
        return f"{asked} as asked."
    if refusal and best.engine == "deepspeed":
        words = f"The fastest that fits; the streaming engine is out: {refusal}."
    elif best.zero_stage == "none":
        words = ""
    else:
        rivals = [plan for plan in stages.values() if plan.fits and plan is not best]
        rival = max(rivals, key=lambda plan: plan.tokens_per_s, default=None)
        words = "Engine auto streams what it can, as this" if best.engine == "stream" else "The fastest that fits"
        if best.engine == "stream" and rival is None:
            words += "; no ZeRO stage of DeepSpeed does"
        elif best.engine == "stream" and rival is not None:
            words += f", by forecast {best.tokens_per_s / rival.tokens_per_s:.1f} x the speed of {rival.title}"
        words += "."
    return f"{_no_infinity(stages)} {words}".strip()


def _no_infinity(stages: dict[str, Plan]) -> str:
    """Whether a stage below 3 would do; empty when none does."""
    simple = next((stages[s] for s in ("none", "zero1", "zero2") if stages[s].fits), None)
    if simple is None:
        return ""
    if simple.zero_stage == "none":
        return "You do not need Infinity for this model: it fits without any ZeRO."
    if simple.homes["optimizer states"] == "RAM":
        return f"You do not need Infinity for this model: {simple.zero_stage} with the optimizer in RAM fits."
    return f"You do not need Infinity for this model: {simple.zero_stage} fits."
