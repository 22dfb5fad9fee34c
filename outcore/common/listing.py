"""Listings of files: each with its size and CRC-32, the listing itself with a checksum, no name leading out of it.

A checkpoint's manifest is one, and so are the checksums beside an exported model (`CHECKSUMS`), which whoever trains or
serves that model again verifies."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.common.files import inside, write_json
from outcore.common.system_errors import describe_errno

CHECKSUMS = "outcore-checksums.json"
"""Beside an exported model."""
CHECKSUM = "checksum"
_CHUNK_BYTES = 8 << 20


class DamagedListing(ValueError):
    """A listing cannot be read or contradicts itself; the message says which file and why."""


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum that a file must have."""

    n_bytes: int
    crc32: int


Files = Mapping[str, FileEntry]
"""Entries by path below the folder, with `/`."""


def crc32_of(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    crc = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def take_stock(folder: Path, known: Mapping[Path, int], *, without: str) -> dict[str, FileEntry]:
    """Every file below `folder` but the one called `without`; checksums that are `known` are not taken again."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != without:
            crc = known[path] if path in known else crc32_of(path)
            files[path.relative_to(folder).as_posix()] = FileEntry(path.stat().st_size, crc)
    return files


def as_json(files: Files) -> dict[str, dict[str, int]]:
    """The value that `parse_files` reads."""
    return {name: {"bytes": entry.n_bytes, "crc32": entry.crc32} for name, entry in files.items()}


def parse_files(value: Any) -> dict[str, FileEntry]:
    """Read what `as_json` wrote. ValueError, TypeError or KeyError for anything else, and names that lead out."""
    if not isinstance(value, dict):
        raise ValueError("no list of files")
    files = {}
    for name, entry in value.items():
        n_bytes, crc = entry["bytes"], entry["crc32"]
        if type(n_bytes) is not int or type(crc) is not int or n_bytes < 0:
            raise ValueError(f"{name!r} has no size or checksum")
        if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name!r} leads out of the folder")
        files[name] = FileEntry(n_bytes, crc)
    return files


def read_listing(path: Path) -> dict[str, Any]:
    """A JSON object. DamagedListing for whatever is wrong."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DamagedListing(f"{path}: cannot be read: {describe_errno(error.errno)}.") from error
    except (ValueError, RecursionError) as error:
        raise DamagedListing(f"{path}: damaged: not JSON ({error}).") from error
    if not isinstance(body, dict):
        raise DamagedListing(f"{path}: damaged: not a listing of files.")
    return body


def checksum_of(body: Mapping[str, Any]) -> str:
    """Checksum of everything in a listing but its own checksum."""
    rest = {key: value for key, value in body.items() if key != CHECKSUM}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True, separators=(',', ':')).encode()):08x}"


def problem_of(folder: Path, name: str, entry: FileEntry, *, verify: bool = True) -> str | None:
    """Words for what is wrong with a listed file; None when nothing is. `verify`: read all of it."""
    path = folder / name
    try:
        inside(folder, name)
        if not path.is_file():
            return f"{path}: missing, though the manifest lists it."
        n_bytes = path.stat().st_size
        if n_bytes != entry.n_bytes:
            return f"{path}: has {n_bytes} bytes, the manifest says {entry.n_bytes}: it was cut short or changed."
        if verify and crc32_of(path) != entry.crc32:
            return f"{path}: its checksum is wrong: the file was changed or damaged."
    except ValueError as error:
        return f"{folder}: its manifest lists a file outside: {error}."
    except OSError as error:
        return f"{path}: cannot be read: {describe_errno(error.errno)}."
    return None


def write_checksums(folder: Path, known: Mapping[Path, int]) -> None:
    """Put `CHECKSUMS` of all files into a folder. OSError."""
    body: dict[str, Any] = {"format_version": 1, "files": as_json(take_stock(folder, known, without=CHECKSUMS))}
    write_json(folder / CHECKSUMS, {**body, CHECKSUM: checksum_of(body)})


def damaged_weights(folder: Path) -> tuple[list[str], list[str]]:
    """(damaged weights, other files that changed) of a folder with `CHECKSUMS`, in words; nothing without.

    A person may edit a configuration or a chat template; weights and their index change by damage only. DamagedListing.
    """
    path = folder / CHECKSUMS
    if not path.is_file():
        return [], []
    body = read_listing(path)
    try:
        files = parse_files(body["files"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedListing(f"{path}: damaged: {error}.") from error
    if body.get(CHECKSUM) != checksum_of(body):
        raise DamagedListing(f"{path}: damaged: its checksum is wrong.")
    damaged, changed = [], []
    for name, entry in files.items():
        problem = problem_of(folder, name, entry)
        if problem is not None:
            (damaged if ".safetensors" in name else changed).append(problem)
    return damaged, changed
