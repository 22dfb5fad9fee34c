"""Holding of units on the device, and the choice of those in tiles, from sizes alone: one rule for engine and planner.

Whole, the device holds buffers for layers and for embedding or head, the sums of their gradients, buffers in which
these leave, and at one time a unit's gradient as autograd makes it with that unit's activations or logits. Where that
is more than the device has, it holds less, the cheapest saving first: gradients of embedding and head leave in parts
through buffers of a layer's size, two layers are there at a time instead of three, gradients leave through one buffer
instead of two. None of these changes a bit of any result, and none lengthens a step whose computing hides its copies.
Then embedding and head are tiled (their logits are computed twice), then one layer at a time is held (its upload waits
for the one before), and only then layers are tiled, the largest first. Where all that is too much, rows are long: all
but attention goes in tiles of tokens, as large ones as fit, and a layer's whole rows are on the device if they fit.
Pure, and without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from outcore.common.quantities import MIB, format_gib

WEIGHTS_SHARE = 60
"""Percent of the device's memory for buffers of weights and gradients where the rest of a step's needs is unknown."""
USABLE_SHARE = 93
"""Percent of the device's memory for everything where a step's needs are known: they are estimates."""
CHUNK_SHARE = 40
"""Percent of the device's memory that an MLP's intermediates may take in a tiled layer: its weights need little."""
MAX_TILE_BYTES = 64 * MIB
"""Larger ones fill the link no better (16 MiB reach 99 % of its rate) and compute no faster."""
TILES_PER_DEVICE = 96
"""Auto: tiles of the device's memory divided by this, at most."""
TILES_HELD = 10
"""Tiles' worth of weights, sums and gradients on the device at a time; and of activations of a tile of tokens."""
LEAST_TOKENS, MOST_TOKENS = 16, 2048
"""Tokens of a tile where memory is short: matrix products are no faster with more."""
GROWN_SHARE = 85
"""Percent of the device's memory that larger tiles of tokens and whole rows on the device may fill: they gain speed
only."""
RESIDENT_SHARE = 4
"""Weights of at most a tile's bytes divided by this are resident: not cut."""
LAYER_BUFFERS, SHIP_BUFFERS = 3, 2
"""Layers on the device at a time, and gradients leaving it, where there is room."""
PART_NUMEL = 1 << 24
"""Gradients of embedding and head leave in multiples of so many elements where they leave in parts."""


@dataclass(frozen=True)
class UnitSize:
    """Sizes of an embedding, a layer or a head (a tied one is there once)."""

    index: int
    is_layer: bool
    size_bytes: int
    trainable_numel: int
    is_large: bool
    """Whether a weight of it would be cut: others gain nothing from tiles."""
    expanded_bytes: int = 0
    """Bytes once packed weights are expanded, which one unit at a time is, beside the buffers; 0: none is packed."""


@dataclass(frozen=True)
class Model:
    """The units, and how their numbers are held."""

    units: tuple[UnitSize, ...]
    itemsize: int
    sum_itemsize: int = 4
    tied: bool = False

    @cached_property
    def ends(self) -> frozenset[int]:
        """Embedding and head, as far as tiles help them."""
        return frozenset(unit.index for unit in self.units if unit.is_large and not unit.is_layer)


@dataclass(frozen=True)
class TilingWork:
    """Bytes that a step needs on the device besides buffers."""

    checkpoints: int
    """Activation checkpoints on the device."""
    between: int
    """Hidden states and their gradients between units."""
    masks: int
    """Bytes that attention over packed rows takes: masks, or the flash kernel's own."""
    layer: int
    """Activations of a layer's backward."""
    tiled_layer: int
    head: int
    """Logits and what their loss takes."""
    tiled_head: int
    evaluation: int
    """Bytes that an evaluation needs, instead of the others; its head untiled."""
    at_embedding: int = 0
    """Hidden states of whole rows at the embedding and their copy, where elsewhere there are only tiles of them."""
    tile_tokens: int = 0
    """Tokens of a tile where rows are long; 0: rows are whole."""
    rows: int = 0
    """Whole rows of a layer that are on the device where rows are long; 0: they live in RAM."""
    long: tuple[TilingWork, ...] = ()
    """Needs where rows are long, the fastest way first, the one that takes least last; none: they cannot be cut."""

    def of(self, holding: Holding) -> TilingWork:
        """Bytes needed where the device holds units so."""
        ways = (way for way in self.long if (way.tile_tokens, way.rows > 0) == (holding.tile_tokens, holding.near))
        return next(ways, self)


@dataclass(frozen=True)
class Holding:
    """Way in which the device holds units: buffers, tiles, long rows."""

    tiled: frozenset[int] = frozenset()
    layer_buffers: int = LAYER_BUFFERS
    ship_buffers: int = SHIP_BUFFERS
    ends_in_parts: bool = False
    """Gradients of embedding and head leave in parts; the buffers for it are as large as the largest layer's."""
    part_numel: int = PART_NUMEL
    """Parts are whole multiples of so many elements."""
    tile_tokens: int = 0
    """Layers run on tiles of so many tokens, but for attention; 0: on whole rows."""
    near: bool = False
    """Whether a layer's whole rows are on the device meanwhile, and not in RAM."""

    def cut_as(self, way: TilingWork) -> Holding:
        """Make this holding for long rows."""
        return replace(self, tile_tokens=way.tile_tokens, near=way.rows > 0)

    def words(self) -> str:
        """Text for people: what is less than usual; '' when nothing is."""
        layers = {1: "one layer at a time", 2: "two layers at a time"}
        less = [layers[self.layer_buffers]] if self.layer_buffers < LAYER_BUFFERS else []
        less += ["gradients leave through one buffer"] if self.ship_buffers < SHIP_BUFFERS else []
        less += ["those of embedding and head in parts"] if self.ends_in_parts else []
        where = "a layer's whole rows on the device" if self.near else "whole rows in RAM"
        if self.tile_tokens:
            less.append(f"all of a layer but attention in tiles of {self.tile_tokens} tokens, {where}")
        return ", ".join(less)


HELD_WHOLE = Holding()
"""Holding where there is room."""


@dataclass(frozen=True)
class HeldBytes:
    """Bytes on the device, by part."""

    weights: int
    sums: int
    leaving: int
    made_by_layer: int
    """The gradient of a layer as autograd makes it."""
    made_by_ends: int
    tiles: int

    @property
    def buffers(self) -> int:
        """Bytes that are held all the time."""
        return self.weights + self.sums + self.leaving + self.tiles

    @property
    def total(self) -> int:
        """Bytes with a gradient in the making."""
        return self.buffers + max(self.made_by_layer, self.made_by_ends)


def tile_bytes_of(device_bytes: int | None) -> int:
    """Bytes of a tile where nobody says."""
    if device_bytes is None:
        return MAX_TILE_BYTES
    return max(1, min(MAX_TILE_BYTES, device_bytes // TILES_PER_DEVICE))


def chunk_bytes_of(device_bytes: int) -> int:
    """Intermediates of an MLP that a tiled layer may hold at once."""
    return max(1, device_bytes * CHUNK_SHARE // 100)


def held_bytes(model: Model, holding: Holding, tile_bytes: int = 0) -> HeldBytes:
    """Device memory for weights and gradients. `tile_bytes`: of one tile, where any unit is tiled."""
    layers = [unit for unit in model.units if unit.is_layer and unit.index not in holding.tiled]
    ends = [unit for unit in model.units if not unit.is_layer and unit.index not in holding.tiled]
    layer_numel = max((unit.trainable_numel for unit in layers), default=0)
    ends_numel = max((unit.trainable_numel for unit in ends), default=0)
    weights = max((unit.size_bytes for unit in layers), default=0) * min(holding.layer_buffers, len(layers))
    weights += max((unit.size_bytes for unit in ends), default=0)
    weights += max((unit.expanded_bytes for unit in layers), default=0)
    summed = layer_numel + ends_numel if model.tied else max(layer_numel, ends_numel)
    in_parts = max(layer_numel, min(holding.part_numel, ends_numel))
    leaving = in_parts if holding.ends_in_parts else max(layer_numel, ends_numel)
    return HeldBytes(
        weights=weights,
        sums=model.sum_itemsize * summed,
        leaving=holding.ship_buffers * model.itemsize * leaving,
        made_by_layer=model.itemsize * layer_numel,
        made_by_ends=model.itemsize * ends_numel,
        tiles=TILES_HELD * tile_bytes if holding.tiled else 0,
    )


def needed_bytes(model: Model, holding: Holding, work: TilingWork, tile_bytes: int) -> int:
    """The most that a step or an evaluation holds on the device."""
    held, work = held_bytes(model, holding, tile_bytes), work.of(holding)
    some_layer_tiled = bool(holding.tiled - model.ends)
    layer = held.made_by_layer + (work.tiled_layer if some_layer_tiled else work.layer)
    head = held.made_by_ends + (work.tiled_head if model.ends & holding.tiled else work.head)
    embedding = max(work.at_embedding, work.at_embedding // 2 + held.made_by_ends)
    step = work.checkpoints + work.between + max(layer, head, embedding)
    return held.buffers + work.masks + work.rows + max(step, work.evaluation)


def choose_holding(
    model: Model,
    device_bytes: int,
    tile_bytes: int,
    *,
    layer_buffers: int = LAYER_BUFFERS,
    work: TilingWork | None = None,
    may_tile: bool = True,
    cuts_rows: bool | None = None,
) -> Holding:
    """The first way of holding units that fits; when none does, the one that takes least.

    `layer_buffers`: at most. `work` None: unknown, so buffers and gradients get a fixed share of the device.
    `cuts_rows`: whether layers run on tiles of tokens; None: where nothing else fits."""
    share = WEIGHTS_SHARE if work is None else USABLE_SHARE

    def best(ways: list[Holding], grown: int = 0) -> tuple[Holding, int]:
        needed = []
        for number, way in enumerate(ways):
            needed.append(held_bytes(model, way).total if work is None else needed_bytes(model, way, work, tile_bytes))
            if needed[-1] <= device_bytes * (GROWN_SHARE if number < grown else share) // 100:
                return way, needed[-1]
        least = min(needed)
        return ways[needed.index(least)], least

    ways = list(_ways(model, layer_buffers, may_tile))
    found, n_bytes = best(ways)
    if work is None or not work.long or cuts_rows is False:
        return found
    if cuts_rows is None and n_bytes <= device_bytes:  # closely, but rows in RAM cost more than that risk
        return found
    *larger, least = work.long
    grown = [way.cut_as(needs) for needs in larger for way in ways if not way.tiled]
    cut, n_cut_bytes = best([*grown, *(way.cut_as(least) for way in ways if way.tiled <= model.ends)], len(grown))
    return cut if cuts_rows or n_cut_bytes < n_bytes else found


def _ways(model: Model, layer_buffers: int, may_tile: bool) -> Iterator[Holding]:
    """From the fastest to the one that takes least memory."""
    two, one = min(2, layer_buffers), 1
    whole = [(layer_buffers, SHIP_BUFFERS, False), (layer_buffers, SHIP_BUFFERS, True)]
    less = [(two, SHIP_BUFFERS, True), (two, 1, True)]
    ends = model.ends if may_tile else frozenset[int]()
    yield from (Holding(frozenset(), *way) for way in (*whole, *less))
    if ends:
        yield from (Holding(ends, *way) for way in (*whole, *less))
    yield Holding(ends, one, 1, True)
    layers = [unit for unit in model.units if unit.is_large and unit.is_layer] if may_tile else []
    tiled = frozenset[int]()
    for size_bytes in sorted({unit.size_bytes for unit in layers}, reverse=True):
        tiled |= {unit.index for unit in layers if unit.size_bytes == size_bytes}
        for some in (tiled, ends | tiled) if ends else (tiled,):
            yield from (Holding(some, *way) for way in (*whole, *less))


@dataclass(frozen=True)
class Tiling:
    """Holding of a model's units, and which of them are in tiles."""

    model: Model
    holding: Holding
    tile_bytes: int
    chunk_bytes: int | None = None
    """Intermediates of an MLP that a tiled layer may hold at once; None: no limit is known."""

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile where rows are long; 0: layers run on whole rows."""
        return self.holding.tile_tokens

    @property
    def ends(self) -> bool:
        """Whether embedding or head is in tiles."""
        return any(not unit.is_layer and unit.index in self.holding.tiled for unit in self.model.units)

    @property
    def layers(self) -> frozenset[int]:
        """Layers in tiles, counted from 0."""
        tiled = self.holding.tiled
        return frozenset(unit.index - 1 for unit in self.model.units if unit.is_layer and unit.index in tiled)

    @property
    def held(self) -> HeldBytes:
        """Device memory for weights and gradients."""
        return held_bytes(self.model, self.holding, self.tile_bytes)

    def words(self) -> str:
        """Text for people; '' where nothing is in tiles."""
        where = "on the GPU" if self.holding.near else "in RAM"
        long = f"of a layer all but attention in tiles of {self.tile_tokens} tokens, its whole rows {where}"
        long = long if self.tile_tokens else ""
        if not self.holding.tiled:
            return long
        count, total = len(self.layers), sum(unit.is_layer for unit in self.model.units)
        layers = "all layers" if count == total else f"{count} of {total} layers"
        what = " and ".join(["embedding and head"] * self.ends + [layers] * bool(count))
        words = f"{what} computed in tiles of {format_gib(self.tile_bytes)}: whole they leave no room"
        return f"{words}; {long}" if long else words


def choose_tiling(
    choice: str,
    device_bytes: int | None,
    tile_bytes: int | None,
    layer_buffers: int,
    model_of: Callable[[int], Model],
    work_of: Callable[[int, int | None], TilingWork | None],
    *,
    may_cut_rows: bool = True,
) -> Tiling:
    """Decide. `choice`: 'auto', 'on', 'off' or 'tokens', as the engine's setting; `device_bytes` None: unknown, nothing
    needs to be tiled; `tile_bytes` None: from `device_bytes`. `model_of`: units for a tile's bytes; `work_of`: what a
    step needs beside them, for the bytes of a tile and of a chunk; None where that is unknown. `may_cut_rows`: whether
    layers may run on tiles of tokens. Rows that were to be cut and cannot be stay whole."""
    tile_bytes = tile_bytes or tile_bytes_of(device_bytes)
    chunk_bytes = None if device_bytes is None else chunk_bytes_of(device_bytes)
    model, holding = model_of(tile_bytes), Holding(layer_buffers=layer_buffers)
    if choice == "on":
        holding = replace(holding, tiled=frozenset(unit.index for unit in model.units if unit.is_large))
        return Tiling(model, holding, tile_bytes, chunk_bytes)
    work = work_of(tile_bytes, chunk_bytes) if device_bytes is not None or choice == "tokens" else None
    if device_bytes is not None:
        holding = choose_holding(
            model,
            device_bytes,
            tile_bytes,
            layer_buffers=layer_buffers,
            work=work,
            may_tile=choice != "off",
            cuts_rows=True if choice == "tokens" else None if choice == "auto" and may_cut_rows else False,
        )
    elif work is not None and work.long:
        holding = holding.cut_as(work.long[-1])
    return Tiling(model, holding, tile_bytes, chunk_bytes)
