"""How the streaming engine will hold units on the device and which it will compute in tiles, by its own rule.

The engine decides from units' sizes and from what is free on the device when it is built; a plan takes the card's
memory less framework and desktop. Costs are those of docs/tiling.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from outcore.common.quantities import format_gib
from outcore.plan.hardware import Hardware
from outcore.plan.terms.case import Case
from outcore.sizing.layouts import StreamLayout
from outcore.sizing.shape import ModelShape
from outcore.sizing.tiles import (
    HELD_WHOLE,
    RESIDENT_SHARE,
    TILES_HELD,
    Holding,
    Model,
    UnitSize,
    choose_holding,
    chunk_bytes_of,
    tile_bytes_of,
)
from outcore.sizing.work import step_work


@dataclass(frozen=True)
class Tiling:
    """The engine's decision. `layers`: indices of tiled layers, from 0."""

    ends: bool = False
    layers: frozenset[int] = frozenset()
    tile_bytes: int = 0
    chunk_bytes: int | None = None
    holding: Holding = HELD_WHOLE
    """How whole units are held."""

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile where rows are long; 0: layers run on whole rows."""
        return self.holding.tile_tokens

    @property
    def any(self) -> bool:
        return self.ends or bool(self.layers)

    @property
    def held_tile_bytes(self) -> int:
        """Tiles, their sums and gradients on the device."""
        return TILES_HELD * self.tile_bytes if self.any else 0

    def words(self, shape: ModelShape) -> str:
        """For people; '' where nothing is in tiles."""
        where = "on the GPU" if self.holding.near else "in RAM"
        long = f"of a layer all but attention in tiles of {self.tile_tokens} tokens, its whole rows {where}"
        long = long if self.tile_tokens else ""
        if not self.any:
            return long
        what = ["embedding and head"] if self.ends else []
        if self.layers:
            all_of_them = len(self.layers) == shape.num_layers
            what.append("all layers" if all_of_them else f"{len(self.layers)} of {shape.num_layers} layers")
        words = f"{' and '.join(what)} computed in tiles of {format_gib(self.tile_bytes)}: whole they leave no room"
        return f"{words}; {long}" if long else words


def device_bytes_of(hardware: Hardware, layout: StreamLayout) -> int | None:
    """Memory that the engine plans tiles for; None without a GPU, where no limit is known."""
    if layout.device_bytes is not None:
        return layout.device_bytes
    return None if hardware.is_cpu else hardware.tensor_bytes


def tiling_of(case: Case[StreamLayout]) -> Tiling:
    """What the engine will do with this model there."""
    shape, layout, e = case.shape, case.layout, case.element_bytes
    device_bytes = device_bytes_of(case.hardware, layout)
    holding, in_ram = Holding(layer_buffers=layout.layer_buffers), layout.checkpoints_home == "ram"
    if device_bytes is None and layout.tiling not in ("on", "tokens"):
        return Tiling(holding=holding)
    tile_bytes = layout.tile_bytes or tile_bytes_of(device_bytes)
    chunk_bytes = None if device_bytes is None else chunk_bytes_of(device_bytes)
    units = _units(shape, e, tile_bytes)
    model = Model(units, e, tied=shape.tied)
    if layout.tiling == "on":
        holding = replace(holding, tiled=frozenset(unit.index for unit in units if unit.is_large))
    else:
        work = step_work(
            shape, e, case.seq_length, case.micro_tokens, layout.accumulation,
            checkpoints_home=layout.checkpoints_home, compiled=layout.compiled,
            tile_bytes=tile_bytes, chunk_bytes=chunk_bytes, masks=case.masks,
        )  # fmt: skip
        if device_bytes is None:
            return Tiling(holding=holding.cut_as(work.long[-1]) if work.long else holding)
        holding = choose_holding(
            model, device_bytes, tile_bytes,
            layer_buffers=layout.layer_buffers, work=work, may_tile=layout.tiling != "off",
            cuts_rows={"tokens": True, "off": False}.get(layout.tiling, None if in_ram else False),
        )  # fmt: skip
    ends = frozenset(unit.index for unit in units if not unit.is_layer)
    layers = frozenset(index - 1 for index in holding.tiled - ends)
    return Tiling(bool(holding.tiled & ends), layers, tile_bytes, chunk_bytes, holding)


@lru_cache(maxsize=16)
def _units(shape: ModelShape, element_bytes: int, tile_bytes: int) -> tuple[UnitSize, ...]:
    """Parts as the engine takes the model apart; gaps between parameters are not counted."""
    adapters = -(-shape.adapter_params // shape.num_layers)

    def unit(index: int, is_layer: bool, params: int, largest_weight: int) -> UnitSize:
        beside = adapters + shape.whole_in_layer if is_layer else min(params, shape.whole_in_ends)
        trained = beside if shape.lora_r else params
        size = element_bytes * (params + (adapters if is_layer else 0))
        is_large = element_bytes * largest_weight > tile_bytes // RESIDENT_SHARE
        if is_layer and shape.quantize:
            packed_bytes = size - shape.layer_saved_bytes(element_bytes)
            return UnitSize(index, is_layer, packed_bytes, trained, is_large, expanded_bytes=size)
        return UnitSize(index, is_layer, size, trained, is_large)

    def largest_of(params: int) -> int:
        widest = max(shape.num_heads * shape.head_dim, shape.ffn_width)
        return params // 4 if shape.is_moe else shape.hidden_size * widest

    layers = [unit(1 + i, True, params, largest_of(params)) for i, params in enumerate(shape.layer_params)]
    found = [
        unit(0, False, shape.ends_params if shape.tied else shape.embedding_params, shape.head_weight_numel),
        *layers,
    ]
    if not shape.tied:
        found.append(unit(1 + shape.num_layers, False, shape.head_params, shape.head_weight_numel))
    return tuple(found)
