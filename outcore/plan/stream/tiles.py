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
    HeldBytes,
    Holding,
    Model,
    UnitSize,
    choose_holding,
    chunk_bytes_of,
    held_bytes,
    tile_bytes_of,
)
from outcore.sizing.training import PartNeeds, parts_of_shape
from outcore.sizing.work import step_work


@dataclass(frozen=True)
class Tiling:
    """The engine's decision. `layers`: indices of tiled layers, from 0."""

    model: Model
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
    def held(self) -> HeldBytes:
        """Device memory for weights and gradients."""
        return held_bytes(self.model, self.holding, self.tile_bytes)

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
        return Tiling(_model(shape, e, 0), holding=holding)
    tile_bytes = layout.tile_bytes or tile_bytes_of(device_bytes)
    chunk_bytes = None if device_bytes is None else chunk_bytes_of(device_bytes)
    model = _model(shape, e, tile_bytes)
    if layout.tiling == "on":
        holding = replace(holding, tiled=frozenset(unit.index for unit in model.units if unit.is_large))
    else:
        work = step_work(
            shape, e, case.seq_length, case.micro_tokens, layout.accumulation,
            checkpoints_home=layout.checkpoints_home, compiled=layout.compiled,
            tile_bytes=tile_bytes, chunk_bytes=chunk_bytes, masks=case.masks,
        )  # fmt: skip
        if device_bytes is None:
            return Tiling(model, holding=holding.cut_as(work.long[-1]) if work.long else holding)
        holding = choose_holding(
            model, device_bytes, tile_bytes,
            layer_buffers=layout.layer_buffers, work=work, may_tile=layout.tiling != "off",
            cuts_rows={"tokens": True, "off": False}.get(layout.tiling, None if in_ram else False),
        )  # fmt: skip
    ends = frozenset(unit.index for unit in model.units if not unit.is_layer)
    layers = frozenset(index - 1 for index in holding.tiled - ends)
    return Tiling(model, bool(holding.tiled & ends), layers, tile_bytes, chunk_bytes, holding)


@lru_cache(maxsize=16)
def _model(shape: ModelShape, element_bytes: int, tile_bytes: int) -> Model:
    """Parts as the engine takes the model apart."""
    layers, ends = parts_of_shape(shape, element_bytes)
    least = tile_bytes // RESIDENT_SHARE
    widest = shape.hidden_size * max(shape.num_heads * shape.head_dim, shape.ffn_width)

    def unit(index: int, is_layer: bool, part: PartNeeds, largest: int) -> UnitSize:
        expanded = part.size_bytes if part.home_bytes < part.size_bytes else 0
        return UnitSize(
            index, is_layer, part.home_bytes, part.trained, element_bytes * largest > least, expanded_bytes=expanded
        )

    found = [unit(0, False, ends[0], shape.head_weight_numel)]
    for number, (part, params) in enumerate(zip(layers, shape.layer_params, strict=True)):
        found.append(unit(1 + number, True, part, params // 4 if shape.is_moe else widest))
    found += [unit(1 + len(layers), False, end, shape.head_weight_numel) for end in ends[1:]]
    return Model(tuple(found), element_bytes, tied=shape.tied)
