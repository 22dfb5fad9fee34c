"""Abilities of a model, found out by trying it: a tiny copy of its config is run on the CPU before training.

Two questions that no list of model names answers for good. May the loss be computed from hidden states chunk by
chunk? And are packed documents really kept apart in attention, for every kind of layer and more than one row? Both
are answered by comparing numbers; a model that cannot be tried gets the safe answer, with the reason. Costs a few
forward passes of a model of some thousand parameters, a fraction of a second.

Parameters that the loss of a language model never reaches: an indexer that only picks tokens, cross-attention of a
decoder that is trained without an encoder.

torch's AdamW leaves a parameter without a gradient alone. An engine that keeps gradients in one flat buffer sees zeros
there, and would shrink it by weight decay. So such parameters are found on the tiny copy, by one backward pass, and
frozen in the model: they cost no gradient and no states either. Names are compared with their numbers left out, and all
that share such a pattern must be without a gradient: an expert that got no token in the trial is trained as its
siblings are."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from outcore.model.facts import ConfigKey, checkpoint_name, model_class_of, resolve_attention
from outcore.model.forward import CausalParts, Isolation, forward_inputs
from outcore.model.trial.loss_terms import USUAL_TERMS, LossTerms, try_loss_terms
from outcore.model.trial.shrink import VOCAB, shrink_config
from outcore.model.weights import seeded_cpu, without_partitioning


def pattern_of(name: str) -> str:
    """A parameter's name with a star for each number: equal for all layers and experts."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", checkpoint_name(name))


def without_gradient(tiny: nn.Module) -> frozenset[str]:
    """Patterns of the trainable parameters that get no gradient from the logits or a balancing loss."""
    ids = torch.randint(2, VOCAB, (2, 24), generator=torch.Generator().manual_seed(4))
    named = {name: p for name, p in tiny.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        output: Any = tiny(**forward_inputs(tiny, {"input_ids": ids}))
        total = output.logits.float().square().mean()
        aux = getattr(output, "aux_loss", None)
        if isinstance(aux, torch.Tensor) and aux.requires_grad:
            total = total + aux
        grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    reached: defaultdict[str, bool] = defaultdict(bool)
    for name, grad in zip(named, grads, strict=True):
        reached[pattern_of(name)] |= grad is not None
    return frozenset(pattern for pattern, is_reached in reached.items() if not is_reached)


def freeze(model: nn.Module, patterns: frozenset[str]) -> list[str]:
    """Freeze the parameters of these patterns; their names."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad and pattern_of(name) in patterns}
    for p in found.values():
        p.requires_grad_(False)
    return list(found)


MAX_TRIAL_PARAMS = 20_000_000
"""A shrunken config that is still larger than this is not tried (the shrinking did not understand it)."""
TOLERANCE = 1e-3
"""Largest difference of logits, relative to their spread, between two ways to compute the same thing in fp32."""
DOCUMENTS = ((7, 1, 9, 7), (11, 13))
"""Lengths of the documents in the two trial rows: a single token, some longer than the trial's attention window."""


@dataclass(frozen=True)
class Abilities:
    """Answers, each with its reason in words ('' when the answer is yes)."""

    chunked_head: bool
    chunked_reason: str
    isolation: Isolation | None
    """Way in which packed documents are kept apart; None: they are not."""
    packing_reason: str
    terms: LossTerms = USUAL_TERMS
    """Terms of the model's own loss beside cross-entropy."""
    without_gradient: frozenset[str] = frozenset()
    """Patterns of parameters that the loss never reaches; they are frozen."""

    @property
    def packing(self) -> bool:
        """True when packed documents are kept apart in attention and positions."""
        return self.isolation is not None


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Inside (or in a function that this decorates) torch computes with one thread: products of a trial take
    microseconds, and where other work is on the cores a second thread is waited for twenty times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_abilities(
    config: Any,
    attn_implementation: str = "auto",
    trust_remote_code: bool = False,
    build: Callable[..., nn.Module] | None = None,
) -> Abilities:
    """Try a tiny copy of a transformers config. Never raises for the model's sake: what fails is answered no. Asked
    again about an equal config a process answers from memory: data, weights and engine of one start ask.

    `build`: what makes the model from a config, where that is not the config's own class."""
    if getattr(config, "is_encoder_decoder", False):
        reason = "an encoder-decoder runs whole and one sample per row"
        routers = bool(getattr(config, "output_router_logits", False))
        terms = LossTerms(unknown="its own forward adds losses of its routers" if routers else "")
        return Abilities(False, reason, None, reason, terms)
    # FlashAttention needs a GPU; it is fed one flat row whose borders it reads from the same position_ids.
    trial_attention, _ = resolve_attention(config, attn_implementation)
    if trial_attention not in ("sdpa", "eager"):
        trial_attention = "sdpa"
    return _tried(ConfigKey.about(config), trial_attention, trust_remote_code, build)


@lru_cache(64)
@on_one_thread()
def _tried(
    asked: ConfigKey, attention: str, trust_remote_code: bool, build: Callable[..., nn.Module] | None
) -> Abilities:
    make = partial(_tiny_model, attention=attention, trust_remote_code=trust_remote_code, build=build)
    try:
        with without_partitioning(), seeded_cpu(0, "trial"):
            model: Any = make(shrink_config(asked.config))
            run_once(model)
            terms = try_loss_terms(model, make)
    except Exception as error:  # any model's own code may fail in any way on a shrunken config
        reason = f"a tiny copy of the model could not be built and run to try it ({_first_line(error)})"
        return Abilities(False, reason, None, reason)
    with torch.no_grad(), seeded_cpu(0, "trial inputs"):
        config_of_tiny: Any = model.config
        for part in (config_of_tiny, config_of_tiny.get_text_config()):  # not asked for any more: logits are compared
            part.output_router_logits = False
        if terms.unknown:
            chunked_reason = f"{terms.unknown}, which is computed with the model as a whole"
        elif chunked_reason := _try(_chunked_differs, model):
            chunked_reason = f"its head cannot be run apart: {chunked_reason}"
        isolation, packing_reason = _find_isolation(model)
        idle = _try_gradients(model)
    return Abilities(not chunked_reason, chunked_reason, isolation, packing_reason, terms, idle)


def _tiny_model(
    tiny: Any, attention: str, trust_remote_code: bool, build: Callable[..., nn.Module] | None
) -> nn.Module:
    build = build or builder_of(tiny, trust_remote_code)
    with torch.device("meta"):
        skeleton = build(copy.deepcopy(tiny), dtype=torch.float32, attn_implementation=attention)
    size = sum(p.numel() for p in skeleton.parameters())
    if size > MAX_TRIAL_PARAMS:
        raise ValueError(f"its tiny copy still has {size} parameters")
    model = build(tiny, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 2.0 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@torch.no_grad()
def run_once(tiny: nn.Module) -> None:
    """A forward pass; any error means that the config was not shrunk well, and says nothing of the model."""
    tiny(**forward_inputs(tiny, {"input_ids": torch.full((2, 12), 2)}))


def builder_of(config: Any, trust_remote_code: bool) -> Callable[..., nn.Module]:
    """Choose what makes a model from a config: its transformers class, or the code that comes with it."""
    try:
        return model_class_of(config)._from_config  # pyright: ignore[reportAttributeAccessIssue]
    except ValueError:
        if not trust_remote_code:
            raise
    from transformers import AutoModelForCausalLM

    return partial(AutoModelForCausalLM.from_config, trust_remote_code=True)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _try(question: Callable[[nn.Module], str], model: nn.Module) -> str:
    try:
        return question(model)
    except Exception as error:
        return f"the trial failed ({_first_line(error)})"


def _try_gradients(model: nn.Module) -> frozenset[str]:
    try:
        return without_gradient(model)
    except Exception:  # a model whose own backward fails trains nowhere; whoever trains it says why
        return frozenset()


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference of two tensors relative to the spread of the second; inf when shapes or numbers are off."""
    if a.shape != b.shape or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("inf")
    return float((a - b).abs().max() / b.std().clamp(min=1e-12))


def _chunked_differs(model: nn.Module) -> str:
    parts = CausalParts(model)
    ids = torch.randint(2, VOCAB, (2, 12))
    whole = model(input_ids=ids, use_cache=False).logits
    hidden = parts.decoder(**forward_inputs(parts.decoder, {"input_ids": ids})).last_hidden_state
    chunks = [parts.logits(chunk[None]) for chunk in hidden.reshape(-1, hidden.shape[-1]).tensor_split(5)]
    apart = torch.cat(chunks, dim=1).reshape(whole.shape)
    difference = _difference(apart, whole)
    if difference > TOLERANCE:
        return f"logits of its head alone differ from those of the whole model (by {difference:.1e} of their spread)"
    return ""


def _find_isolation(model: nn.Module) -> tuple[Isolation | None, str]:
    ids = torch.randint(2, VOCAB, (2, sum(DOCUMENTS[0])))
    try:
        apart = torch.stack(
            [
                torch.cat([model(input_ids=d[None], use_cache=False).logits[0] for d in row.split(list(lengths))])
                for row, lengths in zip(ids, DOCUMENTS, strict=True)
            ]
        )
        together = model(input_ids=ids, use_cache=False).logits
    except Exception as error:
        return None, f"the trial failed ({_first_line(error)})"
    if not _difference(together, apart) > 10 * TOLERANCE:
        return None, "the trial could not tell documents apart at all, so it proves nothing"
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in DOCUMENTS])
    batch = {"input_ids": ids, "position_ids": positions}
    reasons = []
    ways: tuple[Isolation, ...] = ("position_ids", "mask_4d", "mask_map")
    for way in ways:
        try:
            packed = model(**forward_inputs(model, batch, way)).logits
        except Exception as error:
            reasons.append(f"with {way} it fails ({_first_line(error)})")
            continue
        difference = _difference(packed, apart)
        if difference <= TOLERANCE:
            return way, ""
        reasons.append(f"with {way} logits are off by {difference:.1e} of their spread")
    return None, "packed documents would see each other: " + "; ".join(reasons)
