"""Settings, warnings, report and picture, from made-up measurements."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from outcore.common.quantities import GIB, KIB, MIB
from outcore.machine import Drive, Machine
from outcore.probe.bench.compute import ComputeRates
from outcore.probe.bench.drive import DriveResult
from outcore.probe.bench.host import UpdateRates
from outcore.probe.bench.lanes import StagingTest
from outcore.probe.bench.latency import SIZES_BYTES, LatencyResult
from outcore.probe.bench.load_sampler import LinkUnderLoad
from outcore.probe.bench.measurement import Measurement
from outcore.probe.gds.facts import GdsFacts
from outcore.probe.gds.ladder import ladder_rows
from outcore.probe.gds.verdict import PathVerdict, judge
from outcore.probe.report.recommend import drive_link_warning, drive_warnings, gpu_warnings, recommend, staging_warnings
from outcore.probe.report.record import Measured, build_report, measured_machine, to_json, write_text
from outcore.probe.report.show import render
from tests.probe.report_schema import check_report


def cell(link: str, rate: float, block_bytes: int = 8 * MIB, depth: int = 8, engine: str = "posix") -> Measurement:
    return Measurement(link, "x", engine, block_bytes, depth, int(rate * 1e9), 1.0)


def laptop(**changes: Any) -> Machine:
    machine = dataclasses.replace(Machine.load("rtx4070-laptop"), links=None)
    return dataclasses.replace(machine, **changes)


def drive_result() -> DriveResult:
    curve = {64 * KIB: 0.35, 256 * KIB: 0.7, MIB: 0.9, 4 * MIB: 0.98, 8 * MIB: 1.0, 64 * MIB: 0.99}
    found = [cell("drive_read", 6.6 * f, block) for block, f in curve.items()]
    found += [cell("drive_write", 5.5 * f, block) for block, f in curve.items()]
    found += [cell("drive_mixed", 6.1 * f, block) for block, f in curve.items()]
    found += [cell("drive_read", 6.6 * f, depth=depth) for depth, f in ((1, 0.5), (4, 0.97))]
    return DriveResult(
        "/data", True, found, iops_4k=90_000, iops_depth=32, written_bytes=8 * 10**9, line_rate_gb_per_s=7.9
    )


def staging_test(**changes: Any) -> StagingTest:
    test = StagingTest(
        asked_bytes=8 * GIB, granted_bytes=8 * GIB, write_combined_bytes=4 * GIB, is_pinned=True, build_s=3.1,
        write_combined=True, write_combined_reason="measured not slower", slot_bytes=8 * MIB, num_slots=10,
        up_gb_per_s=6.4, up_limit="drive 6.60 GB/s", up_overlap=0.97, down_gb_per_s=5.3, down_limit="drive 5.50 GB/s",
        down_overlap=0.96,
        measurements=[cell("drive_to_gpu", 6.4, engine="lanes"), cell("gpu_to_drive", 5.3, engine="lanes")],
    )  # fmt: skip
    return dataclasses.replace(test, **changes)


def findings(**changes: Any) -> Measured:
    """A laptop with a GeForce on native Linux."""
    chunks = {64 * KIB: 0.3, MIB: 0.85, 16 * MIB: 0.99, 256 * MIB: 1.0}
    copies = []
    for link, kind, top in (
        ("h2d", "default", 12.6), ("h2d", "write-combined", 12.7), ("h2d", "pageable", 6.0), ("d2h", "default", 13.0),
        ("d2h", "pageable", 5.0),
    ):  # fmt: skip
        copies += [cell(link, top * f, chunk, 1, kind) for chunk, f in chunks.items()]
    facts = GdsFacts(gpu_error="no driver")
    values: dict[str, Any] = {
        "machine": laptop(),
        "verdict": judge(facts),
        "ladder": ladder_rows(facts),
        "effort": "default",
        "drives": [drive_result()],
        "measurements": [
            *copies,
            cell("both_ways", 20.0, engine="default"),
            cell("ram", 61.0, depth=10, engine="triad"),
        ],
        "staging": staging_test(),
        "latency": LatencyResult(
            {name: {s: f * (1e-4 + s / 2e9) for s in SIZES_BYTES} for name, f in (("plain", 1.0), ("staged", 0.6))}, 12
        ),
        "pcie": LinkUnderLoad(4, 8, 4, 8, temperature_c=71, samples=40),
        "updates": UpdateRates("extension (avx512)", 14, 1 << 27, {"fp32": 4.125, "split8": 5.25}, 3.0),
        "elapsed_s": 61.0,
    }
    found = Measured(**{**values, **changes})
    found.settings = recommend(found.verdict, found.main_drive(), found.staging, {"kvikio": 5.9}, None)
    return found


def test_recommended_settings_and_their_reasons() -> None:
    found = findings().settings
    assert found.aio == {
        "block_size": 4 * MIB, "queue_depth": 8, "intra_op_parallelism": 8, "single_submit": False,
        "overlap_events": True, "use_gds": False,
    }  # fmt: skip
    assert found.outcore["storage"] == {"engine": "posix", "threads": 8, "block_bytes": 4 * MIB}
    assert found.outcore["lanes"] == {"slot_bytes": 8 * MIB, "num_slots": 10}
    assert found.outcore["write_combined"] == "on"
    assert found.outcore["transfer_path"] == "staged"
    assert "staged 6.40, kvikio 5.90" in found.why["outcore.transfer_path"]
    assert "staging_bytes" not in found.outcore and "nvme_path" not in found.outcore
    assert set(found.why) == {f"{s}.{k}" for s, values in found.changes().items() for k in values}


@pytest.mark.parametrize(("path", "rates", "chosen"), [
    ("gds-nvfs", {"gds": 6.9}, "gds"),
    ("gds-nvfs", {"gds": 6.5}, "staged"),  # no 5 % faster than 6.4
    ("gds-p2pdma", {}, "staged"),
    ("cufile-compat", {"kvikio": 9.0}, "kvikio"),
    ("cufile-compat", {"gds": 9.0}, "staged"),  # gds is not proved
])  # fmt: skip
def test_the_path_of_parameters_is_the_fastest_that_was_proved(path: str, rates: Any, chosen: str) -> None:
    found = recommend(PathVerdict(path, "", ()), drive_result(), staging_test(), rates, None)
    assert found.aio["use_gds"] is False, "train_model.py refuses a file that has it on"
    assert found.outcore["transfer_path"] == chosen


def test_less_memory_than_asked_is_written_down() -> None:
    found = recommend(judge(GdsFacts()), None, staging_test(granted_bytes=2 * GIB), {}, "/fast")
    assert found.outcore["staging_bytes"] == 2 * GIB
    assert found.outcore["nvme_path"] == "/fast"
    assert found.aio == {}
    assert recommend(judge(GdsFacts()), None, None, {}, None).changes() == {}


def nvme(**changes: Any) -> Drive:
    values = {
        "path": "/data", "kind": "nvme", "reason": "", "mount_point": "/", "filesystem": "ext4",
        "device": "/dev/nvme0n1p2",
    }  # fmt: skip
    space = {"total_bytes": 10**12, "free_bytes": 5 * 10**11, "disks": ("nvme0n1",)}
    return Drive(**{**values, **space, **changes})


@pytest.mark.parametrize(("changes", "words"), [
    ({"kind": "hdd", "rotational": True, "rotational_trusted": True}, "rotational disk"), ({"kind": "ssd"}, "SATA SSD"),
    ({"kind": "ssd", "is_usb": True}, "USB drive"), ({"kind": "tmpfs", "filesystem": "tmpfs"}, "RAM disk"),
    ({"kind": "network", "filesystem": "nfs4"}, "network share (nfs4)"),
    ({"kind": "network", "filesystem": "9p", "mount_point": "/mnt/c"}, "Windows drive seen from WSL2"),
    ({"free_bytes": 10**11}, "90 % full"),
])  # fmt: skip
def test_drive_warnings(changes: dict[str, Any], words: str) -> None:
    found = drive_warnings(nvme(**changes), None, is_wsl2=True)
    assert len(found) == 1 and words in found[0]


def test_a_good_drive_has_none_and_a_virtual_disk_is_not_called_rotational() -> None:
    assert drive_warnings(nvme(), drive_result(), False) == []
    assert drive_warnings(nvme(kind="virtual", rotational=True, rotational_trusted=False), None, True) == []


def test_slow_and_buffered_drives() -> None:
    slow = DriveResult("/data", False, [cell("drive_read", 1.2), cell("drive_write", 2.5)])
    found = drive_warnings(nvme(), slow, False)
    assert any("refuses direct I/O" in w for w in found)
    assert any("below 2 GB/s (read 1.20 GB/s)" in w for w in found)


def test_gpu_warnings() -> None:
    assert gpu_warnings(LinkUnderLoad(4, 8, 4, 8), laptop()) == []
    found = gpu_warnings(LinkUnderLoad(3, 4, 4, 8, throttle_bits=0x20, temperature_c=92), laptop())
    assert "generation 3 x4 under load, it could do generation 4 x8" in found[0]
    assert "throttled for heat during the test at 92 degrees" in found[1]
    assert "power limit" in gpu_warnings(LinkUnderLoad(4, 8, 4, 8, throttle_bits=0x4), laptop())[0]
    assert gpu_warnings(LinkUnderLoad(error="NVML is missing"), laptop()) == ["NVML is missing"]
    assert gpu_warnings(None, laptop()) == [] and gpu_warnings(LinkUnderLoad(), laptop(gpus=())) == []


def test_a_drive_in_a_slow_slot() -> None:
    files = {
        "current_link_speed": "8.0 GT/s PCIe",
        "max_link_speed": "16.0 GT/s PCIe",
        "current_link_width": "4",
        "max_link_width": "4",
    }
    warning = drive_link_warning(nvme(), lambda path: files[path.rsplit("/", 1)[1]])
    assert warning is not None and "8 GT/s x4, it could do 16 GT/s x4" in warning
    assert drive_link_warning(nvme(), lambda path: None) is None


def test_staging_warnings() -> None:
    assert staging_warnings(None, None) == []
    assert staging_warnings(staging_test(notes=["less than asked"]), None) == ["less than asked"]
    assert "--quick builds only" in staging_warnings(staging_test(asked_bytes=GIB), GIB)[0]


def test_the_report_follows_its_schema_and_survives_json() -> None:
    report = json.loads(to_json(build_report(findings())))
    assert check_report(report) == []
    assert report["links"]["drive_read_gb_per_s"] == 6.6
    assert report["links"]["h2d_gb_per_s"] == 12.7  # pageable memory is no link
    assert report["links"]["peer_gb_per_s"] is None
    assert report["latency"]["lower_pct"]["staged"] == pytest.approx(40.0)
    assert report["pcie"]["line_rate_gb_per_s"] == pytest.approx(15.752)
    empty = Measured(laptop(), judge(GdsFacts()), [], "quick")
    assert check_report(json.loads(to_json(build_report(empty)))) == []


def test_a_report_that_breaks_the_schema_is_found() -> None:
    report = {**build_report(findings()), "schema_version": 99, "warnings": "none", "extra": 1, "links": {}}
    del report["ladder"]
    problems = " ".join(check_report(report))
    for words in ("99", "warnings has the type str", "extra is not part", "ladder is missing", "links lacks ram"):
        assert words in problems


def test_the_planner_can_load_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "machine_profile.json"
    write_text(path, measured_machine(findings()).to_json())
    machine = Machine.load(path)
    assert machine.links is not None
    assert (machine.links.source, machine.links.drive_mixed_gb_per_s) == ("measured", 6.1)
    assert machine.links.ram_gb_per_s == 61.0
    assert machine.links.optimizer_gparams_per_s == {"fp32": 4.125, "split8": 5.25}
    assert measured_machine(findings(updates=None)).links.optimizer_gparams_per_s is None  # pyright: ignore
    assert machine.links.host_layer_s is None
    assert machine.links.write_combined_share == 1.008, "write-combined over default, both to the GPU"
    assert os.listdir(tmp_path) == ["machine_profile.json"]
    launched = findings(host_layer_s=0.00412345678)
    links = measured_machine(launched).links
    assert links is not None and links.host_layer_s == 0.004123
    text = render(dataclasses.replace(launched, compute=ComputeRates("cuda:0", "bf16", 30.0, 200.0, 1.0)))
    assert "launches of one eager layer" in text and "4.12 ms of one core" in text
    assert build_report(launched)["compute"] is None, "compute was not measured"


def test_the_text() -> None:
    found = findings(warnings=["a warning"], skipped=["links between GPUs: one GPU"])
    text = render(found, width=100)
    for words in (
        "CPU optimizer, split8 states", "5.250 10^9 parameters/s (14 threads, extension (avx512))", "Verdict: staged",
        "RAM to GPU, pinned", "overlap 0.97 of the slowest link (drive 6.60 GB/s)",
        "aio.block_size = 4194304: reads and writes at once reach", "generation 4 x8 (at best 4 x8)", "- a warning",
        "links between GPUs: one GPU", "8.00 GB written to the drive(s)", "seen through the staged lanes",
    ):  # fmt: skip
        assert words in " ".join(text.split())
    assert "run it again" not in " ".join(text.split())
    assert max(len(line) for line in text.splitlines() if not line.startswith("expected")) <= 100
    assert "rate changed meanwhile" in render(findings(staging=staging_test(up_overlap=1.3)), width=100)
    bare = render(Measured(laptop(gpus=()), judge(GdsFacts()), ladder_rows(GdsFacts()), "quick"))
    assert "no drive could be measured" in bare and "no drive was measured" in bare
