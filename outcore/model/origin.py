"""Files that a model's weights were read from, known again when the model is exported: what a run did not train is
taken from there byte for byte, and only if these are still the same files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from outcore.model.weights import shard_files

Stamp = tuple[int, int]
"""(bytes, nanoseconds of the last change) of a file."""


@dataclass(frozen=True)
class Origin:
    """The published model, exported run or GGUF file that a run began from."""

    path: str
    """Folder, GGUF file or hub id."""
    dtype: torch.dtype | None
    """Type in which its weights are stored, by its configuration; None: it says none."""
    stamps: dict[Path, Stamp]
    """Files of weights, and what they were when they were read."""

    @classmethod
    def of(cls, path: str, dtype: torch.dtype | None = None) -> Origin:
        """The origin as it is now. RuntimeError or OSError where there are no weights."""
        return cls(path, dtype, {file: _stamp(file) for file in shard_files(path)})

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, whose tensors have other names than any export."""
        return self.path.lower().endswith(".gguf")

    @property
    def folder(self) -> Path:
        """Folder where its configuration and its other files lie."""
        return next(iter(self.stamps)).parent

    def why_not(self) -> str:
        """Why nothing can be taken from it any more, in words; '' where it is as it was."""
        for file, stamp in self.stamps.items():
            try:
                if _stamp(file) != stamp:
                    return f"{file} has changed"
            except OSError:
                return f"{file} is gone"
        return ""


def _stamp(file: Path) -> Stamp:
    found = file.stat()
    return found.st_size, found.st_mtime_ns
