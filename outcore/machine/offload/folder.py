"""Is this folder a place to offload to?

`validate_nvme_path` really writes, reads back and removes a test file, checks free space with a reserve and tells what
kind of drive it is. Nothing is left on the drive."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath

from outcore.common.quantities import GB, MIB, format_gb
from outcore.common.words import own_command
from outcore.machine.drives import drive_of
from outcore.machine.mounts import read_mounts
from outcore.machine.records import Drive

FREE_RESERVE = 0.20
"""Share of the free space that stays free: drives slow down and wear out faster when they are full."""
SPACE_SAFETY = 1.5
"""Free space that must be there, over the bytes that a run puts on the drive."""
MIN_GB_PER_S = 2.0
"""Rate of reads and of writes below which a drive dominates every step (the product's threshold)."""
WARNINGS = {
    "hdd": "Warning: this is a rotating disk; offloading to it takes minutes per step. Use an NVMe drive or RAM.",
    "ssd": "Warning: SATA and USB SSDs reach about 0.5 GB/s; expect steps several times longer than on NVMe.",
    "network": "Warning: this is a network file system; every step would cross the network. Use a local NVMe drive.",
    "tmpfs": "Warning: this is a RAM disk; offloading to it saves no RAM and is lost at power-off. Use "
    "--offload_optimizer cpu.",
}
"""Kind of drive -> what is said of it."""
UNSEEN = f" Whether an NVMe drive is behind it cannot be seen; {own_command('probe')} measures its speed."
TEST_FILE_BYTES = 4 * MIB
_WINDOWS_PATH = re.compile(r"^[A-Za-z]:[\\/]|^\\\\|^//[^/]")
_TEST_PREFIX = ".outcore-write-test-"


class NvmePathError(ValueError):
    """The text is not a path this machine can use."""


def resolve_nvme_path(path: str | os.PathLike[str]) -> Path:
    """The absolute folder that `path` means (`~` expanded, relative to the current folder).

    Raises:
        NvmePathError: empty text, a NUL byte, or a Windows spelling on another system; but a UNC path means the folder
            where this system has that share mounted, if it has."""
    text = os.fspath(path)
    if not text or not text.strip():
        raise NvmePathError("The NVMe path is empty. Give a folder on an NVMe drive, for instance /mnt/nvme/outcore.")
    if "\0" in text:
        raise NvmePathError(f"The NVMe path {text!r} contains a NUL character, which no file system takes.")
    if os.name != "nt" and _WINDOWS_PATH.match(text):
        tail = re.sub(r"^[A-Za-z]:[\\/]", "", text).replace("\\", "/")
        if (mounted := _mounted_share(tail)) is not None:
            return mounted
        where = f"/mnt/{text[0].lower()}/{tail}" if text[1:2] == ":" else "the folder where that share is mounted"
        raise NvmePathError(
            f"{text!r} is a Windows spelling, but this is {os.uname().sysname}. Under WSL2 the same folder is {where}; "
            "a folder of the Linux file system itself (for instance ~/outcore-nvme) is several times faster."
        )
    return Path(os.path.abspath(os.path.expanduser(text)))


def resolve_nvme_paths(text: str | os.PathLike[str]) -> tuple[Path, ...]:
    """The folders of 'A,B', one for each drive; a folder that exists by that name, comma and all, is one.

    NvmePathError as `resolve_nvme_path`, and for the same folder twice."""
    whole = os.fspath(text)
    parts = [whole] if "," not in whole or os.path.isdir(os.path.expanduser(whole)) else whole.split(",")
    folders = tuple(resolve_nvme_path(part.strip()) for part in parts)
    if len(set(folders)) < len(folders):
        raise NvmePathError(f"{whole!r} names a folder twice: give one folder of each drive, with commas between.")
    return folders


def _mounted_share(text: str, root: Path = Path("/")) -> Path | None:
    """'//server/share/x' -> '/mnt/nas/x' where the mount table has that share; names of hosts know no case."""
    for mount in reversed(read_mounts(root)):  # the latest mount is the one that is seen
        source = mount.source.replace("\\", "/").rstrip("/")
        below = text[len(source) :]
        if source.startswith("//") and text.lower().startswith(source.lower()) and below[:1] in ("", "/"):
            return Path(os.path.abspath(mount.mount_point + below))
    return None


def validate_nvme_path(path: str | os.PathLike[str], required_space_gb: float) -> tuple[bool, str]:
    """Can `path` hold `required_space_gb` GB (10**9 bytes) of offloaded states?

    Creates the folder when it does not exist (and removes it again when it turns out unusable), writes a test file,
    reads it back and removes it, and keeps 20 % of the free space in reserve.

    Returns:
        (ok, message): '' when all is well. When not ok the message says why and what to do; when ok it is a warning
        (a slow or volatile kind of drive). `describe_folder` says what is there.
    Raises:
        ValueError: `required_space_gb` is negative or not a number."""
    if isinstance(required_space_gb, bool) or not isinstance(required_space_gb, (int, float)):
        raise ValueError(f"required_space_gb must be a number of GB, got {required_space_gb!r}.")
    if not math.isfinite(required_space_gb) or required_space_gb < 0:
        raise ValueError(f"required_space_gb must be 0 or more, got {required_space_gb!r}.")
    try:
        folder = resolve_nvme_path(path)
    except NvmePathError as error:
        return False, str(error)
    created: list[Path] = []
    try:
        created = _make_folder(folder)
        write_and_read_back(folder)
        free_bytes = shutil.disk_usage(folder).free
    except (OSError, ValueError) as error:
        _remove_folders(created)
        return False, _explain(folder, error)
    usable_bytes = free_bytes * (1 - FREE_RESERVE)
    required_bytes = required_space_gb * GB
    if usable_bytes < required_bytes:
        what = describe_folder(folder)
        _remove_folders(created)
        return False, (
            f"{what} It has {format_gb(free_bytes)} free; {format_gb(required_bytes)} are needed and "
            f"{FREE_RESERVE:.0%} of the free space stay in reserve, so "
            f"{format_gb(required_bytes / (1 - FREE_RESERVE))} "
            "must be free. Free some space, choose another drive with --nvme_offload_path, or offload less."
        )
    warnings = (WARNINGS.get(drive_of(folder).kind, ""), system_drive_warning(folder))
    return True, " ".join(filter(None, warnings))


def system_drive_warning(folder: str | os.PathLike[str], system_drive: str | None = None) -> str:
    """Warning when a Windows folder lies on the drive that Windows runs from (None: SYSTEMDRIVE, which only Windows
    sets); '' anywhere else."""
    system = system_drive or os.environ.get("SYSTEMDRIVE", "")
    if not system or PureWindowsPath(folder).drive.lower() != system.lower():
        return ""
    return (
        f"Warning: {system.upper()} is the system drive: Windows writes there too and stops when it is full. Use "
        "another with --nvme_offload_path."
    )


def describe_folder(path: str | os.PathLike[str]) -> str:
    """Words for what lies under a folder, for example '/mnt/a: NVMe drive /dev/nvme0n1, ext4, 900 GB free.'"""
    drive: Drive = drive_of(resolve_nvme_path(path))
    kind = {
        "nvme": "NVMe drive",
        "ssd": "SATA or USB SSD",
        "hdd": "rotating hard disk",
        "network": "network file system",
        "tmpfs": "RAM disk (tmpfs)",
        "virtual": "virtual disk",
    }.get(drive.kind, "drive of unknown kind")
    what = " ".join(part for part in (kind, drive.device or "") if part)
    if drive.filesystem:
        what += f", {drive.filesystem}"
    if drive.free_bytes is not None:
        what += f", {format_gb(drive.free_bytes)} free"
    return f"{path}: {what}.{UNSEEN if drive.kind in ('virtual', 'unknown') else ''}"


def slow_drive_warning(path: str | os.PathLike[str], read_gb_per_s: float, write_gb_per_s: float) -> str:
    """Warning in words when a drive reads or writes below `MIN_GB_PER_S`; '' when it reaches both."""
    rates = {"reads": read_gb_per_s, "writes": write_gb_per_s}
    slow = " and ".join(f"{does} {rate:.1f} GB/s" for does, rate in rates.items() if rate < MIN_GB_PER_S)
    if not slow:
        return ""
    return (
        f"Warning: {path} {slow}, below {MIN_GB_PER_S:g} GB/s: steps that offload to this drive wait for it most of "
        "the time. Use a PCIe 4.0 NVMe drive, or keep more in RAM."
    )


def _make_folder(folder: Path) -> list[Path]:
    """Create the folder; the parts that were created, innermost first."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is a file, not a folder", str(folder))
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_folders(created: list[Path]) -> None:
    for part in created:
        with contextlib.suppress(OSError):
            part.rmdir()


@contextlib.contextmanager
def temporary_file(folder: Path) -> Iterator[Path]:
    """An empty file in `folder` that is removed again whatever happens, a kill included where open files have a path of
    their own (Linux): there it has lost its name before anything is written to it."""
    fd, name = tempfile.mkstemp(prefix=_TEST_PREFIX, dir=folder)
    opened = Path(f"/proc/self/fd/{fd}")
    try:
        if opened.exists():
            os.unlink(name)
        yield opened if opened.exists() else Path(name)
    finally:
        os.close(fd)
        Path(name).unlink(missing_ok=True)


def write_and_read_back(folder: Path) -> None:
    """Write a few MiB into the folder, read them back, remove them. OSError when the drive refuses or changes them."""
    data = secrets.token_bytes(TEST_FILE_BYTES)
    with temporary_file(folder) as file:
        with open(file, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        if file.read_bytes() != data:
            raise OSError(errno.EIO, "a test file read back differently from what was written", str(folder))


def _explain(folder: Path, error: Exception) -> str:
    code = getattr(error, "errno", None)
    advice = {
        errno.EACCES: f"You may not write there. Choose a folder you own, or run: sudo chown $USER {str(folder)!r}",
        errno.EPERM: "You may not write there. Choose a folder you own.",
        errno.EROFS: "The file system is mounted read-only. Remount it writable or choose another drive.",
        errno.ENOSPC: "The drive is full. Free some space or choose another drive.",
        errno.EDQUOT: "Your quota on this drive is used up. Free some space or choose another drive.",
        errno.ENOTDIR: "It, or a part of it, is a file. Give the path of a folder.",
        errno.EEXIST: "It, or a part of it, is a file. Give the path of a folder.",
        errno.ENAMETOOLONG: "The name is too long for the file system. Choose a shorter path.",
        errno.EIO: "The drive reports errors. Check it (dmesg, smartctl) before you trust it with anything.",
    }.get(code or 0, "Choose another folder with --nvme_offload_path.")
    reason = getattr(error, "strerror", None) or str(error)
    return f"{folder} cannot be used for offloading: {reason}. {advice}"
