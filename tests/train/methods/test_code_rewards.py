"""Rewards of code in answers, which runs in a sandbox."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.apart.sandbox import Sandbox, SandboxError
from outcore.cli import main
from outcore.train.methods.rewards import RewardError, RewardProcess, Rewards
from tests.train.methods.test_rollouts import command, here, steps_of  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")
RIGHT = "So:\n```python\ndef add(a, b):\n    return 0\n```\nNo:\n```python\ndef add(a, b):\n    return a + b\n```"
REACHES = "def add(a, b):\n    import socket\n    socket.create_connection(('192.0.2.1', 80))"
WRITES = "```\ndef add(a, b):\n    open('/usr/x', 'w')\n```"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3"


@pytest.fixture(autouse=True)
def sandboxed() -> None:
    try:
        Sandbox().judge("", ["assert True"], None, 9)
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture
def process() -> Iterator[RewardProcess]:
    process = RewardProcess("code", 200.0)
    process.start()
    yield process
    process.close()


def judged(process: RewardProcess, said: list[str], row: dict[str, Any], answers: int = 4) -> list[float | None]:
    rewards = Rewards(process, "code", answers, skips=False, say=said.append)
    completions: list[Any] = [
        RIGHT,
        REACHES,
        WRITES,
        [{"role": "assistant", "content": "def add(a, b):\n    return 4"}],
    ]
    given = {"number": [7] * 4, "columns": [json.dumps(row)] * 4, "completion_ids": [[1]] * 4}
    return rewards(["?"] * 4, completions, trainer_state=SimpleNamespace(global_step=2), **given)


@pytest.mark.parametrize(
    "row",
    [
        {"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]},
        {"test_list": ["assert add(1, 2) == 3"], "entry_point": None},
        {"test": CHECK, "entry_point": "add"},
    ],
)
def test_code_is_judged_by_its_rows_tests(row: dict[str, Any], process: RewardProcess) -> None:
    said = list[str]()
    assert judged(process, said, row) == [1, 0, 0, 0]
    (words,) = said
    assert "step 3: prompt 7: answer 2 tried the network; answer 3 tried the disk. In the sandbox this fails" in words


@pytest.mark.parametrize(
    ("row", "words"), [({"answer": "3"}, "the row has no tests"), ({"test": CHECK}, "no entry_point says what it gets")]
)
def test_rows_without_tests_are_told(row: dict[str, Any], words: str, process: RewardProcess) -> None:
    with pytest.raises(RewardError, match=f"step 3: prompt 7: code raised ValueError: .*{words}"):
        judged(process, [], row)


def test_a_run_is_rewarded_by_code(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"hello {i}", "tests": ["assert add(1, 2) == 3"]} for i in range(8)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    usual = command(steps=1)
    usual[usual.index("--reward_function") + 1] = "code"
    assert main([*usual, "--reward_timeout_s", "200"]) == 0
    assert steps_of()[0]["reward"] == 0 and "rewards/code/mean" in steps_of()[0]
    usual[usual.index("--reward_function") + 1] = "codes"
    assert main(usual) == 2
    assert "nor one of math_verify, code, code_without_sandbox" in capsys.readouterr().err
