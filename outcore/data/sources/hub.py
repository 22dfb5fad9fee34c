"""Data sets of the hub, and folders written by `save_to_disk`, through the `datasets` library.

Downloaded once into the library's own cache by default; with streaming (or by itself when the data set is larger than a
quarter of the free RAM) read over the network while it is tokenised. Everything that can go wrong on the way there
becomes one error that names what works without a network."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from outcore.data.basis import DataError, nearest, shorten
from outcore.data.sources.paths import LOCAL_ALTERNATIVES
from outcore.data.sources.records import BadRow, Record, Where, without_filled_nulls

STREAM_ABOVE_SHARE_OF_RAM = 0.25
STREAM_LOOK_ROWS = 16
"""Rows of a stream that tell its shape: each is read over the network."""


class HubSource:
    """Rows of one split of a hub data set. The data set is opened on construction, so a wrong name fails at once."""

    is_text = False

    def __init__(self, dataset_id: str, config: str | None, split: str, streaming: str) -> None:
        self.dataset_id, self.config, self.split = dataset_id, config, split
        self.name = f"{dataset_id}{f' ({config})' if config else ''} [{split}]"
        self.revision: str | None = None
        self._say: list[str] = []
        try:
            self._open(streaming)
        except DataError:
            raise
        except Exception as error:
            raise _explain(error, self.name, dataset_id) from error

    def _open(self, streaming: str) -> None:
        import datasets

        builder = datasets.load_dataset_builder(self.dataset_id, self.config)
        self.revision = str(builder.hash) if builder.hash else None
        splits = list(builder.info.splits or ())
        if splits and self.split.split("[")[0] not in splits:
            raise DataError(
                f"hub data set {self.dataset_id!r} has no split {self.split!r}{nearest(self.split, splits)}; "
                f"it has: {', '.join(splits)}"
            )
        self.streaming = streaming == "on" or (
            streaming == "auto" and _larger_than_ram_share(builder.info.dataset_size)
        )
        if self.streaming and streaming == "auto":
            self._say.append(
                f"{self.name} is larger than a quarter of the free RAM: read as a stream, not downloaded first"
            )
        self._dataset: Any = datasets.load_dataset(
            self.dataset_id, self.config, split=self.split, streaming=self.streaming
        )

    def identity(self) -> dict[str, Any]:
        fingerprint = self.revision if self.streaming else getattr(self._dataset, "_fingerprint", self.revision)
        return {
            "kind": "hub",
            "id": self.dataset_id,
            "config": self.config,
            "split": self.split,
            "fingerprint": fingerprint,
        }

    def records(self) -> Iterator[Record | BadRow]:
        try:
            for number, row in enumerate(self._dataset, start=1):
                yield Record(Where(self.name, "row", number), without_filled_nulls(row))
        except (OSError, RuntimeError) as error:
            raise _explain(error, self.name, self.dataset_id) from error

    def again(self, place: str) -> tuple[Iterator[Record | BadRow], bool]:
        return islice(self.records(), STREAM_LOOK_ROWS if self.streaming else None), True

    def notes(self) -> list[str]:
        return list(self._say)


class SavedDatasetSource:
    """A folder written by `Dataset.save_to_disk` (arrow files, memory-mapped)."""

    is_text = False

    def __init__(self, path: Path, split: str) -> None:
        import datasets

        self.name = str(path)
        try:
            loaded = datasets.load_from_disk(str(path))
        except Exception as error:
            raise DataError(f"{path}: the saved data set cannot be opened: {shorten(str(error))}") from error
        if isinstance(loaded, datasets.DatasetDict):
            if split not in loaded:
                names = [str(name) for name in loaded]
                raise DataError(f"{path} has no split {split!r}{nearest(split, names)}; it has: {', '.join(names)}")
            loaded = loaded[split]
        self._dataset: Any = loaded

    def identity(self) -> dict[str, Any]:
        return {"kind": "saved", "fingerprint": self._dataset._fingerprint, "rows": len(self._dataset)}

    def records(self) -> Iterator[Record | BadRow]:
        for number, row in enumerate(self._dataset, start=1):
            yield Record(Where(self.name, "row", number), without_filled_nulls(row))

    def again(self, place: str) -> tuple[Iterator[Record | BadRow], bool]:
        return self.records(), True

    def notes(self) -> list[str]:
        return []


def _larger_than_ram_share(size_bytes: int | None) -> bool:
    import psutil

    return bool(size_bytes) and size_bytes > STREAM_ABOVE_SHARE_OF_RAM * psutil.virtual_memory().available


def _explain(error: BaseException, name: str, dataset_id: str) -> DataError:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    what = shorten(str(error), 200)
    if "DatasetNotFoundError" in kinds or "RepositoryNotFoundError" in kinds:
        return DataError(
            f"{dataset_id!r} is neither a local file or folder nor a data set that the hub shows (misspelt, private, "
            f"or gated: then log in with `hf auth login`): {what}. What works without the hub: {LOCAL_ALTERNATIVES}"
        )
    if kinds & {"ConnectionError", "ConnectError", "OfflineModeIsEnabled", "Timeout", "TimeoutException", "gaierror"}:
        return DataError(
            f"the hub cannot be reached for data set {name!r} ({what}). Check the network or proxy and try again, or "
            f"use what needs no network: {LOCAL_ALTERNATIVES}"
        )
    if "config" in what.lower() and isinstance(error, ValueError):
        return DataError(f"hub data set {dataset_id!r}: {what}. Choose one with --dataset_config")
    return DataError(
        f"hub data set {name!r} cannot be loaded: {type(error).__name__}: {what}. What works without the hub: "
        f"{LOCAL_ALTERNATIVES}"
    )
