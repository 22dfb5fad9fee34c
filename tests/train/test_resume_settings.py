"""What a resumed run says of the format of its optimizer states."""

from types import SimpleNamespace
from typing import Any

import pytest

from outcore.checkpoint import changed_settings


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
