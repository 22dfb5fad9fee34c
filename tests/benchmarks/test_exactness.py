"""The judge of `stream_exact.py`: what passes, and what does not."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "exactness"))

from stream_exact import Step, judge  # pyright: ignore[reportMissingImports]


def steps(losses, skipped=(), scales=None):
    return [Step(loss, 1.0, i in skipped, scales[i] if scales else 1.0) for i, loss in enumerate(losses)]


FP16 = {"losses": [4.0, 4.0, 3.9, 3.8, 3.7, 3.7, 3.6], "skipped": (0, 4), "scales": [8, 4, 4, 8, 8, 4, 4]}


def test_same_training_passes():
    assert judge("bf16", steps([4, 3]), steps([4.01, 3.01]), (5, 4), 0.005)["failures"] == []
    assert judge("fp16", steps(**FP16), steps(**FP16), (5, 4), 0.005)["failures"] == []


@pytest.mark.parametrize(("kind", "plain", "stream", "held_out", "words"), [
    ("bf16", {"losses": [4, 3]}, {"losses": [4, 3.02]}, (5, 4), "differs by 0.667% at step 1"),
    ("bf16", {"losses": [4, 3]}, {"losses": [4, float("nan")]}, (5, 4), "differs by"),
    ("bf16", {"losses": [4, 3]}, {"losses": [4, 3]}, (5, 5), "has not fallen"),
    ("bf16", {"losses": [4, 3]}, {"losses": [4, 3]}, (5, float("nan")), "has not fallen"),
    ("lora", {"losses": [4, 3], "skipped": (1,)}, {"losses": [4, 3], "skipped": (1,)}, (5, 4), "were skipped"),
    ("fp16", FP16, {**FP16, "skipped": (0, 5)}, (5, 4), "other steps were skipped"),
    ("fp16", FP16, {**FP16, "skipped": ()}, (5, 4), "nothing was tried"),
    ("fp16", FP16, {**FP16, "scales": [8] * 7}, (5, 4), "never fell"),
    ("fp16", FP16, {**FP16, "scales": [8, 4, 4, 4, 4, 2, 2]}, (5, 4), "never rose"),
    ("fp16", FP16, {**FP16, "skipped": (0, 1)}, (5, 4), "no overflow came after good steps"),
])  # fmt: skip
def test_other_training_is_told(kind, plain, stream, held_out, words):
    failures = judge(kind, steps(**plain), steps(**stream), held_out, 0.005)["failures"]
    assert any(words in failure for failure in failures), failures
