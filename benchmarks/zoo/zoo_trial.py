"""What outcore does with one architecture, tried on a tiny copy of it: a record of plain values, written as JSON.

Whether it streams (in fp32, in bf16 from scratch and from trained weights, with its balancing loss), whether three
steps of it end where plain PyTorch ends (fp32, clipping, two ragged micro-batches) and what it exports loads again,
whether packed rows, LoRA's automatic targets and tiles work. Every refusal is in the words that a user reads.
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from zoo_shapes import config_of

from outcore.common.quantities import MIB
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.check.gradients import try_tiled_copy, why_config_not_trained, why_not_trained
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.parts import StreamUnsupported
from outcore.model import LoadedModel, LoraSettings
from outcore.model.adapters import apply_lora
from outcore.model.facts import model_class_of, model_facts, resolve_attention
from outcore.model.forward import forward_inputs
from outcore.model.trial.abilities import check_abilities, freeze
from outcore.model.trial.shrink import VOCAB, shrink_config

SETTINGS = StreamSettings(
    staging_bytes=2 * MIB,
    slot_bytes=MIB // 4,
    num_slots=2,
    optimizer_threads=1,
    optimizer_backend="torch",
    compile="off",
    max_grad_norm=0.5,
    weight_decay=0.1,
    eps=1e-4,  # far above rounding: some gradients are zero but for it (a key's bias), and Adam would blow that up
)
STEPS, LR = 3, 3e-3
TOLERANCE = 2e-4
"""Largest difference of a weight after all steps, relative to the learning rate's full reach (steps x LR)."""
Record = dict[str, Any]


def try_architecture(name: str) -> Record:
    """The record of one model type. Never raises: an unexpected error is a field `crash`."""
    record: Record = {"name": name}
    try:
        _try(name, record)
    except Exception as error:
        record["crash"] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        record["trace"] = traceback.format_exc(limit=-6)
    return record


def _try(name: str, record: Record) -> None:
    try:
        config = config_of(name)
    except Exception as error:
        record["unbuilt"] = f"its config class cannot be made with its defaults ({_line(error)})"
        return
    record["is_encoder_decoder"] = bool(getattr(config, "is_encoder_decoder", False))
    if record["is_encoder_decoder"]:
        record["streams"] = why_config_not_trained(config)
        return
    try:
        attention, _ = resolve_attention(config, "auto")
        make(config, attention)
    except Exception as error:
        record["unbuilt"] = f"transformers does not build or run a small one ({_line(error)})"
    began_s = time.perf_counter()
    record["streams"] = why_config_not_trained(config)
    record["asked_s"] = round(time.perf_counter() - began_s, 2)
    if record["streams"]:
        return
    abilities = check_abilities(config, attention)
    record["packing"], record["packing_reason"] = abilities.isolation or "", abilities.packing_reason
    record["bf16"] = why_config_not_trained(config, dtype=torch.bfloat16)
    record["bf16_trained"] = why_config_not_trained(config, dtype=torch.bfloat16, trained=True)
    record["routers"] = _routers(name)
    record["steps"] = _refused_or(lambda: _three_steps(make(config, attention)))
    record["export"] = _refused_or(lambda: _export(make(config, attention)))
    record["lora"] = _refused_or(lambda: _lora(make(config, attention)))
    record["tiles"] = _refused_or(lambda: try_tiled_copy(make(config, attention), build_stream_engine))


def _routers(name: str) -> str | None:
    """Why it does not stream with its balancing loss; None: it has none."""
    config = config_of(name)
    text = config.get_text_config()
    if not hasattr(text, "output_router_logits"):
        return None
    text.output_router_logits = True
    return why_config_not_trained(config)


def make(config: Any, attention: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A tiny model with random weights and no dropout."""
    tiny = shrink_config(config)
    attention = attention if attention in ("sdpa", "eager") else "sdpa"
    torch.manual_seed(0)
    model = model_class_of(tiny)._from_config(tiny, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.normal_(0.0, 1.0 / p.shape[-1] ** 0.5)
        model(**forward_inputs(model, {"input_ids": torch.full((1, 9), 2)}))
    _without_noise(model)
    model.config.use_cache = False
    abilities = check_abilities(tiny, attention)
    freeze(model, abilities.without_gradient)
    return LoadedModel(model.train(), tiny, model_facts(model), abilities, f"tiny {tiny.model_type}")


def _without_noise(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for field, value in list(vars(module).items()):
            if isinstance(value, float) and ("dropout" in field or "layerdrop" in field or "jitter" in field):
                setattr(module, field, 0.0)


def _batches(step: int, packs: bool) -> list[dict[str, torch.Tensor]]:
    """Two ragged micro-batches of one global batch: padded rows, and packed ones where the model takes them."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(2, VOCAB, (2, 15), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    padded = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    ids = torch.randint(2, VOCAB, (1, 12), generator=generator)
    other = {"input_ids": ids, "labels": ids.clone()}
    if packs:
        other["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)])[None]
        other["labels"][:, 5] = -100
    return [padded, other]


def _three_steps(loaded: LoadedModel) -> str:
    """'' when three steps end where torch's AdamW over the whole model ends; otherwise what differs."""
    plain = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
    packs = loaded.abilities.packing
    engine = build_stream_engine(loaded, SETTINGS, device="cpu", pinned_grant=False)
    try:
        mine = [engine.train_step(_batches(step, packs), LR) for step in range(STEPS)]
        engine._parts.updates.drain()
        weights = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
    finally:
        engine.close()
    with torch.no_grad():
        for name, p in loaded.model.named_parameters():
            p.copy_(plain[name])
    losses, norms = _plain_steps(loaded, packs)
    off = max(abs(a.loss - b) / max(1.0, abs(b)) for a, b in zip(mine, losses))
    if not off <= 1e-5:
        return f"WRONG: losses off by {off:.1e}"
    off = [abs((a.grad_norm or 0.0) - b) / b for a, b in zip(mine, norms)]
    # Of the same weights; later ones differ by rounding, which choices of experts and some recurrences blow up: plain
    # PyTorch in fp32 is off by 2.5e-4 of fp64's for qwen3_5 in step 3.
    if not (off[0] <= 1e-4 and max(off) <= 1e-3):
        return f"WRONG: gradient norms off by {off[0]:.1e} in step 1, {max(off):.1e} later"
    worst = max(
        (float((weights[name] - p.detach()).abs().mean()) / (STEPS * LR), name)
        for name, p in loaded.model.named_parameters()
    )
    return "" if worst[0] <= TOLERANCE else f"WRONG: {worst[1]} off by {worst[0]:.1e} of its reach"


def _plain_steps(loaded: LoadedModel, packs: bool) -> tuple[list[float], list[float]]:
    """(losses, norms) of plain PyTorch."""
    trained = [p for p in loaded.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=LR, betas=SETTINGS.betas, eps=SETTINGS.eps, weight_decay=SETTINGS.weight_decay, foreach=False
    )
    loss, losses, norms = loaded.token_loss(), [], []
    for step in range(STEPS):
        batches = _batches(step, packs)
        total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        optimizer.zero_grad(set_to_none=True)
        summed = 0.0
        for batch in batches:
            result = loss(loaded.model, batch)
            result.objective(total).backward()
            summed += float(result.loss_sum.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, SETTINGS.max_grad_norm)))
        optimizer.step()
        losses.append(summed / total)
    return losses, norms


def _export(loaded: LoadedModel) -> str:
    """'' when what is exported loads as the same model."""
    ids = {"input_ids": torch.arange(2, 14)[None]}
    with torch.no_grad():
        before = loaded.model.eval()(**forward_inputs(loaded.model, ids)).logits
    engine = build_stream_engine(loaded, SETTINGS, device="cpu", pinned_grant=False)
    attention = loaded.model.config._attn_implementation
    try:
        with tempfile.TemporaryDirectory() as folder:
            try:
                engine.export(Path(folder) / "final")
            except StrictDataclassError as error:  # transformers refuses to save the tiny config, not ours to judge
                return f"not tried: {_line(error)}"
            again = type(loaded.model).from_pretrained(
                Path(folder) / "final", dtype=torch.float32, attn_implementation=attention
            )
    finally:
        engine.close()
    again.config.use_cache = False
    _without_noise(again)
    with torch.no_grad():
        after = again.eval()(**forward_inputs(again, ids)).logits
    off = float((after - before).abs().max())
    return "" if off <= 1e-5 * float(before.abs().max()) else f"WRONG: logits of the export are off by {off:.1e}"


def _lora(loaded: LoadedModel) -> str:
    """'' when automatic targets are adapted and stream; otherwise why not."""
    model = apply_lora(loaded.model, LoraSettings(r=2), 0)
    adapted = LoadedModel(model.train(), loaded.config, model_facts(model), loaded.abilities, loaded.words)
    if why := why_not_trained(adapted):
        return why
    engine = build_stream_engine(adapted, SETTINGS, device="cpu", pinned_grant=False)
    try:
        result = engine.train_step(_batches(0, loaded.abilities.packing), LR)
    finally:
        engine.close()
    return "" if result.loss > 0 and (result.grad_norm or 0.0) > 0 else "WRONG: adapters get no gradient"


def _refused_or(question: Callable[[], str | None]) -> str:
    """What a question finds ('' when all is well), a refusal in its words, or the crash with its error."""
    try:
        return question() or ""
    except (StreamUnsupported, ValueError) as error:
        return str(error)
    except Exception as error:
        return f"CRASH: {_line(error)}\n{traceback.format_exc(limit=-4)}"


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
