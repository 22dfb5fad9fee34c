"""What a resumed run says of the format of its optimizer states."""

from types import SimpleNamespace
from typing import Any

import pytest

from outcore.checkpoint import CheckpointError, changed_settings, check_same_run


def test_other_steps_are_named_before_the_warm_up_that_follows_from_them() -> None:
    def fingerprint(steps: int, warmup: int) -> dict[str, Any]:
        schedule = {"kind": "cosine", "peak_lr": 1e-4, "warmup_steps": warmup, "total_steps": steps}
        return {"fingerprint": {"schedule": schedule}}

    checkpoint: Any = SimpleNamespace(trainer_state=lambda: fingerprint(100, 3), path="step-1")
    with pytest.raises(CheckpointError, match=r"total_steps 100, this run has 200.*--max_steps or --num_train_epochs"):
        check_same_run(checkpoint, fingerprint(200, 6)["fingerprint"])
    with pytest.raises(CheckpointError, match=r"warmup_steps 3, this run has 6.*--warmup_steps"):
        check_same_run(checkpoint, fingerprint(100, 6)["fingerprint"])


@pytest.mark.parametrize(("before", "after", "said"), [
    ("fp32", "split", "the states are converted exactly"), ("fp24_m8", "split8", "the states are converted exactly"),
    ("split", "split8", "the moments are rounded to 8 bits once"),
    ("split8", "fp24_m8", "the masters are rounded to 24 bits once"),
    ("fp32", "fp24_m8", "the moments are rounded to 8 bits and the masters are rounded to 24 bits once"),
])  # fmt: skip
def test_a_changed_format_says_what_is_rounded(before: str, after: str, said: str) -> None:
    checkpoint: Any = SimpleNamespace(trainer_state=lambda: {"settings": {"state_format": before}})
    assert changed_settings(checkpoint, {"state_format": after}) == [
        f"resume: state_format {before} -> {after}: training goes on with {after}; {said}"
    ]
