"""Parity: the same suite by the harness's own Hugging Face backend on the same weights, compared document by
document."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outcore.evaluate.history import Comparison, as_table, compare
from outcore.evaluate.settings import EvaluationError, EvaluationSettings
from outcore.infer.opening import OpenedModel

MAX_POINTS = 0.1
"""Difference of a score, in points of accuracy or per cent of a perplexity, up to which two backends agree."""
Record = dict[str, Any]
Answers = tuple[Sequence[Record], Sequence[Record], float]
"""Scores, documents, seconds in the model."""


@dataclass(frozen=True)
class Reference:
    """Arguments of the harness's own backend."""

    pretrained: str
    adapter: str | None
    dtype: str
    device: str
    max_length: int
    batch_size: int
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Parity:
    """Comparison of two backends: scores and seconds."""

    comparisons: tuple[Comparison, ...]
    ours_s: float
    theirs_s: float

    @property
    def is_equal(self) -> bool:
        """Whether every score agrees."""
        return bool(self.comparisons) and all(abs(one.difference) <= MAX_POINTS for one in self.comparisons)

    def words(self) -> str:
        """The comparison, for people."""
        columns = ("task", "metric", "a", "b", "difference", "unit", "changed", "p_value", "max_logprob_difference")
        rows = [[asdict(one)[name] for name in columns] for one in self.comparisons]
        head = ("task", "metric", "hf", "outcore", *columns[4:])
        verdict = "equal" if self.is_equal else f"NOT within {MAX_POINTS} points"
        ratio = self.theirs_s / self.ours_s if self.ours_s else 0.0
        return (
            f"{as_table(rows, head)}\nscores {verdict}; in the model: hf {self.theirs_s:.1f} s, outcore "
            f"{self.ours_s:.1f} s ({ratio:.2f}x as fast)"
        )


def reference_of(opened: OpenedModel, max_length: int, args: Any) -> Reference:
    """The harness's own backend on this model's weights. EvaluationError where it cannot load them."""
    folders = opened.found.folders
    if (Path(folders[0]) / "manifest.json").is_file():
        raise EvaluationError(
            f"{folders[0]} is a checkpoint, which the harness's own backend does not load. Export it (outcore export) "
            "and name that folder.",
            "parity",
        )
    dtype = next(p.dtype for p in opened.found.loaded.model.parameters() if p.is_floating_point())
    return Reference(
        folders[0],
        folders[1] if len(folders) > 1 else None,
        str(dtype).removeprefix("torch."),
        str(opened.device),
        max_length,
        args.hf_batch_size,
        args.trust_remote_code,
    )


def softmax_of(device: str) -> dict[str, str]:
    """Precision in which the harness's backend turns logits into log-probabilities and sums them, by its own option.

    Left alone it takes the model's: in bf16 a sum of 300 nat is rounded to 2, and in fp32 on a CPU torch's log-softmax
    over 49,152 words is off by 8e-6 a token, always to the same side."""
    return {"softmax_dtype": "float32" if device.startswith("cuda") else "float64"}


def run_reference(reference: Reference, settings: EvaluationSettings) -> Answers:
    """Answer the tasks with the harness's own backend."""
    from lm_eval.models import huggingface

    backend: Any = huggingface.HFLM  # its decorator hides the class's own parameters
    lm = backend(
        pretrained=reference.pretrained,
        peft=reference.adapter,
        dtype=reference.dtype,
        device=reference.device,
        max_length=reference.max_length,
        batch_size=reference.batch_size,
        trust_remote_code=reference.trust_remote_code,
        **softmax_of(reference.device),
    )
    lm.model.eval()
    found = timed_suite(lm, settings)
    del lm
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def timed_suite(lm: Any, settings: EvaluationSettings) -> Answers:
    """Run the tasks on any model of the harness; returns scores, samples and seconds."""
    from outcore.evaluate.harness import load_tasks, run_suite

    tasks = load_tasks(settings, trust_remote_code=True)  # the command has loaded them before, or refused them
    clock = _Clock(lm)
    scores: list[Record] = []
    samples: list[Record] = []

    def scored(name: str, of_task: list[Record], documents: list[Record]) -> None:
        scores.extend(of_task)
        samples.extend(documents)

    run_suite(lm, settings, lambda name, number: None, scored, tasks)
    return scores, samples, clock.seconds


def compare_with_reference(
    reference: Reference, settings: EvaluationSettings, ours: Answers, say: Callable[[str], None]
) -> Parity:
    """Ours against the harness's own backend."""
    say(f"the harness's own backend on {reference.pretrained} ({reference.dtype}, {reference.device}) ...")
    scores, samples, seconds = run_reference(reference, settings)
    return Parity(tuple(compare(scores, samples, ours[0], ours[1])), ours[2], seconds)


def save_parity(parity: Parity, folder: Path) -> Path:
    """Keep a comparison beside the evaluation's result."""
    path = folder / "parity.json"
    value = {
        "comparisons": [asdict(one) for one in parity.comparisons],
        "outcore_s": parity.ours_s,
        "hf_s": parity.theirs_s,
        "is_equal": parity.is_equal,
    }
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
    return path


class _Clock:
    """Seconds inside a backend's answers."""

    def __init__(self, lm: Any) -> None:
        self.seconds = 0.0
        for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            setattr(lm, name, self._timed(getattr(lm, name)))

    def _timed(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            began_s = time.monotonic()
            try:
                return ask(*args, **more)
            finally:
                self.seconds += time.monotonic() - began_s

        return timed
