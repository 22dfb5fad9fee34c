"""Every case, through the real entry points: what a person reads, the exit code, and what is on the disk then."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outcore.train.loop import TrainingLoop
from tests.bad_inputs.cases import CASES
from tests.bad_inputs.world import REPOSITORY, TWO_HOSTS, Case, NotHere, Shared, World, run_case


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    session = Shared(tmp_path_factory.mktemp("bad inputs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "plot", lambda trainer: None)  # loss.png takes longer than the steps
        yield session
    session.close()


@pytest.mark.more(after=60)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.id, marks=pytest.mark.more if case.program == TWO_HOSTS else ()) for case in CASES],
)
def test_the_person_reads_what_helps(case: Case, tmp_path: Path, shared: Shared) -> None:
    try:
        outcome = run_case(case, tmp_path, shared)
    except NotHere as reason:
        pytest.skip(str(reason))
    assert outcome.code == case.code, outcome.printed
    assert [word for word in case.words if word not in outcome.message] == [], outcome.message
    assert "Traceback" not in outcome.printed
    assert "\n" not in outcome.message, "one paragraph"
    if case.code and case.program == "train_model.py":
        assert outcome.printed.rstrip().endswith(outcome.printed.rpartition("error: ")[2].rstrip()), "said last"
        assert outcome.printed.count("error: ") == 1


def test_the_script_says_it_in_one_line_as_well() -> None:
    """As a person starts it: exit code 2, one line on stderr, nothing else anywhere."""
    done = subprocess.run(
        [sys.executable, "train_model.py", "--learning_rat", "3"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown flag --learning_rat. Did you mean --learning_rate?\n"


def test_a_case_that_lies_is_found(tmp_path: Path, shared: Shared) -> None:
    """The checks can fail: a refused run that left a folder is not one that made nothing."""

    def leaves_a_folder(world: World) -> None:
        world.file("a.docx")
        (world.here / "checkpoint").mkdir()

    wrong = Case("x", "nothing", "--dataset {here}/a.docx", 2, (), "nothing", leaves_a_folder)
    with pytest.raises(AssertionError, match="the failed run made"):
        run_case(wrong, tmp_path, shared)
