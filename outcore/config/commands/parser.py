"""The parser of all commands but train_model.py's: what is wrong with a command line is a line, not a page."""

from __future__ import annotations

import argparse
from typing import NoReturn

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
