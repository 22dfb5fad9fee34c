"""A layer's experts on few tokens, with no host in between: each pair of a token and an expert by the expert's number.

Where an expert lies is a table on the device. Those in a slot of the cache are multiplied by the GPU, the others by the
CPU, both at once; the GPU asks for them itself (`weights/hand_over.py`), so CUDA graphs hold a pass. What is not in RAM
is read from its drive first (`from_drive.py`). What was chosen is written to page-locked RAM: while the next pass runs,
the host sees there which experts are to come into slots, at most `MOST_SWAPS`, and which make room for them. The table
follows when they have come, so no pass waits for them.

N tokens, K experts of each, P = N K pairs, H hidden size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outcore.common.errors import EngineError
from outcore.flow.experts.by_pairs import first_matrix, run_pairs
from outcore.flow.experts.cache import ExpertCache
from outcore.flow.experts.chosen import ChosenLayers, GroupMemory
from outcore.flow.experts.form import experts_of, form_of
from outcore.flow.experts.from_drive import DriveExperts
from outcore.flow.parts import ModelParts, Part
from outcore.flow.weights import HandOver, WeightHomes
from outcore.formats import DeviceProducts, PackedProducts, PackedSpec, Scattered, device_products, stack_of
from outcore.staging.pool import SmallCopies, device_view

MOST_SWAPS = 8
"""Experts that come between two passes: the CPU reads the same memory meanwhile."""


class FewTokens:
    """Runs passes of few tokens so, between `begin` and `end`. `homes`: of the experts; `of_token`: K. ValueError, in
    words, for a model of which that cannot be."""

    def __init__(
        self,
        units: ModelParts,
        cache: ExpertCache,
        homes: WeightHomes,
        hand_over: HandOver,
        layers: ChosenLayers,
        most_tokens: int,
        of_token: int,
    ) -> None:
        self.most_tokens = most_tokens
        on_drive = {layer: part for layer, part in cache.parts.items() if homes.rest(part) is not None}
        at_once = max((min(cache.forms[layer].num_experts, most_tokens * of_token) for layer in on_drive), default=0)
        self.drive = DriveExperts(on_drive, homes, at_once) if on_drive else None
        """Brings experts whose homes are on a drive; None: none are."""
        self.is_on = True
        """Whether passes are to run so."""
        device = cache.memory.device
        self._cache, self._copies, self._of_token = cache, SmallCopies(device), of_token
        self._told = torch.zeros(
            (len(cache.parts), self.most_tokens * of_token), dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        """Experts that the last pass chose, layer by layer."""
        self._products = hand_over.products
        self.answered = hand_over.products.answered
        """Tells (questions that the CPU answered, seconds that it took)."""
        self._pairs = 0
        """Pairs of the last pass, in each layer."""
        self._chosen, self._where = self._told[:, :0], cache.where_now
        told = self._told
        if device.type == "cuda":
            told = device_view(told.view(-1).view(torch.uint8), device).view(torch.int32).view(told.shape)
        self._layers = layers
        for row, (layer, part) in enumerate(cache.parts.items()):
            module = experts_of(units.layers[layer])
            assert module is not None
            tables = _Tables(cache.where[row], told[row], cache.where_now[row], self._told[row])
            scattered = None if self.drive is None else self.drive.of.get(layer)
            home = homes.ram(part) if scattered is None or self.drive is None else self.drive.memory[0]
            at_home = _AtHome(home.view(torch.uint8), scattered)
            layers.of[layer].few = _Experts(
                module, part, cache, homes, at_home, hand_over, layers.scratch, tables, of_token
            )

    def begin(self, tokens: int) -> None:
        """A pass of so many tokens is about to be queued, and the one before it has run."""
        self._chosen, self._where = self._told[:, : self._pairs].clone(), self._cache.where_now.clone()
        self._pairs = tokens * self._of_token
        self._cache.settle(self._copies)
        self._layers.is_few = True

    def check(self) -> None:
        """EngineError when results of a pass that has run are not there."""
        if self.drive is not None:
            self.drive.check()
        if self._products.failed:
            raise EngineError(f"the CPU could not multiply experts: {self._products.failed}")

    def end(self) -> None:
        """The pass is queued."""
        self._layers.is_few = False
        self._cache.used()
        if self._chosen.numel():
            self._cache.adapt(self._chosen, self._where, MOST_SWAPS)


@dataclass(frozen=True)
class _AtHome:
    """What the CPU knows of the place of a layer's experts."""

    first: torch.Tensor
    """Bytes of the first, with the others behind it, or what `scattered` counts places from."""
    scattered: Scattered | None


@dataclass(frozen=True)
class _Tables:
    """Places of a layer's experts and its choice, as the device and the CPU see them."""

    where: torch.Tensor
    told: torch.Tensor
    where_in_ram: torch.Tensor
    told_in_ram: torch.Tensor


class _Experts:
    """One layer's."""

    def __init__(
        self,
        module: nn.Module,
        part: Part,
        cache: ExpertCache,
        homes: WeightHomes,
        at_home: _AtHome,
        hand_over: HandOver,
        scratch: GroupMemory,
        tables: _Tables,
        of_token: int,
    ) -> None:
        self._module: Any = module
        self._tables = tables
        self._matrices: dict[str, _Matrix] = {}
        self._biases: dict[str, torch.Tensor] = {}
        for number, (slot, owners) in enumerate(zip(part.layout.slots, part.owners, strict=True)):
            name = owners[0][1]
            if slot.packed is not None:
                if slot.packed.is_transposed != module.is_transposed:
                    raise ValueError(f"{name} of {part.name} is not packed along what its products sum over")
                self._matrices[name] = _Matrix(part, number, cache, at_home, hand_over, scratch, tables)
            elif name.endswith("_bias"):
                self._biases[name.removesuffix("_bias")] = homes.read(slot.name).to(cache.memory.device)
        first = first_matrix(module)
        if set(self._matrices) != {first, "down_proj"}:
            raise ValueError(f"the experts of {part.name} are not two packed matrices each")
        self._matrices[first].share = of_token
        for matrix in self._matrices.values():
            matrix.open()

    def __call__(self, hidden: torch.Tensor, choice: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [N, H], choice [N, K], weights [N, K] -> [N, H]."""
        numbers = choice.reshape(-1)
        torch.add(numbers, 0, out=self._tables.told[: len(numbers)])
        slots = self._tables.where[numbers]

        def bias(name: str) -> torch.Tensor | None:
            return self._biases[name][numbers] if name in self._biases else None

        def product(name: str, rows: torch.Tensor) -> torch.Tensor:
            return self._matrices[name].product(rows, slots)

        return run_pairs(self._module, hidden, choice, weights, product, bias)


class _Matrix:
    """One matrix of each of a layer's experts. `share`: pairs of each row."""

    def __init__(
        self,
        part: Part,
        number: int,
        cache: ExpertCache,
        at_home: _AtHome,
        hand_over: HandOver,
        scratch: GroupMemory,
        tables: _Tables,
    ) -> None:
        slot, itemsize = part.layout.slots[number], part.layout.dtype.itemsize
        assert slot.packed is not None
        self.share = 1
        self._spec, self._of_one = slot.packed, PackedSpec(slot.packed.format, slot.packed.shape[1:])
        self._hand_over, self._scratch, self._tables = hand_over, scratch, tables
        self._group = cache.group
        self._has_kernel = cache.memory.device.type == "cuda" and DeviceProducts.can(self._of_one)
        self._slots, self._at_home = cache.planes(part)[number], at_home
        if not PackedProducts.can(self._of_one):
            raise ValueError(f"there are no kernels for {slot.packed.format.name} of {self._of_one.shape[1]} columns")
        form = form_of(part)
        self._planes, self._stride_bytes = [], form.size_bytes
        for piece in form.pieces:
            if piece.slot == number:
                plane = slot.packed.format.planes[len(self._planes)]
                bytes_of = at_home.first[piece.at_bytes : piece.at_bytes + piece.numel * itemsize]
                self._planes.append(bytes_of.view(plane.dtype).view(-1, plane.per_block))
        self._task = -1

    def open(self) -> None:
        """Tell the CPU of it."""
        strides = [self._stride_bytes] * len(self._planes)
        stack = stack_of(self._spec, self._planes, strides, self._at_home.scattered)
        tables = self._tables
        self._task = self._hand_over.products.task_of_chosen(
            stack, tables.told_in_ram, self.share, elsewhere=tables.where_in_ram
        )

    def product(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Row n / share of `rows` [P / share, columns] times the matrix of pair n, whose slot `slots` [P] says:
        [P, results]."""
        pairs = len(slots)
        self._hand_over.ask_chosen(self._task, rows, pairs)
        here = self._in_slots(rows, slots)
        there = self._hand_over.chosen(pairs, self._of_one.shape[0])
        return torch.where((slots < 0)[:, None], there, here).to(rows.dtype)

    def _in_slots(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        if self._has_kernel:
            return device_products(rows.device).multiply_chosen(self._of_one, self._slots, slots, rows)
        found, at = [], slots.clamp(min=0)
        given = rows[:, None].expand(-1, self.share, -1).flatten(0, 1)[..., None]
        for start in range(0, len(slots), self._group):
            some = at[start : start + self._group]
            spec = PackedSpec(self._of_one.format, (len(some), *self._of_one.shape))
            self._scratch.used_bytes = 0
            values = self._scratch.take(spec.shape, rows.dtype)
            spec.expand_planes([plane[some].flatten(0, 1) for plane in self._slots], values)
            found.append(torch.bmm(values, given[start : start + self._group]).squeeze(-1))
        return found[0] if len(found) == 1 else torch.cat(found)
