"""`outcore serve` with evaluation jobs among its routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outcore.serve import serve_main

if TYPE_CHECKING:
    from outcore.serve.additions import Addition, Service


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code."""
    return serve_main(argv, _additions)


def _additions(service: Service) -> Sequence[Addition]:
    from outcore.evaluate.http import with_evaluations  # which needs the server's packages

    return with_evaluations(service)
