"""Whether what scratch files give back is verified, and the words for it: `--nvme_checksums auto|on|off|sampled`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from outcore.optim import DigestFound, find_digest
from outcore.storage import DigestRule

Mode = Literal["auto", "on", "off", "sampled"]
MODES: tuple[Mode, ...] = ("auto", "on", "off", "sampled")
ENOUGH_GB_PER_S = 4.0
"""Rate of one core from which everything is verified: two cores then keep up with a drive of 8 GB/s."""
ONE_IN = 8
"""Sampled: one section of 8 MiB of so many."""


@dataclass(frozen=True)
class Verification:
    """The rule for stores, None for none, and what the run's header says."""

    rule: DigestRule | None
    words: str


def choose_verification(mode: Mode = "auto", *, direct: bool = False) -> Verification:
    """Measure the digest and decide. `direct`: bytes go past the CPU, which would have to fetch them back."""
    if mode not in MODES:
        raise ValueError(f"nvme_checksums must be {', '.join(MODES)}, got {mode!r}")
    if mode == "off":
        return Verification(None, "nvme_checksums off: what the drive gives back is taken as it comes")
    found = _found()
    rate = f"{found.name}, {found.gb_per_s:.0f} GB/s a core"
    if mode == "on" or (mode == "auto" and not direct and found.gb_per_s >= ENOUGH_GB_PER_S):
        words = f"nvme_checksums {mode}: every block of 64 KiB is verified on its way back ({rate})"
        return Verification(DigestRule(found.digest), words)
    why = "" if mode == "sampled" else "reads into GPU memory go past the CPU; " if direct else "slow here; "
    return Verification(
        DigestRule(found.digest, ONE_IN),
        f"nvme_checksums {mode}: one section of 8 MiB in {ONE_IN} is verified on its way back ({why}{rate}); "
        "--nvme_checksums on verifies everything",
    )


@functools.lru_cache(maxsize=1)
def _found() -> DigestFound:
    """Measured once for a process: an answer that does not change."""
    return find_digest()
