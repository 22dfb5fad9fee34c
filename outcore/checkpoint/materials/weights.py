"""Content of a base's weights in one hash: of samples of each tensor (a second for hundreds of GB), or of every byte.

A base that is stored packed is hashed as it is stored. How a base is cut into files changes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from outcore.common import file_errors
from outcore.formats.checkpoint import safetensors_places
from outcore.model.facts import gguf_header
from outcore.model.weights import shard_files

PIECE_BYTES = 4096
PIECES = 8
"""Pieces of a tensor that is sampled, spread evenly over it."""
MOST_PIECES = 8192
"""Pieces of a model, whose places on a hard disk are milliseconds apart; of tens of thousands of tensors every n-th."""
READ_BYTES = 8 << 20


def weights_hashes(name: str, *, whole: bool) -> tuple[str, str]:
    """(hash of samples, hash of every byte where `whole` asks for it, else '') of the model called `name`: folder, GGUF
    file or hub id. RuntimeError or FileError when it cannot be read."""
    places = list(_places(name))
    with file_errors("reading the base's weights", name):
        return _hash(places, whole=False), _hash(places, whole=True) if whole else ""


class _Place(NamedTuple):
    what: str
    """Name, type and shape of a tensor."""
    file: Path
    offset: int
    n_bytes: int


def _places(name: str) -> Iterator[_Place]:
    files = shard_files(str(Path(name).expanduser()) if Path(name).expanduser().exists() else name)
    if files[0].suffix.lower() == ".gguf":
        tensors = gguf_header(files[0]).tensors
        for key, (kind, shape, n_bytes, offset) in sorted(tensors.items()):
            yield _Place(f"{key} {kind} {shape}", files[0], offset, n_bytes)
        return
    for key, place in sorted(safetensors_places(files).items()):
        yield _Place(f"{key} {place.dtype} {place.shape}", place.file, place.offset, place.size_bytes)


def _hash(places: list[_Place], *, whole: bool) -> str:
    found = hashlib.blake2b(digest_size=16)
    opened: dict[Path, Any] = {}
    pieces = min(PIECES, max(1, MOST_PIECES // max(1, len(places))))
    every = -(-len(places) // MOST_PIECES)
    try:
        for number, place in enumerate(places):
            found.update(f"{place.what}\0".encode())
            if number % every and not whole:
                continue
            if place.file not in opened:
                opened[place.file] = open(place.file, "rb", buffering=0)  # noqa: SIM115
            file = opened[place.file]
            for start, end in _pieces(place.n_bytes, place.n_bytes if whole else pieces):
                file.seek(place.offset + start)
                found.update(file.read(end - start))
    finally:
        for file in opened.values():
            file.close()
    return found.hexdigest()


def _pieces(n_bytes: int, pieces: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the stretches to sample in a tensor; the whole of a tensor that is no larger than these."""
    if n_bytes <= pieces * PIECE_BYTES:
        yield from ((start, min(start + READ_BYTES, n_bytes)) for start in range(0, n_bytes, READ_BYTES))
        return
    for number in range(pieces):
        start = (n_bytes - PIECE_BYTES) * (number + 1) // (pieces + 1)
        yield start, start + PIECE_BYTES
