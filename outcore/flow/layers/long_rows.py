"""A layer on rows so long that its activations do not fit the device: all but attention in tiles of tokens.

Apart from attention a layer treats each token by itself, whatever its code is. So its own code runs twice on each tile:
first up to its attention, which gives the tile's queries, keys and values; then with attention's result for the tile
in attention's place. Between the two, attention runs over whole rows, one group of heads after another: those that
share keys and values, whose results no other group's depend on. What is held of a whole row is the layer's input and
output, queries, keys, values and attention's result; everything else is a tile's. Whether a model's layers are like
that is tried on a tiny copy (`engine/stream/check`). Cost: the projections to queries, keys and values are computed
twice. Legend: B rows, T tokens, H heads, D width of a head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from outcore.flow.layers.compiled import CompiledLayers, LayerForward, Role
from outcore.flow.layers.unit_weights import in_place
from outcore.flow.parts import LayerCall, ModelParts, StreamUnsupported
from outcore.model.packed import are_borders

NAME = "outcore_long_rows"
"""Stand-in among transformers' attention implementations."""
BEFORE, AFTER = "before attention", "after attention"
"""Roles of layers' code on a tile."""

Attention = Callable[..., tuple[torch.Tensor, Any]]


class _AttentionReached(Exception):
    """Ends a layer's run on a tile at its attention; never leaves this file."""


class Seat:
    """What attention's stand-in gives, and what it was called with; one for all layers of a model. The layers' modules
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
    call: LayerCall
    whole: dict[int, Any]
    """What an argument of the call was cut from, by the id of the cut one."""


@dataclass
class HeadGroup:
    """Heads that share keys and values. Whoever goes back puts gradients in the place of what they are of."""

    query: torch.Tensor
    """[B, H, T, D]"""
    key: torch.Tensor
    value: torch.Tensor
    result: torch.Tensor | None = None
    """[B, T, H, D]: what attention gave."""


@dataclass(frozen=True)
class AttentionCall:
    """How the layer's code calls its attention."""

    function: Attention
    module: nn.Module
    mask: Any
    more: dict[str, Any]

    def of(self, group: HeadGroup) -> torch.Tensor:
        """Attention's result [B, T, H, D] of a group."""
        return self.function(self.module, group.query, group.key, group.value, self.mask, **self.more)[0]


class LongRows:
    """Runs layers on tiles. `tile_tokens`: of a tile, over all rows of a micro-batch; rows of no more
    tokens are left alone. `compiled`: runs tiles where it can. StreamUnsupported where a layer's code is otherwise than
    is said above."""

    def __init__(self, units: ModelParts, tile_tokens: int, compiled: CompiledLayers | None = None) -> None:
        self.units, self.tile_tokens, self.compiled, self.seat = units, tile_tokens, compiled, Seat()
        from transformers import AttentionInterface  # late: it imports the compiler

        AttentionInterface.register(NAME, _stand_in)
        for layer in units.layers:
            for module in layer.modules():
                if _attending_config(module) is not None:
                    module.__dict__["outcore_seat"] = self.seat
        self.roles: dict[str, Role] = {BEFORE: self._role_before, AFTER: self._role_after}
        """What layers' code does on a tile, to be compiled."""
        if compiled is not None:
            for name, role in self.roles.items():
                compiled.register(name, role)

    def takes(self, hidden: torch.Tensor) -> bool:
        """Whether this micro-batch [B, T, hidden] is one of long rows."""
        return hidden.ndim == 3 and hidden.shape[0] * hidden.shape[1] > self.tile_tokens and hidden.shape[1] > 1

    @torch.no_grad()
    def forward(
        self, index: int, tensors: Sequence[torch.Tensor], hidden: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """The layer's output [B, T, hidden]; nothing is kept for a backward. `tensors`: its parameters."""
        groups, asked = self.before_attention(index, tensors, hidden, call)
        for group in groups:
            group.result = asked.of(group)
            del group.query, group.key, group.value
        output = torch.empty_like(hidden)
        for tile in self.tiles(hidden, call):
            result = self.results_of(groups, tile.tokens)
            made = self.run_compiled(AFTER, index, tile, tensors, result)
            output[:, tile.tokens] = self.after(index, tile, tensors, result) if made is None else made
        return output

    def tiles(self, hidden: torch.Tensor, call: LayerCall) -> Iterator[Tile]:
        """The micro-batch's tokens in order, with what the layer is called with for them."""
        rows, length = hidden.shape[:2]
        step = max(1, self.tile_tokens // rows)
        for start in range(0, length, step):
            tokens = slice(start, min(start + step, length))
            whole: dict[int, Any] = {}

            def cut(value: Any, tokens: slice = tokens, whole: dict[int, Any] = whole) -> Any:
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

            yield Tile(tokens, hidden[:, tokens], call.mapped(lambda value: tree_map(cut, value)), whole)

    @torch.no_grad()
    def before_attention(
        self, index: int, tensors: Sequence[torch.Tensor], hidden: torch.Tensor, call: LayerCall
    ) -> tuple[list[HeadGroup], AttentionCall]:
        """Queries, keys and values of the whole rows, group by group, and how attention is asked for: the first tile
        runs by the layer's own code, which tells."""
        groups: list[HeadGroup] = []
        asked: AttentionCall | None = None
        for tile in self.tiles(hidden, call):
            made = self.run_compiled(BEFORE, index, tile, tensors) if asked is not None else None
            parts, asked = self.before(index, tile, tensors) if made is None else (made, asked)
            if not groups:
                groups = _empty_groups(parts, hidden.shape[1])
            pieces = [part.chunk(len(groups), dim=1) for part in parts]
            for group, query, key, value in zip(groups, *pieces, strict=True):
                for home, piece in ((group.query, query), (group.key, key), (group.value, value)):
                    home[:, :, tile.tokens] = piece
        assert asked is not None
        return groups, asked

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
        """What a role's compiled function gives; None where it cannot be compiled, and nothing has happened."""
        if self.compiled is None or not self.compiled.is_active(index):
            return None
        with self._standing_in(index):
            return self.compiled.run(role, index, tensors, tile.hidden, tile.call, *more)

    @staticmethod
    def results_of(groups: Sequence[HeadGroup], tokens: slice) -> torch.Tensor:
        """Attention's result [B, t, H, D] for some tokens, all heads together."""
        return torch.cat([group.result[:, tokens] for group in groups if group.result is not None], dim=2)

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
        """Within this context the layer's attention is the stand-in; gives what it is outside."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        modules = self.units.layers[index].modules()
        configs = {id(config): config for module in modules if (config := _attending_config(module))}
        names = {config._attn_implementation for config in configs.values()}
        if len(names) != 1 or (name := names.pop()) not in ALL_ATTENTION_FUNCTIONS:
            raise StreamUnsupported("its attention is not one that transformers dispatches")
        seat = self.seat
        seat.given, seat.ends, seat.times = None, False, 0
        try:
            for config in configs.values():
                config.__dict__["_attn_implementation_internal"] = NAME
            yield ALL_ATTENTION_FUNCTIONS[name]
        finally:
            for config in configs.values():
                config.__dict__["_attn_implementation_internal"] = name
            seat.given, seat.parts = None, []


def _empty_groups(parts: Sequence[torch.Tensor], length: int) -> list[HeadGroup]:
    """Room for whole rows, in as many groups as there are heads of keys; one where these are not those of values, too,
    or do not divide the queries'."""
    query, key, value = parts
    heads = key.shape[1]
    count = heads if value.shape[1] == heads and query.shape[1] % heads == 0 else 1

    def room(part: torch.Tensor) -> torch.Tensor:
        return part.new_empty((part.shape[0], part.shape[1] // count, length, part.shape[3]))

    return [HeadGroup(*(room(part) for part in parts)) for _ in range(count)]


def _attending_config(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    return config if "_attn_implementation_internal" in getattr(config, "__dict__", {}) else None
