"""Evaluations over HTTP."""

from outcore.evaluate.http.routes import Evaluations

__all__ = ["Evaluations"]
