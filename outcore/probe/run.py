"""The run behind `gds_optimizer.py`: the stages in order, each with its share of the time, each able to be left out.

A stage that cannot run here (no GPU, no kvikio, out of time) leaves a sentence in `skipped`; it never leaves a made-up
number. The test files are removed when `run` ends, for whatever reason.

Progress on stderr: a line per stage."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch

from outcore.common.quantities import GIB, MIB, format_gib
from outcore.common.words import own_command
from outcore.machine import Machine, detect_machine, drive_of, pcie_gb_per_s
from outcore.probe.bench.budget import Budget
from outcore.probe.bench.compute import measure_compute
from outcore.probe.bench.device import measure_copies, measure_peers
from outcore.probe.bench.drive import DriveResult, drive_rate, measure_drive, recommended
from outcore.probe.bench.drive_cell import batch_limit_bytes
from outcore.probe.bench.drive_file import TestFile, measure_direct, open_direct_engine
from outcore.probe.bench.host import MOST_NUMEL, measure_host, measure_updates
from outcore.probe.bench.lanes import (
    ProbeStaging,
    StagingTest,
    build_pool,
    choose_write_combined,
    measure_pageable,
    run_staging_test,
)
from outcore.probe.bench.latency import SIZES_BYTES, measure_latency
from outcore.probe.bench.load_sampler import LoadSampler
from outcore.probe.bench.measurement import measure_ram, thread_counts
from outcore.probe.gds.facts import READ_BYTES, GdsFacts, collect_facts
from outcore.probe.gds.ladder import ladder_rows
from outcore.probe.gds.verdict import judge
from outcore.probe.report import recommend as advice
from outcore.probe.report.recommend import recommend
from outcore.probe.report.record import Measured
from outcore.probe.system import RealSystem, System
from outcore.staging import LaneSettings, PinnedPool, UploadLane
from outcore.storage import BlockFile, BufferedFallbackWarning, PosixEngine, StorageEngine, StorageError

if TYPE_CHECKING:
    from outcore.probe.options import ProbeOptions

WEIGHTS = {
    "drive": 40.0,
    "ram": 4.0,
    "updates": 5.0,
    "compute": 4.0,
    "copies": 14.0,
    "lanes": 24.0,
    "latency": 8.0,
    "direct": 5.0,
    "peers": 3.0,
}
STAGES = (
    "machine and GPUDirect Storage",
    "staging buffer",
    "drives",
    "memory",
    "CPU optimizer",
    "compute",
    "copies",
    "lanes",
    "latency",
    "peers",
)
MOST_COMPUTE_S, HOST_SHARE = 3.0, 0.4
MOST_UPDATES_S, LEAST_UPDATES_SHARE = 6.0, 0.35
"""Share of all measurements' time: 3.5 s of --quick, on top of what the budget gives when that is less."""
UPDATES_NUMEL = MOST_NUMEL
LEAST_STAGE_S = 0.5  # lanes and latency are measured in any case, in short cells when the time is up
NO_GPU_POOL_BYTES = GIB
COPY_MEMORY_BYTES = 256 * MIB
DRIVE_MEMORY_BYTES = 256 * MIB
LATENCY_SLOTS = 4
FALLBACK_BLOCK_BYTES, FALLBACK_DEPTH = 8 * MIB, 8


class ProbeRun:
    """One run. `system` and `machine` stand in for this computer in tests."""

    def __init__(
        self,
        options: ProbeOptions,
        progress: StageProgress,
        system: System | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.options, self.progress = options, progress
        self.effort = options.effort
        self.system = system or RealSystem()
        self._machine = machine
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.has_gpu = self.device.type == "cuda"
        self.budget = Budget(self.effort.total_s, dict(WEIGHTS))
        for stage in () if self.has_gpu else ("copies", "direct"):
            self.budget.drop(stage)
        if torch.cuda.device_count() < 2:
            self.budget.drop("peers")

    def run(self) -> Measured:
        """Run all stages; returns what was found. Raises `TestPathError` when a directory cannot be measured."""
        start_s = time.monotonic()
        with warnings.catch_warnings(), ExitStack() as stack:
            warnings.simplefilter("ignore", BufferedFallbackWarning)  # said better by `advice`
            found, facts = self._ladder()
            pool = self._pool(found, stack)
            files = self._drives(found, facts, pool, stack)
            self._ram(found)
            self._updates(found)
            self._compute(found)
            drive = found.main_drive()
            file = files.get(drive.target) if drive is not None else None
            if pool is not None:
                self._copies(found, pool)
                if file is not None and drive is not None:
                    self._lanes(found, pool, file, drive, facts)
            self._peers(found)
        named = found.main_drive() if self.options.paths_named else None
        found.settings = recommend(
            found.verdict, found.main_drive(), found.staging, found.direct_gb_per_s, named.target if named else None
        )
        self._warn(found)
        found.elapsed_s = time.monotonic() - start_s
        return found

    def _ladder(self) -> tuple[Measured, GdsFacts]:
        self.progress.stage("machine and GPUDirect Storage")
        directory = self.options.paths[0]
        machine = self._machine or detect_machine()
        with TestFile(directory, READ_BYTES) as test_file:
            test_file.fill(limit_s=10.0)
            facts = collect_facts(self.system, str(test_file.path), drive_of(directory))
        found = Measured(machine, judge(facts), ladder_rows(facts), self.effort.name)
        found.warnings += self.options.notes
        if machine.gpus and not self.has_gpu:
            found.warnings.append(
                f"torch {torch.__version__} cannot use the {machine.gpus[0].name}: nothing of the GPU was measured; "
                f"run `{own_command('setup')}`: it says what matches this machine"
            )
        return found, facts

    def _drives(
        self, found: Measured, facts: GdsFacts, pool: PinnedPool | None, stack: ExitStack
    ) -> dict[str, BlockFile]:
        """Measures every directory and keeps the files open for the stages after it."""
        self.progress.stage("drives")
        files: dict[str, BlockFile] = {}
        stage_s = self.budget.begin("drive") / len(self.options.paths)
        memory = None
        leases = stack.enter_context(ExitStack())
        if pool is not None:
            n_bytes = min(DRIVE_MEMORY_BYTES, pool.largest_free_bytes())
            memory = leases.enter_context(pool.lease(n_bytes, "drive measurement")).tensor.numpy()
        for directory in self.options.paths:
            test_file = stack.enter_context(TestFile(directory, self.effort.file_bytes))
            start_s = time.monotonic()
            try:
                test_file.fill(limit_s=stage_s / 2)
                file = stack.enter_context(BlockFile(test_file.path, "rw"))
                left_s = stage_s - (time.monotonic() - start_s)
                result = measure_drive(
                    file,
                    str(directory),
                    self.effort,
                    left_s,
                    ["posix", *(["kvikio"] if self.has_gpu and facts.auto.status == "ok" else [])],
                    expected_gb_per_s=test_file.fill_gb_per_s,
                    memory=memory,
                )
                result.line_rate_gb_per_s = _line_rate(directory)
            except StorageError as error:
                found.skipped.append(f"drive {directory}: {error}")
                continue
            result.written_bytes += test_file.written_bytes
            if test_file.swept:
                found.warnings.append(
                    f"removed {len(test_file.swept)} test file(s) of an earlier, killed run in {directory}"
                )
            found.drives.append(result)
            files[result.target] = file
        leases.close()
        return files

    def _ram(self, found: Measured) -> None:
        self.progress.stage("memory")
        stage_s = self.budget.begin("ram")
        counts = thread_counts(found.machine.cpu_cores, found.machine.cpu_threads)
        found.measurements += measure_ram(counts, stage_s, self.effort.cell_s)

    def _updates(self, found: Measured) -> None:
        self.progress.stage("CPU optimizer")
        stage_s = self.budget.begin("updates", LEAST_UPDATES_SHARE * self.effort.total_s)
        try:
            found.updates = measure_updates(min(MOST_UPDATES_S, stage_s), most_numel=UPDATES_NUMEL)
        except (MemoryError, RuntimeError, TimeoutError) as error:
            found.skipped.append(f"the CPU optimizer: {error}")

    def _compute(self, found: Measured) -> None:
        self.progress.stage("compute")
        stage_s = self.budget.begin("compute")
        limit_s = min(MOST_COMPUTE_S, max(stage_s, LEAST_STAGE_S))
        if not self.has_gpu:
            found.compute = measure_compute(self.device, limit_s)
            return
        found.host_layer_s = measure_host(self.device, HOST_SHARE * limit_s)
        found.compute = measure_compute(self.device, (1 - HOST_SHARE) * limit_s)

    def _pool(self, found: Measured, stack: ExitStack) -> PinnedPool | None:
        self.progress.stage("staging buffer")
        asked = self.options.config.staging
        limits = [self.effort.staging_cap_bytes, None if self.has_gpu else NO_GPU_POOL_BYTES]
        wanted_bytes = min([asked.staging_bytes, *(limit for limit in limits if limit is not None)])
        if not self.has_gpu and wanted_bytes < asked.staging_bytes:
            built, configured = format_gib(wanted_bytes), format_gib(asked.staging_bytes)
            found.skipped.append(f"no GPU: {built} of plain memory stand in for {configured} of pinned staging memory")
        test = StagingTest(wanted_bytes)
        try:
            pool = build_pool(ProbeStaging(wanted_bytes, asked.write_combined), self.device, test)
        except RuntimeError as error:
            found.warnings.append(str(error))
            return None
        stack.callback(pool.close)
        found.staging = test
        return pool

    def _copies(self, found: Measured, pool: PinnedPool) -> None:
        self.progress.stage("copies")
        assert found.staging is not None
        if not self.has_gpu:
            found.skipped.append("copies between RAM and GPU: no GPU")
        else:
            stage_s = self.budget.begin("copies")
            home = torch.zeros(COPY_MEMORY_BYTES, dtype=torch.uint8)
            with ExitStack() as leases, LoadSampler(gpu_id()) as sampler:
                host = {"pageable": home}
                for kind, combined in (("default", False), ("write-combined", True)):
                    n_bytes = min(COPY_MEMORY_BYTES, pool.largest_free_bytes(combined) // 2)
                    if n_bytes and not (combined and not pool.write_combined_bytes):
                        lease = leases.enter_context(pool.lease(n_bytes, f"probe {kind}", combined))
                        host[kind] = lease.tensor
                found.measurements += measure_copies(
                    self.device, host, self.effort.chunks_bytes, stage_s, self.effort.cell_s
                )
            found.pcie = sampler.seen
            found.measurements.append(measure_pageable(pool, self.device, home, self.effort.cell_s))
        asked = self.options.config.staging
        found.staging.write_combined, found.staging.write_combined_reason = choose_write_combined(
            asked, found.measurements, self.device
        )

    def _lanes(self, found: Measured, pool: PinnedPool, file: BlockFile, drive: DriveResult, facts: GdsFacts) -> None:
        self.progress.stage("lanes")
        assert found.staging is not None
        setting = recommended(drive)
        block_bytes, depth = (setting.block_bytes, setting.depth) if setting else (FALLBACK_BLOCK_BYTES, FALLBACK_DEPTH)
        with PosixEngine(num_threads=depth, block_bytes=block_bytes) as engine:
            stage_s = self.budget.begin("lanes", LEAST_STAGE_S)
            run_staging_test(
                pool,
                engine,
                file,
                found.staging,
                self.effort,
                stage_s=stage_s,
                transfer_bytes=batch_limit_bytes(drive_rate(drive, "drive_read"), self.effort.cell_s),
            )
            self._latency(found, pool, engine, file, facts)

    def _latency(
        self, found: Measured, pool: PinnedPool, engine: StorageEngine, file: BlockFile, facts: GdsFacts
    ) -> None:
        self.progress.stage("latency")
        assert found.staging is not None
        combined = found.staging.write_combined
        slot_bytes = min(max(SIZES_BYTES), pool.largest_free_bytes(combined) // LATENCY_SLOTS // 4096 * 4096)
        with ExitStack() as stack:
            direct = self._direct(found, file, facts, stack) if self.has_gpu else {}
            stage_s, repeats = self.budget.begin("latency", LEAST_STAGE_S), self.effort.latency_repeats
            lane = UploadLane(
                pool, engine, self.device, LaneSettings(slot_bytes, LATENCY_SLOTS, combined), "probe-latency"
            )
            with lane:
                found.latency = measure_latency(file, self.device, lane, stage_s, repeats, direct)

    def _direct(self, found: Measured, file: BlockFile, facts: GdsFacts, stack: ExitStack) -> dict[str, StorageEngine]:
        """Reads into GPU memory without our staging; the engine stays open for the latency test."""
        name, engine, reason = open_direct_engine(found.verdict, facts)
        if engine is None:
            found.skipped.append(f"reads into GPU memory through kvikio: {reason}")
            self.budget.drop("direct")
            return {}
        stack.callback(engine.close)
        try:
            rate = measure_direct(engine, name, file, self.device, min(1.0, self.budget.begin("direct")))
        except StorageError as error:
            found.warnings.append(f"reads into GPU memory through {name} failed: {error}")
            return {}
        found.measurements.append(rate)
        found.direct_gb_per_s[name] = rate.gb_per_s
        return {name: engine}

    def _peers(self, found: Measured) -> None:
        self.progress.stage("peers")
        count = torch.cuda.device_count()
        if count < 2:
            found.skipped.append(f"links between GPUs: {'one GPU' if count else 'no GPU'}")
            return
        stage_s = self.budget.begin("peers")
        devices = [torch.device("cuda", index) for index in range(count)]
        limit_s = min(self.effort.cell_s, stage_s / (count * (count - 1)))
        measured, notes = measure_peers(devices, limit_s)
        found.measurements += measured
        found.warnings += notes

    def _warn(self, found: Measured) -> None:
        measured = {drive.target: drive for drive in found.drives}
        for directory in self.options.paths:
            drive = drive_of(directory)
            result = measured.get(str(directory))
            found.warnings += advice.drive_warnings(drive, result, found.machine.is_wsl2)
            link = advice.drive_link_warning(drive, self.system.read_text)
            found.warnings += [link] if link else []
            found.skipped += result.notes if result else []
        found.warnings += advice.gpu_warnings(found.pcie, found.machine)
        found.warnings += advice.staging_warnings(found.staging, self._cap_said(found))

    def _cap_said(self, found: Measured) -> int | None:
        cap = self.effort.staging_cap_bytes
        return cap if self.has_gpu and found.staging and found.staging.asked_bytes == cap else None


def gpu_id() -> int | str:
    """NVML's name for CUDA device 0, which CUDA_VISIBLE_DEVICES does not shift."""
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    if uuid is None:
        return 0
    return str(uuid) if str(uuid).startswith("GPU-") else f"GPU-{uuid}"


def _line_rate(directory: Path) -> float | None:
    drive = drive_of(directory)
    return pcie_gb_per_s(drive.pcie_gen, drive.pcie_width)


class StageProgress:
    """`stage` says that one of `stages` begins."""

    def __init__(self, stages: Sequence[str], stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._stages = list(stages)
        self._start_s = time.monotonic()

    def stage(self, name: str) -> None:
        """Begin this stage: those before it are done (or left out). ValueError for an unknown name."""
        number, elapsed_s = self._stages.index(name) + 1, time.monotonic() - self._start_s
        print(f"[{number}/{len(self._stages)}] {elapsed_s:5.1f} s  {name}", file=self._stream, flush=True)
