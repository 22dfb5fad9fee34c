"""The benchmarks on whatever this machine has: they measure, stay inside their bounds and leave nothing behind."""

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outcore.common.quantities import KIB, MIB
from outcore.probe.bench import drive_file as direct_bench
from outcore.probe.bench.budget import EFFORTS, Budget, cell_time_s
from outcore.probe.bench.device import measure_copies, measure_peers
from outcore.probe.bench.drive import DriveResult, drive_rate, measure_drive, recommended
from outcore.probe.bench.drive_cell import KINDS, bench_memory, measure_cell, measure_iops
from outcore.probe.bench.drive_file import TestFile, measure_direct, open_direct_engine
from outcore.probe.bench.lanes import (
    ProbeStaging,
    StagingTest,
    build_pool,
    choose_write_combined,
    run_staging_test,
    slot_plan,
)
from outcore.probe.bench.latency import LatencyResult, measure_latency
from outcore.probe.bench.load_sampler import LoadSampler
from outcore.probe.bench.measurement import Measurement, best, measure_ram, smallest_good_enough, thread_counts
from outcore.probe.gds.facts import GdsFacts, ReadTest
from outcore.probe.gds.verdict import PathVerdict
from outcore.staging import LaneSettings, PinnedPool, UploadLane
from outcore.storage import BlockFile, PosixEngine
from tests.refused import failing

CPU = torch.device("cpu")
TINY = replace(
    EFFORTS["quick"], cell_s=0.02, file_bytes=8 * MIB, blocks_bytes=(256 * KIB, MIB), depths=(1, 2),
    write_cell_bytes=4 * MIB,
)  # fmt: skip


def cell(link: str, rate: float, block_bytes: int = MIB, depth: int = 1, engine: str = "posix") -> Measurement:
    return Measurement(link, "x", engine, block_bytes, depth, int(rate * 1e9), 1.0)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("drive")
    with TestFile(directory, 8 * MIB) as file:
        file.fill(limit_s=30.0)
        yield file
    assert not list(directory.iterdir())


@pytest.fixture
def open_file(filled: TestFile) -> Any:
    with BlockFile(filled.path, "rw") as file:
        yield file


def test_choosing_settings() -> None:
    cells = [
        cell("drive_read", 3.0, 8 * MIB, 8),
        cell("drive_read", 2.95, MIB, 4),
        cell("drive_read", 1.0, 64 * KIB, 1),
    ]
    assert smallest_good_enough(cells) is cells[1]
    assert best(cells, link="drive_read") is cells[0]
    assert best(cells, link="h2d") is None
    assert smallest_good_enough([]) is None
    assert Measurement("x", "x", "x", 1, 1, 5, 0.0).gb_per_s == 0.0


def test_recommended_prefers_mixed_and_blocks_that_do_not_cost_a_core() -> None:
    result = DriveResult(
        "/x", True, [cell("drive_read", 9.0), cell("drive_mixed", 5.0, 64 * KIB), cell("drive_mixed", 4.0)]
    )
    chosen = recommended(result)
    assert chosen is not None and (chosen.link, chosen.block_bytes) == ("drive_mixed", MIB)
    only_reads = DriveResult("/x", True, [cell("drive_read", 9.0, 64 * KIB)])
    assert recommended(only_reads) is only_reads.measurements[0]
    assert recommended(DriveResult("/x", True)) is None


def test_budget_hands_time_on() -> None:
    now = [0.0]
    budget = Budget(100.0, {"a": 1.0, "b": 3.0, "c": 1.0}, clock=lambda: now[0])
    budget.drop("c")
    assert budget.begin("a") == pytest.approx(25.0)
    now[0] = 40.0  # a took longer than it was given
    assert budget.begin("b") == pytest.approx(60.0)
    assert budget.remaining_s == pytest.approx(60.0)
    late = Budget(1.0, {"a": 1.0}, clock=lambda: now[0])
    now[0] = 99.0
    assert late.begin("a", least_s=0.5) == 0.5
    assert cell_time_s(10.0, 5, 1.0) == 1.0
    assert cell_time_s(0.0, 5, 1.0) > 0
    with pytest.raises(KeyError):
        budget.begin("b")


@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_moves_bytes(open_file: BlockFile, kind: str) -> None:
    with PosixEngine(num_threads=2, block_bytes=256 * KIB) as engine:
        found = measure_cell(open_file, engine, kind, 256 * KIB, 2, 0.01, 4 * MIB, bench_memory(4 * MIB))
    assert (found.link, found.engine, found.block_bytes, found.depth) == (kind, "posix", 256 * KIB, 2)
    assert found.moved_bytes % (256 * KIB) == 0 and found.gb_per_s > 0


def test_unknown_kind(open_file: BlockFile) -> None:
    with PosixEngine(num_threads=1) as engine, pytest.raises(ValueError, match="unknown kind"):
        measure_cell(open_file, engine, "drive_seek", MIB, 1, 0.01, None, bench_memory(4 * MIB))
    with PosixEngine(num_threads=1) as engine, pytest.raises(ValueError, match="needs 4194304 bytes"):
        measure_cell(open_file, engine, "drive_read", MIB, 1, 0.01, None, bench_memory(MIB))


def test_a_drive_is_measured(open_file: BlockFile) -> None:
    result = measure_drive(open_file, "/here", TINY, 1.0, ("posix", "kvikio"))
    assert {m.link for m in result.measurements} == set(KINDS)
    assert {m.block_bytes for m in result.measurements} == {256 * KIB, MIB}
    assert all(drive_rate(result, kind) > 0 for kind in KINDS)
    assert drive_rate(result, "h2d") == 0.0
    assert result.iops_4k > 0 and result.iops_depth == 2
    assert result.written_bytes > 0
    keys = [(m.link, m.engine, m.block_bytes, m.depth) for m in result.measurements]
    assert len(keys) == len(set(keys))  # finals are pooled with the first measurement
    if not torch.cuda.is_available():
        assert [note for note in result.notes if "kvikio" in note]
    whole = measure_drive(open_file, "/here", replace(TINY, full_grid=True), 1.0)
    assert len({(m.block_bytes, m.depth) for m in whole.measurements if m.link == "drive_read"}) == 4


def test_a_short_read_is_no_iops(filled: TestFile) -> None:
    fake = SimpleNamespace(size_bytes=filled.size_bytes * 1000, path=filled.path, direct=False)
    with pytest.raises(OSError, match="short read"):
        measure_iops(fake, 1, 5.0)  # type: ignore[arg-type]


def test_memory_bandwidth() -> None:
    before = torch.get_num_threads()
    found = measure_ram([1, 2], 0.05, 0.02, array_bytes=MIB)
    assert [m.depth for m in found] == [1, 2] and all(m.gb_per_s > 0 for m in found)
    assert torch.get_num_threads() == before
    assert thread_counts(10, 16) == [1, 2, 4, 8, 10, 16]
    assert thread_counts(1, 1) == [1]


def test_peers() -> None:
    found, notes = measure_peers([CPU, torch.device("cpu", 0)], 0.01, n_bytes=MIB)
    assert [m.target for m in found] == ["cpu -> cpu:0", "cpu:0 -> cpu"]
    assert notes == []


@pytest.mark.parametrize("quick", [True, False])
def test_staging_test(open_file: BlockFile, quick: bool) -> None:
    test = StagingTest(32 * MIB)
    settings = ProbeStaging(32 * MIB, "auto")
    with closing(build_pool(settings, CPU, test)) as pool:
        test.write_combined, test.write_combined_reason = choose_write_combined(settings, [], CPU)
        with PosixEngine(num_threads=2, block_bytes=MIB) as engine:
            effort = replace(TINY, name="quick" if quick else "default")
            run_staging_test(pool, engine, open_file, test, effort, stage_s=0.5)
        assert pool.free_bytes == pool.capacity_bytes
    assert test.granted_bytes == 32 * MIB
    assert test.slot_bytes * test.num_slots <= 32 * MIB
    assert test.up_gb_per_s > 0 and test.down_gb_per_s > 0
    assert test.up_overlap > 0 and test.up_limit.split()[0] in ("drive", "copy")
    assert {m.link for m in test.measurements} == {"drive_to_gpu", "gpu_to_drive"}


def test_slot_plans_fit_the_pool() -> None:
    for pool_bytes in (64 * KIB, MIB, 64 * MIB, 8 << 30):
        for slot_bytes, slots in slot_plan(pool_bytes, 8 * MIB, 8, quick=False):
            assert slots >= 2 and slot_bytes % 4096 == 0 and slot_bytes * slots <= pool_bytes
    assert slot_plan(8 << 30, 8 * MIB, 8, quick=False)[0] == (8 * MIB, 10)


def test_write_combined_is_measured() -> None:
    cuda = torch.device("cuda", 0)
    auto = ProbeStaging(1, "auto")
    faster = [cell("h2d", 12.0, engine="default"), cell("h2d", 12.1, engine="write-combined")]
    slower = [cell("h2d", 12.0, engine="default"), cell("h2d", 9.0, engine="write-combined")]
    assert choose_write_combined(auto, faster, cuda)[0] is True
    use, reason = choose_write_combined(auto, slower, cuda)
    assert use is False and "9.0 GB/s" in reason
    assert choose_write_combined(auto, slower[:1], cuda) == (False, "the machine gave no write-combined memory")
    assert choose_write_combined(ProbeStaging(1, "on"), slower, cuda)[0] is True
    assert choose_write_combined(ProbeStaging(1, "off"), faster, cuda)[0] is False


def test_latency(open_file: BlockFile) -> None:
    with PinnedPool(8 * MIB, device=CPU) as pool, PosixEngine(num_threads=2) as engine:
        lane = UploadLane(pool, engine, CPU, LaneSettings(MIB, 2), owner="test")
        with lane:
            result = measure_latency(open_file, CPU, lane, 0.0, 5, {"kvikio": engine})
    sizes = list(result.median_s["plain"])
    assert sizes == [4 * KIB, 64 * KIB, 256 * KIB, MIB]
    assert set(result.median_s) == {"plain", "staged", "kvikio"} and set(result.median_s["staged"]) == {MIB}
    assert all(s > 0 for row in result.median_s.values() for s in row.values())
    assert result.repeats == 3  # the time was up, the least is measured


def test_latency_verdicts() -> None:
    plain = {4 * KIB: 1.0, MIB: 1.0, 4 * MIB: 2.0}
    kvikio = {4 * KIB: 3.0, MIB: 0.9, 4 * MIB: 1.8}
    result = LatencyResult({"plain": plain, "staged": {MIB: 0.7, 4 * MIB: 1.4}, "kvikio": kvikio})
    assert result.lower_pct("staged", MIB) == pytest.approx(30.0)
    assert result.verdict() == (
        "expected ~30 % lower latency than plain copies, from 1 MiB up: seen through the staged lanes that training "
        "takes (30 % lower), refuted by kvikio (10 % lower); smaller transfers take the plain path"
    )
    assert "not measured" in LatencyResult({"plain": plain}).verdict()


class FakeNvml:
    """An NVML whose link wakes up under load and whose GPU gets hot."""

    def __init__(self, missing: tuple[str, ...] = ()) -> None:
        self.missing, self.generations, self.down = missing, [1, 4, 4], False

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None:
        self.down = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def __getattr__(self, name: str) -> Any:
        if name in self.missing:
            raise RuntimeError("Not Supported")
        values = {
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetCurrPcieLinkWidth": 8,
            "nvmlDeviceGetTemperature": 88,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x24,
        }
        if name == "nvmlDeviceGetCurrPcieLinkGeneration":
            return lambda handle: self.generations.pop(0) if len(self.generations) > 1 else self.generations[0]
        return lambda handle, *rest: values[name]


def test_what_nvml_refuses_stays_unknown() -> None:
    with LoadSampler(0, FakeNvml(missing=("nvmlDeviceGetCurrPcieLinkWidth",))) as sampler:
        pass
    assert sampler.seen.pcie_width is None and sampler.seen.samples >= 1

    class Broken:
        def nvmlInit(self) -> None:
            raise OSError("NVML Shared Library Not Found")

    with LoadSampler(0, Broken()) as sampler:
        pass
    assert "Not Found" in sampler.seen.error and not sampler.seen.thermal


def verdict(path: str) -> PathVerdict:
    return PathVerdict(path, "", ())


def test_direct_reads(open_file: BlockFile, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_direct_engine(verdict("staged"), GdsFacts())[1:] == (None, "kvikio is not installed")
    failed = GdsFacts(kvikio_version="1", auto=ReadTest("signal", "SIGABRT"))
    assert open_direct_engine(verdict("staged"), failed)[1:] == (None, "kvikio's read failed: SIGABRT")
    works = GdsFacts(kvikio_version="1", auto=ReadTest("ok"))
    asked: dict[str, Any] = {}
    with PosixEngine(num_threads=2) as engine:
        monkeypatch.setattr(direct_bench, "open_engine", lambda name, **settings: asked.update(settings) or engine)
        assert open_direct_engine(verdict("gds-nvfs"), works) == ("gds", engine, "")
        assert asked["gds"] is True
        assert open_direct_engine(verdict("cufile-compat"), works)[0] == "kvikio"
        assert asked["gds"] is False
        found = measure_direct(engine, "gds", open_file, CPU, 0.02)
    assert found.engine == "gds" and found.gb_per_s > 0
    monkeypatch.setattr(direct_bench, "open_engine", failing(RuntimeError("no driver")))
    assert open_direct_engine(verdict("cufile-compat"), works)[1:] == (None, "no driver")


@pytest.mark.gpu
def test_copies_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    test = StagingTest(256 * MIB)
    with closing(build_pool(ProbeStaging(256 * MIB, "auto"), device, test)) as pool:
        assert test.is_pinned
        with pool.lease(64 * MIB, "d") as lease, pool.lease(64 * MIB, "w", True) as combined:
            host = {"default": lease.tensor, "write-combined": combined.tensor}
            found = measure_copies(device, host, (MIB, 16 * MIB), 1.0, 0.1)
    assert {m.link for m in found} == {"h2d", "d2h", "both_ways"}
    assert all(m.gb_per_s > 0 for m in found)
