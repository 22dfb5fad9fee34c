"""The ladder as rows of a table: what each step asked and what it found on this machine."""

from __future__ import annotations

from outcore.probe.gds.facts import GdsFacts, ReadTest
from outcore.probe.gds.verdict import LadderRow


def ladder_rows(facts: GdsFacts) -> list[LadderRow]:
    """The rows, in the order in which the questions are asked."""
    rows = [_system_row(facts)]
    if not facts.platform.startswith("linux"):
        rows.append(LadderRow("cuFile and kvikio", "no", "there is neither on this operating system"))
        return rows
    rows += [
        _gpu_row(facts),
        _nvidia_fs_row(facts),
        _p2pdma_row(facts),
        _drive_row(facts),
        _gdscheck_row(facts),
        _kvikio_row(facts),
        _read_row("kvikio's own choice", facts.auto, facts),
        _read_row("decisive read, no fallback", facts.direct, facts),
    ]
    if facts.p2pdma_trial.status != "not-run":
        rows.append(_read_row("decisive read, P2PDMA asked for", facts.p2pdma_trial, facts))
    return rows


def _system_row(facts: GdsFacts) -> LadderRow:
    if facts.platform == "win32":
        return LadderRow("operating system", "no", "native Windows")
    if facts.is_wsl2:
        return LadderRow("operating system", "no", f"WSL2 ({facts.kernel_release})")
    if facts.platform.startswith("linux"):
        return LadderRow("operating system", "yes", f"Linux {facts.kernel_release}")
    return LadderRow("operating system", "no", facts.platform)


def _gpu_row(facts: GdsFacts) -> LadderRow:
    step = "GPU, attribute 116 (RDMA)"
    if not facts.gpus:
        return LadderRow(step, "no", f"no GPU: {facts.gpu_error or 'not asked'}")
    gpu = facts.gpus[0]
    more = f" and {len(facts.gpus) - 1} more" if len(facts.gpus) > 1 else ""
    value = {True: "1 (necessary, not sufficient)", False: "0", None: "not known to this driver"}
    state = {True: "yes", False: "no", None: "unknown"}[gpu.gpu_direct_rdma_supported]
    return LadderRow(
        step, state, f"{gpu.name}{more}, CUDA {facts.cuda_version}: {value[gpu.gpu_direct_rdma_supported]}"
    )


def _nvidia_fs_row(facts: GdsFacts) -> LadderRow:
    if facts.nvidia_fs is None:
        return LadderRow("nvidia-fs module", "no", "not loaded (/proc/driver/nvidia-fs/stats is missing)")
    stats = facts.nvidia_fs
    counters = f"reads {stats.reads}, mappings {stats.bar1_maps}"
    enabled = "" if stats.io_stats_enabled else "; read counting is off, mappings are the witness"
    return LadderRow("nvidia-fs module", "yes", f"loaded, version {stats.driver_version}; {counters}{enabled}")


def _p2pdma_row(facts: GdsFacts) -> LadderRow:
    asked = bool((facts.cufile_json.get("properties") or {}).get("use_pci_p2pdma"))
    words = {True: "yes", False: "no", None: "unknown"}
    parts = {
        "kernel PCI_P2PDMA": facts.kernel_has_p2pdma,
        "open kernel module": facts.open_kernel_module,
        "static BAR1": facts.static_bar1,
        "use_pci_p2pdma": asked,
    }
    needed = (facts.kernel_has_p2pdma, facts.open_kernel_module, asked)
    state = "no" if False in needed else "unknown" if None in needed else "yes"
    found = ", ".join(f"{name} {words[value]}" for name, value in parts.items())
    if facts.nvme_multipath:
        found += ", NVMe multipath on (P2PDMA wants it off)"
    return LadderRow("P2PDMA prerequisites", state, found)


def _drive_row(facts: GdsFacts) -> LadderRow:
    if facts.drive_kind == "unknown" and not facts.drive_filesystem:
        return LadderRow("drive and filesystem", "unknown", "not known")
    good = facts.drive_kind == "nvme" and facts.drive_filesystem in ("ext4", "xfs")
    found = f"{facts.drive_device or 'no device'}, {facts.drive_kind}, {facts.drive_filesystem or 'unknown filesystem'}"
    return LadderRow("drive and filesystem", "yes" if good else "no", found)


def _gdscheck_row(facts: GdsFacts) -> LadderRow:
    if facts.gdscheck_path is None:
        return LadderRow("gdscheck -p", "info", "not installed")
    return LadderRow("gdscheck -p", "info", "; ".join(facts.gdscheck_lines) or "said nothing of use")


def _kvikio_row(facts: GdsFacts) -> LadderRow:
    step = "kvikio, is_gds_available"
    if not facts.kvikio_version:
        return LadderRow(step, "no", "kvikio is not installed")
    if facts.kvikio_error:
        return LadderRow(step, "no", f"kvikio {facts.kvikio_version} does not load: {facts.kvikio_error}")
    answer = {True: "true", False: "false", None: "no answer"}[facts.is_gds_available]
    state = {True: "yes", False: "no", None: "unknown"}[facts.is_gds_available]
    library = f", libcufile {facts.libcufile_version}" if facts.libcufile_version else ""
    return LadderRow(step, state, f"kvikio {facts.kvikio_version}{library}: {answer}")


def _read_row(step: str, test: ReadTest, facts: GdsFacts) -> LadderRow:
    if test.status == "not-run":
        why = (
            "no GPU" if not facts.gpus else "no kvikio" if not facts.kvikio_version or facts.kvikio_error else "not run"
        )
        return LadderRow(step, "unknown", f"not tried: {why}")
    if test.status != "ok":
        reason = f" (libcufile: {test.log[-1]})" if test.log else ""
        return LadderRow(step, "no", f"{test.status}: {test.detail}{reason}")
    counted = {"GDS": "cuFile", "POSIX": "POSIX"}.get(test.backend or "", "a path it does not name")
    nvfs = (
        "; nvidia-fs counters moved"
        if test.nvidia_fs_moved
        else "; nvidia-fs counters stood still"
        if facts.nvidia_fs
        else ""
    )
    return LadderRow(step, "yes", f"bytes right, counted on {counted}{nvfs}")
