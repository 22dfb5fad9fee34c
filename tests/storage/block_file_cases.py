"""Files and the kinds of I/O for the tests of BlockFile."""

import warnings
from pathlib import Path

import numpy as np

from outcore.storage import BlockFile, BufferedFallbackWarning, aligned_bytes

KINDS = ["direct-512", "direct-4096", "buffered"]


def make(path: Path, kind: str, size_bytes: int | None = None, mode: str = "create") -> BlockFile:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BufferedFallbackWarning)
        return BlockFile(path, mode, size_bytes, direct=kind != "buffered")  # type: ignore[arg-type]


def at_address(n_bytes: int, shift: int) -> np.ndarray:
    """Memory whose address is `shift` bytes beyond a page boundary."""
    return aligned_bytes(n_bytes + shift + 1)[shift : shift + n_bytes]
