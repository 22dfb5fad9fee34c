"""What a resumed run says of the format of its optimizer states, and of what another version did otherwise."""

from types import SimpleNamespace
from typing import Any

import pytest

from outcore.checkpoint import CheckpointError, changed_settings, check_same_run
from outcore.train.changes import changed_by_version


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


def test_what_an_older_version_did_otherwise_is_said() -> None:
    now = {"kind": "cosine", "min_ratio": 0.0, "warmup_steps": 9, "first": 0}
    older = {"kind": "cosine", "warmup_steps": 9}
    said = "a tenth of the peak", "a step ahead", "norms and biases decayed"

    def lines(schedule: dict[str, Any], settings: dict[str, Any], step: int, *, decay_all: bool = False) -> list[str]:
        state = {"fingerprint": {"schedule": schedule}, "settings": settings}
        checkpoint: Any = SimpleNamespace(trainer_state=lambda: state, step=step)
        return changed_by_version(checkpoint, {"schedule": now}, decay_all=decay_all)

    found = lines(older, {"weight_decay": 0.01}, 3)
    assert len(found) == 3 and all(words in line for words, line in zip(said, found, strict=True))
    assert len(lines(older, {"weight_decay": 0.01}, 9, decay_all=True)) == 1, "the warm-up is over"
    assert lines(now, {"weight_decay": 0.01, "decay_all": False}, 3) == []
    assert lines({**older, "min_ratio": 0.0}, {"weight_decay": 0.0}, 9) == []
