"""Digests of memory that goes to a drive and comes back: 64 bits for each block, without the GIL.

CRC-32C by the processor's own instruction (about 20 GB/s a core); where it or the extension is missing, zlib's CRC-32
(1 to 4 GB/s). They live as long as the process and are never written down, so they need not agree between machines."""

from __future__ import annotations

import time
import zlib
from typing import NamedTuple, Protocol

import numpy as np

from outcore.optim.choice import open_backend
from outcore.optim.extension import ExtensionBackend

_TRIAL_BYTES = 8 << 20


class Digest(Protocol):
    """Digests of each `block_bytes` of `data` (uint8, contiguous; the last block may be shorter), as uint64."""

    def __call__(self, data: np.ndarray, block_bytes: int) -> np.ndarray: ...


class DigestFound(NamedTuple):
    """The fastest digest of this machine."""

    digest: Digest
    name: str
    gb_per_s: float
    """Rate of one core, on memory of 8 MiB."""


def crc32_digest(data: np.ndarray, block_bytes: int) -> np.ndarray:
    """zlib's, for machines without the extension."""
    view = data.data
    sums = [zlib.crc32(view[at : at + block_bytes]) for at in range(0, data.nbytes, block_bytes)]
    return np.array(sums, dtype=np.uint64)


def find_digest() -> DigestFound:
    """Choose and measure, some milliseconds."""
    backend = open_backend()
    found: Digest = crc32_digest
    name = "CRC-32 (zlib)"
    if isinstance(backend, ExtensionBackend) and backend.has_digest:
        found, name = backend.digest, "CRC-32C (hardware)"
    data = np.zeros(_TRIAL_BYTES, dtype=np.uint8)
    best_s = min(_seconds(found, data) for _ in range(3))
    return DigestFound(found, name, data.nbytes / best_s / 1e9)


def _seconds(digest: Digest, data: np.ndarray) -> float:
    began_s = time.perf_counter()
    digest(data, 1 << 16)
    return time.perf_counter() - began_s
