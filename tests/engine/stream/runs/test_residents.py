"""Layers that stay on the device: the same bits as without them, whatever a run does meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outcore.common.quantities import GIB, MIB
from outcore.engine.base import NonFiniteLossError
from outcore.engine.stream.residents import measured_use
from outcore.sizing.streaming import OTHERS_BYTES, SPARE_BYTES, DeviceUse
from outcore.sizing.tiles import Holding
from outcore.sizing.training import PartNeeds, Pins, TrainingLimits, TrainingNeeds, place_training
from tests.engine.inside import parts_of
from tests.engine.stream.training import LR, TINY, batches_of, fixtures, freeze_most
from tests.flow.models import plain_batch
from tests.refused import refused

(build,) = fixtures
pytestmark = pytest.mark.usefixtures("one_thread")
ALL = 1 << 40
HOLDING = replace(TINY, resident_bytes=ALL)


def train(engine, steps, first=0, batches=batches_of):
    return [engine.train_step(batches(step), LR).loss for step in range(first, first + steps)]


def saved(engine, folder):
    """(the engine's state, bytes of every file of a checkpoint)."""
    folder.mkdir()
    state = engine.save(folder, lambda path, crc: None)
    return state, {path.name: path.read_bytes() for path in folder.iterdir()}


def held(engine) -> int:
    return parts_of(engine).residents.num_held


@pytest.mark.more(after=2)
@pytest.mark.parametrize("model, dtype, changes", [
    ("llama", torch.bfloat16, {"states": "split", "max_grad_norm": 0.05}),
    ("gpt2", torch.bfloat16, {"states": "fp32", "max_grad_norm": 0.0}),
    ("gpt2", torch.float16, {"initial_loss_scale": 64.0, "activations": "ram"}),
    ("qwen3", torch.float32, {"num_layer_buffers": 1, "chunk_numel": 2048}),
])  # fmt: skip
def test_results_are_those_of_a_run_without_residents(build, tmp_path, model, dtype, changes):
    """Clipping or not, one micro-batch or more, dropout where the model has it: losses and every saved byte."""
    found = []
    for limit in (0, ALL):
        engine = build(model, replace(TINY, resident_bytes=limit, **changes), dtype=dtype, dropout=0.1)
        losses = train(engine, 4) + train(engine, 2, 4, batches=lambda step: batches_of(step, 1))
        found.append((losses, saved(engine, tmp_path / str(limit))[1]))
        assert held(engine) == (len(parts_of(engine).units.layers) if limit else 0)
    assert found[0] == found[1]


def test_some_layers_stay_as_far_as_the_limit_reaches(build):
    engine = build("llama", HOLDING)
    train(engine, 2)
    one_bytes = parts_of(engine).residents.device_bytes // held(engine)
    fewer = build("llama", replace(TINY, resident_bytes=one_bytes * 3 // 2))
    assert "after 2 steps the first layers take up to" in fewer.describe()
    train(fewer, 1)
    assert held(fewer) == 0
    assert train(fewer, 3, 1) == train(build("llama"), 4)[1:]
    assert held(fewer) == 1 and "residents: layer 0 to layer 0 stay on the device" in fewer.describe()


def test_checkpoint_resume_evaluation_and_export_see_what_stays(build, tmp_path):
    runs = []
    for settings in (TINY, HOLDING):
        engine = build("gpt2", replace(settings, states="split"), dtype=torch.bfloat16)
        folder = tmp_path / str(settings.resident_bytes)
        losses = train(engine, 4)
        evaluated = engine.evaluate([plain_batch(seed=77)])
        weights = {name: p.detach().clone() for name, p in engine.loaded.model.named_parameters()}
        state, files = saved(engine, folder)
        sampled = engine.sample([5, 6, 7], 4, None)
        losses += train(engine, 2, 4)
        engine.load(folder, state)
        losses += train(engine, 4, 4)
        resumed = build("gpt2", replace(settings, states="split"), dtype=torch.bfloat16, seed=9)
        resumed.load(folder, state)
        assert train(resumed, 4, 4) == losses[-4:]
        engine.export(folder / "exported")
        exported = (folder / "exported" / "model.safetensors").read_bytes()
        runs.append((losses, evaluated, sampled, files, exported, {n: w.tolist() for n, w in weights.items()}))
    assert runs[0] == runs[1]


def test_a_closed_engine_leaves_the_weights_of_its_last_step(build):
    found = []
    for settings in (TINY, HOLDING):
        engine = build("llama", settings)
        train(engine, 4)
        engine.close()
        found.append([p.tolist() for p in engine.loaded.model.parameters()])
    assert found[0] == found[1]


def test_frozen_parameters_stay_too(build):
    engine = build("llama", HOLDING, prepare=freeze_most)
    assert train(engine, 5) == train(build("llama", prepare=freeze_most), 5)
    assert held(engine) == len(parts_of(engine).units.layers)


def longer(step):
    """Steps of one size, from the fourth on of twice as many tokens."""
    return [plain_batch(2, 24 if step >= 4 else 12, seed=step)]


def test_a_larger_step_that_does_not_fit_sends_all_home_and_they_come_again(build, caplog):
    engine = build("llama", HOLDING)
    residents = parts_of(engine).residents
    room = SPARE_BYTES + 100 * MIB
    residents.measure = lambda: DeviceUse(room, 0, 60 * MIB)
    losses = train(engine, 4, batches=longer)
    assert held(engine)
    residents.measure = lambda: DeviceUse(room, 0, 0)
    losses += train(engine, 1, 4, batches=longer)
    assert not held(engine) and "go from the GPU back to RAM" in caplog.text and "a step of 48 tokens" in caplog.text
    residents.measure = lambda: DeviceUse(2 * room, 0, 120 * MIB)
    losses += train(engine, 3, 5, batches=longer)
    assert held(engine)
    assert losses == train(build("llama"), 8, batches=longer)


def test_a_larger_step_that_fits_leaves_them_there(build):
    engine = build("llama", HOLDING)
    parts_of(engine).residents.measure = lambda: DeviceUse(SPARE_BYTES + 200 * MIB, 0, 60 * MIB)
    assert train(engine, 6, batches=longer) == train(build("llama"), 6, batches=longer)
    assert held(engine)


@pytest.mark.more(after=2)
@pytest.mark.parametrize("when, clip", [("training", 1.0), ("training", 0.0), ("evaluating", 1.0)])
def test_without_memory_beside_them_the_pass_is_made_again(build, caplog, when, clip):
    """The allocator refuses once, in the middle of a forward pass."""
    engine, other = (build("llama", replace(settings, max_grad_norm=clip)) for settings in (HOLDING, TINY))
    assert train(engine, 3) == train(other, 3)
    runner, calls = parts_of(engine).flow.runner, [0]
    original = runner.layer

    def refuses(*args):
        calls[0] += 1
        if calls[0] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*args)

    runner.layer = refuses
    if when == "evaluating":
        batches = [plain_batch(seed=77)]
        assert engine.evaluate(batches) == other.evaluate(batches)
    assert train(engine, 3, 3) == train(other, 3, 3)
    assert "memory was short beside them" in caplog.text
    runner.layer = lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
    parts_of(engine).residents.forget()
    with pytest.raises(torch.OutOfMemoryError):
        engine.train_step(batches_of(6), LR)


def test_where_nothing_stays_graphs_give_memory_back(build, monkeypatch):
    """The pass is made again without them; when they are gone, too, the run ends with torch's own error."""

    class Graphs:
        num_graphs, said = 3, ""

        def give_up(self, why):
            self.num_graphs, self.said = 0, why

    engine, other, graphs = build("llama"), build("llama"), Graphs()
    assert train(engine, 1) == train(other, 1)
    runner = parts_of(engine).flow.runner
    original, left = runner.layer, [1]
    monkeypatch.setattr(runner.compiled, "graphs", graphs)

    def refuses(*args):
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*args)

    runner.layer = refuses
    assert train(engine, 2, 1) == train(other, 2, 1)
    assert graphs.said == "memory was short beside them"
    left[0] = 1
    with pytest.raises(torch.OutOfMemoryError):
        engine.train_step(batches_of(3), LR)


def test_after_memory_was_short_one_less_comes_again(build):
    """As many would be short of it again, and a pass be lost every third step."""
    engine = build("llama", HOLDING)
    runner = parts_of(engine).flow.runner
    train(engine, 3)
    original, counts = runner.layer, [held(engine)]
    for _ in range(counts[0]):

        def refuses(*args):
            runner.layer = original
            raise torch.OutOfMemoryError("CUDA out of memory")

        runner.layer = refuses
        train(engine, 3)
        counts.append(held(engine))
    assert counts == list(range(counts[0], -1, -1)) and counts[0] > 1


def test_where_memory_is_gone_when_layers_come_those_that_came_stay(build, monkeypatch):
    engine, other = build("llama", HOLDING), build("llama", TINY)
    assert train(engine, 1) == train(other, 1)
    zeros, states = torch.zeros, []

    def short(*args, **kwargs):
        if kwargs.get("dtype") is torch.uint8:
            states.append(args)
            if len(states) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", short)
    assert train(engine, 2, 1) == train(other, 2, 1)
    assert held(engine) == 1 and len(states) == 2
    assert train(engine, 3, 3) == train(other, 3, 3)


def test_without_clipping_no_step_is_made_again_once_a_layer_is_updated(build):
    engine = build("llama", replace(HOLDING, max_grad_norm=0.0))
    train(engine, 3)
    parts_of(engine).schedule.backward.layer = lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA"))
    with pytest.raises(torch.OutOfMemoryError):  # the head's update is under way
        engine.train_step(batches_of(3), LR)
    assert held(engine)


def test_a_gradient_that_is_not_finite_reaches_no_state_on_the_device(build, tmp_path):
    """Deferred: the step is skipped whole; immediate: the run stops and that layer is as it was."""
    for clip in (1.0, 0.0):
        engine = build("llama", replace(HOLDING, max_grad_norm=clip))
        train(engine, 3)
        residents = parts_of(engine).residents
        before = residents.slab(parts_of(engine).units.layer_units[1]).clone()
        original, left = parts_of(engine).schedule.backward.layer, [1]

        def poisoned(index, *args, original=original, left=left):
            grad = original(index, *args)
            if index == 1 and left[0]:
                left[0] -= 1
                args[-1].flat[3] = float("inf")
            return grad

        parts_of(engine).schedule.backward.layer = poisoned
        if clip:
            assert engine.train_step(batches_of(3), LR).skipped
        else:
            with pytest.raises(NonFiniteLossError, match="resume from the last checkpoint"):
                engine.train_step(batches_of(3), LR)
        assert torch.equal(residents.slab(parts_of(engine).units.layer_units[1]), before)


@pytest.mark.more(after=1)
@pytest.mark.parametrize(
    "changes",
    [
        {"states": "split8"}, {"tiling": "on", "tile_bytes": 1024}, {"nvme_path": "@", "state_ram_bytes": 0},
        {"optimizer": "muon", "states": "split"},
    ],
)  # fmt: skip
def test_none_stay_with_8_bit_moments_tiles_muon_or_states_on_a_drive(build, tmp_path, changes):
    changes = {name: str(tmp_path) if value == "@" else value for name, value in changes.items()}
    engine = build("llama", replace(HOLDING, **changes), dtype=torch.bfloat16)
    train(engine, 3)
    assert held(engine) == 0 and "residents" not in engine.describe()


def test_none_stay_where_a_layer_is_too_large_for_one_update(build, monkeypatch):
    monkeypatch.setattr("outcore.optim.gpu.MOST_NUMEL", 100)
    engine = build("llama", HOLDING)
    train(engine, 3)
    assert not held(engine)


def test_none_stay_unless_told_where_there_is_no_gpu(build):
    engine = build("llama", replace(TINY, resident_bytes=None))
    train(engine, 3)
    assert held(engine) == 0 and "residents" not in engine.describe()
    refused(ValueError, "resident_bytes must not be negative", lambda: replace(TINY, resident_bytes=-1))


@pytest.mark.parametrize(
    "seconds, stays",
    [((0.176, 0.218, 0.006, 0.061, 0.019), True), ((0.161, 0.06, 0.012, 0.095, 0.04), True), ((0.9, 2, 0, 0, 0.02), 0)],
    ids=["16k", "4k", "computes"],
)
def test_all_idle_memory_is_taken_only_where_the_forecast_gains(build, seconds, stays):
    """Phases of 1.2 B on an H100 at two sizes, clipped, and of a GPU that never waits."""
    phase_s = dict(zip(("forward", "backward", "optimizer", "stall_optimizer", "stall_pcie"), seconds, strict=True))
    engine = build("llama", HOLDING)
    residents = parts_of(engine).residents
    residents._limit_bytes, original = None, residents.step_ended
    residents.step_ended = lambda settle, _: original(settle, phase_s)
    found = [engine.train_step(batches_of(step), LR) for step in range(4)]
    assert [one.loss for one in found] == train(build("llama"), 4)
    assert bool(held(engine)) == stays
    said = [one.said for one in found]
    assert said[0] == said[2] == said[3] == "" and "of a step" in said[1]
    assert ("layer 0 to layer 1 stay on the device" if stays else "no layer stays on the device: 2 could") in said[1]


def test_where_memory_is_short_it_is_said_that_none_stays(build):
    engine = build("llama", HOLDING)
    parts_of(engine).residents.measure = lambda: DeviceUse(SPARE_BYTES, 0, 0)
    train(engine, 1)
    assert "no layer stays on the device: one takes" in engine.train_step(batches_of(1), LR).said
    assert held(engine) == 0


def test_other_programs_are_left_memory_but_not_under_a_cap(monkeypatch):
    """What the driver has free is for all; a cap of the allocator's is this run's alone."""
    device, cap = torch.device("cuda", 0), [1.0]
    fakes = {
        "mem_get_info": (3 * GIB, 8 * GIB), "memory_reserved": GIB, "memory_allocated": GIB, "empty_cache": None,
        "max_memory_allocated": 2 * GIB,
    }  # fmt: skip
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda *_: cap[0])
    assert measured_use(device, None) == DeviceUse(4 * GIB - OTHERS_BYTES, GIB, GIB)
    cap[0] = 3 / 8
    assert measured_use(device, None) == DeviceUse(3 * GIB, GIB, GIB)
    assert measured_use(device, 2 * GIB) == DeviceUse(2 * GIB, GIB, GIB)


def test_the_rule_of_what_stays():
    needs = TrainingNeeds((PartNeeds(200, 200, 100),) * 3, (), 2, "fp32")
    limits = TrainingLimits(1 << 40, Pins(0))
    clipped, unclipped = (place_training(needs, replace(limits, waits_for_norm=waits)) for waits in (True, False))
    assert clipped.resident_bytes(0, 10) == 1620 and unclipped.resident_bytes(0, 10) == 1420
    found = [clipped.staying(idle, 10).stays for idle in (-1, 1619, 1620, 3239, 3240, 10**9)]
    assert found == [0, 0, 1, 1, 2, 3] and clipped.staying(10**9, 10).stay_bytes == 3 * 1620
    assert replace(clipped, holding=Holding(frozenset({0}))).staying(10**9, 10).stays == 0
    assert replace(clipped, needs=replace(needs, ranks=2)).staying(10**9, 10).stays == 0
    assert DeviceUse(SPARE_BYTES + 1000, 300, 100).idle == 590
