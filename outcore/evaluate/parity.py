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
MAX_FARTHER = 1.25
"""In 16 bits two orders of the same sums differ by rounding. Ours may be this many times as far from fp32 as the
harness's backend is: over 160 endings its own two attention implementations are 1.25 times apart."""
Record = dict[str, Any]
Answers = tuple[Sequence[Record], Sequence[Record], float]
"""Scores, documents, seconds in the model."""


@dataclass(frozen=True)
class Reference:
    """What the harness's own backend is given."""

    pretrained: str
    adapter: str | None
    dtype: str
    device: str
    max_length: int
    batch_size: int
    uses_device_map: bool = False
    vram_gib: float | None = None
    trust_remote_code: bool = False
    asks_fp32: bool = False
    """Whether the harness's backend also runs on the same weights widened to fp32."""


@dataclass(frozen=True)
class FromExact:
    """How far both backends are from fp32 on the same weights: one row for each metric that has log-probabilities."""

    theirs: tuple[Comparison, ...]
    ours: tuple[Comparison, ...]

    def distances(self) -> list[tuple[str, str, float, float]]:
        """(task, metric, theirs, ours), nat a document."""
        return [
            (a.task, a.metric, a.rms_logprob_difference, b.rms_logprob_difference)
            for a, b in zip(self.theirs, self.ours, strict=True)
            if a.rms_logprob_difference is not None and b.rms_logprob_difference is not None
        ]

    @property
    def is_as_near(self) -> bool:
        """Whether ours is as near as the harness's backend in every metric."""
        found = self.distances()
        return bool(found) and all(ours <= MAX_FARTHER * theirs for _, _, theirs, ours in found)


@dataclass(frozen=True)
class Parity:
    """How two backends compare."""

    comparisons: tuple[Comparison, ...]
    ours_s: float
    theirs_s: float
    exact: FromExact | None = None
    """Distance of each from fp32, if that was asked for."""

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
        exact = "" if self.exact is None else f"\n{self._exact_words(self.exact)}"
        return (
            f"{as_table(rows, head)}{exact}\nscores {verdict}; in the model: hf {self.theirs_s:.1f} s, outcore "
            f"{self.ours_s:.1f} s ({ratio:.2f}x as fast)"
        )

    def _exact_words(self, exact: FromExact) -> str:
        head = ("task", "metric", "hf from fp32, nat", "outcore from fp32, nat")
        verdict = "as near to fp32 as hf" if exact.is_as_near else f"NOT within {MAX_FARTHER} times hf's distance"
        return f"{as_table([list(row) for row in exact.distances()], head)}\noutcore is {verdict}"


def reference_of(opened: OpenedModel, max_length: int, args: Any) -> Reference:
    """The harness's own backend on this model's weights. EvaluationError where it cannot load them."""
    folders = opened.found.folders
    if (Path(folders[0]) / "manifest.json").is_file():
        raise EvaluationError(
            f"{folders[0]} is a checkpoint, which the harness's own backend does not load. Export it (outcore export) "
            "and name that folder.",
            "parity",
        )
    if args.hf_fp32 and args.hf_device_map:
        raise EvaluationError(
            "--hf_fp32 widens weights that device_map has laid out for 16 bits: leave one of them out.", "hf_fp32"
        )
    dtype = next(p.dtype for p in opened.found.loaded.model.parameters() if p.is_floating_point())
    if args.hf_fp32 and dtype == torch.float32:
        raise EvaluationError("--hf_fp32 compares 16 bits with fp32, and this model is in fp32 already.", "hf_fp32")
    return Reference(
        folders[0],
        folders[1] if len(folders) > 1 else None,
        str(dtype).removeprefix("torch."),
        str(opened.device),
        max_length,
        args.hf_batch_size,
        args.hf_device_map,
        args.vram_gib,
        args.trust_remote_code,
        args.hf_fp32,
    )


def softmax_of(device: str) -> dict[str, str]:
    """Precision in which the harness's backend turns logits into log-probabilities and sums them, by its own option.

    Left alone it takes the model's: in bf16 a sum of 300 nat is rounded to 2, and in fp32 on a CPU torch's log-softmax
    over 49,152 words is off by 8e-6 a token, always to the same side."""
    return {"softmax_dtype": "float32" if device.startswith("cuda") else "float64"}


def run_reference(reference: Reference, settings: EvaluationSettings, *, widened: bool = False) -> Answers:
    """What the harness's own backend says; `widened`: in fp32, on the weights as their own precision rounds them."""
    from lm_eval.models import huggingface

    backend: Any = huggingface.HFLM  # its decorator hides the class's own parameters
    spread: dict[str, Any] = {"parallelize": True} if reference.uses_device_map else {}
    spread |= softmax_of(reference.device)
    if spread and reference.vram_gib is not None:
        spread["max_memory_per_gpu"] = f"{reference.vram_gib}GiB"
    lm = backend(
        pretrained=reference.pretrained,
        peft=reference.adapter,
        dtype=reference.dtype,
        device=reference.device,
        max_length=reference.max_length,
        batch_size=reference.batch_size,
        trust_remote_code=reference.trust_remote_code,
        **spread,
    )
    if widened:
        lm.model.float()
    lm.model.eval()
    found = timed_suite(lm, settings)
    del lm
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def timed_suite(lm: Any, settings: EvaluationSettings) -> Answers:
    """What any model of the harness says."""
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
    exact = None
    if reference.asks_fp32:
        say("the same in fp32 ...")
        true = run_reference(reference, settings, widened=True)
        exact = FromExact(
            tuple(compare(true[0], true[1], scores, samples)), tuple(compare(true[0], true[1], ours[0], ours[1]))
        )
    return Parity(tuple(compare(scores, samples, ours[0], ours[1])), ours[2], seconds, exact)


def save_parity(parity: Parity, folder: Path) -> Path:
    """Keep a comparison beside the evaluation's result."""
    path = folder / "parity.json"
    value = {
        "comparisons": [asdict(one) for one in parity.comparisons],
        "outcore_s": parity.ours_s,
        "hf_s": parity.theirs_s,
        "is_equal": parity.is_equal,
        "from_fp32_nat": [] if parity.exact is None else parity.exact.distances(),
        "is_as_near_to_fp32": None if parity.exact is None else parity.exact.is_as_near,
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
