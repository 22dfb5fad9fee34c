"""Trainers of TRL and transformers leave the same bits of a streamed model as of the plain one."""

from pathlib import Path

import pytest

import outcore.hf
from tests.hf.callers import FAMILIES, TRAINERS, assert_same, trained

pytestmark = pytest.mark.usefixtures("one_thread")
CASES = [(which, FAMILIES[at % 3], at % 2 == 0) for at, which in enumerate(TRAINERS)]


# The other half of the combinations comes with 50 steps, below.
@pytest.mark.parametrize(("which", "family", "lora"), CASES)
def test_weights_are_those_of_the_plain_model(which: str, family: str, lora: bool, tmp_path: Path) -> None:
    plain = trained(which, family, tmp_path / "plain", lora=lora)
    assert_same(plain, trained(which, family, tmp_path / "streamed", lora=lora, prepare=outcore.hf.stream))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("which", TRAINERS)
def test_weights_are_those_of_the_plain_model_after_50_steps(
    which: str, family: str, lora: bool, tmp_path: Path
) -> None:
    plain = trained(which, family, tmp_path / "plain", lora=lora, steps=50)
    assert_same(plain, trained(which, family, tmp_path / "streamed", lora=lora, steps=50, prepare=outcore.hf.stream))
