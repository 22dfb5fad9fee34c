"""`outcore`: the console command; each subcommand is one room's door."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    args = sys.argv[1:] if argv is None else argv
    print(f"outcore: unknown command {args[:1]}", file=sys.stderr)
    return 2
