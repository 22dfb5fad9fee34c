"""Optimizer states on NVMe: the same bits as in RAM, through checkpoints too."""

import os
from dataclasses import replace

import pytest

from outcore.common.quantities import MIB
from outcore.flow.weights import scratch
from tests.engine.inside import parts_of
from tests.engine.stream.training import LR, losses_of
from tests.flow.models import plain_batch
from tests.optim.cases import extension
from tests.refused import refused
from tests.states.training import IMMEDIATE, TINY, assert_same, batches_of, everything, fixtures, trained
from tests.waiting import until

built, build, faulty = fixtures
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.more(after=2)
@pytest.mark.parametrize(("states", "settings"), [
    ("split8", TINY), ("split8", IMMEDIATE), ("fp32", replace(TINY, optimizer_backend="torch")), ("fp24_m8", TINY),
    *(pytest.param(states, TINY, marks=pytest.mark.slow) for states in ("split", "fp32_m8")),
    *(pytest.param(s, IMMEDIATE, marks=pytest.mark.slow) for s in ("fp32", "split", "fp32_m8", "fp24_m8")),
])  # fmt: skip
def test_residency_changes_no_bit(build, states, settings):
    settings = replace(settings, states=states)
    expected = trained(build(settings))
    assert any(bool(value.any()) for name, value in expected[1].items() if name.startswith("exp_avg_sq"))
    for share in (0.5, 0.0):
        engine = build(settings, share)
        chunks = [chunk for unit in parts_of(engine).units.all for chunk in parts_of(engine).homes[unit].chunks]
        spilled = [chunk for chunk in chunks if chunk.on_nvme]
        assert sum(chunk.numel for chunk in spilled) >= (1 - share) * 0.95 * sum(chunk.numel for chunk in chunks)
        assert_same(trained(engine), expected)
        ring = parts_of(engine).ring
        moved = 2 * sum(chunk.moved_bytes for chunk in spilled)
        tails = 2 * sum(chunk.state_format.tail_bytes(chunk.numel) for chunk in spilled)
        assert bool(tails) == (states in ("fp32", "split"))
        assert moved <= ring.written_bytes <= moved + tails and ring.read_bytes >= moved
        assert max(len(parts_of(engine).homes.flowing(unit)) for unit in parts_of(engine).units.all) > ring.num_slots


@pytest.mark.parametrize("states", ["fp32", pytest.param("split", marks=pytest.mark.slow)])
def test_several_threads_of_the_extension_compress(build, states):
    extension()
    settings = replace(TINY, states=states, optimizer_backend="extension", optimizer_threads=3)
    expected = trained(build(replace(TINY, states=states, optimizer_backend="torch")))
    assert_same(trained(build(settings, 0.0)), expected)
    assert_same(trained(build(replace(settings, compress_on_nvme=False), 0.0)), expected)


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("changes", "settings"), [
    ({"state_ring_slots": 1}, TINY), ({"state_ring_slots": 1}, IMMEDIATE), ({"chunk_numel": 1024}, TINY),
    pytest.param({"state_ring_slots": 2}, TINY, marks=pytest.mark.slow),
    pytest.param({"state_ring_slots": 2}, IMMEDIATE, marks=pytest.mark.slow),
    pytest.param({"chunk_numel": 1024}, IMMEDIATE, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_ring_changes_no_bit(build, changes, settings):
    settings = replace(settings, states="split8", optimizer_threads=2)
    assert_same(trained(build(replace(settings, **changes), 0.0)), trained(build(settings)))


def test_states_are_striped_over_several_drives(build, tmp_path):
    paths = (str(tmp_path / "drive-a"), str(tmp_path / "drive-b"))
    engine = build(replace(TINY, nvme_path=paths, state_ram_bytes=0))
    assert all(os.listdir(os.path.join(path, scratch.FOLDER)) for path in paths)
    assert_same(trained(engine), trained(build()))


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("states", "before", "after"), [
    ("fp32", 0.0, None), ("split8", None, 0.0), ("split8", 0.0, 0.5),
    pytest.param("split8", 0.0, None, marks=pytest.mark.slow), pytest.param("fp32", None, 0.0, marks=pytest.mark.slow),
    pytest.param("fp32", 0.0, 0.5, marks=pytest.mark.slow),
])  # fmt: skip
def test_checkpoints_resume_in_another_residency(build, tmp_path, before, after, states):
    settings = replace(TINY, states=states)
    engine = build(settings, before)
    trained(engine)
    folder = tmp_path / "saved"
    folder.mkdir()
    state = engine.save(folder, lambda path, crc: None)
    losses = losses_of(engine, range(3, 6), batches_of)
    other = build(settings, after)
    other.train_step(batches_of(9), LR)  # what is read ahead for the next step must not outlive the load
    other.load(folder, state)
    assert losses_of(other, range(3, 6), batches_of) == losses
    assert_same(([], everything(other)), ([], everything(engine)))


@pytest.mark.more
@pytest.mark.parametrize("states", ["split8", pytest.param("fp32", marks=pytest.mark.slow)])
def test_a_load_writes_nothing_twice(build, tmp_path, faulty, states):
    """Parameters are of several chunks here; both moments of a chunk lie together on the drive. What two parameters
    share of a chunk may come twice."""
    engine = build(replace(TINY, states=states, chunk_numel=1024), 0.0)
    engine.train_step(batches_of(0), LR)
    state = engine.save(tmp_path, lambda path, crc: None)
    written: list[tuple[str, int]] = []
    for drive in faulty:
        drive.fail("write", matches=lambda file, offset, _: written.append((str(file.path), offset)) is not None)
    engine.load(tmp_path, state)
    assert len(written) > 50 and len(written) - len(set(written)) < 10


@pytest.mark.parametrize("settings", [TINY, IMMEDIATE], ids=["deferred", "immediate"])
def test_a_second_checkpoint_is_not_of_the_first_ones_states(build, tmp_path, settings):
    """With one chunk on the drive, the one that a save read last is the one that the next save begins with."""
    folders = []
    for share in (None, 0.9999):
        engine = build(settings, share)
        on_drive = [c for unit in parts_of(engine).units.all for c in parts_of(engine).homes[unit].chunks if c.on_nvme]
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
    parts_of(engine).updates.drain()
    engine.train_step(batches_of(1), LR)
    assert engine.train_step(batches_of(2), LR).phase_s["stall_nvme"] > 0
    assert "of states (100 %)" in engine.describe() and "3 slots" in engine.describe()


@pytest.mark.parametrize("settings", [TINY, IMMEDIATE], ids=["deferred", "immediate"])
def test_reading_ahead_begins_where_the_next_updates_do_and_leaves_a_slot(build, settings):
    engine = build(settings, 0.0)
    engine.train_step(batches_of(0), LR)
    parts_of(engine).updates.drain()
    ring, units = parts_of(engine).ring, parts_of(engine).units.all
    passages = ring._schedule._passages
    assert not passages
    parts_of(engine).updates.begin_step()
    until(lambda: len(passages) >= ring.num_slots - 1)
    first = parts_of(engine).homes.flowing(units[0] if settings is TINY else units[-1])
    assert sorted(passages) == [chunk.element_offset for chunk in first[: ring.num_slots - 1]]


# --- the arena of gradients


@pytest.mark.more
def test_a_small_arena_changes_no_bit_and_takes_less_memory(build):
    usual = build(IMMEDIATE)
    largest = max(parts_of(usual).arena[unit].nbytes for unit in parts_of(usual).units.all)
    expected = trained(usual)
    for share, limit in ((None, largest), (None, 3 * largest // 2), (0.0, largest), (0.5, 2 * largest)):
        engine = build(replace(IMMEDIATE, gradient_bytes=limit), share)
        assert parts_of(engine).arena.size_bytes < parts_of(usual).arena.size_bytes
        assert_same(trained(engine), expected)
        assert not parts_of(engine).arena._held


def test_an_arena_that_cannot_hold_the_largest_gradient_is_refused(build):
    refused(ValueError, "cannot hold the gradient of", lambda: build(replace(IMMEDIATE, gradient_bytes=4096)))
    refused(ValueError, "gradient_bytes needs immediate updates", lambda: replace(TINY, gradient_bytes=MIB))
