"""`outcore serve` with evaluation jobs among its routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outcore.serve import serve_main

if TYPE_CHECKING:
    from outcore.serve.additions import Addition, Service


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code."""
    return serve_main(argv, with_evaluations)


def with_evaluations(service: Service) -> Sequence[Addition]:
    """Evaluations of the model that this service has loaded; their history lies beside the server's records."""
    from outcore.evaluate.http import Evaluations

    return [Evaluations(lambda: service, service.settings.logs.parent / "evaluations")]
