"""The parser of all commands but train_model.py's: what is wrong with a command line is a line, not a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from outcore.common.words import did_you_mean
from outcore.config.flags import underscored

UNKNOWN = "unrecognized arguments: "
"""Beginning of argparse's message about flags that it does not know."""

MODEL_FLAGS = ("--model", "--model_name_or_path")


class _Help(argparse.Action):
    """`--help`: the flags that matter most; `--help all`: every one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, CommandParser)
        parser.show_help(everything=values == "all")


class CommandParser(argparse.ArgumentParser):
    """argparse that names the nearest flag instead of listing all of them, takes dashes for underscores, and a model by
    `--model` where it has a place of its own. `common`: flags, by destination, of the short help; (): all of them."""

    def __init__(self, *args: Any, common: Sequence[str] = (), **more: Any) -> None:
        super().__init__(*args, add_help=False, **more)
        self._common = common
        words = "this text; all: every flag" if common else "this text"
        more = {"nargs": "?", "metavar": "all"} if common else {"nargs": 0}
        self.add_argument("--help", "-h", action=_Help, help=words, **more)

    def show_help(self, *, everything: bool) -> NoReturn:
        """Print the help, with every flag or the common ones, and leave."""
        if self._common and not everything:
            for action in self._actions:
                if action.option_strings and action.dest not in (*self._common, "help"):
                    action.help = argparse.SUPPRESS
            self.epilog = f"The flags that matter most; {self.prog} --help all lists every one."
        self.print_help()
        self.exit()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = [underscored(word) for word in (sys.argv[1:] if args is None else args)]
        if any(action.dest == "model" and not action.option_strings for action in self._actions):
            words = _placed(words)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        hint, word = "", message.removeprefix(UNKNOWN).partition(" ")[0].partition("=")[0]
        if message.startswith(UNKNOWN) and word.startswith("-"):
            hint = did_you_mean(word, self._option_string_actions, 1)
        elif message.startswith(UNKNOWN) and "--prompt" in self._option_string_actions:
            hint = " A text to go on from is given by --prompt."
        self.exit(2, f"{self.prog}: {message}.{hint} {self.prog} --help lists what there is.\n")


def _placed(words: list[str]) -> list[str]:
    """`--model M` (as training, planning and looking at data have it) as M at its place."""
    for number, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in MODEL_FLAGS and (equals or number + 1 < len(words)):
            end = number + (1 if equals else 2)
            return [value if equals else words[number + 1], *words[:number], *words[end:]]
    return words


class Once(argparse.Action):
    """A flag of which a second value would replace the first, though who gives two wants both."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is given twice, and one is taken at a time")
        setattr(namespace, self.dest, values)
