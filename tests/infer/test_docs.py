"""Commands in the docs of inference and serving are ones that the real parsers take; the Python snippet runs."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields

import pytest

from outcore.infer.commands import chat, generate, score
from outcore.plan.fields import PlanConfig, parse_plan
from outcore.serve import main as serve
from tests.forked import ROOT

PARSERS = {
    "generate": generate.parser,
    "chat": chat.parser,
    "score": score.parser,
    "serve": serve.parser,
}
PAGES = [ROOT / "docs/inference.md", ROOT / "docs/serving.md"]


def commands() -> list[str]:
    blocks = [block for page in PAGES for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)]
    return [line for block in blocks for line in block.splitlines() if line.startswith("outcore ")]


@pytest.mark.parametrize("line", commands())
def test_commands_are_parsed(line):
    _, name, *arguments = shlex.split(line, comments=True)
    parse_plan(arguments) if name == "plan" else PARSERS[name]().parse_args(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_are_real(page):
    known = {flag for make in PARSERS.values() for action in make()._actions for flag in action.option_strings}
    known |= {f"--{field.name}" for field in fields(PlanConfig)}
    shown = set(re.findall(r"`(--[a-z_]+)", page.read_text()))
    assert shown and shown <= known, shown - known


def test_the_snippet_runs(tiny_folder, monkeypatch, capsys):
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    exec(snippet.replace("final_model/my-run", str(tiny_folder[0])), {})
    assert "preset latency" in capsys.readouterr().out
