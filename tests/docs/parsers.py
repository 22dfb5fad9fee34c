"""Every program's own parser, and nothing behind it: what a command would do next is cut off once it is parsed."""

import argparse
import importlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from outcore.cli import COMMANDS
from outcore.plan.fields import parse_plan
from outcore.train.configure import parse_config
from tests.forked import ROOT


class ParsedError(Exception):
    """Ends a program whose command line was taken."""


@contextmanager
def until_parsed(argv: Sequence[str]) -> Iterator[None]:
    """Run what is within with this command line, to the end of `parse_args`."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *args: object, **more: object) -> None:
        parse_args(self, *args, **more)  # type: ignore[arg-type]
        raise ParsedError

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse), mock.patch.object(sys, "argv", list(argv)):
        try:
            yield
        except ParsedError:
            return
    raise AssertionError(f"{argv[0]} parses no command line")


def parse_outcore(name: str, args: list[str]) -> None:
    """`outcore NAME ARGS`."""
    if name == "train":
        parse_config(args)
    elif name == "plan":
        parse_plan(args)
    elif "--list_tasks" not in args:  # ends `evaluate` before its parser; a test of evaluate runs it
        with until_parsed(["outcore", name, *args]):
            importlib.import_module(COMMANDS[name][0]).main(args)


def parse_script(path: Path, args: list[str]) -> None:
    """`python PATH ARGS`."""
    name = path.name
    if name == "train_model.py":
        parse_config([arg for arg in args if arg != "--help"])
    elif name == "performance_test.py":
        from outcore.performance.command import parser

        parse_config(parser().parse_known_args(args)[1])
    elif name == "setup.py":
        from outcore.install.options import parse_options

        rest = parse_options(args).rest
        if "--run" in args:
            parse_config(list(rest))
    elif name == "gds_optimizer.py":
        from outcore.probe.options import parse_options as parse_probe

        with until_parsed([name, *args]):
            parse_probe(args, ROOT)
    else:
        beside = [str(path.parent), *sys.path]  # as python has it: what a script imports lies beside it
        with until_parsed([str(path), *args]), mock.patch.object(sys, "path", beside):
            runpy.run_path(str(path), run_name="__main__")


def parse_module(name: str, args: list[str]) -> None:
    """`python -m NAME ARGS`."""
    if not args:
        assert importlib.util.find_spec(name) is not None, name
        return
    if name == "outcore.evaluate.lm_eval":
        import pytest

        pytest.importorskip("lm_eval")
    with until_parsed([name, *args]):
        runpy.run_module(name, run_name="__main__")


def parse_deepspeed(args: list[str]) -> None:
    """`deepspeed ARGS SCRIPT FLAGS`: the launcher's parser, then the script's."""
    from deepspeed.launcher import runner

    found = runner.parse_args(args)
    assert found.user_script == "train_model.py", found.user_script
    parse_config(found.user_args)


def parse_make(args: list[str]) -> None:
    """`make TARGET`: a target of the Makefile, and a room of tests."""
    target, *settings = args
    assert f"\n{target}:" in (ROOT / "Makefile").read_text(), target
    for setting in settings:
        room = setting.removeprefix("ROOM=")
        assert (ROOT / "tests" / room).is_dir(), setting


def parse_command(words: list[str]) -> None:
    """Parse one command line as its program would; raises what that raises (SystemExit(2) from argparse)."""
    program, *args = words
    if program == "outcore":
        assert args[0] in COMMANDS, f"outcore knows no {args[0]}"
        if args[1:]:  # else the name of a command in a sentence
            parse_outcore(args[0], args[1:])
    elif program in ("python", "python3"):
        if args[0] == "-m":
            parse_module(args[1], args[2:])
        else:
            assert (ROOT / args[0]).is_file(), args[0]
            parse_script(ROOT / args[0], args[1:])
    elif program == "deepspeed":
        parse_deepspeed(args)
    elif program == "make":
        parse_make(args)
    else:
        assert program in ("pytest", "lm_eval"), program
