"""WSL2's memory: what the guest has against what Windows has, and the line in .wslconfig that raises it."""

from __future__ import annotations

import re

from outcore.common.quantities import GIB, format_gib
from outcore.install.verify.rows import DEGRADED, OK, ReportRow
from outcore.machine import Machine, Runner

# Leave Windows an eighth of the memory, and not less than 4 GiB.
GUEST_SHARE = 7 / 8
MIN_HOST_REST_BYTES = 4 * GIB
_ASK_WINDOWS = (
    "powershell.exe",
    "-NoProfile",
    "-NonInteractive",
    "-Command",
    "(Get-CimInstance Win32_ComputerSystem).TotalPhysicalMemory",
)
_WHERE = "/mnt/c/Windows/System32/WindowsPowerShell/v1.0/powershell.exe"


def host_ram_bytes(runner: Runner) -> int | None:
    """Ask Windows through WSL's interoperability; None when it is switched off or does not answer."""
    for tool in (_ASK_WINDOWS[0], _WHERE):
        try:
            code, text = runner([tool, *_ASK_WINDOWS[1:]])
        except OSError:
            continue
        match = re.search(r"\b(\d{9,})\b", text) if code == 0 else None
        if match:
            return int(match.group(1))
    return None


def recommended_guest_gib(host_bytes: int) -> int:
    """Whole GiB for `memory=` in .wslconfig."""
    return int(min(host_bytes * GUEST_SHARE, host_bytes - MIN_HOST_REST_BYTES) // GIB)


def wsl_memory_row(machine: Machine, runner: Runner) -> ReportRow:
    """Degraded when the guest has clearly less than it could."""
    guest, host = machine.ram_total_bytes, host_ram_bytes(runner)
    needed = "most of the computer's RAM for the guest (WSL2 takes half by itself)"
    howto = r"in %UserProfile%\.wslconfig under [wsl2]: `memory={}`, then `wsl --shutdown`"
    if host is None:
        found = f"guest {format_gib(guest)}; Windows did not tell how much the computer has"
        return ReportRow("WSL2 memory", found, needed, DEGRADED, False, howto.format("<seven eighths>GB"))
    found = f"guest {format_gib(guest)} of the computer's {format_gib(host)}"
    wanted_gib = recommended_guest_gib(host)
    if guest >= (wanted_gib - 2) * GIB:  # the kernel keeps some for itself
        return ReportRow("WSL2 memory", found, needed, OK, False)
    return ReportRow("WSL2 memory", found, needed, DEGRADED, False, howto.format(f"{wanted_gib}GB"))
