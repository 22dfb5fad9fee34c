"""`Manifest`: every file of a checkpoint with size and CRC-32, its step, and a checksum over all of that.

Nothing outside it is read, and no name in it may lead out of the folder. Files below `export/` can be made again from
the model, so damage there is told and mended when a run resumes, and stops nothing.

Version 1 (to November 2026) had no checksum over itself and no hash of the model's configuration; it is read still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outcore.common import listing, write_json
from outcore.common.listing import CHECKSUM, DamagedListing, Files, checksum_of, crc32_of

__all__ = ["CheckpointError", "Manifest", "crc32_of", "listed_files"]

NAME = "manifest.json"
TRAINER = "trainer.json"
EXPORT = "export"
VERSION = 2


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, or of another model; the message says which file and why."""


class ExportRefused(CheckpointError, ValueError):
    """A sound checkpoint cannot be exported as it was asked."""


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents."""

    step: int
    order: int
    """Counts when the checkpoint was written or gone back to; 0: by a version that counted steps only."""
    files: Files
    config_sha256: str | None = None
    """Hash of the model's configuration; None: the model has none, or an older version wrote this."""
    version: int = VERSION

    @staticmethod
    def of(folder: Path, step: int, order: int, checksums: Mapping[Path, int], config_sha256: str | None) -> Manifest:
        """Take stock of a folder; `checksums` are those known already, the others are read."""
        return Manifest(step, order, listing.take_stock(folder, checksums, without=NAME), config_sha256)

    def save(self, folder: Path) -> None:
        """Write it, atomically and durably. OSError."""
        body: dict[str, Any] = {
            "format_version": self.version,
            "step": self.step,
            "order": self.order,
            "config_sha256": self.config_sha256,
            "files": listing.as_json(self.files),
        }
        if self.version > 1:
            body[CHECKSUM] = checksum_of(body)
        write_json(folder / NAME, body)

    @staticmethod
    def load(folder: Path) -> Manifest:
        """Read and check it. CheckpointError for whatever is wrong with it."""
        path = folder / NAME
        try:
            body = listing.read_listing(path)
        except DamagedListing as error:
            raise CheckpointError(str(error)) from error
        version = body.get("format_version")
        if type(version) is not int or version not in (1, VERSION):
            raise CheckpointError(
                f"{path}: has format version {version!r}; this program reads versions 1 and {VERSION}: it is damaged, "
                "or a newer program wrote it."
            )
        if version > 1 and body.get(CHECKSUM) != checksum_of(body):
            raise CheckpointError(f"{path}: damaged: its checksum is wrong.")
        try:
            return _parse(body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: damaged: {error}.") from error

    def with_order(self, order: int) -> Manifest:
        """Copy of these contents, written or gone back to at another time."""
        return replace(self, order=order)

    def problem(self, folder: Path, name: str, *, verify: bool = True) -> str | None:
        """Find what is wrong with a listed file, in words; None when nothing is. `verify`: read it all."""
        return listing.problem_of(folder, name, self.files[name], verify=verify)


def listed_files(folder: Path, stem: str) -> list[Path]:
    """Shards called `stem-…`: those that the manifest lists; all of them in a folder that is no checkpoint."""
    if not (folder / NAME).is_file():
        return sorted(folder.glob(f"{stem}-*-of-*.safetensors"))
    names = Manifest.load(folder).files
    return sorted(folder / name for name in names if Path(name).match(f"{stem}-*-of-*.safetensors") and "/" not in name)


def _parse(body: dict[str, Any]) -> Manifest:
    step, order, sha = body["step"], body.get("order", 0), body.get("config_sha256")
    for what, value in (("step", step), ("order", order)):
        if type(value) is not int or value < 0:
            raise ValueError(f"{what} is {value!r}")
    if not (sha is None or isinstance(sha, str)):
        raise ValueError(f"config_sha256 is {sha!r}")
    files = listing.parse_files(body["files"])
    if TRAINER not in files:
        raise ValueError(f"it does not list {TRAINER}")
    if not any(name.endswith(".safetensors") and not name.startswith(f"{EXPORT}/") for name in files):
        raise ValueError("it lists no weights")
    return Manifest(step, order, files, sha, body["format_version"])
