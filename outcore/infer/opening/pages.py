"""Pages of a model that is being opened: as many as its placement has room for, those that wait on a drive, and the
names of the bytes that they were computed with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from outcore.common.quantities import GIB, format_gib
from outcore.infer.cache import (
    ROOT,
    CacheSettings,
    GroupPlan,
    KeptPrefixes,
    KeptStates,
    KvCache,
    KvMemory,
    PrefixesDamaged,
    root_of,
)
from outcore.infer.opening.model import MANIFEST, FoundModel
from outcore.infer.opening.place import PlacedModel
from outcore.infer.passes import fresh_layers

PREFIX_GIB = 8.0
"""GiB of the drive for beginnings of prompts, unless told."""


Kept = tuple[KeptPrefixes | None, KeptStates | None]
"""Stores on a drive: of prompts' pages, and of the states at their ends; None: not kept there."""


def cache_of(placed: PlacedModel, memory: KvMemory, kept: Kept) -> KvCache:
    """Pages for as many tokens as the placement's bytes hold, the same for every group without a window; copies of
    states as many as the needs count. `kept`: where shared beginnings go that memory forgets."""
    settings, placement, needs, way = placed.settings, placed.placement, placed.needs, placed.way
    size, chunk = settings.page_tokens, placement.chunk_tokens
    sequences = placement.max_sequences

    def pages(tokens: int, window: int | None) -> int:
        kept = tokens if window is None else min(tokens, sequences * (window + chunk + 2 * size))
        return max(1, -(-kept // size))

    def total_bytes(tokens: int) -> int:
        return sum(pages(tokens, window) * size * of_token for window, of_token in needs.kv.bytes_by_window)

    low, high = 1, max(2, placement.kv_bytes // max(1, min(b for _, b in needs.kv.bytes_by_window)))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if total_bytes(middle * size) <= placement.kv_bytes else (low, middle - 1)
    most = sequences * (placement.context_tokens + size)
    groups = tuple(GroupPlan(window, pages(min(low * size, most), window)) for window, _ in needs.kv.bytes_by_window)
    # Where results may not depend on company, no chunk may end where another prompt happened to leave.
    shares = settings.share_prefixes and (way == "paged" or (way == "states" and needs.num_snapshots > 0))
    most = needs.num_snapshots if way == "states" else None
    roots = (ROOT, *(root_of(_of_place(Path(folder), with_times=True)) for folder in placed.found.adapters))
    return KvCache(CacheSettings(groups, size, placed.dtype, settings.kv_format, shares, most, roots), memory, *kept)


def kept_of(placed: PlacedModel, progress: Callable[[str], None]) -> Kept:
    """Beginnings of prompts on the drive; None, said aloud, where those kept before cannot be read: a start that nobody
    watches does not fail by what is only computed again. ValueError for another fault of the folder, or where nothing
    names the weights."""
    found, settings, shapes, dtype = placed.found, placed.settings, placed.kept.shapes, placed.dtype
    if settings.prefix_path is None:
        return None, None
    if placed.way != "paged" and not placed.needs.num_snapshots:
        why = "this model reads a prompt in one piece"
        if placed.way == "states":
            why = "states of this model are not shared" if settings.deterministic else "RAM has no room for its states"
        raise ValueError(f"prefix_path: {why}, so no prompt begins where another one did. Leave it out.")
    identity = {
        "weights": bytes_of(found),
        "config": found.loaded.config.to_json_string(use_diff=False),
        "dtype": str(dtype),
        "kv_format": settings.kv_format,
        "page_tokens": settings.page_tokens,
        "windows": [str(window) for window in shapes],
        "deterministic": settings.deterministic,
        "device": placed.device.type,
    }
    short = found.loaded.facts.short_positions
    if short is not None:  # keys are turned by one of two sets of factors (`rotary`)
        identity["rotary_factors"] = "long" if placed.context > short else "short"
    if found.loaded.quantize is not None:  # packed as they are loaded: the files are those of the 16-bit model
        identity["quantize"] = found.loaded.quantize
    page_bytes = settings.page_tokens * sum(
        shape.token_bytes(dtype, settings.kv_format) for of_layers in shapes.values() for shape in of_layers.values()
    )
    budget, has_states = int((settings.prefix_gib or PREFIX_GIB) * GIB), placed.way == "states"
    where = settings.prefix_path
    with ExitStack() as undo:
        try:
            pages = KeptPrefixes(where, budget >> has_states, identity, settings.page_tokens, page_bytes)
            undo.callback(pages.close)
            progress(f"beginnings of prompts: {len(pages):,} pages in {pages.folder}, {_reserved(pages)}")
            if not has_states:
                undo.pop_all()
                return pages, None
            of_states = placed.kept.state_bytes, partial(fresh_layers, found.loaded.config)
            states = KeptStates(where, budget - pages.size_bytes, identity, settings.page_tokens, *of_states)
            undo.pop_all()
        except PrefixesDamaged as error:
            progress(f"warning: {error} This run keeps no beginnings of prompts, and finds none.")
            return None, None
    kept = states.records
    progress(f"recurrent states at their ends: {len(kept):,} in {kept.folder}, {_reserved(kept)}")
    return pages, states


def _reserved(kept: KeptPrefixes) -> str:
    return f"{format_gib(kept.size_bytes)} reserved"


HASHED_BYTES = 1 << 20
"""Bytes hashed of each file of weights, from its beginning (the names and shapes of its tensors, and values)."""
WEIGHTS = ("config.json", "adapter_config.json", "*.safetensors", "*.gguf")


def model_hash(folders: Sequence[str]) -> str:
    """Name of a model's bytes, and of its adapter's: config, and size and beginning of each file of weights; of a
    checkpoint its manifest, which names every file with its checksum. '' where they are not on this machine."""
    parts = [_of_place(Path(folder), with_times=False) for folder in folders]
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return parts[0] if parts else ""
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()


def bytes_of(found: FoundModel) -> list[str]:
    """Name as `model_hash` does, one name each, and with the times of files: weights that were overwritten in place
    have another name. A hub id is named by its commit. ValueError where nothing names them."""
    names = []
    for folder in found.folders:
        name = _of_place(Path(folder), with_times=True) or str(getattr(found.loaded.config, "_commit_hash", None) or "")
        if not name:
            raise ValueError(f"prefix_path: nothing tells which weights {folder} are, so nothing can be kept for them.")
        names.append(name)
    return names


def _of_place(place: Path, *, with_times: bool) -> str:
    manifest = place / MANIFEST
    if manifest.is_file():
        return hashlib.blake2b(manifest.read_bytes(), digest_size=16).hexdigest()
    files = [place] if place.is_file() else sorted({path for kind in WEIGHTS for path in place.glob(kind)})
    if not files:
        return ""
    found = hashlib.blake2b(digest_size=16)
    for path in files:
        status = path.stat()
        found.update(f"{path.name} {status.st_size}{f' {status.st_mtime_ns}' if with_times else ''}".encode())
        with open(path, "rb") as file:
            found.update(file.read(HASHED_BYTES))
    return found.hexdigest()
