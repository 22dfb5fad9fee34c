"""Updates in two halves, weights and later moments: the same bits as at once, whatever a run does meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outcore.engine.stream.idle.late_moments import LateMoments
from tests.engine.inside import parts_of
from tests.engine.stream.runs.test_residents import saved, train
from tests.engine.stream.training import TINY, batches_of, fixtures
from tests.flow.models import plain_batch

(build,) = fixtures
pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = {"gpt2": "n_layer"}


def late(engine):
    return parts_of(engine).updates.late


@pytest.mark.parametrize(
    "model, dtype, changes",
    [
        ("llama", torch.bfloat16, {"states": "split", "max_grad_norm": 0.05}),
        ("gpt2", torch.bfloat16, {"states": "fp32", "activations": "ram"}),
        ("gpt2", torch.float16, {"initial_loss_scale": 64.0, "activations": "ram", "optimizer_backend": "torch"}),
        ("llama", torch.float32, {"num_layer_buffers": 1, "chunk_numel": 512, "activations": "ram"}),
        ("llama", torch.bfloat16, {"states": "fp32", "activations": "ram", "resident_bytes": 60_000}),
    ],
)
@pytest.mark.parametrize("number", [1, 99])
def test_results_are_those_of_updates_at_once(build, tmp_path, monkeypatch, model, dtype, changes, number):
    """Losses, an evaluation and every saved byte, with moments updated as late as can be; checkpoints of activations
    keep away from gradients still needed."""
    found, begin, settle, drain = [], LateMoments.weights_done, LateMoments.settle, LateMoments.drain
    queued = {}

    def begin_one(self, part):
        if part.index in queued:
            begin(self, *queued.pop(part.index))

    monkeypatch.setattr(LateMoments, "weights_done", lambda self, *args: queued.update({args[0].index: args}))
    monkeypatch.setattr(LateMoments, "settle", lambda self, part: (begin_one(self, part), settle(self, part)))
    monkeypatch.setattr(
        LateMoments, "drain", lambda self: ([begin_one(self, args[0]) for args in list(queued.values())], drain(self))
    )
    for count in (0, number):
        settings = replace(TINY, late_moments=count, **changes)
        engine = build(model, settings, dtype=dtype, dropout=0.1, **{LAYERS.get(model, "num_hidden_layers"): 5})
        losses = train(engine, 3)
        losses.append(engine.evaluate([plain_batch(seed=77)]).loss)
        losses += train(engine, 3, 3, batches=lambda step: batches_of(step, 1))
        found.append((losses, saved(engine, tmp_path / str(count))[1]))
        halved = len(parts_of(engine).units.layers) + 1 - parts_of(engine).residents.num_held
        assert len(late(engine)._parts) == min(count, halved)
    assert found[0] == found[1]


def phases(waits_s, forward_s=1.0, backward_s=1.0):
    return {"forward": forward_s, "backward": backward_s, "stall_optimizer": waits_s}


def test_parts_are_found_by_trying(build):
    """More while the forward waits for updates, fewer once the backward waits for moments, then a rest."""
    found = late(build("llama", replace(TINY, late_moments=None)))
    number = len(found._candidates)
    found.step_ends(phases(0.01))
    assert found.count == 0
    found.step_ends(phases(0.5))
    assert found.count == max(1, number // 8)
    for _ in range(2 * number):
        found.step_ends(phases(0.5))
    assert found.count == number
    found._waits = [(0.0, 0.3)]
    found.step_ends(phases(0.5))
    assert found.count == number - 1
    found.step_ends(phases(0.5))
    assert found.count == number - 1
    for _ in range(20):
        found.step_ends(phases(0.5))
    assert found.count == number


@pytest.mark.parametrize(
    "changes",
    [
        {"max_grad_norm": 0.0},
        {"states": "fp32_m8"},
        {"tiling": "on", "tile_bytes": 1024},
        {"optimizer": "muon"},
    ],
)
def test_no_halves_where_there_is_nothing_to_win(build, changes):
    engine = build("llama", replace(TINY, late_moments=99, **changes))
    train(engine, 3)
    assert not late(engine)._parts
