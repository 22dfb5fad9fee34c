"""A layer on rows so long that its activations do not fit the device: all but attention in tiles of tokens.

Apart from attention a layer treats each token by itself, whatever its code is. So its own code runs twice on each tile:
first up to its attention, which gives the tile's queries, keys and values; then with attention's result for the tile
in attention's place. Between the two, attention runs over whole rows, one group of heads after another: those that
share keys and values, whose results no other group's depend on. Whatever is held of a whole row (the layer's input and
output, queries, keys, values and attention's result) has its home in RAM (`row_homes`), or all but input and output on
the device, where there is room for it; otherwise that has some tiles of it, or one group of heads. Whether a model's
layers are like that is tried on a tiny copy (`engine/stream/check`). Cost: the projections to queries, keys and values
are computed twice, and what lives in RAM crosses the link (`sizing.activations`).
Legend: B rows, T tokens, t tokens of a tile, G groups, H heads, D width of a head.

Attention of a layer, one group of heads after another: how its rows lie in memory, and how it is asked for.

Legend: B rows, T tokens, t tokens of a tile, G groups, H heads, D width of a head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from outcore.flow.layers.compiled import CompiledLayers, LayerForward, Role
from outcore.flow.layers.row_homes import RowHomes, RowWriter
from outcore.flow.layers.unit_weights import in_place
from outcore.flow.parts import LayerCall, ModelParts, StreamUnsupported
from outcore.model.packed import are_borders
from outcore.sizing.activations import long_block_tokens

Attention = Callable[..., tuple[torch.Tensor, Any]]


@dataclass(frozen=True)
class Heads:
    """Layout of a group of heads that share keys and values: queries, keys, values, in that order."""

    groups: int
    shapes: tuple[tuple[int, int], ...]
    """(heads of a group, width of a head) of queries, keys, values."""

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor]) -> Heads:
        """Make a group for each head of keys, or a single one if values have another number of heads or the queries'
        heads do not divide. `parts`: queries, keys, values [B, H, t, D]."""
        query, key, value = parts
        heads = key.shape[1]
        groups = heads if value.shape[1] == heads and query.shape[1] % heads == 0 else 1
        return cls(groups, tuple((part.shape[1] // groups, part.shape[3]) for part in parts))

    @property
    def widths(self) -> list[int]:
        return [heads * width for heads, width in self.shapes]

    @property
    def result_width(self) -> int:
        return self.shapes[0][0] * self.shapes[2][1]

    def pack(self, parts: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        """Fill rows [G, B, t, sum of widths] from queries, keys and values [B, H, t, D]."""
        for part, place, shape in zip(parts, rows.split(self.widths, dim=-1), self.shapes, strict=True):
            place.unflatten(-1, shape).copy_(part.unflatten(1, (self.groups, -1)).permute(1, 0, 3, 2, 4))

    def unpacked(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Undo `pack`."""
        parts = zip(rows.split(self.widths, dim=-1), self.shapes, strict=True)
        return [part.unflatten(-1, shape).permute(1, 0, 3, 2, 4).flatten(1, 2) for part, shape in parts]

    def of_group(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values [B, H, T, D] of a group's rows [B, T, sum of widths], in the same memory."""
        parts = zip(rows.split(self.widths, dim=-1), self.shapes, strict=True)
        return [part.unflatten(-1, shape).transpose(1, 2) for part, shape in parts]

    def result(self, rows: torch.Tensor) -> torch.Tensor:
        """Attention's result of all heads [B, t, H, D] for rows [G, B, t, result width]."""
        return rows.unflatten(-1, (self.shapes[0][0], -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def pack_result(self, result: torch.Tensor, rows: torch.Tensor) -> None:
        """Write attention's result [B, t, H, D] into `rows` [G, B, t, result width], the inverse of `result`."""
        of_groups = result.unflatten(2, (self.groups, -1)).permute(2, 0, 1, 3, 4)
        rows.unflatten(-1, of_groups.shape[3:]).copy_(of_groups)


@dataclass(frozen=True)
class AttentionCall:
    """Call of the attention, as the layer's code makes it."""

    function: Attention
    module: nn.Module
    mask: Any
    more: dict[str, Any]

    def of(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention's result [B, T, H, D] of [B, H, T, D]."""
        return self.function(self.module, query, key, value, self.mask, **self.more)[0]


@dataclass(frozen=True)
class Attending:
    """Attention that a layer asks for: how, and the rows that it is about, at home."""

    heads: Heads
    asked: AttentionCall
    rows: torch.Tensor
    """[G, B, T, width]: queries, keys and values, group by group; on the way back their gradients."""
    results: torch.Tensor
    """[G, B, T, width], room for attention's."""


NAME = "outcore_long_rows"
"""Stand-in among transformers' attention implementations."""


class _AttentionReached(Exception):
    """Ends a layer's run on a tile at its attention; never leaves this file."""


class Seat:
    """Result of attention's stand-in, and its arguments; one for all layers of a model. The layers' modules
    hold it, where compiled code finds it."""

    def __init__(self) -> None:
        self.given: torch.Tensor | None = None
        """Attention's result; None before attention."""
        self.ends = False
        """Whether a run ends there; compiled code goes on with zeros, and drops what comes of them."""
        self.parts: list[torch.Tensor] = []
        """Queries, keys, values."""
        self.times = 0
        self.asked: tuple[nn.Module, Any, dict[str, Any]] | None = None


def _stand_in(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    seat = module.__dict__["outcore_seat"]
    seat.times += 1
    if seat.given is not None:
        return seat.given, None
    seat.parts = [query, key, value]
    if seat.ends:
        seat.asked = module, attention_mask, more
        raise _AttentionReached
    rows, heads, length, _ = query.shape
    return query.new_zeros(rows, length, heads, value.shape[-1]), None


@dataclass(frozen=True)
class Tile:
    """Some tokens of all rows."""

    tokens: slice
    hidden: torch.Tensor
    more: list[torch.Tensor]
    """Other rows [..., t, width], at the same tokens."""
    call: LayerCall
    whole: dict[int, Any]
    """Whole argument of the call, by the id of the slice of it."""


class LongRows:
    """Runs layers on tiles. `tile_tokens`: of a tile, over all rows of a micro-batch; `homes`: where whole rows live;
    `compiled`: runs tiles where it can. StreamUnsupported where a layer's code is otherwise than is said above."""

    BEFORE, AFTER = "before attention", "after attention"
    """Roles of layers' code on a tile."""

    def __init__(
        self, units: ModelParts, tile_tokens: int, homes: RowHomes, compiled: CompiledLayers | None = None
    ) -> None:
        self.units, self.tile_tokens, self.homes, self.compiled, self.seat = units, tile_tokens, homes, compiled, Seat()
        from transformers import AttentionInterface  # late: it imports the compiler

        AttentionInterface.register(NAME, _stand_in)
        self._configs: list[list[Any]] = []
        """Configs that say how a layer attends, layer by layer."""
        for layer in units.layers:
            attending = [module for module in layer.modules() if _attending_config(module) is not None]
            for module in attending:
                module.__dict__["outcore_seat"] = self.seat
            self._configs.append([*{id(m.config): m.config for m in attending}.values()])
        self.roles: dict[str, Role] = {self.BEFORE: self._role_before, self.AFTER: self._role_after}
        """Functions of the layers' code on a tile, to be compiled."""
        if compiled is not None:
            for name, role in self.roles.items():
                compiled.register(name, role)

    def takes(self, hidden: torch.Tensor) -> bool:
        """Whether hidden states [B, T, hidden] live in RAM: all of more than a token, however short their rows are."""
        return hidden.ndim == 3 and hidden.shape[1] > 1

    @torch.no_grad()
    def forward(
        self, index: int, tensors: Sequence[torch.Tensor], hidden: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """The layer's output [B, T, hidden] for its input, both in RAM; nothing is kept for a backward. `tensors`: its
        parameters."""
        found = self.before_attention(index, tensors, hidden, call)
        with self.homes.sending() as leaving:
            for group, (rows,) in enumerate(self.homes.arriving([one] for one in found.rows)):
                result = found.asked.of(*found.heads.of_group(rows))
                leaving.send(result.flatten(2).contiguous(), found.results[group])
                del rows, result
        output = self.homes.room(hidden.shape, hidden.dtype)
        with self.writer(output) as written:
            for tile in self.tiles(call, hidden, found.results):
                result = found.heads.result(*tile.more)
                made = self.run_compiled(self.AFTER, index, tile, tensors, result)
                written.put(tile.tokens, self.after(index, tile, tensors, result) if made is None else made)
        return output

    def expect(self, hidden: torch.Tensor) -> None:
        """The next layer will be asked about these rows: let their first tokens come before its weights do."""
        self.homes.expect(hidden, self._block(hidden.shape[0]))

    def writer(self, home: torch.Tensor) -> RowWriter:
        """Writer that takes the rows of tiles in order."""
        return self.homes.writer(home, self._block(home.shape[-3]))

    def _step(self, rows: int) -> int:
        """Tokens of a row in a tile."""
        return max(1, self.tile_tokens // rows)

    def _block(self, rows: int) -> int:
        """Tokens of a row that come or go together."""
        return self._step(rows) * (long_block_tokens(self.tile_tokens) // self.tile_tokens)

    def tiles(self, call: LayerCall, hidden: torch.Tensor, *more: torch.Tensor) -> Iterator[Tile]:
        """The micro-batch's tokens in order: of its hidden states and other rows in RAM, on the device, with what the
        layer is called with for them."""
        rows, length = hidden.shape[:2]
        step = self._step(rows)
        block = self._block(rows)
        starts = range(0, length, block)
        wanted = ([home[..., at : at + block, :] for home in (hidden, *more)] for at in starts)
        for at, pieces in zip(starts, self.homes.arriving(wanted), strict=True):
            for start in range(at, min(at + block, length), step):
                tokens = slice(start, min(start + step, length))
                own, *others = (piece[..., start - at : tokens.stop - at, :] for piece in pieces)
                cut, whole = self._cut(call, tokens, length)
                yield Tile(tokens, own, others, cut, whole)

    @staticmethod
    def _cut(call: LayerCall, tokens: slice, length: int) -> tuple[LayerCall, dict[int, Any]]:
        """(the call for some tokens, what its arguments were cut from by their id)."""
        whole: dict[int, Any] = {}

        def cut(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or are_borders(value):
                return value
            if value.ndim in (2, 3) and value.shape[1] == length:
                piece = value[:, tokens]
            elif value.ndim == 1 and value.shape[0] == length:
                piece = value[tokens]
            else:
                return value
            whole[id(piece)] = value
            return piece

        return call.mapped(lambda value: tree_map(cut, value)), whole

    @torch.no_grad()
    def before_attention(
        self, index: int, tensors: Sequence[torch.Tensor], hidden: torch.Tensor, call: LayerCall
    ) -> Attending:
        """Queries, keys and values of the whole rows, and how attention is asked for: the first tile runs by the
        layer's own code, which tells."""
        tiles = self.tiles(call, hidden)
        first = next(tiles)
        parts, asked = self.before(index, first, tensors)
        heads, shape, dtype = Heads.of(parts), hidden.shape[:2], parts[0].dtype
        rows = self.homes.room((heads.groups, *shape, sum(heads.widths)), dtype, passes=True)
        with self.writer(rows) as written:
            with written.room(first.tokens) as place:
                heads.pack(parts, place)
            del first, parts, place  # the block that it came in
            for tile in tiles:
                made = self.run_compiled(self.BEFORE, index, tile, tensors)
                with written.room(tile.tokens) as place:
                    heads.pack(self.before(index, tile, tensors)[0] if made is None else made, place)
        results = self.homes.room((heads.groups, *shape, heads.result_width), dtype, passes=True)
        return Attending(heads, asked, rows, results)

    def before(
        self, index: int, tile: Tile, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], AttentionCall]:
        """(queries, keys, values [B, H, t, D] of a tile, how attention is asked for), by the layer's own code."""
        seat = self.seat
        with self._standing_in(index) as function:
            try:
                seat.ends = True
                self._run(index, tile, tensors)
            except _AttentionReached:
                assert seat.asked is not None
                (module, mask, more), parts, seat.asked, seat.parts = seat.asked, seat.parts, None, []
                uncut = {name: tile.whole.get(id(one), one) for name, one in more.items()}
                return parts, AttentionCall(function, module, tile.whole.get(id(mask), mask), uncut)
        raise StreamUnsupported(f"layer {index} does not come to an attention that transformers dispatches")

    def after(self, index: int, tile: Tile, tensors: Sequence[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
        """The layer's output on a tile, by its own code. `result` [B, t, H, D]: attention's."""
        with self._standing_in(index):
            self.seat.given = result
            output = self._run(index, tile, tensors)
            if self.seat.times != 1:
                raise StreamUnsupported(f"layer {index} attends {self.seat.times} times")
        return output

    def run_compiled(self, role: str, index: int, tile: Tile, tensors: Sequence[torch.Tensor], *more: Any) -> Any:
        """Result of a role's compiled function; None where it cannot be compiled, and nothing has happened."""
        if self.compiled is None or not self.compiled.is_active(index):
            return None
        with self._standing_in(index):
            return self.compiled.run(role, index, tensors, tile.hidden, tile.call, *more)

    def _role_before(self, forward: LayerForward, trainable: Sequence[bool]) -> Callable[..., list[torch.Tensor]]:
        seat = self.seat

        def before(tensors: Sequence[torch.Tensor], hidden: torch.Tensor, args: tuple, kwargs: dict) -> Any:
            seat.given = None
            forward(tensors, hidden, args, kwargs)
            parts, seat.parts = seat.parts, []
            return parts

        return before

    def _role_after(self, forward: LayerForward, trainable: Sequence[bool]) -> Callable[..., torch.Tensor]:
        seat = self.seat

        def after(
            tensors: Sequence[torch.Tensor], hidden: torch.Tensor, args: tuple, kwargs: dict, result: torch.Tensor
        ) -> torch.Tensor:
            seat.given = result
            output = forward(tensors, hidden, args, kwargs)
            seat.given = None
            return output

        return after

    def _run(self, index: int, tile: Tile, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        with in_place(self.units.layer_units[index], tensors):
            output = self.units.layers[index](tile.hidden, *tile.call.args, **tile.call.kwargs)
        return output if isinstance(output, torch.Tensor) else output[0]

    @contextmanager
    def _standing_in(self, index: int) -> Iterator[Attention]:
        """Replace the layer's attention by the stand-in while the context lasts; yields the real attention."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        configs = self._configs[index]
        names = {config._attn_implementation for config in configs}
        if len(names) != 1 or (name := names.pop()) not in ALL_ATTENTION_FUNCTIONS:
            raise StreamUnsupported("its attention is not one that transformers dispatches")
        seat = self.seat
        seat.given, seat.ends, seat.times = None, False, 0
        try:
            for config in configs:
                config.__dict__["_attn_implementation_internal"] = NAME
            yield ALL_ATTENTION_FUNCTIONS[name]
        finally:
            for config in configs:
                config.__dict__["_attn_implementation_internal"] = name
            seat.given, seat.parts = None, []


def _attending_config(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    return config if "_attn_implementation_internal" in getattr(config, "__dict__", {}) else None
