"""Paths as people write them: spaces, ~, Windows drives and UNC shares on Linux and WSL2, or a hub id after all.

On WSL2 `C:\\data\\x.jsonl` is translated to /mnt/c/data/x.jsonl and `\\\\wsl$\\Ubuntu\\home\\me` to /home/me. Anything
else spelled the Windows way is refused with the spelling that works. Nothing is opened here."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from outcore.data.basis import DataError, nearest

DATA_EXTENSIONS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
COMPRESSED_EXTENSIONS = (".gz", ".zst")
LOCAL_ALTERNATIVES = (
    "a local file (.txt, .jsonl, .json, .csv or .parquet), a folder of text files, or the built-in text "
    "(--dataset embedded)"
)

_DRIVE = re.compile(r"^([A-Za-z]):[\\/](.*)$", re.DOTALL)
_UNC = re.compile(r"^(?:\\\\|//)([^\\/]+)[\\/]+([^\\/]+)[\\/]*(.*)$", re.DOTALL)
_WSL_HOSTS = ("wsl$", "wsl.localhost")
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


def running_on_wsl() -> bool:
    """WSL kernels carry "microsoft" in their release name."""
    return "microsoft" in platform.uname().release.lower()


def is_windows_spelling(text: str) -> bool:
    """True for `C:\\x`, `C:/x` and `\\\\server\\share` (a Linux path may begin with //, so only backslashes count)."""
    return bool(_DRIVE.match(text)) or text.startswith("\\\\")


def translate(text: str, *, on_wsl: bool | None = None, mount_root: Path = Path("/mnt")) -> Path:
    """The local path that `text` means.

    Raises DataError for a Windows or UNC spelling that has no meaning on this system, saying which one has."""
    if os.name == "nt":
        return Path(text).expanduser()
    on_wsl = running_on_wsl() if on_wsl is None else on_wsl
    if drive := _DRIVE.match(text):
        letter, rest = drive.group(1).lower(), drive.group(2).replace("\\", "/")
        translated = mount_root / letter / rest
        if not on_wsl:
            raise DataError(
                f"'{text}' is a Windows path, but this is Linux: give the path where that drive is mounted here "
                f"(under WSL2 it would be {translated}), or copy the data over"
            )
        if not (mount_root / letter).is_dir():
            raise DataError(
                f"'{text}' means {translated} under WSL2, but drive {letter.upper()}: is not mounted at "
                f"{mount_root / letter}. Mount it: sudo mkdir -p {mount_root / letter} && "
                f"sudo mount -t drvfs {letter.upper()}: {mount_root / letter}"
            )
        return translated
    if text.startswith("\\\\") and (unc := _UNC.match(text)):
        host, share, rest = unc.group(1), unc.group(2), unc.group(3).replace("\\", "/")
        if host.lower() in _WSL_HOSTS:
            if on_wsl:
                return Path("/") / rest
            raise DataError(f"'{text}' is how Windows sees a WSL file; here it would be /{rest}")
        mounted = mount_root / share
        how = (
            f"sudo mkdir -p {mounted} && sudo mount -t drvfs '\\\\{host}\\{share}' {mounted}"
            if on_wsl
            else f"sudo mkdir -p {mounted} && sudo mount -t cifs //{host}/{share} {mounted}"
        )
        raise DataError(
            f"'{text}' is a Windows network share, which Linux programs cannot open by that name. Mount it ({how}) "
            f"and give {mounted / rest}"
        )
    return Path(text).expanduser()


def looks_like_hub_id(text: str) -> bool:
    """owner/name or name, without an extension that only a file would have and without ./, ~ or further slashes."""
    suffixes = (*DATA_EXTENSIONS, *COMPRESSED_EXTENSIONS, ".txt", ".text", ".md")
    return bool(_HUB_ID.match(text)) and not text.lower().endswith(suffixes)


def missing_file_error(text: str, path: Path) -> DataError:
    """The error for a local path that is not there: the nearest name in its folder, or the deepest folder that
    exists."""
    parent = path.parent
    if parent.is_dir():
        try:
            names = [entry.name for entry in os.scandir(parent)]
        except OSError:
            names = []
        return DataError(f"no such file or folder: {text!r} (looked at {path.absolute()}){nearest(path.name, names)}")
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    return DataError(
        f"no such file or folder: {text!r}: of its path only {parent.absolute()} exists. Is the drive mounted?"
    )
