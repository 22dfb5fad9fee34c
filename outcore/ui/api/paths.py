"""Folders as they are typed: which there are, and whether one is a place to offload to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outcore.common.files import nearest_existing
from outcore.common.quantities import format_gib
from outcore.common.words import own_command
from outcore.machine import detect_machine, drive_of, local_drives
from outcore.machine.offload import MIN_GB_PER_S, describe_folder, resolve_nvme_path, validate_nvme_path
from outcore.plan import ProfileError, load_hardware
from outcore.serve.additions import bad
from outcore.ui.api.form import check_reach

MOST_FOLDERS = 200
SMALL_RAM_BYTES = 16 * 10**9
"""Below it pinned memory leaves the system too little that it can move."""
ADVICE = {
    "nvme": "For one NVMe drive: block size 1 MiB (PCIe 4.0: up to 4 MiB), queue depth 8 to 16; 32 for several drives.",
    "ssd": "For a SATA or USB SSD: block size 512 KiB, queue depth 4.",
    "hdd": "A disk that turns: block size 4 MiB, queue depth 4; expect steps of minutes.",
}


def check_path(body: Mapping[str, Any], allowed: Sequence[Path]) -> dict[str, Any]:
    """Whether a run can offload into this folder: writable, space, kind of drive, speed as measured. Really writes a
    test file, and leaves nothing."""
    path, needed_gb = body.get("path"), body.get("needed_gb", 0)
    if not isinstance(path, str):
        raise bad("path must be a text.", "path")
    if not isinstance(needed_gb, (int, float)) or not 0 <= needed_gb < 1e9:
        raise bad("needed_gb must be a number of at least 0.", "needed_gb")
    check_reach({"nvme_offload_path": path}, allowed)
    missing = _missing(path)
    is_good, words = validate_nvme_path(path, needed_gb)
    is_warned = is_good and words != ""
    if is_good:
        words = f"{describe_folder(path)} It is writable. {words}".strip()
    for folder in missing:  # a path is checked as it is typed, letter by letter: only a run makes its folder
        with contextlib.suppress(OSError):  # was not made, or a run has begun to use it
            folder.rmdir()
    found: dict[str, Any] = {"path": path, "is_good": is_good, "words": words, "warning": is_warned}
    try:
        drive = drive_of(resolve_nvme_path(path))
    except (ValueError, OSError):
        return found | {"kind": "unknown", "free_bytes": None, "speed": "", "advice": ""}
    return found | {
        "kind": drive.kind,
        "free_bytes": drive.free_bytes,
        "speed": _speed(),
        "advice": advice(drive.kind, detect_machine().ram_total_bytes),
    }


def advice(kind: str, ram_bytes: int) -> str:
    """Settings for DeepSpeed's own offload engine on this kind of drive and this much RAM."""
    words = ADVICE.get(kind, "")
    if ram_bytes < SMALL_RAM_BYTES:
        words += f" This machine has {format_gib(ram_bytes)} of RAM: turn pin_memory off."
    return words.strip()


def _missing(text: str) -> list[Path]:
    """Folders of the path that are not there, innermost first."""
    try:
        path = resolve_nvme_path(text)
    except ValueError:
        return []
    return [part for part in (path, *path.parents) if not part.exists()]


def _speed() -> str:
    try:
        hardware = load_hardware()
    except (ProfileError, ValueError, OSError):
        return f"Its speed was not measured: {own_command('probe')} does."
    read, write = hardware.drive_read_gb_per_s, hardware.drive_write_gb_per_s
    slow = "" if min(read, write) >= MIN_GB_PER_S else f" Below {MIN_GB_PER_S:g} GB/s steps take long."
    return f"Measured: {read:.1f} GB/s read, {write:.1f} GB/s written.{slow}"


def folders_in(path: str, allowed: Sequence[Path]) -> dict[str, Any]:
    """Folders below a path (below the nearest one that exists), models in it, and the drives of this machine to begin
    at."""
    check_reach({"nvme_offload_path": path.strip() or "."}, allowed)
    folder = nearest_existing(os.path.abspath(Path(path.strip() or ".").expanduser()))
    folder = folder if folder.is_dir() else folder.parent
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
        names = sorted(entry.name for entry in entries if _holds(os.DirEntry.is_dir, entry))
        models = sorted(entry.name for entry in entries if _holds(_is_model, entry))
    except OSError as error:
        raise bad(f"{folder} cannot be listed: {error.strerror}.", "path") from error
    drives = [
        {"path": drive.mount_point, "kind": drive.kind, "free_bytes": drive.free_bytes} for drive in local_drives()
    ]
    return {
        "path": str(folder),
        "parent": str(folder.parent),
        "folders": names[:MOST_FOLDERS],
        "models": models[:MOST_FOLDERS],
        "drives": drives,
    }


def _holds(test: Callable[[os.DirEntry[str]], bool], entry: os.DirEntry[str]) -> bool:
    """Whether an entry passes; one that may not be looked into, or whose name is no UTF-8, is left out of the list."""
    try:
        entry.name.encode()
        return test(entry)
    except (OSError, UnicodeEncodeError):
        return False


def _is_model(entry: os.DirEntry[str]) -> bool:
    path = Path(entry.path)
    return path.suffix.lower() == ".gguf" or ((path / "config.json").is_file() and any(path.glob("*.safetensors")))
