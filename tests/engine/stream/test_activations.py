"""Activation checkpoints on NVMe: same bits as on the device, space known beforehand, failures where they are taken."""

import errno
from dataclasses import replace

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.engine.base import EngineError
from outcore.engine.stream.activations.memory import BEHIND_LAYERS, DEVICE_STACKS
from outcore.engine.stream.blueprint import draw_blueprint
from outcore.engine.stream.build import build_stream_engine
from outcore.flow.weights.scratch import FOLDER
from outcore.staging import LaneTransfer
from tests.engine.inside import parts_of
from tests.engine.stream.training import LR, losses_of, same, weights_of, with_drive
from tests.engine.stream.training import batches_of as growing_batches
from tests.flow.models import TINY_SETTINGS, plain_batch, tiny_loaded
from tests.refused import refused

built, drive = with_drive
TINY = replace(TINY_SETTINGS, max_grad_norm=0.5)
LAYERS = 6
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def build(built, drive, tmp_path):
    def make(where="nvme", model="llama", prepare=None, **changes):
        settings = replace(TINY, activations=where, nvme_path=str(tmp_path) if where == "nvme" else None, **changes)
        tiny = {"dtype": torch.bfloat16, "dropout": 0.1, "num_hidden_layers": LAYERS}
        return built(model, settings, prepare=prepare, storage=drive, **tiny)

    return make


def batches_of(step: int):
    """Growing rows, so that the store of an earlier step becomes too small."""
    return growing_batches(step, 3, longer=7)


def run(engine, steps=3):
    return losses_of(engine, range(steps), batches_of), weights_of(engine)


@pytest.mark.more(after=1)
@pytest.mark.parametrize("changes", [{}, {"slot_bytes": 4096, "num_slots": 1}])
def test_results_do_not_depend_on_where_checkpoints_wait(build, drive, changes):
    on_device = run(build("device"))
    assert same(run(build("ram")), on_device)
    drive.delay(0.005, "write")
    slow = drive.delay(0.005, "read")
    assert same(run(build("nvme", **changes)), on_device)
    assert slow.fired > 0


@pytest.mark.parametrize("where", ["ram", "nvme"])
def test_stalls_are_looked_for_wherever_checkpoints_are_waited_for(build, monkeypatch, where):
    engine = build(where)
    stalls, waits, brackets = parts_of(engine).stalls, [], []
    for name in ("wait", "wait_stream"):
        real = getattr(LaneTransfer, name)

        def noted(self, *args, real=real, **kwargs):
            if self.label.startswith("activations"):
                waits.append(stalls._open is not None)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(LaneTransfer, name, noted)
    until = stalls.until
    monkeypatch.setattr(stalls, "until", lambda what, reason: brackets.append(what) or until(what, reason))
    micro_batches = batches_of(0)
    engine.train_step(micro_batches, LR)
    assert waits and all(waits)
    # kept, fetched and taken: in RAM a layer's micro-batches are one transfer, and the last two layers' stay
    times = 1 if where == "ram" else len(micro_batches)
    assert sum(what.startswith("activations") for what in brackets) == (LAYERS - 2) * (2 * times + 1)


def test_frozen_lower_layers_keep_no_checkpoints(build, drive):
    def freeze(model):
        for name, p in model.named_parameters():
            p.requires_grad_(f"layers.{LAYERS - 1}." in name or f"layers.{LAYERS - 3}." in name)

    on_device = run(build("device", prepare=freeze))
    writes = drive.delay(0.0, "write")
    assert same(run(build(prepare=freeze, slot_bytes=MIB, staging_bytes=8 * MIB), steps=3), on_device)
    # the last two stay, so one layer's three micro-batches go down in each step
    assert writes.fired == 3 * 3


def test_only_the_last_layers_stay_on_the_device(build):
    engine = build()
    held = []
    kept = parts_of(engine).schedule.activations
    take = kept.take

    def watch(layer, micro_batch):
        held.append((len(kept._coming), len(kept._device._kept)))
        return take(layer, micro_batch)

    kept.take = watch
    engine.train_step(batches_of(0), LR)
    assert max(coming for coming, _ in held) <= 2 * 3 and max(stay for _, stay in held) <= 2 * 3
    assert not kept._going and not kept._coming and not kept._device._kept


def test_space_is_reserved_before_training(build, tmp_path):
    engine = build(step_tokens=(24, 15, 30))
    row_bytes = engine.loaded.facts.hidden_size * 2
    wanted = (LAYERS - 2) * sum(-(-tokens * row_bytes // 4096) * 4096 for tokens in (24, 15, 30))
    assert wanted <= parts_of(engine).scratch.size_bytes < wanted + MIB
    store = parts_of(engine).schedule.activations._store
    engine.train_step(batches_of(0), LR)  # 2 x 12, 1 x 15, 2 x 18 tokens: more in the last one
    assert parts_of(engine).schedule.activations._store is not store
    engine.close()
    assert not (tmp_path / FOLDER).exists()
    refused(EngineError, r"no room for the activations on NVMe.*too few", lambda: build(step_tokens=(10**13,)))
    assert not (tmp_path / FOLDER).exists()


def test_no_room_in_mid_run_changes_nothing(build, monkeypatch):
    engine = build()
    run(engine, 1)
    before = {n: p.detach().clone() for n, p in engine.loaded.model.named_parameters()}
    monkeypatch.setattr("outcore.storage.store.tensor_store.check_space", _full)
    refused(EngineError, "no room", lambda: engine.train_step(batches_of(1), LR))
    monkeypatch.undo()
    assert all(torch.equal(p, before[n]) for n, p in engine.loaded.model.named_parameters())
    assert engine.train_step(batches_of(1), LR).loss > 0


def _full(directories, sizes):
    from outcore.storage import StorageError

    raise StorageError("reservation of space", path=directories[0], errno=errno.ENOSPC, reason="test")


def test_the_forward_waits_for_a_drive_that_falls_behind(build, drive):
    """A checkpoint holds device memory until it is written, so only a few layers' may be on their way."""
    engine = build(slot_bytes=MIB, staging_bytes=8 * MIB)
    kept = parts_of(engine).schedule.activations
    keep, late = kept.keep, []

    def watch(layer, micro_batch, hidden):
        keep(layer, micro_batch, hidden)
        if layer < LAYERS - 2:
            late.extend(layer - key[0] for key, (transfer, *_) in kept._going.items() if not transfer.done())

    kept.keep = watch
    drive.delay(0.05, "write")
    engine.train_step(batches_of(0), LR)
    assert late and max(late) < BEHIND_LAYERS


@pytest.mark.more(after=1)
@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.parametrize("how", ["fail", "short"])
def test_a_failed_transfer_stops_the_step_where_it_is_taken(build, drive, tmp_path, kind, how):
    engine = build()
    run(engine, 1)
    state = engine.save(tmp_path, lambda path, crc: None)
    on = engine.train_step(batches_of(1), LR).loss
    plan = getattr(drive, how)(kind, after=2)
    with pytest.raises(
        EngineError, match=f"checkpoint of layer .*{'written' if kind == 'write' else 'read back'}"
    ) as e:
        engine.train_step(batches_of(1), LR)
    assert plan.fired and "tensors.bin" in str(e.value) and "wanted" in str(e.value)
    engine.close()
    drive.clear()
    again = build()
    again.load(tmp_path, state)
    assert again.train_step(batches_of(1), LR).loss == on


@pytest.mark.more
def test_checkpoints_in_ram_lie_in_the_gradients_homes_while_they_fit(build):
    def taken(engine, batches) -> int:
        engine.train_step(batches, LR)
        return parts_of(engine).schedule.activations.host_bytes

    def trained(where):
        engine = build(where)
        losses = [engine.train_step(large, LR).loss, engine.train_step(small, LR).loss]
        engine.evaluate(small)
        return losses, [p.detach().clone() for p in engine.loaded.model.parameters()]

    small = [plain_batch(1, 8, seed=1), plain_batch(1, 8, seed=2)]
    large = [plain_batch(4, 64, seed=3) for _ in range(4)]
    assert taken(build("ram"), small) == 0
    layer = parts_of(build("ram")).units.layer_units[0].layout
    assert 4 * 4 * 64 * 2 * tiny_loaded("llama").config.hidden_size > layer.trainable_numel * 2, "they must not all fit"
    assert taken(build("ram"), large) > 0
    in_ram, on_device = trained("ram"), trained("device")
    assert in_ram[0] == on_device[0]
    assert all(torch.equal(a, b) for a, b in zip(in_ram[1], on_device[1], strict=True))


def test_checkpoints_on_their_way_to_ram_take_two_buffers_however_many_layers_there_are(build):
    engine = build("ram")
    kept = parts_of(engine).schedule.activations
    seen = []
    for lane, place in ((kept._download, 0), (kept._upload, 1)):
        submit = lane.submit_host

        def watched(*tensors, submit=submit, place=place, **more):
            if "activations" in more.get("label", ""):
                seen.append(tensors[place].untyped_storage().data_ptr())
            return submit(*tensors, **more)

        lane.submit_host = watched
    for _ in range(2):
        engine.train_step(batches_of(0), LR)
    assert len(seen) >= 4 * (LAYERS - 2)
    assert len(set(seen)) == DEVICE_STACKS


@pytest.mark.parametrize("rows", [1, 40])
def test_memory_for_checkpoints_is_known_before_the_first_step(build, rows):
    tokens = (rows * 12, rows * 20)
    engine = build("ram", step_tokens=tokens)
    engine.train_step([plain_batch(rows, count // rows, seed=count) for count in tokens], LR)
    plan = draw_blueprint(engine.loaded, engine.settings, torch.device("cpu"), trial=False, build=build_stream_engine)
    expected_bytes = plan.placed.beyond
    assert parts_of(engine).schedule.activations.host_bytes == expected_bytes
    assert (expected_bytes > 0) == (rows == 40)  # the others lie in the gradients' homes
