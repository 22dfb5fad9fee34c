"""Can this model be streamed? Found out by doing it: a tiny copy of its config is run part by part and as a whole.

The structure is taken apart on the model itself (`discovery`); whether the parts put together are the model is a
question of numbers, for padded and (where the model trains on them) packed rows. What is compared is a `Trial`: the
logits here; whoever trains compares gradients. No list of model names is kept. Cost: a fraction of a second.

How attention learns of the documents in packed rows: by their borders or by masks. Decided when an engine is built.

By their borders (`outcore.model.packed.trial`), documents cost what they would cost alone and there is no mask of
T x T; this needs sdpa attention in a model that passes two trials (`outcore.model.packed.trial`). Everything else goes
on with masks, with the reason said once. On the CPU the same borders become masks within each layer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from outcore.common.errors import line_of
from outcore.flow.check.handed_over import why_not_by_hidden_states
from outcore.flow.layers import Head, HeadInput, PartRunner
from outcore.flow.parts import (
    CallLog,
    DeviceBatch,
    LayerCall,
    ModelParts,
    Part,
    StreamUnsupported,
    alike,
    discover_units,
    several_types,
)
from outcore.formats.checkpoint import why_not_read
from outcore.model import LoadedModel
from outcore.model.facts import language_config, model_facts, parameter_types, quantization_of, resolve_attention
from outcore.model.forward import IGNORE, attention_of, forward_inputs, unwrap
from outcore.model.packed import PACKED_ATTENTION, takes_packed_attention, why_masks_differ, why_no_kernel
from outcore.model.trial import (
    MAX_TRIAL_PARAMS,
    VOCAB,
    Abilities,
    builder_of,
    check_abilities,
    on_one_thread,
    run_once,
    shrink_config,
)
from outcore.model.weights import seeded_cpu

TOLERANCE = 1e-3
"""Largest difference that a trial may find, relative to the largest value, in fp32."""
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trial:
    """One comparison of a trial."""

    what: str
    """Words for the comparison, in a refusal."""
    difference: Callable[[LoadedModel, Batch], float]
    """Difference of a tiny copy on one batch, part by part and as a whole."""


def why_not_streamed(loaded: LoadedModel, trial: Trial | None = None) -> str:
    """Reason why not; '' when this model can be streamed; otherwise the reason, in words. Parameters must be on the
    CPU. `trial`: None compares logits."""
    try:
        discover_units(loaded)
        try_tiny_copy(loaded, trial)
    except StreamUnsupported as error:
        return str(error)
    return ""


def config_of_type(model_type: str) -> Any:
    """Configuration of this architecture with its class's defaults. Raises ValueError where transformers has none."""
    from transformers import AutoConfig

    return language_config(AutoConfig.for_model(model_type))


@on_one_thread()
def why_config_not_streamed(
    config: Any,
    attention: str = "auto",
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    *,
    trial: Trial | None = None,
    trained: bool = False,
) -> str:
    """Answer `why_not_streamed` from a transformers config alone: no weight is read, no memory is spent. `dtype`: of
    the run; `trained`: its weights come from a checkpoint."""
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder has two stacks of layers; only decoder-only models are streamed"
    quantization = quantization_of(config) if trained else None
    if quantization is not None and (why := why_not_read(quantization)):
        return why
    attention, _ = resolve_attention(config, attention)
    abilities = check_abilities(config, attention, trust_remote_code)
    try:
        with seeded_cpu(0, "stream trial"):
            build = builder_of(config, trust_remote_code)
            tiny = _tiny_model(build, config, attention, abilities)
            with torch.device("meta"):
                types = parameter_types(build(shrink_config(config), dtype=dtype), dtype, trained=trained)
    except Exception as error:  # any model's own code may fail in any way on a shrunken config
        return _not_tried(error)
    return why_not_streamed(tiny, trial) or several_types(types)


@on_one_thread()
def try_tiny_copy(loaded: LoadedModel, trial: Trial | None = None) -> None:
    """StreamUnsupported when a tiny copy of the model gives other numbers unit by unit than as a whole."""
    try:
        with seeded_cpu(0, "stream trial"):
            tiny = tiny_copy(loaded)
            ids = torch.randint(2, VOCAB, (2, 12))
    except Exception as error:  # any model's own code may fail in any way on a shrunken config
        raise StreamUnsupported(_not_tried(error)) from error
    labels = ids.clone()
    labels[:, :2] = IGNORE
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    batches: list[Batch] = [{"input_ids": ids, "labels": labels.masked_fill(mask == 0, IGNORE), "attention_mask": mask}]
    if loaded.abilities.packing:
        positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1).contiguous()
        batches.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    try:
        units = discover_units(tiny)
        why = why_not_by_hidden_states(units, batches[0]) or _why_not_alone(units, units.record(batches[0]))
    except StreamUnsupported:
        raise
    except Exception as error:
        raise StreamUnsupported(f"a tiny copy of it failed layer by layer ({line_of(error)})") from error
    if why:
        raise StreamUnsupported(why)
    for batch in batches:
        kind = "packed" if "position_ids" in batch else "padded"
        try:
            difference = (trial or FORWARD).difference(tiny, batch)
        except StreamUnsupported:
            raise
        except Exception as error:
            raise StreamUnsupported(
                f"a tiny copy of it failed unit by unit on {kind} rows ({line_of(error)})"
            ) from error
        if not difference <= TOLERANCE:
            raise StreamUnsupported(
                f"unit by unit, a tiny copy of it gets other {(trial or FORWARD).what} than as a whole on {kind} rows "
                f"(off by {difference:.1e} of the largest)"
            )


def _not_tried(error: Exception) -> str:
    return f"a tiny copy of it could not be built and run to try it ({line_of(error)}{_place_of(error)})"


def _place_of(error: Exception) -> str:
    """The innermost module or config of the model in whose code an error came up, in words; '' without any."""
    place, trace = "", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) or hasattr(owner, "model_type"):
            place = f", in {type(owner).__name__}.{trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    return place


@torch.no_grad()
def _why_not_alone(units: ModelParts, log: CallLog) -> str:
    """Which layer uses what earlier ones left in a mapping that all are called with (keys and values that layers
    share): it is run with and without. '' when there is none."""
    hidden = log.hidden
    left: dict[int | str, dict[Any, Any]] = {}
    writers: list[str] = []

    def run(index: int, call: LayerCall) -> torch.Tensor:
        output = units.layers[index](hidden, *call.args, **call.kwargs)
        return output if isinstance(output, torch.Tensor) else output[0]

    for index in range(len(units.layers)):
        call = log.call(index)
        before = {name: {**ledger, **left.get(name, {})} for name, ledger in call.ledgers.items()}
        for name, ledger in call.ledgers.items():
            ledger.update(before[name])
        output = run(index, call)
        try:
            uses = bool(writers) and not torch.equal(run(index, log.call(index)), output)
        except LookupError:
            uses = True
        if uses:
            return (
                f"its layers hand each other more than the hidden states: layer {index} uses what layer"
                f"{'s' if len(writers) > 1 else ''} {' and '.join(writers)} left in {', '.join(map(str, left))}"
            )
        for name, ledger in call.ledgers.items():
            written = {key: value for key, value in ledger.items() if value is not before[name].get(key)}
            if written:
                left.setdefault(name, {}).update(written)
                writers.append(str(index))
        hidden = output
    return ""


@on_one_thread()
def sharing_holds(loaded: LoadedModel) -> bool:
    """Whether, in a tiny copy, layers that look alike (`structure`) give the same bits with each other's weights."""
    with seeded_cpu(0, "stream trial"):
        tiny = tiny_copy(loaded)
        ids = torch.randint(2, VOCAB, (2, 12))
    batches: list[Batch] = [{"input_ids": ids}]
    if attention_of(unwrap(loaded.model)) == PACKED_ATTENTION:  # its windows come from the layers, not with a mask
        takes_packed_attention(unwrap(tiny.model))
        positions = torch.cat([torch.arange(11), torch.arange(1)]).expand(2, -1)
        batches.append(DeviceBatch({"input_ids": ids, "position_ids": positions}, torch.device("cpu")))
    units = discover_units(tiny)
    return all(_sharing_holds(units, units.record(batch)) for batch in batches)


@torch.no_grad()
def _sharing_holds(units: ModelParts, log: CallLog) -> bool:
    for index, like in enumerate(alike(units.layers)):
        call, own = log.call(index), units.layers[index]
        weights: dict[str, torch.Tensor] = dict(own.named_parameters())
        shared = functional_call(units.layers[like], weights, (log.hidden, *call.args), call.kwargs)
        output = own(log.hidden, *call.args, **call.kwargs)
        pair = [value if isinstance(value, torch.Tensor) else value[0] for value in (shared, output)]
        if not torch.equal(*pair):
            return False
    return True


def forward_difference(tiny: LoadedModel, batch: Batch) -> float:
    """Largest difference of the logits, part by part and as a whole, relative to the largest; in fp32 on the CPU."""
    causal = unwrap(tiny.model)
    inputs = forward_inputs(causal, batch, tiny.abilities.isolation or "position_ids")
    with torch.no_grad():
        whole = causal(**inputs).logits.float().flatten(0, -2)
        runner = PartRunner(discover_units(tiny))
        log = runner.embed(slab_of(runner.units.embed), batch)
        hidden = log.hidden
        for index, unit in enumerate(runner.units.layer_units):
            hidden, _ = runner.layer(index, slab_of(unit), hidden, log.call(index))
        head = Head(runner, vocab_size=tiny.facts.vocab_size)
        everywhere = torch.arange(len(whole))
        mine = head.logits(slab_of(runner.units.head), HeadInput(hidden, batch, log), everywhere)
    counted = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).reshape(-1).bool()
    off = float((mine - whole)[counted].abs().max()) / max(float(whole[counted].abs().max()), 1e-12)
    return off if off == off else float("inf")


FORWARD = Trial("logits", forward_difference)


def slab_of(unit: Part) -> torch.Tensor:
    """Parameters of the part, as they would lie on the device."""
    slab = torch.zeros(unit.layout.numel, dtype=unit.layout.dtype)
    for view, parameter in zip(unit.layout.views(slab), unit.parameters, strict=True):
        view.copy_(parameter.detach())
    return slab


def tiny_copy(loaded: LoadedModel) -> LoadedModel:
    """A copy of the model's shrunken config with random weights, fp32, on the CPU."""
    causal = unwrap(loaded.model)
    build: Any = type(causal)._from_config  # pyright: ignore[reportAttributeAccessIssue]
    return _tiny_model(build, loaded.config, attention_of(causal), loaded.abilities)


def _tiny_model(build: Callable[..., nn.Module], original: Any, attention: str, abilities: Abilities) -> LoadedModel:
    config = shrink_config(original)
    attention = attention if attention in ("sdpa", "eager") else "sdpa"
    with torch.device("meta"):
        sizes = {
            name: p.numel()
            for name, p in build(config, dtype=torch.float32, attn_implementation=attention).named_parameters()
        }
    if (size := sum(sizes.values())) > MAX_TRIAL_PARAMS:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ValueError(f"it still has {size} parameters, {sizes[largest]} of them in {largest}")
    model = build(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 1.0 / parameter.shape[-1] ** 0.5)
    run_once(model.eval())
    return LoadedModel(model, config, model_facts(model), abilities, "a tiny copy")


logger = logging.getLogger(__name__)


def attention_to_packed_rows(
    loaded: LoadedModel, device: torch.device, dtype: torch.dtype, *, wanted: bool = True, trial: bool = True
) -> str:
    """Have the model attend to packed rows by their borders where it can; in words, what it does ('' when it does not
    come up). `wanted`: whether the choice of attention was left to us; `trial`: first on a tiny copy."""
    causal = unwrap(loaded.model)
    if attention_of(causal) != "sdpa" or loaded.abilities.isolation != "position_ids":
        return ""
    if not wanted:
        return "masks, as asked"
    if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        return "masks (torch's variable-length kernel computes in bf16 and fp16)"
    why = why_no_kernel(loaded.config, device, dtype) if device.type == "cuda" else ""
    if not why and trial:
        try:
            with seeded_cpu(0, "stream trial"):
                tiny = tiny_copy(loaded).model
        except Exception as error:  # any model's own code may fail in any way on a shrunken config
            why = f"a tiny copy of it could not be built to try it ({type(error).__name__}: {error})"
        else:
            why = why_masks_differ(tiny)
    why = why or takes_packed_attention(causal)
    if why:
        logger.warning("packed rows are computed with masks: %s", why)
        return f"masks ({why})"
    return "variable-length flash attention" if device.type == "cuda" else "masks, made in each layer (no GPU)"
