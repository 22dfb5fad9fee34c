"""Trained parameters on NVMe, written back after each update: the same bits as in RAM, with states there or not."""

from dataclasses import replace

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.engine.base import EngineError
from tests.engine.inside import parts_of
from tests.engine.stream.training import LR, batches_of, homes_of, result_of, same, with_drive
from tests.flow.models import TINY_SETTINGS, padded_batch

built, drive = with_drive
TINY = replace(TINY_SETTINGS, slot_bytes=16384, chunk_numel=8192, max_grad_norm=0.5)
TINY = replace(TINY, weight_read_ahead_bytes=128 * 1024, state_ring_bytes=MIB, optimizer_backend="auto")
NOTHING_IN_RAM = {"weight_ram_bytes": 0, "state_ram_bytes": 0, "activations": "nvme"}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def build(built, drive, tmp_path, engines):
    def make(model="llama", seed=0, **changes):
        settings = replace(TINY, nvme_path=str(tmp_path / f"drive{len(engines)}"), **changes)
        return built(model, settings, seed=seed, dtype=torch.bfloat16, dropout=0.1, storage=drive)

    return make


def run(engine, steps=range(2)):
    return result_of(engine, steps, 2)


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("model", "states"), [
    ("llama", "split8"), ("gpt2", "fp32"), pytest.param("llama", "fp32", marks=pytest.mark.slow),
    pytest.param("gpt2", "split8", marks=pytest.mark.slow),
])  # fmt: skip
def test_residency_changes_no_bit(build, drive, model, states):
    expected = run(build(model, states=states))
    drive.delay(0.001, "write")
    for changes in ({"weight_ram_bytes": 0}, {"weight_ram_bytes": 50_000, "state_ram_bytes": 60_000}, NOTHING_IN_RAM):
        engine = build(model, states=states, **changes)
        assert same(run(engine), expected), changes
        weights = parts_of(engine).homes.weights
        assert weights.ram_bytes <= changes["weight_ram_bytes"] and weights.nvme_bytes > 0


@pytest.mark.more(after=1)
@pytest.mark.parametrize("states", ["fp32", "split"])
def test_updates_during_the_backward_pass(build, states):
    """Immediate updates: a layer's parameters are written back while lower layers are still at work."""
    changes = {"max_grad_norm": 0.0, "states": states}
    assert same(run(build(**changes, **NOTHING_IN_RAM)), run(build(**changes)))


def _reads(engine, monkeypatch) -> list[tuple[str, int]]:
    """(part, bytes) of parameters that are read from the drive from now on."""
    found, (lane,) = [], parts_of(engine).drive_lanes
    submit = lane.submit_stored

    def counted(store, name, out, *args, **more):
        found.append((name, out.nbytes))
        return submit(store, name, out, *args, **more)

    monkeypatch.setattr(lane, "submit_stored", counted)
    return found


IN_LAYERS = [
    ({"activations": "device"}, lambda layer: 0),
    ({"activations": "nvme", "weight_ram_bytes": 50_000}, lambda layer: 0),
    ({"activations": "ram"}, lambda layer: layer),  # checkpoints may need all of the gradient's home
    ({"activations": "ram", "step_tokens": (24, 15)}, lambda layer: 2 * TINY.chunk_numel),  # in whole chunks
]


TILES = {"tiling": "on", "tile_bytes": 4096}, [({"activations": "device"}, None)]


@pytest.mark.more(after=1)
@pytest.mark.parametrize(
    ("max_grad_norm", "tiles", "cases"),
    [(0.0, {}, IN_LAYERS[::3]), (0.5, {}, IN_LAYERS), (0.5, *TILES), (0.0, *TILES)],
)
def test_what_an_update_wrote_is_not_read_again(build, tmp_path, monkeypatch, max_grad_norm, tiles, cases):
    """New parameters lie where the gradient was, up to the next one; on the drive, too, before they are used."""
    common = {"max_grad_norm": max_grad_norm, "num_layer_buffers": 1, **tiles}
    expected = run(build(**common), range(3))
    for changes, bytes_again in cases:
        engine = build(**{"weight_ram_bytes": 0, "state_ram_bytes": 0, **common, **changes})
        layers = {unit.name: unit.layout.home_bytes for unit in parts_of(engine).units.layer_units}
        reads = _reads(engine, monkeypatch)
        first = engine.train_step(batches_of(0), LR).loss
        assert layers.keys() <= {name for name, _ in reads} and reads
        reads.clear()
        losses = [engine.train_step(batches_of(step), LR).loss for step in (1, 2)]
        losses.append(engine.evaluate([padded_batch(2, 14, seed=9)]).loss)
        assert same((([first, *losses], engine.sample([5, 6, 7], 2, None)), homes_of(engine)), expected), changes
        if bytes_again is None:
            continue
        again = {n for name, n in reads if name in layers}
        assert again <= {bytes_again(layers[name]) for name in layers} - {0}, changes
        if changes is not cases[0][0]:
            continue
        engine.save(tmp_path, lambda path, crc: None)
        engine.load(tmp_path, {"updates": 3, "optimizer": "adamw", "optimizer_state": True})
        reads.clear()
        engine.evaluate([padded_batch(2, 14, seed=9)])
        assert layers.keys() <= {name for name, _ in reads}  # what was loaded is on the drive only


@pytest.mark.more
@pytest.mark.parametrize("states", ["fp32", "split8"])
def test_resumed_in_another_residency(build, tmp_path, states):
    first = build(states=states, **NOTHING_IN_RAM)
    run(first, range(2))
    folder = tmp_path / "step"
    folder.mkdir()
    state = first.save(folder, lambda path, crc: None)
    in_ram = build(states=states)
    run(in_ram, range(2))
    other = tmp_path / "other"
    other.mkdir()
    in_ram.save(other, lambda path, crc: None)
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert all((folder / name).read_bytes() == (other / name).read_bytes() for name in names)
    expected = run(first, range(2, 4))
    for changes in ({}, {"weight_ram_bytes": 40_000, "chunk_numel": 4096}):
        resumed = build(states=states, seed=7, **changes)
        resumed.load(folder, state)
        assert same(run(resumed, range(2, 4)), expected)


@pytest.mark.more(after=2)
@pytest.mark.parametrize("fault", ["fail", "short"])
@pytest.mark.parametrize("changes", [{}, {"state_ram_bytes": 0, "max_grad_norm": 0.0}])
def test_a_failed_write_back_stops_the_run(build, drive, fault, changes):
    """Though the parameters wait in RAM, too: nobody goes on with what the drive has not got."""
    engine = build(weight_ram_bytes=0, **changes)
    run(engine, range(1))
    parts = parts_of(engine)
    assert all(parts.arena.weights(unit) is not None for unit in parts.units.layer_units)
    plan = getattr(drive, fault)("write", after=3, matches=lambda file, *_: file.path.parent.name == "weights")
    with pytest.raises(EngineError, match="last checkpoint"):
        for step in range(1, 4):
            engine.train_step(batches_of(step), LR)
        parts_of(engine).updates.drain()
    assert plan.fired
