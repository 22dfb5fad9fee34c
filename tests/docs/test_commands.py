"""Each command line of README and docs is one that its program takes; each flag they name exists."""

import argparse
import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from outcore.cli import COMMANDS
from outcore.config import ConfigError
from tests.docs.pages import PAGES, commands_of, flags_of
from tests.docs.parsers import parse_command
from tests.forked import ROOT

ELSEWHERE = {
    "--num_gpus", "--hostfile", "--num_nodes", "--include", "--exclude", "--master_addr", "--node_rank",  # deepspeed
    "--model_args", "--tasks",  # lm_eval
    "--logdir",  # tensorboard
    "--cov",  # pytest-cov
    "--bf16",  # other trainers
    "--install", "--shutdown",  # wsl.exe
}  # fmt: skip
"""Flags of other programs that the pages speak of."""


BOTH = ("outcore/common/errors.py", "outcore/common/words.py", "outcore/engine/deepspeed/environment.py")
"""Files whose words name a script beside what is there without it."""
PROGS = ("gds_optimizer.py", "performance_test.py", "train_model.py")
"""Names by which a script, too, tells its usage."""


def test_messages_name_a_script_of_the_clone_only_where_there_is_one() -> None:
    """Who installed by pip has no setup.py or gds_optimizer.py; `own_command` knows."""
    script = re.compile(r"\b(setup|gds_optimizer|performance_test|train_model)\.py|\brequirements[/.]|{own_command")
    found = []
    for file in sorted((ROOT / "outcore").rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        of_clone = name.startswith("outcore/install/") and "/probes/" not in name  # its rows have fixes of their own
        if of_clone or name in BOTH:
            continue
        tree = ast.parse(file.read_text())
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            f"{name}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and id(node) not in told
            if isinstance(node.value, str) and node.value not in PROGS and script.search(node.value)
        ]
    assert not found


def test_names_that_begin_with_a_vowels_sound_are_written_with_an() -> None:
    """In messages and on the pages; letters are spoken one by one."""
    wrong = re.compile(r"\b[Aa] (NVIDIA|NVMe|NVML|HTTP|HF|LLM|RTX|SSD|H[12]00|fp\d+|int8|nf4|OOM|API|ID|8|11|18|80)\b")
    files = [ROOT / "README.md", ROOT / "setup.py", *(ROOT / "docs").glob("*.md"), *(ROOT / "outcore").rglob("*.py")]
    assert not [(str(file), found[0]) for file in files if (found := wrong.search(file.read_text(encoding="utf-8")))]


def lines() -> list[str]:
    """All commands of all pages, each once."""
    return list(dict.fromkeys(line for page in PAGES for line in commands_of(page)))


def test_the_pages_have_commands() -> None:
    found = lines()
    assert len(found) > 60
    assert {line.split()[1] for line in found if line.startswith("outcore ")} >= set(COMMANDS) - {"score"}


@pytest.mark.parametrize("line", lines())
def test_a_command_is_parsed(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    filled = {"DIR": str(tmp_path), "/mnt/nvme": str(tmp_path), "N": "2"}
    words = [filled.get(word, word) for word in shlex.split(line, comments=True)]
    if ">" in words:
        words = words[: words.index(">")]
    parse_command([word for word in words if word not in ("...", "…")])


WORD = r"(?:--[a-z]\w*|\{\}|[\w./*-]*[\w*/])"
FILLED = {"--method": "dpo", "--port": "7860"}
"""Values where a message has one of its own."""


def _words_of(node: ast.AST) -> str:
    """A text of the code: `own_command("probe")` as `outcore probe`, what else is filled in as {}."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_words_of, node.values))
    if isinstance(node, ast.FormattedValue):
        own = re.fullmatch(r"own_command\('(\w+)'\)", ast.unparse(node.value))
        return f"outcore {own[1]}" if own else "{}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def told() -> list[tuple[str, ...]]:
    """Commands in messages, each once: name, and what looks like its arguments up to the first word of a sentence."""
    found = set()
    command = re.compile(rf"\boutcore ({'|'.join(COMMANDS)})\b((?: {WORD})*)")
    for file in (ROOT / "outcore").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        no_text = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        no_text |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            for name, words in command.findall("" if id(node) in no_text else _words_of(node)):
                given: list[str] = []
                for word in words.split():
                    after_flag = bool(given) and given[-1].startswith("--")
                    if not (after_flag or word.startswith("--") or word.isupper() or re.search(r"[./]", word)):
                        break
                    given.append(FILLED.get(given[-1], "name") if word == "{}" else word)
                found.add((name, *given))
    return sorted(found)


def test_commands_in_messages_are_parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What stands behind a flag may be its value or the next word of the sentence."""
    monkeypatch.chdir(ROOT)
    found = told()
    assert len(found) > 25 and ("setup", "--check", "writes") in found
    for command in found:
        words = ["outcore", *(str(tmp_path) if word in ("DIR", "FOLDER") else word for word in command)]
        whole = [*words, "--tasks", "a"] if command[0] == "evaluate" and len(command) > 2 else words
        try:
            parse_command(whole)
        except (SystemExit, ConfigError):
            assert len(words) > 3 and words[-2].startswith("--"), command
            parse_command(words[:-1])


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"train", "plan"}))  # whose table of settings has its own
def test_help_tells_what_each_flag_is_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[argparse.ArgumentParser] = []

    def parse(self: argparse.ArgumentParser, *args: object, **more: object) -> None:
        parsers.append(self)
        raise SystemExit

    for method in ("parse_args", "parse_known_args"):
        monkeypatch.setattr(argparse.ArgumentParser, method, parse)
    with pytest.raises(SystemExit):
        importlib.import_module(COMMANDS[name][0]).main([])
    for parser in parsers:  # grows: verbs have parsers of their own
        for action in parser._actions:
            parsers += action.choices.values() if isinstance(action, argparse._SubParsersAction) else ()
            assert action.help or (action.choices is not None and not action.option_strings), (
                f"{parser.prog} {action.dest}"
            )


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Flags of all programs: what they add to an argparse parser, in any file of theirs, and the table of settings."""
    from outcore.config import TrainConfig, fields_of
    from outcore.plan.fields import PlanConfig

    found = set(ELSEWHERE)
    for config in (TrainConfig, PlanConfig):
        for row in fields_of(config).values():
            found |= {f"--{name}" for name in (row.name, *row.spec.aliases)} | {f"--no_{row.name}"}
    for folder in ("outcore", "benchmarks", "tests/faults"):
        for file in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r"[\"'](--[a-z][a-z0-9_-]*)[\"']", file.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_that_sentences_name_exist(page: Path, known: set[str]) -> None:
    unknown = {flag for flag in flags_of(page) if flag.replace("-", "_").replace("__", "--", 1) not in known} - known
    assert not unknown, f"{page.name} names {sorted(unknown)}"
