"""The whole example of docs/runs.md, line by line as a stranger copies it: only MODEL and the size are filled in."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.forked import start_script
from tests.train.jobs import REPOSITORY, fixtures, fresh_env

corpus, shared, straight, straight_by, in_the_repository = fixtures
SMALL = "--seq_length 64 --gradient_accumulation_steps 1 --precision fp32 --report_to none"
PROGRAM = """
import os, sys
os.chdir({folder!r})
from outcore.cli import main
sys.exit(main())
"""


def _example() -> tuple[list[str], str]:
    """The commands, and the Python after them."""
    text = (REPOSITORY / "docs/runs.md").read_text(encoding="utf-8").partition("## A whole example")[2]
    commands, python = (re.search(rf"```{kind}\n(.*?)```", text, re.S) for kind in ("bash", "python"))
    assert commands is not None and python is not None
    return commands.group(1).strip().splitlines(), python.group(1)


def _write_data(folder: Path) -> None:
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"Who is {n}?"},
                {"role": "assistant", "content": f"{n} is {n % 7}."},
            ]
        }
        for n in range(60)
    ]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps(chat) for chat in chats))
    rows = "\n".join(f"How much is {n} and {n}?,It is {2 * n}." for n in range(60))
    (folder / "qa.csv").write_text(f"prompt,completion\n{rows}\n")


@pytest.mark.slow
def test_a_stranger_walks_through_the_whole_example(tmp_path: Path, straight: Path) -> None:
    commands, python = _example()
    assert [shlex.split(line)[1] for line in commands] == ["train", "train", "train", "export"]
    _write_data(tmp_path)
    program, log = tmp_path / "program.py", tmp_path / "log.txt"
    program.write_text(PROGRAM.format(folder=str(tmp_path)))

    def start(line: str):
        words = shlex.split(line.replace("MODEL", str(straight / "export/r")))
        assert words[0] == "outcore"
        small = shlex.split(SMALL) if words[1] == "train" else []
        return start_script(program, [*words[1:], *small], fresh_env(OMP_NUM_THREADS="1"), log)

    first = start(commands[0])
    saved, until_s = tmp_path / "checkpoints/mine", time.monotonic() + 600
    while not any(saved.glob("step-*")):
        assert time.monotonic() < until_s and first.poll() is None, log.read_text()
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGINT)
    assert first.wait(600) == 130 and "Go on with the same command and --resume_from_checkpoint auto" in log.read_text()
    for line in commands[1:]:
        log.write_text("")
        assert start(line).wait(900) == 0, log.read_text()
    said = log.read_text()
    assert "AutoModelForCausalLM.from_pretrained loads it" in said
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = python.replace('"my_model"', repr(str(tmp_path / "my_model")))
    code += "\nprint(model.generate(**tokenizer('Who is 3?', return_tensors='pt'), max_new_tokens=2).shape[1])"
    done = subprocess.run([sys.executable, "-c", code], cwd=elsewhere, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    from safetensors.torch import load_file

    merged, before = (
        load_file(tmp_path / "my_model/model.safetensors"), load_file(straight / "export/r/model.safetensors"),
    )  # fmt: skip
    assert any(not torch.equal(merged[name].float(), before[name].float()) for name in before)
