"""An engine on a thread of its own: passes run there and callers wait beside it, so that what interrupts a caller
(Ctrl-C, a client that goes away) never ends a pass in its middle."""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections.abc import Callable
from functools import partial

from outcore.infer.engine import SHORT_PASS_S, InferenceEngine

MAX_FAILURES = 3
"""Passes that fail in a row after which the engine is not well."""
TRIED_AGAIN_S = 30.0
"""An engine that is not well takes requests again so long after its last failure; a pass that succeeds mends it."""
IDLE_S = 0.5


class EngineThread:
    """Owns an engine from `start` to `stop`."""

    def __init__(self, engine: InferenceEngine, on_failure: Callable[[Exception], None] = lambda error: None) -> None:
        self.engine, self._on_failure = engine, on_failure
        self.failures, self.failed_at_s = 0, -math.inf
        self._stopping = threading.Event()
        run = contextvars.copy_context().run  # torch keeps the compiler's settings for each context
        self._thread = threading.Thread(target=run, args=(self._run,), name="engine", daemon=True)

    @property
    def is_well(self) -> bool:
        return self._thread.is_alive() and self.failures < MAX_FAILURES

    @property
    def refused_for_s(self) -> float:
        """Seconds for which requests are refused yet; 0 while they are taken, inf while no thread runs."""
        if not self._thread.is_alive():
            return math.inf
        return 0.0 if self.is_well else max(0.0, self.failed_at_s + TRIED_AGAIN_S - time.monotonic())

    def start(self) -> None:
        """Begin to run passes."""
        self._thread.start()

    def stop(self, timeout_s: float = 60.0) -> bool:
        """End after the pass under way; answers that are not finished are cancelled. False when it takes longer."""
        self._stopping.set()
        self.engine.call_soon(lambda: None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def hand_over(self, waits: bool) -> None:
        """Pass on what was said. Called on the thread for every pass: where passes are short, once the next one has
        been queued on the device, while this thread leaves the interpreter to others; else when a pass has run, or
        has failed. `waits`: what was said may be passed on with what the next pass says."""

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.engine.wait_for_work(IDLE_S)
            try:
                while not self._stopping.is_set():
                    counts = self.engine.counts
                    passes, is_short = counts.passes, counts.last_pass_s < SHORT_PASS_S
                    did = self.engine.step(partial(self.hand_over, True) if is_short else lambda: None)
                    if not did or counts.last_pass_s >= SHORT_PASS_S:
                        self.hand_over(False)
                    if not did:
                        break
                    if counts.passes > passes:  # and no note only was done
                        self.failures = 0
            except Exception as error:
                self.hand_over(False)
                self.failures, self.failed_at_s = self.failures + 1, time.monotonic()
                self._on_failure(error)
        self.engine.cancel_all()
        while self.engine.step() and self.engine.has_texts:  # who asked waits for them
            pass
        self.hand_over(False)
