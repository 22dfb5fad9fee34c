"""Pinned memory that the machine grants, which may be less than was asked for: RAM is looked at first, then a probe in
a child process.

A refused pinned allocation can leave a CUDA context unusable (seen on WSL2, where the limit is anywhere from 0.5 to
5 GB), so there the asking is done by `probe_pinned.py` in a process of its own. Cost: a second or more for a second
CUDA context, and 0.5 s per GiB. On native Linux a refusal is an ordinary error, after which the pool asks for less
(`slab.build_slabs`), so nothing is asked beforehand. The grant can be kept and given to later pools
(`PinnedPool(..., probe=grant)`)."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outcore.common.quantities import GIB, format_gib
from outcore.machine import available_ram_bytes, detect_ram
from outcore.staging.pool.allocator import ALIGNMENT_BYTES
from outcore.staging.pool.cuda_runtime import find_libcudart

RESERVE_FRACTION = 0.05
"""Part of the total RAM that the pool leaves free at least: page tables, page cache and the desktop need it."""
MIN_RESERVE_BYTES = 1 * GIB
PROBE_BASE_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S_PER_GIB = 10.0  # twenty times what a GiB takes on a slow machine


@dataclass(frozen=True)
class PinnedGrant:
    """Bytes that may be pinned, and why not more."""

    pinned_bytes: int
    """Default memory: fast for the CPU as well."""
    write_combined_bytes: int
    """Write-combined memory; what is refused of it is moved into `pinned_bytes`."""
    largest_piece_bytes: int
    """Largest single registration that is known to work; bigger totals are cut into several slabs."""
    reasons: tuple[str, ...] = ()
    """A sentence for everything that was not granted as asked; empty when all was."""
    pageable_bytes: int = 0
    """RAM for staging memory that is not pinned, where CUDA pins nothing at all."""

    @property
    def total_bytes(self) -> int:
        return self.pinned_bytes + self.write_combined_bytes


def reserve_bytes(root: Path = Path("/")) -> int:
    """RAM the pool leaves free, because pinned pages can be neither swapped nor reclaimed: 5 % of the total (of the
    control group's limit, where there is one), at least 1 GiB."""
    return max(MIN_RESERVE_BYTES, int(detect_ram(root).total_bytes * RESERVE_FRACTION))


def fit_into_ram(pinned_bytes: int, write_combined_bytes: int, budget_bytes: int) -> PinnedGrant:
    """Scales both parts down alike so that their sum fits into `budget_bytes` of RAM."""
    asked_bytes = pinned_bytes + write_combined_bytes
    if asked_bytes <= budget_bytes:
        return PinnedGrant(pinned_bytes, write_combined_bytes, asked_bytes)
    combined_bytes = write_combined_bytes * max(0, budget_bytes) // asked_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    plain_bytes = max(0, budget_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES - combined_bytes
    if not write_combined_bytes:
        combined_bytes = 0
    reason = (
        f"asked for {format_gib(asked_bytes)} of staging memory, but only {format_gib(max(0, budget_bytes))} of RAM "
        f"can be taken while {format_gib(reserve_bytes())} stay free for everything else"
    )
    return PinnedGrant(plain_bytes, combined_bytes, plain_bytes + combined_bytes, (reason,))


def plain_grant(pinned_bytes: int, write_combined_bytes: int) -> PinnedGrant:
    """The RAM test alone (no CUDA, or no probing wanted)."""
    return fit_into_ram(pinned_bytes, write_combined_bytes, available_ram_bytes() - reserve_bytes())


def probe_pinned_memory(
    device: torch.device, pinned_bytes: int, write_combined_bytes: int, *, command: list[str] | None = None
) -> PinnedGrant:
    """Asks a child process how much of the two sizes CUDA grants on `device`, after the RAM test.

    Never raises for a refusal: the grant is smaller (down to zero) and says why. Where the child cannot run at all
    (no libcudart to be found, the GPU in exclusive-process mode) the RAM test stands alone, which is said as well.
    `command` replaces the child's command line in tests."""
    grant = plain_grant(pinned_bytes, write_combined_bytes)
    if grant.total_bytes == 0:
        return grant
    if command is None:
        libcudart = find_libcudart()
        if libcudart is None:
            return _add(grant, "no libcudart is mapped into the process, so the amount was not probed beforehand")
        index = device.index if device.index is not None else torch.cuda.current_device()
        script = Path(__file__).with_name("probe_pinned.py")
        command = [sys.executable, "-I", str(script), "--libcudart", str(libcudart), "--device", str(index)]
        command += ["--pinned-bytes", str(grant.pinned_bytes)]
        command += ["--write-combined-bytes", str(grant.write_combined_bytes)]
    timeout_s = PROBE_BASE_TIMEOUT_S + PROBE_TIMEOUT_S_PER_GIB * grant.total_bytes / GIB
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        output, ending = child.stdout, f"exit status {child.returncode}"
        complete = child.returncode == 0
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else (late.stdout or "")
        ending, complete = f"no answer within {timeout_s:.0f} s", False
    except OSError as error:
        return _add(grant, f"the probing process did not start ({error}), so the amount was not probed beforehand")
    found = _last_json(output)
    if found is None or found.get("error"):
        why = found["error"] if found else f"it said nothing ({ending})"
        return _add(grant, f"the amount was not probed beforehand: {why}")
    return _read_answer(grant, found, complete, ending)


def refusal_is_harmless(system: str | None = None, kernel: str | None = None) -> bool:
    """True on native Linux, where the driver refuses pinned memory with an error and the context lives on; False on
    WSL2 and Windows, where its budget is shared with the display driver. Both names as `platform` has them."""
    system, kernel = system or platform.system(), kernel or platform.release()
    return system == "Linux" and "microsoft" not in kernel.lower()


def settle_grant(
    device: torch.device, pinned_bytes: int, write_combined_bytes: int, probe: bool | PinnedGrant
) -> PinnedGrant:
    """The grant for a pool: probed (True, on CUDA, unless a refusal does no harm here), limited by an earlier one, or
    by RAM alone."""
    if isinstance(probe, PinnedGrant):
        ram_bytes = available_ram_bytes() - reserve_bytes()
        grant = fit_into_ram(pinned_bytes, write_combined_bytes, min(probe.total_bytes, ram_bytes))
        moved_bytes = max(0, grant.write_combined_bytes - probe.write_combined_bytes)
        return PinnedGrant(
            grant.pinned_bytes + moved_bytes,
            grant.write_combined_bytes - moved_bytes,
            probe.largest_piece_bytes,
            grant.reasons if ram_bytes < probe.total_bytes else probe.reasons,
        )
    if probe and device.type == "cuda" and not refusal_is_harmless():
        return probe_pinned_memory(device, pinned_bytes, write_combined_bytes)
    return plain_grant(pinned_bytes, write_combined_bytes)


def _read_answer(grant: PinnedGrant, found: dict, complete: bool, ending: str) -> PinnedGrant:
    reasons = list(grant.reasons)
    asked_bytes = grant.total_bytes
    granted_bytes = int(found["granted_bytes"])
    if granted_bytes < asked_bytes:
        why = found["reason"] or f"the probing process ended early, {ending}"
        reasons.append(f"CUDA pins only {format_gib(granted_bytes)} of {format_gib(asked_bytes)} here: {why}")
    elif not complete:
        reasons.append(f"the probing process ended early ({ending}) after {format_gib(granted_bytes)} had been granted")
    combined_bytes = int(found["write_combined_bytes"])
    if grant.write_combined_bytes and not combined_bytes:
        why = found["write_combined_reason"] or "it was not tried"
        reasons.append(f"no write-combined memory, default memory takes its place: {why}")
    return PinnedGrant(
        granted_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES - combined_bytes,
        combined_bytes,
        int(found["largest_piece_bytes"]),
        tuple(reasons),
        pageable_bytes=0 if granted_bytes else asked_bytes,
    )


def _add(grant: PinnedGrant, reason: str) -> PinnedGrant:
    return replace(grant, reasons=(*grant.reasons, reason))


def _last_json(output: str) -> dict | None:
    for line in reversed(output.splitlines()):
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict):
            return found
    return None
