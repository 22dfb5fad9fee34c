"""Labels that a model which classifies gives to a text, in place of tokens behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Labels:
    """Names of labels, and how their scores are read."""

    names: tuple[str, ...]
    problem: str | None = None
    """Value of the config's problem_type."""

    def probabilities(self, scores: torch.Tensor) -> list[float]:
        """Turn the head's scores [labels] into probabilities; where the model regresses, they stay as they are."""
        if self.problem == "regression":
            return scores.tolist()
        alone = len(self.names) == 1 or self.problem == "multi_label_classification"
        return (scores.sigmoid() if alone else scores.softmax(0)).tolist()


def labels_of(config: Any) -> Labels:
    """Labels by the config of a model that classifies."""
    return Labels(tuple(config.id2label[number] for number in range(len(config.id2label))), config.problem_type)
