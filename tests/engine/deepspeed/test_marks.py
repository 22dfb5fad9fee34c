"""Seconds by phase are asked for with a limit: a GPU that hangs ends the run with words."""

from functools import partial

import torch

from outcore.engine.deepspeed import engine
from outcore.flow.trace import wait_for
from tests.refused import refused


class NeverOver:
    """An event of a GPU that hangs."""

    def __init__(self, enable_timing: bool) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return False


def test_a_step_that_never_ends_is_an_error_not_a_wait_for_good(monkeypatch):
    """torch.cuda.synchronize, which was here, knows no limit."""
    monkeypatch.setattr(torch.cuda, "Event", NeverOver)
    monkeypatch.setattr(engine, "wait_for", partial(wait_for, timeout_s=0.05))
    marks = engine._Marks(torch.device("cuda"))
    marks.start("forward")
    marks.stop()
    refused(TimeoutError, "did not finish a step", marks.seconds)
