"""Files and folders that survive a power cut: synced before they take their name, their folder after it.

A rename is atomic but neither durable nor ordered after the bytes of what it renames: without a sync a crash can leave
the new name with an empty file. So whatever is published here is synced with every folder that holds it, renamed, and
the folder above synced last. Errors leave as they come, with their path; `common.system_errors` explains them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from outcore.common import os_layer


def fsync_file(path: Path) -> None:
    """Bring a file's bytes and size to the drive. Raises OSError."""
    _fsync(path, os_layer.sync_flags())


def fsync_folder(path: Path) -> None:
    """Bring a folder's names to the drive, so that a rename or a new file in it survives a power cut."""
    if not os_layer.IS_WINDOWS:  # which opens no folders
        _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    except OSError as error:  # fsync tells no path
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Bring every file and folder below `folder` to the drive, and `folder` itself. Links are not followed."""
    for where, _, names in os.walk(folder, topdown=False, onerror=_raise):
        for name in names:
            path = Path(where, name)
            if not path.is_symlink():
                fsync_file(path)
        fsync_folder(Path(where))


def _raise(error: OSError) -> None:
    raise error


def nearest_existing(path: Path | str) -> Path:
    """The path, or the nearest above it that exists: what lies there decides for a folder that is not made yet."""
    current = Path(path).absolute()
    while not current.exists() and current != current.parent:
        current = current.parent
    return current


def built_folder(prefix: str | Path | None = None) -> Path:
    """Folder of what this machine built for itself and would build again: that of the environment `prefix` (default:
    this interpreter's), or ~/.cache/outcore where it cannot be written, as a system interpreter's."""
    root = Path(prefix if prefix is not None else sys.prefix)
    return Path.home() / ".cache" / "outcore" if root.exists() and not os.access(root, os.W_OK) else root


def user_folder() -> Path:
    """Folder of what belongs to a user's machine and not to a folder of work, by the system's custom."""
    custom, usual = ("LOCALAPPDATA", "~/AppData/Local") if os_layer.IS_WINDOWS else ("XDG_DATA_HOME", "~/.local/share")
    return Path(os.environ.get(custom) or os.path.expanduser(usual)) / "outcore"


def newest(path: Path) -> Path:
    """The path as it is; of one in `user_folder` that of the same name in logs/ here where that is newer or alone: it
    lay there before."""
    former = Path("logs") / path.name
    if path.parent != user_folder() or not former.is_file():
        return path
    return path if path.is_file() and path.stat().st_mtime >= former.stat().st_mtime else former


def make_folder(path: Path) -> None:
    """Create a folder and those above it that are missing; each new name is brought to the drive. Raises OSError."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
    # Also of one that is there: who made it may have been killed, or refused, before its name was on the drive.
    with contextlib.suppress(PermissionError):  # a folder in which one may write and not read
        fsync_folder(path.parent)


def opener_for_us(path: str, flags: int) -> int:
    """`opener` of `open`: the file is for this user alone, also one that was there."""
    descriptor = os.open(path, flags, 0o600)
    os.chmod(path, 0o600)
    return descriptor


@contextlib.contextmanager
def replacing(path: Path, *, for_us: bool = False) -> Iterator[BinaryIO]:
    """Replace a file: after a crash at any moment it holds the old bytes or the new ones. `for_us`: others on this
    machine may not read it. Raises OSError."""
    aside = path.with_name(f".{path.name}.part")
    try:
        with open(aside, "wb", opener=opener_for_us if for_us else None) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os_layer.replace_file(aside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a drive that fails may refuse this as well
            aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    fsync_folder(path.parent)


def write_atomic(path: Path, data: str | bytes, *, for_us: bool = False) -> None:
    """Replace a file by these bytes, `replacing` it. Of a file's name that is no UTF-8 text gets `\\udcXX`, as JSON
    spells it. Raises OSError."""
    with replacing(path, for_us=for_us) as file:
        file.write(data.encode(errors="backslashreplace") if isinstance(data, str) else data)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of a value as JSON."""
    write_atomic(path, json.dumps(value, indent=1))


def read_object(path: Path) -> dict[str, Any]:
    """A small JSON file's object; {} for one that is missing, damaged or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def publish_folder(aside: Path, final: Path) -> None:
    """Give a finished folder its name, in place of an older one; every byte is on the drive before.

    A crash between the two renames leaves the older folder as `.NAME.old`, which `finish_publishing` brings back."""
    fsync_tree(aside)
    old = _old_of(final)
    if final.exists():
        remove_tree(old)
        os.rename(final, old)
    os.rename(aside, final)
    fsync_folder(final.parent)
    remove_tree(old)


def finish_publishing(final: Path) -> None:
    """Bring an older folder back where a crash came between the two renames of `publish_folder`."""
    old = _old_of(final)
    if old.is_dir():
        remove_tree(old) if final.exists() else os.rename(old, final)


def _old_of(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")


def stats_below(folder: Path) -> Iterator[os.stat_result]:
    """Stat of every file below a folder that others change: what goes away meanwhile is left out."""
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.stat(os.path.join(where, name))


def remove_tree(path: Path) -> None:
    """Remove a folder and all below it, if it is there; a link is removed and not followed. Raises OSError."""
    try:
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    except OSError as error:  # which names what it found below, without the folders above
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_utf8(path: str, what: str) -> None:
    """Raise ValueError for a path of bytes that are no UTF-8. `what`: how the message calls it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{what}: {path!r} is no UTF-8, and libraries that write tokenizers and weights open no such path. Rename "
            "the folder."
        ) from None


def inside(folder: Path, name: str, *, follow_links: bool = False) -> Path:
    """The path of `name`, which a listing read from a file gives, below `folder`. ValueError where it leads out of it:
    absolute, through `..`, or, unless `follow_links`, through a link."""
    relative = Path(name)
    if not name or "\0" in name or relative.is_absolute() or ".." in relative.parts:
        raise ValueError(f"{name!r} leads out of {folder}")
    path = folder / relative
    if not follow_links and not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} leads out of {folder} through a link")
    return path


_MAY_HALVE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]|\0")
"""Bytes without which JSON holds no half of a letter: an escape of one, its own bytes, or another encoding."""


def json_of(given: str | bytes) -> Any:
    """Value of a line or a body of JSON. ValueError in words for what is no JSON, or holds text that no tokenizer
    takes, or a number that no 64-bit float is: NaN, 1e400, a whole number as long."""
    try:
        found = json.loads(given, parse_int=_number, parse_float=_number, parse_constant=_number)
        if isinstance(given, str) or _MAY_HALVE.search(given):
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeError:
        raise ValueError("it holds bytes that are no UTF-8, or half of a letter (a lone surrogate)") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def _number(text: str) -> float:
    if not math.isfinite(found := float(text)):
        raise ValueError(f"it holds {text[:20]}, which is no number here")
    return int(text) if text.lstrip("-").isdigit() else found
