"""A device whose copies end long after they were queued: nothing is read, overwritten or updated before its copy."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.settings import StreamSettings
from tests.engine.inside import parts_of
from tests.engine.stream.training import adapted, batches_of, same, weights_of
from tests.flow.models import TINY_SETTINGS, set_dropout, tiny_loaded
from tests.refused import refused
from tests.staging.fakes import LateEvent, LateStreams

DEFERRED = replace(TINY_SETTINGS, staging_bytes=4 * MIB, activations="ram")
IMMEDIATE = replace(DEFERRED, max_grad_norm=0.0, update="immediate")
TILED = replace(DEFERRED, tiling="on", tile_bytes=10_000)
LONG = replace(DEFERRED, tiling="tokens", tile_bytes=1, step_tokens=(128,), row_tokens=64)


class DeviceStreams(LateStreams):
    """The device's clock for an engine that computes on the CPU: its compute stream is the thread that computes, so
    making it wait for a copy blocks that thread. `afters`: what each group of copies was told to wait for."""

    def __init__(self, delay_s: float, *, all_pinned: bool) -> None:
        super().__init__(delay_s=delay_s)
        self.all_pinned = all_pinned
        self.moments: list[LateEvent] = []
        self.afters: list[LateEvent | None] = []

    def is_pinned(self, host: torch.Tensor) -> bool:
        return self.all_pinned

    def now(self) -> LateEvent:
        event = LateEvent()
        event.passed.set()
        self.moments.append(event)
        return event

    def copy_pieces(self, index: int, pieces: Any, after: Any) -> LateEvent:
        self.afters.append(after)
        return super().copy_pieces(index, pieces, after)

    def hold(self, stream: Any, event: Any) -> None:
        event.synchronize()


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def build(monkeypatch):
    engines, opened = [], []

    def make(model: str, settings: StreamSettings, pinned: bool | None, *, lora: bool = False):
        """`pinned` None: copies end at once."""
        streams = []
        with monkeypatch.context() as patch:
            if pinned is not None:

                def open_late(device: torch.device, count: int) -> DeviceStreams:
                    delay_s = 0.001 if settings.tiling != "auto" else 0.03  # tiles are many
                    streams.append(DeviceStreams(delay_s, all_pinned=pinned))
                    return streams[-1]

                patch.setattr("outcore.staging.lanes.lane.open_streams", open_late)
            loaded = adapted(model, 1, r=2, num_hidden_layers=5) if lora else tiny_loaded(model, num_hidden_layers=5)
            set_dropout(loaded.model, 0.0)
            engines.append(build_stream_engine(loaded, settings, device="cpu", pinned_grant=False, trial=False))
        opened.extend(streams)
        return engines[-1], streams

    yield make
    for engine in engines:
        engine.close()
    for streams in opened:
        streams.close()


def run(engine, count: int) -> tuple[list, dict[str, torch.Tensor]]:
    found: list[Any] = []
    for step in range(3):
        result = engine.train_step(batches_of(step, count), 1e-2)
        found.append((result.loss, result.grad_norm))
        if step == 1:
            found.append(engine.evaluate(batches_of(7, 2)))
    return found, weights_of(engine)


@pytest.mark.more(after=1)
@pytest.mark.parametrize(
    ("model", "settings", "count", "pinned", "lora"),
    [
        ("llama", DEFERRED, 1, True, False), ("gpt2", DEFERRED, 3, False, False), ("gpt2", IMMEDIATE, 3, True, False),
        ("llama", IMMEDIATE, 3, True, True), pytest.param("gpt2", TILED, 3, True, False, marks=pytest.mark.slow),
        ("llama", LONG, 1, True, False), ("llama", LONG, 1, False, True),
    ],
    ids=["one batch", "tied, pageable", "tied, immediate", "frozen base", "tied, in tiles", "long rows",
         "long rows, pageable"],
)  # fmt: skip
def test_results_do_not_depend_on_when_copies_end(build, model, settings, count, pinned, lora):
    at_once = run(build(model, settings, None, lora=lora)[0], count)
    engine, lanes = build(model, settings, pinned, lora=lora)
    late = run(engine, count)
    assert same(at_once, late)
    if pinned:  # a device buffer's memory may be that of work still queued, even before its first use
        assert all(lane.afters and None not in lane.afters for lane in lanes)


def test_after_a_failed_pass_no_buffer_is_filled_before_the_work_that_was_queued(build, monkeypatch):
    engine, (upload, _) = build("llama", DEFERRED, True)
    engine.train_step(batches_of(0, 1), 1e-2)
    whole, queued = parts_of(engine).flow.runner.layer, []

    def fail(index: int, *args: Any) -> Any:
        result = whole(index, *args)
        if index < 2:
            return result
        queued.append(len(upload.moments))
        raise ValueError("the model failed")

    with monkeypatch.context() as patch:
        patch.setattr(parts_of(engine).flow.runner, "layer", fail)
        refused(ValueError, "the model failed", lambda: engine.evaluate(batches_of(1, 1)))
    copies = len(upload.afters)
    engine.evaluate(batches_of(1, 1))
    assert len(upload.afters) > copies
    assert all(upload.moments.index(after) >= queued[0] for after in upload.afters[copies:])
