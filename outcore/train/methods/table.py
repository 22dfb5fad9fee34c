"""Table of methods: what each learns from, and who trains it.

Losses are TRL's where it has them. A head over the decoder (one matrix) is added where a method wants one; what it was
trained for then stands in the exported configuration, so that `outcore serve` answers by it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from outcore.config import ConfigError
from outcore.train.methods import rows

Read = Callable[..., list[rows.Row]]


@dataclass(frozen=True)
class MethodKind:
    """One line of the table."""

    read: Read | None
    """Reads the run's data: rows as the trainer wants them; None: as our own loop's."""
    trainer: str
    """Module and class; '' for one of ours."""
    has_head: bool = False
    has_reference: bool = False
    """Whether it compares with the model as it was: with adapters these switched off, else computed before."""
    rolls_out: bool = False
    """Whether it learns from answers that the model gives while it is trained."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the trainer alone, beside the shared ones."""


METHODS: Mapping[str, MethodKind] = MappingProxyType(
    {
        "dpo": MethodKind(rows.pairs, "trl.DPOTrainer", has_reference=True),
        "kto": MethodKind(rows.judged, "trl.KTOTrainer", has_reference=True),
        "orpo": MethodKind(rows.pairs, "trl.experimental.orpo.ORPOTrainer"),
        "simpo": MethodKind(
            rows.pairs, "trl.experimental.cpo.CPOTrainer",
            settings={"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0},
        ),
        "reward": MethodKind(rows.pairs, "trl.RewardTrainer", has_head=True),
        "classify": MethodKind(rows.labelled, "", has_head=True),
        "embed": MethodKind(rows.partners, ""),
        "distill": MethodKind(None, ""),
        "grpo": MethodKind(rows.asked, "trl.GRPOTrainer", rolls_out=True),
        "gspo": MethodKind(
            rows.asked, "trl.GRPOTrainer", rolls_out=True,
            settings={"importance_sampling_level": "sequence", "loss_type": "grpo"},
        ),
        "rloo": MethodKind(rows.asked, "trl.RLOOTrainer", rolls_out=True, settings={"beta": 0.0}),
        "on_policy_distill": MethodKind(rows.asked, "trl.GRPOTrainer", rolls_out=True),
    }
)  # fmt: skip


def trl_classes(kind: MethodKind) -> tuple[Any, Any]:
    """(trainer, its settings' class). ConfigError where TRL is not there."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    module, _, name = kind.trainer.rpartition(".")
    try:
        found = importlib.import_module(module)
        return getattr(found, name), getattr(found, name.replace("Trainer", "Config"))
    except ImportError as error:
        raise ConfigError(
            f"method: its loss is TRL's, which is not here ({error}). pip install 'outcore[trl]'"
        ) from error
