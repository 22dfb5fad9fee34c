"""Terms that a model's own forward adds to its cross-entropy, found out so that they are trained, too.

A mixture of experts adds a balancing loss times a coefficient; its name differs from model to model, so it is asked of
the model first. Whether nothing else is added is tried on a tiny copy: the loss that its own forward gives with labels
must be cross-entropy plus that. What does not add up is named by the field of the config that switches it off."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.common.errors import line_of
from outcore.model.forward import IGNORE, accepted_names, forward_inputs, shifted_targets
from outcore.model.trial.shrink import VOCAB

logger = logging.getLogger(__name__)

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Names that models and configs have for the weight of the balancing loss."""
TOLERANCE = 1e-4
"""Largest difference of a loss in fp32 that is rounding."""


def aux_coefficient(model: Any) -> float:
    """Weight of the router's balancing loss: the model's or its config's, when that asks for router logits; else 0.
    `model`: or anything else that has its config."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return 0.0
    text = config.get_text_config()
    if not (getattr(config, "output_router_logits", False) or getattr(text, "output_router_logits", False)):
        return 0.0
    found = (getattr(holder, name, None) for holder in (text, config, model) for name in COEFFICIENTS)
    return float(next((value for value in found if value), 0.0))


def mean_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits [B, T, V] averaged over the unmasked targets [B, T], in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


@dataclass(frozen=True)
class LossTerms:
    """Terms of a model's own loss beside cross-entropy."""

    balances: bool = True
    """Whether its forward gives a balancing loss when asked for router logits (Llama 4's does not)."""
    per_micro_batch: bool = False
    """Whether it counts whole for each micro-batch, as transformers' Trainer adds it, not by its share of tokens."""
    unknown: str = ""
    """In words, what else there is; only the whole forward computes it. '' when nothing."""


USUAL_TERMS = LossTerms()


def try_loss_terms(tiny: nn.Module, rebuild: Callable[[Any], nn.Module]) -> LossTerms:
    """The terms of a tiny model. `rebuild`: makes such a model from a changed copy of its config."""
    names, takes_any = accepted_names(tiny)
    if "labels" not in names and not takes_any:  # it has no loss to differ from
        return USUAL_TERMS
    try:
        balances, off = _try_own_loss(tiny)
    except Exception as error:  # its code may fail in any way; it ran without labels, and the loss is computed here
        logger.warning("the model's own loss could not be tried (%s): cross-entropy is trained", line_of(error))
        return USUAL_TERMS
    if off <= TOLERANCE:
        return LossTerms(balances)
    for name, without in _without_a_term(tiny.config):
        try:
            other = rebuild(without)
            other.load_state_dict(tiny.state_dict())
            is_it = _try_own_loss(other)[1] <= TOLERANCE
        except Exception as error:  # a config may be refused, or the model fail, without this field: is it another one?
            logger.debug("the loss without %s could not be tried: %s", name, line_of(error))
            continue
        if is_it:
            return LossTerms(balances, unknown=f"its own forward adds a term to the cross-entropy, of {name}")
    return LossTerms(balances, unknown=f"its own forward gives another loss than cross-entropy (off by {off:.1e})")


def _try_own_loss(tiny: nn.Module) -> tuple[bool, float]:
    """(whether the model's own forward gives a balancing loss, how far its loss is from cross-entropy and that one:
    0 for a model without a loss)."""
    ids = torch.randint(2, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[:, :3] = IGNORE
    coefficient = aux_coefficient(tiny)
    was_training = tiny.training
    tiny.train()
    try:
        with torch.no_grad():
            output = tiny(**_inputs(tiny, ids, coefficient), labels=labels)
    finally:
        tiny.train(was_training)
    aux = getattr(output, "aux_loss", None) if coefficient else None
    own, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    if not isinstance(own, torch.Tensor) or not isinstance(logits, torch.Tensor) or own.numel() != 1:
        return isinstance(aux, torch.Tensor), 0.0
    known = 0.0 if aux is None else coefficient * float(aux)
    targets = (shifted_targets(labels), labels)  # some take labels as shifted already
    rests = (abs(float(own) - known - float(mean_cross_entropy(logits, wanted))) for wanted in targets)
    return isinstance(aux, torch.Tensor), min(rests) / max(1.0, abs(float(own)))


def _inputs(tiny: nn.Module, ids: torch.Tensor, coefficient: float) -> dict[str, Any]:
    inputs = forward_inputs(tiny, {"input_ids": ids})
    if coefficient and "output_router_logits" in accepted_names(tiny)[0]:
        inputs["output_router_logits"] = True
    return inputs


def _without_a_term(config: Any) -> Iterator[tuple[str, Any]]:
    """(field and its value, copy of the config with 0 there) for every number that could be a term's weight."""
    for path in _weights(config.to_dict()):
        changed: Any = copy.deepcopy(config)
        holder = changed
        for part in path[:-1]:
            holder = holder[part] if isinstance(holder, dict) else getattr(holder, part, None)
        if holder is None:
            continue
        value = holder[path[-1]] if isinstance(holder, dict) else getattr(holder, path[-1], None)
        if isinstance(holder, dict):
            holder[path[-1]] = 0.0
        else:
            setattr(holder, path[-1], 0.0)
        yield f"{'.'.join(path)} {value}", changed


def _weights(fields: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _weights(value, (*path, name))
        elif type(value) in (int, float) and value and any(word in name for word in ("loss", "coef", "weight")):
            yield (*path, name)
