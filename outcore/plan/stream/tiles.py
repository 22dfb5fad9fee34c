"""How the streaming engine will hold units on the device and which it will compute in tiles, by its own rule.

The engine decides from units' sizes and from what is free on the device when it is built; a plan takes the card's
memory less framework and desktop. Costs are those of docs/tiling.md."""

from __future__ import annotations

from functools import lru_cache, partial

from outcore.plan.hardware import Hardware
from outcore.plan.terms.case import Case
from outcore.sizing.layouts import StreamLayout
from outcore.sizing.shape import ModelShape
from outcore.sizing.tiles import RESIDENT_SHARE, Model, Tiling, TilingWork, UnitSize, choose_tiling
from outcore.sizing.training import PartNeeds, parts_of_shape
from outcore.sizing.work import step_work


def device_bytes_of(hardware: Hardware, layout: StreamLayout) -> int | None:
    """Memory that the engine plans tiles for; None without a GPU, where no limit is known."""
    if layout.device_bytes is not None:
        return layout.device_bytes
    return None if hardware.is_cpu else hardware.tensor_bytes


def tiling_of(case: Case[StreamLayout]) -> Tiling:
    """What the engine will do with this model there."""
    shape, layout, e = case.shape, case.layout, case.element_bytes

    def work_of(tile_bytes: int, chunk_bytes: int | None) -> TilingWork:
        return step_work(
            shape, e, case.seq_length, case.micro_tokens, layout.accumulation,
            checkpoints_home=layout.checkpoints_home, compiled=layout.compiled,
            tile_bytes=tile_bytes, chunk_bytes=chunk_bytes, masks=case.masks,
        )  # fmt: skip

    return choose_tiling(
        layout.tiling,
        device_bytes_of(case.hardware, layout),
        layout.tile_bytes,
        layout.layer_buffers,
        partial(_model, shape, e),
        work_of,
        may_cut_rows=layout.checkpoints_home == "ram",
    )


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
