"""The report of a run: `gds_report.json` (its schema is in docs/gds.md), and the planner's machine profile."""

from __future__ import annotations

import dataclasses
import datetime
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import outcore
from outcore.common.files import write_atomic
from outcore.machine import Drive, LinkRates, Machine, drive_of, pcie_gb_per_s
from outcore.probe.bench.compute import ComputeRates
from outcore.probe.bench.drive import DriveResult, drive_rate
from outcore.probe.bench.host import UpdateRates
from outcore.probe.bench.lanes import StagingTest, upload_rates
from outcore.probe.bench.latency import LatencyResult
from outcore.probe.bench.load_sampler import LinkUnderLoad
from outcore.probe.bench.measurement import Measurement, best
from outcore.probe.gds.verdict import LadderRow, PathVerdict
from outcore.probe.report.recommend import Recommendation

SCHEMA_VERSION = 3

LINKS = (
    "drive_read",
    "drive_write",
    "drive_mixed",
    "h2d",
    "d2h",
    "both_ways",
    "pageable_to_gpu",
    "drive_to_gpu",
    "gpu_to_drive",
    "ram",
    "peer",
)


@dataclass
class Measured:
    """Everything a run found out, as the stages fill it in."""

    machine: Machine
    verdict: PathVerdict
    ladder: list[LadderRow]
    effort: str
    drives: list[DriveResult] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    """Links that belong to no single drive: copies, memory, peers."""
    staging: StagingTest | None = None
    latency: LatencyResult | None = None
    pcie: LinkUnderLoad | None = None
    compute: ComputeRates | None = None
    host_layer_s: float | None = None
    updates: UpdateRates | None = None
    direct_gb_per_s: dict[str, float] = field(default_factory=dict)
    settings: Recommendation = field(default_factory=Recommendation)
    warnings: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0

    def main_drive(self) -> DriveResult | None:
        """The fastest reader of those measured: the one to put a run's files on."""
        return max(self.drives, key=lambda drive: drive_rate(drive, "drive_read"), default=None)

    def all_measurements(self) -> list[Measurement]:
        """Every cell of every link."""
        found = list(self.measurements)
        for drive in self.drives:
            found += drive.measurements
        return found + (self.staging.measurements if self.staging else [])

    def link_rates(self) -> dict[str, float | None]:
        """GB/s by link, None where it was not measured. Drive links are those of the main drive."""
        main = self.main_drive()
        others = self.measurements + (self.staging.measurements if self.staging else [])
        rates: dict[str, float | None] = {}
        for link in LINKS:
            pool = (
                main.measurements
                if main is not None and link.startswith("drive_") and link != "drive_to_gpu"
                else others
            )
            fastest = best([m for m in pool if m.engine != "pageable"], link=link)
            rates[link] = round(fastest.gb_per_s, 3) if fastest else None
        return rates


def build_report(findings: Measured) -> dict[str, Any]:
    """The report as plain JSON values."""
    verdict = findings.verdict
    return {
        "schema_version": SCHEMA_VERSION,
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "outcore_version": getattr(outcore, "__version__", "unknown"),
        "effort": findings.effort,
        "elapsed_s": round(findings.elapsed_s, 2),
        "verdict": verdict.path,
        "headline": verdict.headline,
        "reasons": list(verdict.reasons),
        "why_not": {path: list(reasons) for path, reasons in verdict.why_not.items()},
        "would_change": list(verdict.would_change),
        "ladder": [dataclasses.asdict(row) for row in findings.ladder],
        "links": {f"{link}_gb_per_s": rate for link, rate in findings.link_rates().items()},
        "compute": _compute(findings),
        "optimizer": dataclasses.asdict(findings.updates) if findings.updates else None,
        "drives": [_drive(drive) for drive in findings.drives],
        "staging": _staging(findings.staging),
        "latency": _latency(findings.latency),
        "pcie": _pcie(findings.pcie),
        "measurements": [_measurement(m) for m in findings.all_measurements()],
        "settings": {"aio": findings.settings.aio, "outcore": findings.settings.outcore, "why": findings.settings.why},
        "machine": findings.machine.to_dict(),
        "warnings": findings.warnings,
        "skipped": findings.skipped,
    }


def measured_machine(findings: Measured) -> Machine:
    """The machine with its measured links, as the planner loads it. A link that was not measured stays None."""
    rates, compute, updates = findings.link_rates(), findings.compute, findings.updates
    default, combined = upload_rates(findings.all_measurements())
    links = LinkRates(
        source="measured",
        h2d_gb_per_s=rates["h2d"],
        d2h_gb_per_s=rates["d2h"],
        both_ways_gb_per_s=rates["both_ways"],
        write_combined_share=round(combined / default, 3) if default and combined else None,
        pageable_to_gpu_gb_per_s=rates["pageable_to_gpu"],
        drive_read_gb_per_s=rates["drive_read"],
        drive_write_gb_per_s=rates["drive_write"],
        drive_mixed_gb_per_s=rates["drive_mixed"],
        ram_gb_per_s=rates["ram"],
        matmul_tflops=round(compute.matmul_tflops, 3) if compute else None,
        device_memory_gb_per_s=round(compute.memory_gb_per_s, 2) if compute else None,
        optimizer_gparams_per_s=updates.gparams_per_s if updates else None,
        host_layer_s=round(findings.host_layer_s, 6) if findings.host_layer_s else None,
    )
    return dataclasses.replace(findings.machine, links=links, drives=_with_rates(findings))


def _with_rates(findings: Measured) -> tuple[Drive, ...]:
    """The machine's drives, those that were measured with their rates."""
    found = {drive.mount_point: drive for drive in findings.machine.drives}
    for result in findings.drives:
        drive = drive_of(result.target)
        found[drive.mount_point] = dataclasses.replace(
            found.get(drive.mount_point, drive),
            read_gb_per_s=round(drive_rate(result, "drive_read"), 3),
            write_gb_per_s=round(drive_rate(result, "drive_write"), 3),
            iops_4k=float(round(result.iops_4k)),
        )
    return tuple(found.values())


def write_text(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old or the new one, never half. Creates its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)


def to_json(report: dict[str, Any]) -> str:
    """The report's text."""
    return json.dumps(report, indent=2, ensure_ascii=False) + "\n"


def _measurement(found: Measurement) -> dict[str, Any]:
    rounded = {"gb_per_s": round(found.gb_per_s, 4), "elapsed_s": round(found.elapsed_s, 4)}
    return dataclasses.asdict(found) | rounded


def _drive(drive: DriveResult) -> dict[str, Any]:
    return {
        "path": drive.target,
        "is_direct": drive.is_direct,
        "read_gb_per_s": round(drive_rate(drive, "drive_read"), 3),
        "write_gb_per_s": round(drive_rate(drive, "drive_write"), 3),
        "mixed_gb_per_s": round(drive_rate(drive, "drive_mixed"), 3),
        "iops_4k": round(drive.iops_4k),
        "iops_depth": drive.iops_depth,
        "line_rate_gb_per_s": drive.line_rate_gb_per_s,
        "written_bytes": drive.written_bytes,
        "notes": drive.notes,
    }


def _staging(test: StagingTest | None) -> dict[str, Any] | None:
    if test is None:
        return None
    values = {f.name: getattr(test, f.name) for f in dataclasses.fields(test) if f.name != "measurements"}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}


def _latency(result: LatencyResult | None) -> dict[str, Any] | None:
    if result is None:
        return None
    return {
        "median_s": {path: {str(size): s for size, s in row.items()} for path, row in result.median_s.items()},
        "lower_pct": {path: result.lower_pct(path) for path in result.median_s if path != "plain"},
        "repeats": result.repeats,
        "verdict": result.verdict(),
    }


def _compute(findings: Measured) -> dict[str, Any] | None:
    rates, host_s = findings.compute, findings.host_layer_s
    if rates is None:
        return None
    return {
        "device": rates.device,
        "dtype": rates.dtype,
        "matmul_tflops": round(rates.matmul_tflops, 3),
        "memory_gb_per_s": round(rates.memory_gb_per_s, 2),
        "host_layer_s": None if host_s is None else round(host_s, 6),
    }


def _pcie(link: LinkUnderLoad | None) -> dict[str, Any] | None:
    if link is None:
        return None
    return {
        "gen": link.pcie_gen,
        "width": link.pcie_width,
        "gen_max": link.pcie_gen_max,
        "width_max": link.pcie_width_max,
        "line_rate_gb_per_s": pcie_gb_per_s(link.pcie_gen, link.pcie_width),
        "throttle_reasons": link.throttle_reasons,
        "temperature_c": link.temperature_c,
        "error": link.error,
    }
