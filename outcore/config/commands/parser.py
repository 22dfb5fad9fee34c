"""The parser of all commands but train_model.py's: what is wrong with a command line is a line, not a page."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from outcore.common.words import did_you_mean

UNKNOWN = "unrecognized arguments: "
"""What argparse says before flags that it does not know."""


class CommandParser(argparse.ArgumentParser):
    """argparse that names the nearest flag instead of listing all of them."""

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith(UNKNOWN):
            word = message.removeprefix(UNKNOWN).split()[0].partition("=")[0]
            hint = did_you_mean(word, self._option_string_actions, 1) if word.startswith("-") else ""
        self.exit(2, f"{self.prog}: {message}.{hint} {self.prog} --help lists what there is.\n")


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
