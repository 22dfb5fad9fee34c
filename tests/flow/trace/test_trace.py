"""The timeline of the streaming engine: one slice for each piece of work, on one clock, in the format viewers read."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outcore.common.quantities import MIB
from outcore.engine.base import TracePlan
from outcore.engine.stream.build import build_stream_engine
from outcore.flow.trace import NO_TRACE, BusyTime, Slice, Stalls, write_trace
from outcore.flow.trace.file import HostTime, PhaseClock, rows_of
from outcore.optim import reference as torch_backend
from outcore.storage.engines.worker import PosixMover
from tests.engine.inside import parts_of
from tests.flow.models import TINY_SETTINGS, plain_batch, set_dropout, tiny_loaded
from tests.refused import failing, refused

MICRO_BATCHES = 2
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def build(engines):
    def make(settings=TINY_SETTINGS, model="llama", device="cpu", num_layers=2):
        loaded = tiny_loaded(model, num_hidden_layers=num_layers)
        set_dropout(loaded.model, 0.0)
        engines.append(build_stream_engine(loaded, settings, device=device, pinned_grant=False, trial=False))
        return engines[-1]

    return make


def train(engine, steps: int, first: int = 0):
    batches = [[plain_batch(2, 16, seed=10 * s + m) for m in range(MICRO_BATCHES)] for s in range(first, first + steps)]
    return [engine.train_step(micro, 1e-3) for micro in batches]


def read_trace(path: Path) -> tuple[list[Slice], dict]:
    """(slices in seconds from the trace's begin, what was traced)."""
    data, found = json.loads(path.read_text()), []
    for event in data["traceEvents"]:
        if event["ph"] == "X":
            args, begin_s = dict(event["args"]), event["ts"] / 1e6
            end_s = begin_s + event["dur"] / 1e6
            found.append(Slice(args.pop("track"), event["name"], event["cat"], begin_s, end_s, args))
    return found, data["otherData"]


def check_format(path: Path) -> None:
    """The fields that the Trace Event Format requires of the two kinds of events used, and no overlap within a row."""
    data = json.loads(path.read_text())
    assert data["displayTimeUnit"] == "ms" and isinstance(data["otherData"], dict)
    rows: dict[int, list[tuple[float, float]]] = {}
    names = {}
    for event in data["traceEvents"]:
        assert {"name", "ph", "ts", "pid", "tid"} <= event.keys() and isinstance(event["name"], str)
        assert event["ph"] in "XM" and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            assert set(event["args"]) == ({"sort_index"} if "sort" in event["name"] else {"name"})
            if event["name"] == "thread_name":
                names[event["tid"]] = event["args"]["name"]
        else:
            assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["cat"], str) and event["args"]["track"]
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert rows.keys() == names.keys() and len(set(names.values())) == len(names)
    for spans in rows.values():
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(spans))


def overlap(a: list[Slice], b: list[Slice]) -> bool:
    return any(one.begin_s < other.end_s and other.begin_s < one.end_s for one in a for other in b)


@pytest.mark.more(after=2)
@pytest.mark.parametrize("changes", [{}, {"max_grad_norm": 0.0}, {"activations": "ram"}, {"activations": "nvme"}])
def test_a_trace_has_every_piece_of_work_once(build, tmp_path, changes):
    if "nvme" in changes.values():
        changes = {**changes, "nvme_path": str(tmp_path), "step_tokens": (32,) * MICRO_BATCHES}
    engine = build(replace(TINY_SETTINGS, **changes), num_layers=4)
    said: list[str] = []
    path = tmp_path / "logs" / "trace.json"
    engine.trace(TracePlan(path, skip_steps=1, num_steps=1, first_step=8), said.append)
    train(engine, 2)
    assert not path.exists()
    parts_of(engine).updates.drain()
    train(engine, 2, first=2)
    assert len(said) == 1 and "step 9" in said[0] and str(path) in said[0]
    check_format(path)
    slices, about = read_trace(path)
    assert about["what"] == "step 9" and "llama" in about["model"]
    tracks = {name: [s for s in slices if s.track == name] for name in {s.track for s in slices}}
    assert [s.name for s in tracks["steps"]] == ["step 9"]
    units = parts_of(engine).units
    work = Counter((s.args["phase"], s.args["unit"], s.args["micro_batch"]) for s in tracks["compute"])
    names = [units.embed.name, *(unit.name for unit in units.layer_units)]
    expected = {(phase, name, m) for phase in ("forward", "backward") for name in names for m in range(MICRO_BATCHES)}
    expected |= {("head", "head", m) for m in range(MICRO_BATCHES)}
    assert work == Counter(expected)
    assert {s.name for s in tracks["download"]} >= {unit.name for unit in units.all}
    assert {s.name for s in tracks["upload"]} >= {unit.name for unit in units.layer_units}
    assert all(s.args["bytes"] > 0 for s in tracks["upload"] + tracks["download"])
    assert {s.name for s in tracks["optimizer"]} <= {unit.name for unit in units.all} and tracks["optimizer"]
    step = tracks["steps"][0]
    assert all(step.begin_s <= s.begin_s <= s.end_s <= step.end_s for s in tracks["compute"])
    order = [s.args["phase"] for s in sorted(tracks["compute"], key=lambda s: s.begin_s)]
    assert order == ["forward"] * 10 + ["head"] * 2 + ["backward"] * 10
    drive = {kind: tracks.get(f"drive {kind}", []) for kind in ("read", "write")}
    if "nvme_path" in changes:  # the checkpoints of the first two of four layers
        assert {s.name for s in drive["read"] + drive["write"]} == {"activations"}
        sizes = [sum(s.args["bytes"] for s in drive[kind]) for kind in ("read", "write")]
        assert sizes[0] == sizes[1] > 0
        assert parts_of(engine).scratch.engine.on_finished is None
    else:
        assert not drive["read"] and not drive["write"]
    for unit in units.layer_units:  # a weight is there before its use
        first_use = min(s.begin_s for s in tracks["compute"] if s.args["unit"] == unit.name)
        assert min(s.end_s for s in tracks["upload"] if s.name == unit.name) <= first_use


def test_lanes_and_updates_overlap_with_compute(build, tmp_path):
    """The picture that the timeline is for: with compute slowed down, copies and updates run under it."""
    engine = build(replace(TINY_SETTINGS, max_grad_norm=0.0), num_layers=6)
    for runner in (parts_of(engine).flow.runner, parts_of(engine).schedule.backward):
        original = runner.layer
        runner.layer = lambda *args, original=original: (time.sleep(0.01), original(*args))[1]
    path = tmp_path / "trace.json"
    engine.trace(TracePlan(path, 0, 2, 1), lambda _: None)
    train(engine, 2)
    engine.close()
    slices, _ = read_trace(path)
    compute = [s for s in slices if s.track == "compute"]
    for track in ("upload", "download", "optimizer"):
        assert overlap(compute, [s for s in slices if s.track == track]), track


def test_after_the_window_nobody_listens_and_results_are_the_same(build, tmp_path):
    plain = [r.loss for r in train(build(), 4)]
    engine = build()
    engine.trace(TracePlan(tmp_path / "t.json", 1, 2, 1), lambda _: None)
    assert [r.loss for r in train(engine, 4)] == plain
    parts = parts_of(engine)
    assert parts.flow.trace is NO_TRACE and parts.stalls.trace is NO_TRACE
    assert parts.upload.clock.on_copy is parts.download_lane.clock.on_copy is parts.optimizer.on_finished is None


def test_a_failure_in_a_traced_step_still_leaves_the_trace(build, tmp_path):
    engine = build()
    engine.trace(TracePlan(tmp_path / "t.json", 0, 2, 1), lambda _: None)
    parts_of(engine).schedule.backward.layer = failing(RuntimeError("broken"))
    refused(RuntimeError, "broken", lambda: train(engine, 1))
    engine.close()
    slices, _ = read_trace(tmp_path / "t.json")
    assert {s.kind for s in slices if s.track == "compute"} == {"forward", "head", "backward"}


def test_a_trace_that_cannot_be_written_does_not_stop_the_run(build, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    engine = build()
    engine.trace(TracePlan(tmp_path / "file" / "t.json", 0, 1, 1), lambda _: None)
    assert len(train(engine, 2)) == 2
    assert "could not be written" in caplog.text


@pytest.mark.parametrize(("steps", "done", "total", "expected"), [
    (2, 0, 150, (3, 2, 1)), (2, 100, 150, (3, 2, 101)), (2, 0, 3, (1, 2, 1)), (5, 0, 3, (0, 3, 1)),
    (1, 9, 9, (0, 1, 10)),
])  # fmt: skip
def test_short_runs_are_traced_earlier(steps, done, total, expected):
    plan = TracePlan.for_run(Path("t.json"), steps, done, total)
    assert (plan.skip_steps, plan.num_steps, plan.first_step) == expected
    refused(ValueError, "at least one step", lambda: TracePlan.for_run(Path("t.json"), 0, 0, 9))


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 3)), max_size=30))
def test_rows_hold_every_slice_once_without_overlap(spans):
    slices = [Slice("t", str(i), "k", begin, begin + length) for i, (begin, length) in enumerate(spans)]
    rows = rows_of(slices)
    assert sorted(s.name for row in rows for s in row) == sorted(s.name for s in slices)
    for row in rows:
        assert all(a.end_s <= b.begin_s for a, b in pairwise(row))


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "t.json"
    slices = [Slice("compute", "layer 0", "forward", 5.0, 5.25, {"unit": "layer 0"}), Slice("new", "x", "y", 5.1, 5.1)]
    write_trace(path, slices, {"what": "a test"})
    check_format(path)
    found, about = read_trace(path)
    assert about == {"what": "a test"} and [s.args for s in found] == [{"unit": "layer 0"}, {}]
    assert [(s.track, s.name, s.kind) for s in found] == [(s.track, s.name, s.kind) for s in slices]
    assert [s.begin_s for s in found] == pytest.approx([0.0, 0.1])


def test_stalls_are_shared_out_to_the_reasons_that_blocked(monkeypatch):
    stalls = Stalls(torch.device("cpu"))
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    stalls.begin()
    with stalls.until("weights of layer 1", "pcie"):
        with stalls.because("optimizer", "update"):
            now[0] += 3.0
        stalls.add("nvme", 1.0)
        now[0] += 2.0
    assert stalls.seconds() == {"stall_pcie": 1.0, "stall_nvme": 1.0, "stall_optimizer": 3.0}
    with stalls.because("optimizer", "draining, outside of a step's needs"):
        now[0] += 7.0
    assert stalls.seconds()["stall_optimizer"] == 3.0
    stalls.begin()
    assert set(stalls.seconds().values()) == {0.0}


def test_busy_time_counts_overlapping_work_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    busy = BusyTime()
    for at_s, call in ((1.0, busy.begins), (2.0, busy.begins), (4.0, busy.ends), (5.0, busy.ends), (9.0, busy.begins)):
        now[0] = at_s
        call()
    now[0] = 9.5
    assert busy.total_s() == 4.5


def test_states_on_a_slow_drive_are_waited_for_and_traced(build, tmp_path, monkeypatch):
    """The drive is slow: the wait is its, not the optimizer's. The optimizer is slow: the other way round."""
    fields = {"nvme_path": str(tmp_path), "state_ram_bytes": 0, "chunk_numel": 1 << 12}
    engine = build(replace(TINY_SETTINGS, **fields, state_ring_slots=2))
    drive = PosixMover.move
    update = torch_backend.update_chunk
    monkeypatch.setattr(PosixMover, "move", lambda *args: (time.sleep(0.03), drive(*args))[1])
    engine.trace(TracePlan(tmp_path / "t.json", 0, 2, 1), lambda _: None)
    train(engine, 1)
    slow_drive = train(engine, 1, first=1)[0].phase_s
    assert slow_drive["stall_nvme"] > slow_drive["stall_optimizer"] >= 0
    monkeypatch.setattr(PosixMover, "move", drive)
    monkeypatch.setattr(torch_backend, "update_chunk", lambda *args: (time.sleep(0.03), update(*args))[1])
    train(engine, 1, first=2)
    slow_cpu = train(engine, 1, first=3)[0].phase_s
    assert slow_cpu["stall_optimizer"] > slow_cpu["stall_nvme"] >= 0
    slices, _ = read_trace(tmp_path / "t.json")
    for kind in ("read", "write"):
        assert "optimizer states" in {s.name for s in slices if s.track == f"drive {kind}"}
    units = {unit.name for unit in parts_of(engine).units.all}
    assert all(any(unit in s.name for unit in units) for s in slices if s.track == "optimizer")


def test_a_host_that_waits_while_the_device_works_is_no_stall():
    """Moments of a device: only the time between them counts, shared out over what blocked the host."""

    class Event:
        def __init__(self, at_ms):
            self.at_ms = at_ms

        def elapsed_time(self, other):
            return other.at_ms - self.at_ms

    stalls = Stalls(torch.device("cpu"))
    for begin_ms, end_ms in ((0.0, 0.0), (10.0, 14.0)):
        with stalls.until("weights", "nvme"):
            stalls.add("optimizer", 0.006)
            stalls.add("pcie", 0.002)
        stalls._stalls[-1].begin, stalls._stalls[-1].end = Event(begin_ms), Event(end_ms)
    found = stalls.seconds()
    assert found == pytest.approx({"stall_optimizer": 0.003, "stall_pcie": 0.001, "stall_nvme": 0.0})


def test_stalls_are_below_the_phases_and_a_slow_lane_or_optimizer_shows(build):
    engine = build(replace(TINY_SETTINGS, num_layer_buffers=1))
    pool = parts_of(engine).optimizer
    original = pool.wait

    def slow(ticket, timeout_s):
        time.sleep(0.05)
        return original(ticket, timeout_s)

    train(engine, 1)
    pool.wait = slow
    updates = parts_of(engine).updates
    updates.is_done = lambda unit: unit.index not in updates._pending  # each is waited for where it is needed
    phases = train(engine, 1, first=1)[0].phase_s
    stalled_s = sum(s for name, s in phases.items() if name.startswith("stall_"))
    assert 0.15 < phases["stall_optimizer"] <= stalled_s <= phases["forward"] + phases["backward"] + 1e-3
    assert phases["stall_nvme"] == 0.0


def test_moments_are_recorded_on_the_device_that_they_are_of(monkeypatch):
    """They were recorded on the current device's stream, whichever that was."""
    streams = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self, stream=None):
            streams.append(stream)

        def query(self):
            return True

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    second = torch.device("cuda", 1)
    HostTime(second).calibrate()
    clock = PhaseClock(second)
    clock.start("forward")
    clock.stop()
    clock.wait()
    assert len(streams) > 3 and set(streams) == {"stream of cuda:1"}


def test_host_time_is_a_line_through_two_calibrations():
    class Event:
        def __init__(self, at_ms):
            self.at_ms = at_ms

        def elapsed_time(self, other):
            return other.at_ms - self.at_ms

    host = HostTime(torch.device("cpu"))
    host.calibrate()
    assert host.of(3.5) == 3.5
    host._pairs = [(Event(1000.0), 50.0)]
    assert host.of(Event(1500.0)) == pytest.approx(50.5)
    host._pairs.append((Event(3000.0), 52.002))
    assert host.of(Event(2000.0)) == pytest.approx(51.001) and host.of(Event(500.0)) == pytest.approx(49.4995)


def test_listeners_leave_no_thread(build, tmp_path):
    before = threading.active_count()
    engine = build()
    engine.trace(TracePlan(tmp_path / "t.json", 0, 1, 1), lambda _: None)
    train(engine, 2)
    engine.close()
    assert threading.active_count() == before


@pytest.mark.gpu
def test_on_a_gpu_device_and_host_are_on_one_clock(build, tmp_path):
    """Compute by CUDA events lies within the step by the host's clock, and each gradient leaves after its backward."""
    streamed = replace(TINY_SETTINGS, staging_bytes=64 * MIB, slot_bytes=MIB, compile="off", resident_bytes=0)
    engine = build(streamed, device="cuda")
    path = tmp_path / "t.json"
    engine.trace(TracePlan(path, 2, 2, 1), lambda _: None)
    train(engine, 5)
    check_format(path)
    slices, _ = read_trace(path)
    steps = [s for s in slices if s.track == "steps"]
    compute = [s for s in slices if s.track == "compute"]
    assert [s.name for s in steps] == ["step 3", "step 4"]
    margin_s = 1e-3
    for one in compute:
        assert any(s.begin_s - margin_s < one.begin_s <= one.end_s < s.end_s + margin_s for s in steps)
    for step in steps:
        for unit in parts_of(engine).units.layer_units:
            backward = [s for s in compute if s.kind == "backward" and s.name == unit.name and s.begin_s > step.begin_s]
            leaves = [s for s in slices if s.track == "download" and s.name == unit.name and s.begin_s > step.begin_s]
            ends_s = min(backward, key=lambda s: s.begin_s).end_s
            assert min(s.begin_s for s in leaves) > ends_s - margin_s
    phases = train(engine, 1, first=9)[0].phase_s
    stalled_s = sum(s for name, s in phases.items() if name.startswith("stall_"))
    assert 0 <= stalled_s <= phases["forward"] + phases["backward"] + margin_s
