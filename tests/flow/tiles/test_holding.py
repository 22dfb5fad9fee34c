"""How the device holds units changes no bit: layers at a time, buffers for gradients, parts or whole."""

from dataclasses import replace

import pytest
import torch

from outcore.engine.stream import blueprint
from outcore.engine.stream.gradients.arena import gradient_bytes_of
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.tiles import TilePlan
from outcore.sizing.tiles import Holding
from outcore.staging import DownloadLane
from tests.engine.inside import parts_of
from tests.engine.stream.training import LR, fixtures, same, weights_of
from tests.flow.models import TINY_SETTINGS, packed_batch, plain_batch
from tests.flow.tiles.holdings import LESS, PART, WHOLE
from tests.refused import refused

(built,) = fixtures
TINY = replace(TINY_SETTINGS, max_grad_norm=0.5)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def build(monkeypatch, built):
    def make(model: str, holding: Holding, settings: StreamSettings = TINY):
        monkeypatch.setattr(blueprint, "plan_tiles", lambda *_: TilePlan((), 1, "as the test says", None, holding))
        return built(model, settings, dtype=torch.bfloat16, dropout=0.1, vocab_size=1024)

    return make


def batches_of(step: int):
    """One micro-batch, two, three: sums in the parameters' type, then in fp32."""
    return [(plain_batch, packed_batch)[m % 2](2, 9 + step + m, seed=10 * step + m) for m in range(1 + step % 3)]


def trained(engine) -> list[tuple[float, float]]:
    return [(r.loss, r.grad_norm) for r in (engine.train_step(batches_of(step), LR) for step in range(4))]


@pytest.mark.more(after=1)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
def test_results_are_bit_identical_however_units_are_held(build, model, max_grad_norm):
    """bf16 with dropout, tied and untied; the clipping norm is summed of the same pieces."""
    settings = replace(TINY, max_grad_norm=max_grad_norm)
    engine = build(model, WHOLE, settings)
    expected = trained(engine), weights_of(engine)
    held = parts_of(engine).flow.arrival.device_bytes, parts_of(engine).download.device_bytes
    for holding in LESS:
        other = build(model, holding, settings)
        assert same((trained(other), weights_of(other)), expected), holding
        less = parts_of(other).flow.arrival.device_bytes, parts_of(other).download.device_bytes
        assert less[1] < held[1] and less[0] <= held[0], holding
        assert (less[0] < held[0]) == (holding.layer_buffers < 2), holding  # it has two layers


def test_buffers_for_parts_are_as_large_as_a_layer(build):
    whole, parts = (parts_of(build("llama", holding)) for holding in (WHOLE, LESS[0]))
    ends, layer = (gradient_bytes_of(unit) for unit in (whole.units.embed, whole.units.layer_units[0]))
    head = gradient_bytes_of(whole.units.head)
    assert head > ends > layer
    assert whole.download.device_bytes - parts.download.device_bytes == 2 * (head - layer)


def test_an_infinite_value_in_any_part_is_seen(build):
    """Without clipping a gradient's norm comes down before it, so that its update can be refused."""
    engine = build("llama", LESS[2], replace(TINY, max_grad_norm=0.0))
    parts = parts_of(engine)
    unit, download = parts.units.embed, parts.download
    for place in (0, 5 * PART + 1, unit.layout.trainable_numel - 1):
        download.begin()
        accumulator = download.accumulator(unit)
        values = torch.zeros_like(accumulator.flat)
        values[place] = torch.inf
        accumulator.add(unit.layout.grad_views(values))
        download.ship(unit, accumulator).wait()
        assert download.norm_of(unit) == torch.inf and not torch.isfinite(download.norm())
        assert parts.arena[unit][place] == torch.inf
        accumulator = download.accumulator(unit)
        values[place] = -3.0
        accumulator.add(unit.layout.grad_views(values))
        download.ship(unit, accumulator).wait()
        assert download.norm_of(unit) == 3.0 and parts.arena[unit].sum() == -3.0
        parts.arena.give_back(unit)


def test_a_part_that_fails_stops_the_step(build, monkeypatch):
    engine = build("llama", LESS[0])
    original, calls = DownloadLane.submit_host, []

    def fails(self, tensor, home, **more):
        calls.append(len(calls))
        if len(calls) == 3:
            raise OSError("the link is gone (made by the test)")
        return original(self, tensor, home, **more)

    monkeypatch.setattr(DownloadLane, "submit_host", fails)
    refused(OSError, "the link is gone", lambda: engine.train_step(batches_of(0), LR))
