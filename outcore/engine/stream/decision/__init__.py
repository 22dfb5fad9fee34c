"""Decisions of the streaming engine for a run: settings, homes, layout."""

from outcore.engine.stream.decision.decide import StreamDecision, decide_stream
