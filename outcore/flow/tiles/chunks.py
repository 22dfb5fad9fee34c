"""Chunks of tokens through a tiled layer's MLP, when its activations for all tokens at once would not fit.

A candidate is a child of the layer that holds weights in tiles and is called with nothing but hidden states [B, T, H].
Whether it treats each token by itself is tried on two tokens the first time (attention, called with more, never gets
here). Each chunk is recomputed in backward, so that one chunk's intermediates are all that is held. Cost: the module's
weights come up once for each chunk, in each of forward, recomputation, recomputation of the chunk, and backward.

Place where gradients of large weights go that are multiplied tile by tile: flow hands them out and keeps none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from outcore.flow.parts import Part, bound
from outcore.flow.tiles.matrix import TiledMatrix, TiledPart


class RowSink(Protocol):
    """Gradients of the rows of an embedding."""

    def note(self, ids: torch.Tensor) -> None:
        """Note rows that are looked up."""
        ...

    def add(self, ids: torch.Tensor, grad: torch.Tensor) -> None:
        """One batch's gradient [len(ids), num_cols] of these rows."""
        ...


class TileSink(Protocol):
    """Gradients of tiles. It is told of every use, because only so it knows which piece of a gradient is the last."""

    counting: bool
    """Off while a chunk of tokens is recomputed: its uses have been counted."""

    def begin_forward(self, unit: Part) -> None:
        """A batch goes through the part: as many will come back."""
        ...

    def begin_backward(self, unit: Part) -> None:
        """A batch comes back."""
        ...

    def expect(self, matrix: TiledMatrix) -> None:
        """The matrix has been used once more in a forward that will be differentiated."""
        ...

    def add(self, matrix: TiledMatrix, tile: int, grad: torch.Tensor) -> None:
        """One part of a tile's gradient, [rows, num_cols]."""
        ...

    def complete(self, matrix: TiledMatrix, tile: int, grad: torch.Tensor) -> None:
        """The whole gradient of a tile, [rows, num_cols]."""
        ...

    def row_sums(self, matrix: TiledMatrix) -> RowSink:
        """For a matrix that is used as an embedding."""
        ...


COPIES = 4
"""Intermediates of each projection that are held at once: its result, the activation's, and their gradients."""
TOLERANCE = 0.02
"""Allowed difference between tokens computed together and one by one in 16 bits: share of the largest value."""


class TokenChunks:
    """Cuts the tokens of tiled layers' MLPs. `chunk_bytes`: intermediates of one chunk; None: never cut."""

    def __init__(self, chunk_bytes: int | None, gradients: TileSink | None) -> None:
        self._chunk_bytes, self._gradients = chunk_bytes, gradients
        self._by_token: dict[type[nn.Module], bool] = {}
        self.num_cut = 0
        """Calls that were cut so far."""

    @contextmanager
    def applied(self, layer: nn.Module, tiled: TiledPart, tensors: Sequence[Any]) -> Iterator[None]:
        """Within this context candidates of `layer` cut their input. `tensors`: what stands for the unit's
        parameters."""
        cut: list[nn.Module] = []
        try:
            for module in layer.children() if self._chunk_bytes is not None else ():
                token_bytes = self._token_bytes(module, tiled)
                if token_bytes:
                    module.__dict__["forward"] = partial(self._run, module, module.forward, tiled, tensors, token_bytes)
                    cut.append(module)
            yield
        finally:
            for module in cut:
                del module.__dict__["forward"]

    def _token_bytes(self, module: nn.Module, tiled: TiledPart) -> int:
        """Bytes of one token's intermediates in a module; 0 when it holds no weight in tiles."""
        inside = {id(child) for child in module.modules()}
        shapes = [
            slot.shape
            for slot, owners in zip(tiled.unit.layout.slots, tiled.unit.owners, strict=True)
            if slot.name in tiled.matrices and any(id(owner) in inside for owner, _ in owners)
        ]
        return COPIES * tiled.unit.layout.dtype.itemsize * sum(max(shape[-2:]) for shape in shapes)

    def _run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        tiled: TiledPart,
        tensors: Sequence[Any],
        token_bytes: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        assert self._chunk_bytes is not None
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, torch.Tensor) or x.ndim != 3:
            return forward(*args, **kwargs)
        num_tokens = x.shape[0] * x.shape[1]
        num_chunks = min(num_tokens, -(-num_tokens * token_bytes // self._chunk_bytes))
        if num_chunks < 2 or not self._is_by_token(module, forward, x):
            return forward(x)
        self.num_cut += 1
        pieces = x.reshape(1, num_tokens, -1).tensor_split(num_chunks, dim=1)
        if not torch.is_grad_enabled():
            return torch.cat([forward(piece) for piece in pieces], dim=1).view(x.shape)
        results = [
            checkpoint(self._once_counted(forward, tiled, tensors), piece, use_reentrant=False) for piece in pieces
        ]
        return torch.cat([result for result in results if isinstance(result, torch.Tensor)], dim=1).view(x.shape)

    def _once_counted(
        self, forward: Callable[..., Any], tiled: TiledPart, tensors: Sequence[Any]
    ) -> Callable[..., Any]:
        """`forward`, whose second run is autograd's recomputation, after the unit's parameters were let go."""
        is_again = False

        def run(piece: torch.Tensor) -> torch.Tensor:
            nonlocal is_again
            if self._gradients is not None:
                self._gradients.counting = not is_again
            is_again = True
            try:
                with bound(tiled.unit.owners, tensors):
                    return forward(piece)
            finally:
                if self._gradients is not None:
                    self._gradients.counting = True

        return run

    @torch.no_grad()
    def _is_by_token(self, module: nn.Module, forward: Callable[..., Any], x: torch.Tensor) -> bool:
        kind = type(module)
        if kind not in self._by_token:
            two = x.detach().reshape(1, -1, x.shape[-1])[:, :2]
            modes = [(child, child.training) for child in module.modules()]
            module.eval()  # no dropout: it would differ, and draw numbers that the recomputation does not
            try:
                together = forward(two)
                alone = [forward(two[:, at : at + 1]) for at in range(two.shape[1])]
            finally:
                for child, mode in modes:
                    child.training = mode
            self._by_token[kind] = (
                isinstance(together, torch.Tensor)
                and together.shape == two.shape
                and float((torch.cat(alone, 1) - together).abs().max()) <= TOLERANCE * float(together.abs().max())
            )
        return self._by_token[kind]
