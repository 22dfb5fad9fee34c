"""Evaluations over HTTP."""

from outcore.evaluate.http.routes import Evaluations, with_evaluations
