"""Gradients on their way down where some parts are computed in tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outcore.engine.stream.gradients.accumulator import GradAccumulator
from outcore.engine.stream.gradients.download import GradientShipping
from outcore.engine.stream.gradients.tiles import TileGradients
from outcore.flow.parts import Part
from outcore.flow.tiles import TiledPart


class TiledDownload:
    """The `GradientShipping` of a model with tiled parts: of these, only resident parameters' gradients are added up
    here."""

    def __init__(
        self,
        inner: GradientShipping,
        tiled: Sequence[TiledPart],
        gradients: TileGradients,
        accumulate_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._inner, self._gradients, self._accumulate_dtype = inner, gradients, accumulate_dtype
        self._tiled = {unit.unit.index: unit for unit in tiled}
        self._device = device

    @property
    def device_bytes(self) -> int:
        return self._inner.device_bytes + self._gradients.device_bytes

    def begin(self) -> None:
        self._inner.begin()
        self._gradients.begin()

    def accumulator(self, unit: Part, *, only_once: bool = False) -> GradAccumulator:
        tiled = self._tiled.get(unit.index)
        if tiled is None:
            return self._inner.accumulator(unit, only_once=only_once)
        resident = tiled.resident
        flat = torch.zeros(resident.trainable_numel, dtype=self._accumulate_dtype, device=self._device)
        return GradAccumulator(resident, flat)

    def ship(self, unit: Part, accumulator: GradAccumulator) -> Any:
        tiled = self._tiled.get(unit.index)
        return self._inner.ship(unit, accumulator) if tiled is None else self._gradients.finish(tiled, accumulator)

    def norm_of(self, unit: Part) -> float | None:
        return self._inner.norm_of(unit)

    def norm(self) -> torch.Tensor:
        return self._inner.norm()
