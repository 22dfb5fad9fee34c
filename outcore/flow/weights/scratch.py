"""Scratch on NVMe: stores of what does not live in RAM during a run, never read by a resume.

One folder below each nvme_path, locked for the engine's life: two runs cannot share it. Stores are made with all their
space reserved, so a full drive is found before training and not in mid-step; what an earlier run that was killed left
behind is removed when the next one starts there, what this one made when it ends, unless the drive hangs: then the
files stay for the next one. Checkpoints hold full copies of their own, so nothing here has to survive a crash.

Whether what scratch files give back is verified, and the words for it: `--nvme_checksums auto|on|off|sampled`."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outcore.common.classes import Closing
from outcore.common.deadline import CLOSE_TIMEOUT_S, Deadline
from outcore.common.errors import EngineError
from outcore.optim import DigestFound, find_digest
from outcore.storage import (
    DRIVE_ACCESS,
    DigestRule,
    DriveAccess,
    StorageEngine,
    StorageError,
    StoreInUse,
    TensorSpec,
    TensorStore,
)
from outcore.storage.store import LOCK_NAME, STORE_NAMES, DirectoryLock, lock_directories, remove_files

Mode = Literal["auto", "on", "off", "sampled"]
MODES: tuple[Mode, ...] = ("auto", "on", "off", "sampled")
ENOUGH_GB_PER_S = 4.0
"""Rate of one core from which everything is verified: two cores then keep up with a drive of 8 GB/s."""
ONE_IN = 8
"""Sampled verification checks one section of 8 MiB out of this many."""


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


logger = logging.getLogger(__name__)

FOLDER = "outcore-scratch"


def _opened(how: DriveAccess) -> StorageEngine:
    """An engine as the settings name it; EngineError, with the reason, for one that this machine cannot run."""
    try:
        return how.open()
    except RuntimeError as error:
        asked = f"transfer_path {how.path}" if how.is_direct else f"storage_engine {how.engine}"
        sure = "--transfer_path staged" if how.is_direct else "--storage_engine posix"
        raise EngineError(f"{asked}: {error}. Leave it out, or {sure}.") from error


class Scratch(Closing):
    """Stores below `paths`, one folder per drive. `engine`: whose threads move the bytes; None opens one as `storage`
    says. `checksums`: whether what comes back is verified (`choose_verification`). `rank`: each of the host's
    `num_ranks` has folders of its own; rank 0 removes what a killed run with more ranks left.

    EngineError when a folder cannot be made, or another run uses it."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        engine: StorageEngine | None = None,
        checksums: Mode = "auto",
        *,
        rank: int = 0,
        num_ranks: int = 1,
        storage: DriveAccess = DRIVE_ACCESS,
    ) -> None:
        name = f"{FOLDER}-{rank}" if rank else FOLDER
        self.folders = [Path(path).expanduser() / name for path in paths]
        self._stores: dict[str, TensorStore] = {}
        self._owns_engine = engine is None
        self._locks: list[DirectoryLock] = []
        try:
            for folder in self.folders:
                folder.mkdir(parents=True, exist_ok=True)
                if folder.is_symlink():
                    raise OSError(errno.ELOOP, "it is a link, and scratch files are not written through one", folder)
            self._locks = lock_directories(self.folders, exclusive=True)
            for folder in self.folders:
                for left in folder.iterdir():
                    _remove_store(left)
            for path in paths if rank == 0 else ():
                _remove_left_by_ranks(Path(path).expanduser(), num_ranks)
        except OSError as error:  # StorageError is one
            for lock in self._locks:
                lock.release()
            if isinstance(error, StoreInUse):
                places = ", ".join(str(folder.parent) for folder in self.folders)
                raise EngineError(
                    f"nvme_offload_path: {places} is in use by another process: a run keeps its parameters or states "
                    "there. Wait until it has ended, or give this run a folder of its own (--nvme_offload_path DIR)"
                ) from error
            raise EngineError(
                f"nvme_offload_path: {self.folders[0]} cannot be used for scratch files: {error}"
            ) from error
        try:
            self.engine: StorageEngine = engine if engine is not None else _opened(storage)
        except EngineError:
            for lock in self._locks:
                lock.release()
            raise
        self.verification = choose_verification(checksums, direct=storage.is_direct)

    def store(self, kind: str, specs: Sequence[TensorSpec]) -> TensorStore:
        """A new store called `kind` for these tensors, zeros at first; one of that name from before is removed.

        EngineError with the bytes that are missing when the drives have no room for it."""
        self.drop(kind)
        folders = [folder / kind for folder in self.folders]
        if link := next((folder for folder in folders if folder.is_symlink()), None):
            raise EngineError(
                f"nvme_offload_path: {link} is a link, and scratch files are not written through one: remove it"
            )
        try:
            made = TensorStore.create(folders, specs, engine=self.engine, digests=self.verification.rule)
        except StorageError as error:
            raise EngineError(
                f"there is no room for the {kind} on NVMe: {error}. Free space there, choose another "
                "nvme_offload_path, or keep more in RAM"
            ) from error
        self._stores[kind] = made
        return made

    def drop(self, kind: str) -> None:
        """Remove a store, if there is one of that name."""
        old = self._stores.pop(kind, None)
        if old is not None:
            old.delete()

    @property
    def unchecked_bytes(self) -> int:
        """Bytes of reads so far that no digest covered."""
        return sum(store.unchecked_bytes for store in self._stores.values())

    @property
    def size_bytes(self) -> int:
        """Bytes reserved on all drives together."""
        return sum(store.total_bytes for store in self._stores.values())

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait for what is under way and remove everything; safe to call twice.

        False when a transfer did not end (which one is logged): its store, the folder and its lock then stay until the
        process ends, what has not begun never does, and the memory that it moves must stay as well."""
        deadline = Deadline(timeout_s)
        for kind, store in list(self._stores.items()):
            try:
                store.delete(deadline.left_s())
                del self._stores[kind]
            except TimeoutError as error:
                deadline.expire()
                logger.error("scratch files stay where they are: %s", error)
            except StorageError as error:
                del self._stores[kind]
                logger.error("scratch files could not be removed: %s", error)
        if self._owns_engine:
            try:
                self.engine.close(cancel=bool(self._stores), stall_s=deadline.left_s())
            except TimeoutError as error:
                logger.error("%s", error)
        if self._stores:
            return False
        locks, self._locks = self._locks, []
        for lock in locks:
            folder = lock.path.parent
            with contextlib.suppress(OSError):
                for left in folder.iterdir():
                    _remove_store(left)
            lock.release(remove=True)
            with contextlib.suppress(OSError):  # not empty: something of somebody else's
                folder.rmdir()
        return True


def _remove_left_by_ranks(path: Path, first: int) -> None:
    """Remove the scratch of ranks from `first` on that nobody uses any more."""
    for folder in path.glob(f"{FOLDER}-*"):
        number = folder.name.removeprefix(f"{FOLDER}-")
        if folder.is_symlink() or not number.isdigit() or int(number) < first:
            continue
        try:
            (lock,) = lock_directories([folder], exclusive=True)
        except StoreInUse:
            continue  # a run of another number of ranks is at work beside this one
        for left in folder.iterdir():
            _remove_store(left)
        lock.release(remove=True)
        with contextlib.suppress(OSError):  # not empty: something of somebody else's
            folder.rmdir()


def _remove_store(folder: Path) -> None:
    """Remove a folder that holds a store's files and nothing else; one that holds more is somebody else's, and a link
    is not followed."""
    if folder.is_symlink() or not folder.is_dir():
        return
    if {path.name for path in folder.iterdir()} <= {*STORE_NAMES, LOCK_NAME}:
        remove_files([folder])
        (folder / LOCK_NAME).unlink(missing_ok=True)
        folder.rmdir()
