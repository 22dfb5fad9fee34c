"""Every command whose standard output is closed, on a full drive, or read by nobody: whether it ends or goes on."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from outcore.cli import COMMANDS
from outcore.common.output import say, show
from tests.train.jobs import REPOSITORY, fixtures, fresh_env

corpus, shared, straight, straight_by, in_the_repository = fixtures
WORKING = {"train", "serve", "start", "ui", "evaluate", "export", "verify", "setup", "probe", "check"}
"""Commands that leave more than what they print: an answered client, a folder, a report."""
IN_ONE_PROCESS = """
import json, os, sys
from outcore import cli

def lost():
    if sys.argv[1] == "full":
        return os.open("/dev/full", os.O_WRONLY)
    reads, writes = os.pipe()
    os.close(reads)
    return writes

for words in json.loads(sys.argv[2]):
    if sys.argv[1] != "closed":  # else it was so when this process began
        os.dup2(lost(), 1)
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    code = 0
    for end in (lambda: cli.main(words), lambda: sys.stdout.flush()):  # as a process does that a parser has ended
        try:
            code = end() or code
        except SystemExit as left:
            code = left.code or code
    print(f"ended: {words[0]} {code}", file=sys.stderr)
"""
ENDS = {"full": 1, "left": 141, "closed": 0}
"""What a command ends with of which nothing is left but what it printed; a closed output was meant so."""


def ended(output: str, commands: list[list[str]], folder: Path) -> tuple[dict[str, int], str]:
    """Exit codes of the commands, one after the other, and what went to standard error."""
    line = shlex.join([sys.executable, "-c", IN_ONE_PROCESS, output, json.dumps(commands)])
    child = subprocess.run(
        line + " >&-" * (output == "closed"), shell=True, cwd=folder, env=fresh_env(PYTHONPATH=str(REPOSITORY)),
        input="hi\n", stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    return {name: int(code) for name, code in re.findall(r"^ended: (\w+) (\d+)$", child.stderr, re.M)}, child.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("output", ENDS)
def test_each_command_knows_whether_its_output_is_all_there_is(output: str, tmp_path: Path) -> None:
    codes, said = ended(output, [[name, "--help"] for name in COMMANDS], tmp_path)
    assert codes == {name: 0 if name in WORKING else ENDS[output] for name in COMMANDS}
    assert said.count("standard output cannot be written: ENOSPC") == (len(COMMANDS) if output == "full" else 0)
    assert "Traceback" not in said


@pytest.mark.more
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("output", ENDS)
def test_commands_at_work_end_so(output: str, tmp_path: Path, straight: Path, corpus: Path) -> None:
    model, small = str(straight / "export/r"), ["--device", "cpu", "--context", "64", "--ram_gib", "1"]
    (tmp_path / "lines.jsonl").write_text('{"text": "red green blue"}\n')
    folders = [f"--{name}_dir={straight / name}" for name in ("checkpoint", "log", "export")]
    commands = [
        ["export", "r", folders[0], "--out", "exported"],
        ["generate", model, "--prompt", "red", "--max_tokens", "2", *small],
        ["chat", model, "--max_tokens", "2", *small],
        ["score", model, "--input", "lines.jsonl", *small],
        ["data", str(corpus), "--model", model, "--html", "none"],
        ["watch", "r", folders[1], "--once"],
        ["runs", *folders],
        ["evaluations", "list"],
        ["machine"],
        ["models", "llama"],
        ["plan", "tiny", "--nominal"],
    ]
    codes, said = ended(output, commands, tmp_path)
    assert codes == {words[0]: 0 if words[0] in WORKING else ENDS[output] for words in commands}, said
    assert "Traceback" not in said and (tmp_path / "exported/model.safetensors").is_file()


def test_an_answer_does_not_steer_the_terminal_that_shows_it(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    text = "red \x1b[31m c1 \x9b2J turned \u202e\ttab\n"
    show(text)
    assert capsys.readouterr().out == text, "a file gets it as it is"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    show(text)
    say(text[:-1])
    told = capsys.readouterr()
    assert told.out == told.err == "red \\x1b[31m c1 \\x9b2J turned \\u202e\ttab\n"
