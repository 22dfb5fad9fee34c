"""Frozen parameters on NVMe (the base under LoRA adapters): the same bits as in RAM, within a budget of RAM."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from outcore.common.quantities import MIB, round_up
from outcore.engine.base import EngineError
from outcore.engine.stream.gradients.arena import gradient_bytes_of
from outcore.flow.parts import discover_units, needs_of_parts
from outcore.flow.weights.scratch import FOLDER
from outcore.sizing.training import cut_homes
from outcore.staging.pool.allocator import ALIGNMENT_BYTES
from tests.engine.inside import parts_of
from tests.engine.stream.training import LR, adapted, batches_of, result_of, same, with_drive
from tests.flow.models import TINY_SETTINGS, plain_batch
from tests.refused import refused
from tests.waiting import until

built, drive = with_drive
TINY = replace(TINY_SETTINGS, slot_bytes=8192, chunk_numel=512, weight_read_ahead_bytes=64 * 1024)
pytestmark = pytest.mark.usefixtures("one_thread")


def base(model: str = "llama"):
    return adapted(model, dtype=torch.bfloat16, num_hidden_layers=4)


@pytest.fixture
def build(built, drive, tmp_path, engines):
    def make(ram_bytes=None, model="llama", **changes):
        spills = ram_bytes is not None or changes.get("activations") == "nvme"
        where = str(tmp_path / f"drive{len(engines)}") if spills else None
        return built(base(model), replace(TINY, weight_ram_bytes=ram_bytes, nvme_path=where, **changes), storage=drive)

    return make


def run(engine, steps=2):
    return result_of(engine, range(steps))


def test_the_budget_is_kept_and_spread_evenly_over_the_layers():
    needs = needs_of_parts(discover_units(base()), "fp32", (), 1)
    parts, num_layers, total = needs.parts, len(needs.layers), needs.weights
    floors, grain_bytes = needs.gradients, 512 * needs.element_bytes
    for ram_bytes in (0, floors, total // 3, total // 2, total - 2, total, 10 * total):
        cuts = cut_homes(needs, ram_bytes, 512)
        assert floors <= sum(cuts) <= max(ram_bytes, floors)
        assert all(needs.gradient_bytes(part) <= cut <= part.home_bytes for part, cut in zip(parts, cuts, strict=True))
        layers, ends = cuts[:num_layers], cuts[num_layers:]
        assert max(layers) - min(layers) <= grain_bytes
        spare = min(ram_bytes, total) - sum(cuts)
        assert spare < 2 * grain_bytes or ram_bytes <= floors or ram_bytes >= total
        if min(layers) > needs.gradient_bytes(parts[0]):
            assert list(ends) == [part.home_bytes for part in needs.ends]
    assert sum(cut_homes(needs, None, 512)) == total
    assert cut_homes(needs, 0, 512, frozenset([1]))[1] == parts[1].home_bytes


@pytest.mark.more
@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_results_do_not_depend_on_where_the_base_lives(build, drive, model):
    expected = run(build(model=model))
    drive.delay(0.001, "read")
    for ram_bytes, changes in [
        (0, {}),
        (60_000, {}),
        (60_000, {"num_layer_buffers": 1, "slot_bytes": 4096, "num_slots": 1, "weight_read_ahead_bytes": 0}),
        (30_000, {"activations": "nvme"}),
    ]:
        engine = build(ram_bytes, model, **changes)
        assert same(run(engine), expected), (ram_bytes, changes)
        weights = parts_of(engine).homes.weights
        adapters = sum(unit.layout.trainable_numel * 2 for unit in parts_of(engine).units.all)
        assert adapters <= weights.ram_bytes <= max(ram_bytes, adapters) and weights.nvme_bytes > 0


def test_parameters_on_nvme_take_no_memory_in_the_model(build):
    engine = build(0)
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in engine.loaded.model.parameters()}
    adapters = sum(p.nbytes for n, p in engine.loaded.model.named_parameters() if "lora_" in n)
    weights = parts_of(engine).homes.weights
    pages = 4096 * len(parts_of(engine).units.all)  # slabs are whole pages
    assert sum(held.values()) < weights.ram_bytes + 2 * len(held) + pages and weights.ram_bytes < 2 * adapters + pages
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        next(p for n, p in engine.loaded.model.named_parameters() if "lora_" not in n).add_(1)
    assert "NVMe" in engine.describe() and "slots of" in engine.describe()


@pytest.mark.more
def test_checkpoints_and_exports_are_the_same(build, tmp_path):
    files = []
    for ram_bytes in (None, 40_000):
        engine = build(ram_bytes)
        run(engine, 2)
        folder = tmp_path / f"of {ram_bytes}"
        (folder / "step").mkdir(parents=True)
        state = engine.save(folder / "step", lambda path, crc: None)
        engine.export(folder / "merged")
        engine.export(folder / "adapter", adapter_only=True)
        paths = [p for p in sorted(folder.rglob("*")) if p.is_file()]
        files.append({str(p.relative_to(folder)): p.read_bytes() for p in paths})
        other = build(70_000 if ram_bytes is None else None)
        other.load(folder / "step", state)
        ahead = engine.train_step(batches_of(5), LR).loss
        assert other.train_step(batches_of(5), LR).loss == ahead
    assert files[0].keys() == files[1].keys() and any("adapter_model" in name for name in files[0])
    assert all(files[0][name] == files[1][name] for name in files[0])
    merged = load_file(tmp_path / "of None" / "merged" / "model.safetensors")
    assert not any("lora_" in name for name in merged)


def test_reads_go_ahead_of_the_device_buffers(build, drive):
    """Two layers fit on the device; the drive reads on into the lane's slots while the first one is at work."""
    engine = build(0, num_layer_buffers=1, slot_bytes=4096, weight_read_ahead_bytes=MIB, staging_bytes=4 * MIB)
    layers = parts_of(engine).units.layer_units
    names = {unit.name for unit in layers}
    reads = []
    lock = threading.Lock()
    store = parts_of(engine).homes.weights.store
    submit = store.submit_read

    def watch(name, *args, **kwargs):
        with lock:
            reads.append(name)
        return submit(name, *args, **kwargs)

    store.submit_read = watch
    runner = parts_of(engine).flow.runner
    layer, ahead = runner.layer, []

    def compute(index, *args):
        if index == 0:
            until(lambda: names <= set(reads))
            ahead.append(set(reads))
        return layer(index, *args)

    runner.layer = compute
    engine.train_step(batches_of(0)[:1], LR)
    assert names <= ahead[0]


@pytest.mark.more(after=1)
@pytest.mark.parametrize("how", ["fail", "short"])
def test_a_failed_read_stops_the_step_and_nothing_hangs(build, drive, how):
    engine = build(0)
    run(engine, 1)
    plan = getattr(drive, how)("read", after=7)
    with pytest.raises(EngineError, match="could not be read from NVMe") as e:
        engine.train_step(batches_of(1), LR)
    assert plan.fired and "tensors.bin" in str(e.value) and "wanted" in str(e.value)
    drive.clear()
    parts_of(engine).updates.drain()
    engine.evaluate([plain_batch()])  # buffers and lanes are in order again
    engine.close()


def test_no_room_on_the_drive_is_said_before_training(build, tmp_path, monkeypatch):
    monkeypatch.setattr("outcore.storage.store.files.shutil.disk_usage", lambda path: SimpleNamespace(free=4096))
    refused(EngineError, r"no room for the weights on NVMe.*too few", lambda: build(0))
    monkeypatch.undo()
    assert not list(tmp_path.rglob(FOLDER))


@pytest.mark.parametrize("ram_bytes", [None, 0, 60_000])
def test_pinned_memory_is_for_what_lives_in_ram(build, ram_bytes):
    """No room is kept for homes that are on NVMe, where there would be enough for all."""
    engine = build(ram_bytes)
    parts = parts_of(engine)
    weights_bytes = sum(round_up(parts.homes.weights.ram(unit).nbytes, ALIGNMENT_BYTES) for unit in parts.units.all)
    gradients_bytes = sum(round_up(gradient_bytes_of(unit), ALIGNMENT_BYTES) for unit in parts.units.all)
    ahead_bytes = 0 if ram_bytes is None else TINY.weight_read_ahead_bytes
    assert parts.staging.capacity_bytes == TINY.lane_bytes + weights_bytes + gradients_bytes + ahead_bytes
    assert parts.staging.capacity_bytes < TINY.staging_bytes
    assert [lane.slot_bytes * lane.num_slots for lane in parts.drive_lanes] == [ahead_bytes] * bool(ahead_bytes)
