"""Optimizer states on NVMe: a clean end whatever fails."""

import errno
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outcore.engine.base import EngineError, NonFiniteLossError
from outcore.engine.stream.build import build_stream_engine
from outcore.flow.weights import scratch
from outcore.optim.formats.compressed import Tail
from outcore.storage.store import files as store_files
from tests.engine.inside import parts_of
from tests.engine.stream.training import LR
from tests.flow.models import plain_batch, tiny_loaded
from tests.refused import failing, refused
from tests.states.training import IMMEDIATE, TINY, assert_same, batches_of, everything, fixtures, trained

built, build, faulty = fixtures
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.more(after=4)
@pytest.mark.parametrize("settings", [TINY, IMMEDIATE], ids=["deferred", "immediate"])
@pytest.mark.parametrize(
    "plan",
    [
        lambda engine: engine.short("read", got=512), lambda engine: engine.fail("read", after=5, errno=errno.EIO),
        lambda engine: engine.fail("write", errno=errno.ENOSPC),
        lambda engine: engine.short("write", after=7, got=4096),
    ],
    ids=["short read", "failed read", "full drive", "short write"],
)  # fmt: skip
def test_a_failed_transfer_stops_the_run(build, faulty, plan, settings):
    engine = build(settings, 0.0)
    engine.train_step(batches_of(0), LR)
    parts_of(engine).updates.drain()
    plan(faulty[0])
    with pytest.raises(EngineError, match=r"tensors\.bin at offset \d+: wanted \d+ bytes, got") as caught:
        for step in range(1, 4):
            engine.train_step(batches_of(step), LR)
    assert "resume from" in str(caught.value)
    with pytest.raises(EngineError):
        engine.evaluate([plain_batch()])
    with pytest.raises(EngineError):
        engine.train_step(batches_of(4), LR)


def test_a_write_that_fails_late_is_not_missed_by_a_save(build, faulty, tmp_path):
    engine = build(TINY, 0.0)
    faulty[0].fail("write", errno=errno.EIO)
    engine.train_step(batches_of(0), LR)
    refused(EngineError, "EIO", lambda: engine.save(tmp_path, lambda path, crc: None))


def test_a_failed_update_in_the_ring_comes_out(build, monkeypatch):
    from outcore.optim import reference as torch_backend

    engine = build(replace(TINY, optimizer_backend="torch"), 0.0)
    engine.train_step(batches_of(0), LR)
    parts_of(engine).updates.drain()
    monkeypatch.setattr(torch_backend, "update_chunk", failing(ArithmeticError("made by the test")))
    engine.train_step(batches_of(1), LR)
    refused(EngineError, "made by the test", lambda: engine.train_step(batches_of(2), LR))


@pytest.mark.more(after=1)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_gradient_that_is_not_finite_reaches_no_state_of_its_unit(build, share):
    engine = build(IMMEDIATE, share)
    trained(engine, 2)
    before = everything(engine)
    layer = parts_of(engine).units.layer_units[0]
    ship = parts_of(engine).download.ship

    def spoiled(unit, accumulator):
        if unit is layer:
            accumulator.flat[7] = float("inf")
        return ship(unit, accumulator)

    parts_of(engine).download.ship = spoiled
    with pytest.raises(NonFiniteLossError):
        engine.train_step(batches_of(2), LR)
    refused(NonFiniteLossError, "was not finite", lambda: parts_of(engine).updates.wait(layer))
    parts_of(engine).updates._pending.pop(layer.index)
    after = everything(engine)
    own = {slot.name for slot in layer.layout.slots}
    changed = {name.split()[-1] for name in before if not torch.equal(before[name], after[name])}
    assert changed and not changed & own


def test_a_skipped_step_leaves_states_on_nvme_alone(build):
    engine = build(TINY, 0.0)
    trained(engine, 2)
    before = everything(engine)
    parts_of(engine).download.norm = lambda: torch.tensor(float("nan"))
    assert engine.train_step(batches_of(2), LR).skipped
    after = everything(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.more
@pytest.mark.parametrize("states", ["fp32_m8", pytest.param("fp32", marks=pytest.mark.slow)])
def test_fp16_overflows_leave_states_on_nvme_as_those_in_ram(build, states):
    """Real ones: the scale is far too high at first, falls, rises again and overflows again."""
    settings = replace(TINY, states=states, initial_loss_scale=2.0**24, loss_scale_hysteresis=1, loss_scale_window=2)
    found = []
    for share in (None, 0.0):
        engine = build(settings, share, dtype=torch.float16)
        results = [engine.train_step(batches_of(step), LR) for step in range(16)]
        found.append(([(r.skipped, r.loss, r.grad_norm) for r in results if not r.skipped], everything(engine)))
        skipped = [r.skipped for r in results]
        first_made = skipped.index(False)
        assert first_made > 1 and any(skipped[first_made:]) and engine.updates == skipped.count(False)
    assert_same(*found)


@pytest.mark.parametrize("settings", [TINY, IMMEDIATE], ids=["deferred", "immediate"])
def test_closing_in_mid_flight(build, faulty, settings):
    engine = build(settings, 0.0)
    for drive in faulty:
        drive.delay(0.02)
    engine.train_step(batches_of(0), LR)
    parts_of(engine).close()  # as after a failure: nothing is drained
    engine._closed = True


# --- the scratch store


def test_a_full_drive_is_refused_before_anything_changes(tmp_path, monkeypatch):
    loaded = tiny_loaded("llama")
    homes = [(p, p.data_ptr()) for p in loaded.model.parameters()]

    monkeypatch.setattr(store_files.shutil, "disk_usage", lambda path: SimpleNamespace(free=40960))
    settings = replace(TINY, nvme_path=str(tmp_path / "drive"), state_ram_bytes=0)
    with pytest.raises(EngineError, match=r"no room for the optimizer states on NVMe.*too few.*keep more in RAM"):
        build_stream_engine(loaded, settings, device="cpu", pinned_grant=False, trial=False)
    assert all(p.data_ptr() == before for p, before in homes)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_a_killed_run_left_is_removed_and_a_living_one_is_not_disturbed(build, tmp_path):
    engine = build(TINY, 0.0)
    path = engine.settings.nvme_path
    loaded = tiny_loaded("llama", dtype=torch.bfloat16)
    with pytest.raises(EngineError, match="in use by another process"):
        build_stream_engine(loaded, engine.settings, device="cpu", pinned_grant=False, trial=False)
    expected = trained(build())
    assert_same(trained(engine), expected)
    shutil.copytree(path, tmp_path / "killed")
    engine.close()
    shutil.copytree(tmp_path / "killed", path, dirs_exist_ok=True)
    assert _files(path)
    again = build_stream_engine(loaded, engine.settings, device="cpu", pinned_grant=False, trial=False)
    again.close()
    assert not _files(path)


def _files(path) -> list[str]:
    folder = os.path.join(path, scratch.FOLDER)
    return os.listdir(folder) if os.path.isdir(folder) else []


def test_settings_that_cannot_be(build, tmp_path):
    refused(ValueError, "needs nvme_path", lambda: replace(TINY, state_ram_bytes=0))
    refused(ValueError, "negative", lambda: replace(TINY, nvme_path=str(tmp_path), state_ram_bytes=-1))
    refused(ValueError, "cannot hold one chunk of states", lambda: build(replace(TINY, state_ring_bytes=4096), 0.0))


def test_a_head_that_is_not_the_one_that_was_written_stops_the_run(build):
    """As when a drive loses a write: the tail is of one update, the head of another."""
    engine = build(TINY, 0.0)
    trained(engine, 2)
    parts_of(engine).updates.drain()
    homes = parts_of(engine).homes
    name = next(iter(homes.weights.names()))
    unit = homes.weights.slot(name)[0]
    chunk = homes[unit].chunks[0]
    chunk.tail = Tail(chunk.tail.offset_bytes, chunk.tail.size_bytes + 1)
    with pytest.raises(EngineError, match=r"other bytes of the states of .* than were written"):
        homes.read_state(name, "exp_avg")
    refused(EngineError, r"other bytes of the states of .* resume from it", lambda: trained(engine, 2))
