"""Entry of `gds_optimizer.py`: its flags first, and torch only once they are right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outcore.common.output import watch_reader
from outcore.probe.flags import parser


def main(argv: Sequence[str], root: Path | None = None) -> int:
    """Run the probe; returns the exit code. `root`: folder of deepspeed_config.json (default: this one).

    A mistyped flag is told, and --help shown, at once, not after the seconds that torch takes to import."""
    watch_reader(ends=False)  # the profile is written all the same
    prog, root = ("gds_optimizer.py", root) if root else ("outcore probe", Path.cwd())
    parser(root, prog).parse_args(list(argv))
    from outcore.probe.main import main

    return main(argv, root)
