"""Optimizer states on NVMe: the same bits as in RAM, through checkpoints too, and a clean end whatever fails."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from dataclasses import replace

import pytest
import torch
from optim_cases import extension
from stream_models import plain_batch, set_dropout, tiny_loaded

from outcore.engine.base import EngineError, NonFiniteLossError
from outcore.engine.stream import scratch
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.settings import StreamSettings
from outcore.optim.compressed import Tail
from outcore.storage import FaultyEngine, open_engine, store_files
from outcore.units import MIB

TINY = StreamSettings(
    staging_bytes=2 * MIB,
    slot_bytes=64 * 1024,
    num_slots=2,
    optimizer_threads=1,
    optimizer_backend="torch",
    chunk_numel=1 << 11,
    max_grad_norm=0.5,
    state_ring_bytes=MIB,
    state_ring_slots=3,
    seed=5,
)
IMMEDIATE = replace(TINY, max_grad_norm=0.0, update="immediate")
LR = 3e-3
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.no_cover]


@pytest.fixture
def build(tmp_path, engines):
    """Engines of a tiny model; `share` of its states in RAM, the rest in a folder of its own."""

    def make(settings=TINY, share: float | None = None, *, model="llama", dtype=torch.bfloat16):
        loaded = tiny_loaded(model, dtype=dtype)
        set_dropout(loaded.model, 0.0)
        if share is not None:
            numel = sum(p.numel() for p in loaded.model.parameters())
            per_param = {"fp32": 12, "split": 10, "fp32_m8": 6.03, "split8": 4.03, "fp24_m8": 3.03}[settings.states]
            folder = tmp_path / f"drive{len(engines)}"
            settings = replace(settings, nvme_path=str(folder), state_ram_bytes=int(share * numel * per_param))
        engines.append(build_stream_engine(loaded, settings, device="cpu", pinned_grant=False, trial=False))
        return engines[-1]

    return make
    assert not [path for path in tmp_path.glob("drive*/**/*") if path.is_file()]  # nothing is left on the drive
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("state-ring")]


@pytest.fixture
def faulty(monkeypatch) -> list[FaultyEngine]:
    """Drive engines made from now on, which fail on command."""
    made: list[FaultyEngine] = []

    def open_faulty(*args, **kwargs):
        made.append(FaultyEngine(open_engine(*args, **kwargs)))
        return made[-1]

    monkeypatch.setattr(scratch, "open_engine", open_faulty)
    return made


def batches_of(step: int):
    return [plain_batch(2, 12, seed=100 * step), plain_batch(1, 15, seed=100 * step + 1)]


def trained(engine, steps=3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, all states and weights by name)."""
    losses = [engine.train_step(batches_of(step), LR).loss for step in range(steps)]
    return losses, everything(engine)


def everything(engine) -> dict[str, torch.Tensor]:
    engine._parts.updates.drain()
    homes = engine._parts.homes
    found = {}
    for name in homes.names():
        found[name] = homes.weight(name).clone()
        for family in ("master", "exp_avg", "exp_avg_sq"):
            found[f"{family} {name}"] = homes.read_state(name, family)
    return found


def assert_same(first, second) -> None:
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


@pytest.mark.parametrize("settings", [TINY, IMMEDIATE], ids=["deferred", "immediate"])
@pytest.mark.parametrize("states", ["fp32", "split", "fp32_m8", "split8", "fp24_m8"])
def test_residency_changes_no_bit(build, states, settings):
    settings = replace(settings, states=states)
    expected = trained(build(settings))
    assert any(bool(value.any()) for name, value in expected[1].items() if name.startswith("exp_avg_sq"))
    for share in (0.5, 0.0):
        engine = build(settings, share)
        chunks = [chunk for unit in engine._parts.units.all for chunk in engine._parts.homes[unit].chunks]
        spilled = [chunk for chunk in chunks if chunk.on_nvme]
        assert sum(chunk.numel for chunk in spilled) >= (1 - share) * 0.95 * sum(chunk.numel for chunk in chunks)
        assert_same(trained(engine), expected)
        ring = engine._parts.ring
        moved = 3 * sum(chunk.moved_bytes for chunk in spilled)
        tails = 3 * sum(chunk.state_format.tail_bytes(chunk.numel) for chunk in spilled)
        assert bool(tails) == (states in ("fp32", "split"))
        assert moved <= ring.written_bytes <= moved + tails and ring.read_bytes >= moved
        assert max(len(engine._parts.homes.flowing(unit)) for unit in engine._parts.units.all) > ring.num_slots


@pytest.mark.parametrize("states", ["fp32", "split"])
def test_several_threads_of_the_extension_compress(build, states):
    extension()
    settings = replace(TINY, states=states, optimizer_backend="extension", optimizer_threads=3)
    expected = trained(build(replace(TINY, states=states)))
    assert_same(trained(build(settings, 0.0)), expected)
    assert_same(trained(build(replace(settings, compress_on_nvme=False), 0.0)), expected)


def test_a_head_that_is_not_the_one_that_was_written_stops_the_run(build):
    """As when a drive loses a write: the tail is of one update, the head of another."""
    engine = build(TINY, 0.0)
    trained(engine, 2)
    engine._parts.updates.drain()
    homes = engine._parts.homes
    name = next(iter(homes.names()))
    unit = homes.weights.slot(name)[0]
    chunk = homes[unit].chunks[0]
    chunk.tail = Tail(chunk.tail.offset_bytes, chunk.tail.size_bytes + 1)
    with pytest.raises(EngineError, match=r"other bytes of the states of .* than were written"):
        homes.read_state(name, "exp_avg")
    with pytest.raises(EngineError, match=r"other bytes of the states of .* resume from it"):
        trained(engine, 2)


@pytest.mark.no_cover
@pytest.mark.parametrize("settings", [TINY, IMMEDIATE], ids=["deferred", "immediate"])
@pytest.mark.parametrize("changes", [{"state_ring_slots": 1}, {"state_ring_slots": 2}, {"chunk_numel": 512}])
def test_the_ring_changes_no_bit(build, changes, settings):
    settings = replace(settings, states="split8", optimizer_threads=2)
    assert_same(trained(build(replace(settings, **changes), 0.0)), trained(build(settings)))


def test_states_are_striped_over_several_drives(build, tmp_path):
    paths = (str(tmp_path / "drive-a"), str(tmp_path / "drive-b"))
    engine = build(replace(TINY, nvme_path=paths, state_ram_bytes=0))
    assert all(os.listdir(os.path.join(path, scratch.FOLDER)) for path in paths)
    assert_same(trained(engine), trained(build()))


@pytest.mark.no_cover
@pytest.mark.parametrize("states", ["fp32", "split8"])
@pytest.mark.parametrize(("before", "after"), [(0.0, None), (None, 0.0), (0.0, 0.5)])
def test_checkpoints_resume_in_another_residency(build, tmp_path, before, after, states):
    settings = replace(TINY, states=states)
    engine = build(settings, before)
    trained(engine)
    folder = tmp_path / "saved"
    folder.mkdir()
    state = engine.save(folder, lambda path, crc: None)
    losses = [engine.train_step(batches_of(step), LR).loss for step in range(3, 6)]
    other = build(settings, after)
    other.train_step(batches_of(9), LR)  # what is read ahead for the next step must not outlive the load
    other.load(folder, state)
    assert [other.train_step(batches_of(step), LR).loss for step in range(3, 6)] == losses
    assert_same(([], everything(other)), ([], everything(engine)))


@pytest.mark.parametrize("settings", [TINY, IMMEDIATE], ids=["deferred", "immediate"])
def test_a_second_checkpoint_is_not_of_the_first_ones_states(build, tmp_path, settings):
    """With one chunk on the drive, the one that a save read last is the one that the next save begins with."""
    folders = []
    for share in (None, 0.9999):
        engine = build(settings, share)
        on_drive = [c for unit in engine._parts.units.all for c in engine._parts.homes[unit].chunks if c.on_nvme]
        assert len(on_drive) == (0 if share is None else 1)
        for save in range(2):
            engine.train_step(batches_of(save), LR)
            folders.append(tmp_path / f"saved {share} {save}")
            folders[-1].mkdir()
            engine.save(folders[-1], lambda path, crc: None)
    for ram, drive in zip(folders[:2], folders[2:], strict=True):
        for path in ram.iterdir():
            assert path.read_bytes() == (drive / path.name).read_bytes(), path.name


def test_evaluation_in_between_changes_nothing(build):
    engine, calm = build(TINY, 0.0), build()
    for step in range(3):
        assert engine.train_step(batches_of(step), LR).loss == calm.train_step(batches_of(step), LR).loss
        assert engine.evaluate([plain_batch(seed=9)]) == calm.evaluate([plain_batch(seed=9)])


def test_seconds_and_bytes_are_reported(build, faulty):
    calm = build().train_step(batches_of(0), LR)
    assert calm.phase_s["stall_nvme"] == 0.0
    engine = build(TINY, 0.0)
    engine.train_step(batches_of(0), LR)
    faulty[0].delay(0.01, "read")
    engine._parts.updates.drain()
    engine.train_step(batches_of(1), LR)
    assert engine.train_step(batches_of(2), LR).phase_s["stall_nvme"] > 0
    assert "of states (100 %)" in engine.describe() and "3 slots" in engine.describe()


@pytest.mark.parametrize("settings", [TINY, IMMEDIATE], ids=["deferred", "immediate"])
def test_reading_ahead_begins_where_the_next_updates_do_and_leaves_a_slot(build, settings):
    engine = build(settings, 0.0)
    engine.train_step(batches_of(0), LR)
    engine._parts.updates.drain()
    ring, units = engine._parts.ring, engine._parts.units.all
    passages = ring._schedule._passages
    assert not passages
    engine._parts.updates.begin_step()
    deadline_s = time.monotonic() + 20
    while len(passages) < ring.num_slots - 1 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    first = engine._parts.homes.flowing(units[0] if settings is TINY else units[-1])
    assert sorted(passages) == [chunk.element_offset for chunk in first[: ring.num_slots - 1]]


# --- the arena of gradients


def test_a_small_arena_changes_no_bit_and_takes_less_memory(build):
    expected = build(IMMEDIATE)
    largest = max(expected._parts.arena[unit].nbytes for unit in expected._parts.units.all)
    for share, limit in ((None, largest), (None, 3 * largest // 2), (0.0, largest), (0.5, 2 * largest)):
        engine = build(replace(IMMEDIATE, gradient_bytes=limit), share)
        assert engine._parts.arena.size_bytes < expected._parts.arena.size_bytes
        assert_same(trained(engine), trained(build(IMMEDIATE)))
        assert not engine._parts.arena._held


def test_an_arena_that_cannot_hold_the_largest_gradient_is_refused(build):
    with pytest.raises(ValueError, match="cannot hold the gradient of"):
        build(replace(IMMEDIATE, gradient_bytes=4096))
    with pytest.raises(ValueError, match="gradient_bytes needs immediate updates"):
        replace(TINY, gradient_bytes=MIB)


# --- what goes wrong


@pytest.mark.parametrize("settings", [TINY, IMMEDIATE], ids=["deferred", "immediate"])
@pytest.mark.parametrize(
    "plan",
    [
        lambda engine: engine.short("read", got=512),
        lambda engine: engine.fail("read", after=5, errno=errno.EIO),
        lambda engine: engine.fail("write", errno=errno.ENOSPC),
        lambda engine: engine.short("write", after=7, got=4096),
    ],
    ids=["short read", "failed read", "full drive", "short write"],
)
def test_a_failed_transfer_stops_the_run(build, faulty, plan, settings):
    engine = build(settings, 0.0)
    engine.train_step(batches_of(0), LR)
    engine._parts.updates.drain()
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
    with pytest.raises(EngineError, match="EIO"):
        engine.save(tmp_path, lambda path, crc: None)


def test_a_drive_that_hangs_ends_in_a_timeout(build, faulty):
    engine = build(TINY, 0.0)
    engine._parts.ring._timeout_s = 0.3
    faulty[0].delay(1.5, "read")
    engine.train_step(batches_of(0), LR)
    with pytest.raises(TimeoutError, match="not up to date within"):
        engine.train_step(batches_of(1), LR)
    faulty[0].clear()
    engine._parts.ring._timeout_s = 30.0  # the drive comes back in time for a clean end


def test_a_failed_update_in_the_ring_comes_out(build, monkeypatch):
    from outcore.optim import torch_backend

    engine = build(TINY, 0.0)
    engine.train_step(batches_of(0), LR)
    engine._parts.updates.drain()

    def broken(*args):
        raise ArithmeticError("made by the test")

    monkeypatch.setattr(torch_backend, "update_chunk", broken)
    engine.train_step(batches_of(1), LR)
    with pytest.raises(EngineError, match="made by the test"):
        engine.train_step(batches_of(2), LR)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_gradient_that_is_not_finite_reaches_no_state_of_its_unit(build, share):
    engine = build(IMMEDIATE, share)
    trained(engine, 2)
    before = everything(engine)
    layer = engine._parts.units.layer_units[0]
    ship = engine._parts.download.ship

    def spoiled(unit, accumulator):
        if unit is layer:
            accumulator.flat[7] = float("inf")
        return ship(unit, accumulator)

    engine._parts.download.ship = spoiled
    with pytest.raises(NonFiniteLossError):
        engine.train_step(batches_of(2), LR)
    with pytest.raises(NonFiniteLossError, match="was not finite"):
        engine._parts.updates.wait(layer)
    engine._parts.updates._pending.pop(layer.index)
    after = everything(engine)
    own = {slot.name for slot in layer.layout.slots}
    changed = {name.split()[-1] for name in before if not torch.equal(before[name], after[name])}
    assert changed and not changed & own


def test_a_skipped_step_leaves_states_on_nvme_alone(build):
    engine = build(TINY, 0.0)
    trained(engine, 2)
    before = everything(engine)
    engine._parts.download.norm = lambda: torch.tensor(float("nan"))
    assert engine.train_step(batches_of(2), LR).skipped
    after = everything(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("settings", [TINY, IMMEDIATE], ids=["deferred", "immediate"])
def test_closing_in_mid_flight(build, faulty, settings):
    engine = build(settings, 0.0)
    for drive in faulty:
        drive.delay(0.02)
    engine.train_step(batches_of(0), LR)
    engine._parts.close()  # as after a failure: nothing is drained
    engine._closed = True


# --- the scratch store


def test_a_full_drive_is_refused_before_anything_changes(tmp_path, monkeypatch):
    loaded = tiny_loaded("llama")
    homes = [(p, p.data_ptr()) for p in loaded.model.parameters()]

    class Full:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(store_files.os, "statvfs", lambda path: Full())
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
    with pytest.raises(ValueError, match="needs nvme_path"):
        replace(TINY, state_ram_bytes=0)
    with pytest.raises(ValueError, match="negative"):
        replace(TINY, nvme_path=str(tmp_path), state_ram_bytes=-1)
    with pytest.raises(ValueError, match="cannot hold one chunk of states"):
        build(replace(TINY, state_ring_bytes=4096), 0.0)
