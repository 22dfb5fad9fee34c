"""What the streaming engine decides for a run: settings, homes, layout."""

from outcore.engine.stream.decision.decide import decide_stream
from outcore.engine.stream.decision.decision import StreamDecision
