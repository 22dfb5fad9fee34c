"""A layer's experts on few tokens, with no host in between: each pair of a token and an expert by the expert's number.

A table on the device says where each expert lies. The GPU multiplies with experts in slots while the CPU multiplies
with the others in RAM. The GPU itself asks the CPU for them (`HandOver` in `weights/packed_weight.py`), so a CUDA graph
holds a whole pass. The GPU may also read some experts in RAM, because CPU and link together use more of the memory's
rate than one alone. Experts on a drive are read into RAM first (`from_drive.py`). The choices are written to
page-locked RAM. While the next pass runs, the host finds there which experts should move into slots, at most
`MOST_SWAPS`, and which leave. The table changes only once they have arrived, so no pass waits for them.

N tokens, K experts of each, P = N K pairs, H hidden size.

A module's experts on pairs of a token and an expert: each matrix in one product of all pairs, not expert by expert.

`experts_by_pairs` is what transformers runs for experts of which a CPU multiplies packed ones as they are: two calls of
the kernels for a layer, which hand all chosen experts out together. Longer passes run expert by expert, as before.

Who multiplies which pair of a token and an expert: the GPU from a slot, the GPU from RAM over the link, or the CPU.

Both read RAM at once, each at its own rate. So one in `every` pairs without a slot is the GPU's (0: none), counted in
the order of the pairs. The CPU counts in the same way (products.h: Stack), so neither has to tell the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from outcore.common.deadline import after
from outcore.common.errors import EngineError
from outcore.flow.experts.cache import ExpertCache
from outcore.flow.experts.chosen import ChosenLayers, GroupMemory
from outcore.flow.experts.form import experts_of, form_of, planes_of
from outcore.flow.experts.from_drive import DriveExperts
from outcore.flow.parts import ModelParts, Part
from outcore.flow.weights import HandOver, PackedWeight, WeightHomes
from outcore.formats import DeviceProducts, PackedProducts, PackedSpec, Scattered, device_products, stack_of
from outcore.staging.pool import SmallCopies, device_view

NAME = "outcore_by_pairs"
"""Name of `experts_by_pairs` in a model's configuration."""


def run_pairs(
    module: Any,
    hidden: torch.Tensor,
    choice: torch.Tensor,
    weights: torch.Tensor,
    product: Callable[[str, torch.Tensor], torch.Tensor],
    bias: Callable[[str], torch.Tensor | None],
) -> torch.Tensor:
    """hidden [N, H], choice [N, K], weights [N, K] -> [N, H]. `product(name, rows)`: rows [N or P, columns] times the
    matrix of that name that each pair chose, [P, results]; `bias(name)`: theirs [P, results], if they have one."""

    def linear(name: str, rows: torch.Tensor) -> torch.Tensor:
        values, own = product(name, rows), bias(name)
        return values if own is None else values + own

    values = linear(first_matrix(module), hidden)
    values = linear("down_proj", module._apply_gate(values) if module.has_gate else module.act_fn(values))
    if getattr(module, "has_post_expert_norm", False):
        values = module.post_expert_norm(values)
    weighted = values * weights.reshape(-1, 1)
    return weighted.view(*choice.shape, -1).sum(dim=1).to(hidden.dtype)


def first_matrix(module: Any) -> str:
    """Name of what a token is multiplied with first."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def experts_by_pairs(module: Any, *args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
    """hidden [N, H], choice [N, K], weights [N, K] -> [N, H], in whatever way the model's code gives them."""
    hidden, choice, weights = (*args, *named.values())
    numbers = choice.reshape(-1)
    stacks = [getattr(module, name, None) for name in (first_matrix(module), "down_proj")]
    if not all(
        isinstance(stack, PackedWeight)
        and stack.spec.is_transposed == module.is_transposed
        and stack.products.takes_pairs(stack, len(hidden), len(numbers))
        for stack in stacks
    ):
        return type(module).forward.__wrapped__(module, hidden, choice, weights)
    return run_pairs(
        module,
        hidden,
        choice,
        weights,
        lambda name, rows: getattr(module, name).chosen(rows, numbers),
        lambda name: getattr(module, f"{name}_bias")[numbers] if module.has_bias else None,
    )


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_by_pairs)


WIDTH = 512
"""Results of a pair that one program collects."""


def has_kernels(device: torch.device) -> bool:
    """Whether the kernels of that device are taken."""
    return device.type == "cuda"


def share_out(
    numbers: torch.Tensor, where: torch.Tensor, every: torch.Tensor, told: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slot of each pair or -1, number of its expert if the GPU reads it in RAM, else -1), int32 [P]. The CPU computes
    the rest. `numbers` [P]: experts of the pairs, copied to `told` for the CPU; `where` [experts]: their slots."""
    if has_kernels(numbers.device):
        numbers = numbers.contiguous()
        slots, links = (torch.empty(len(numbers), dtype=torch.int32, device=numbers.device) for _ in range(2))
        block = 1 << max(0, len(numbers) - 1).bit_length()
        _kernels().share_out[(1,)](
            numbers, where, every, told, slots, links, len(numbers), BLOCK=max(32, block), num_warps=1
        )
        return slots, links
    torch.add(numbers, 0, out=told[: len(numbers)])
    slots = where[numbers]
    misses = (slots < 0).int()
    is_linked = (misses > 0) & (every > 0) & (misses.cumsum(0) % every.clamp(min=1) == 0)
    return slots, torch.where(is_linked, numbers.int(), -1)


def collect(
    slots: torch.Tensor,
    links: torch.Tensor,
    in_slots: torch.Tensor,
    linked: torch.Tensor | None,
    of_cpu: torch.Tensor,
) -> torch.Tensor:
    """[P, results] in the type of `in_slots`: each pair's result, taken from slots, from RAM by the GPU, or from the
    CPU."""
    if has_kernels(in_slots.device):
        out, (pairs, width) = torch.empty_like(in_slots), in_slots.shape
        grid = -(-width // WIDTH), pairs
        linked = in_slots if linked is None else linked
        _kernels().collect[grid](slots, links, in_slots, linked, of_cpu, out, width, BLOCK=WIDTH, num_warps=4)
        return out
    found = torch.where((slots < 0)[:, None], of_cpu, in_slots)
    return (found if linked is None else torch.where((links < 0)[:, None], found, linked)).to(in_slots.dtype)


def _kernels() -> Any:
    from outcore.flow.experts import pair_kernels

    return pair_kernels


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
        self.is_on = True
        """Whether passes are to run so."""
        self._adapts = False
        """Whether slots follow what is chosen: not before it is decided, since in a trial each pass shall miss as much
        as the next one."""
        self._products = hand_over.products
        self.answered = hand_over.products.answered
        """Tells (questions that the CPU answered, seconds that it took)."""
        on_drive = {layer: part for layer, part in cache.parts.items() if homes.rest(part) is not None}
        at_once = max((min(cache.forms[layer].num_experts, most_tokens * of_token) for layer in on_drive), default=0)
        self.drive = DriveExperts(on_drive, homes, at_once, cache.counts) if on_drive else None
        """Brings experts whose homes are on a drive; None: none are."""
        device = cache.memory.device
        has_gpu = device.type == "cuda"
        self._cache, self._copies, self._of_token, self._layers = cache, SmallCopies(device), of_token, layers
        shape = len(cache.parts), most_tokens * of_token
        self._told = told = torch.zeros(shape, dtype=torch.int32, pin_memory=has_gpu)
        """Experts that the last pass chose, layer by layer."""
        if has_gpu:
            told = device_view(told.view(-1).view(torch.uint8), device).view(torch.int32).view(shape)
        self._every, never = (
            (torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32, device=device)) for _ in range(2)
        )
        self._pairs = 0
        """Pairs of the last pass, in each layer."""
        self._chosen, self._where = self._told[:, :0], cache.where_now
        self._few: list[_Experts] = []
        for row, (layer, part) in enumerate(cache.parts.items()):
            module = experts_of(units.layers[layer])
            assert module is not None
            at_home = _AtHome(homes.ram(part).view(torch.uint8))
            if self.drive is not None and layer in self.drive.of:
                at_home = _AtHome(self.drive.memory[0], self.drive.of[layer])
            here, there = _Tables(self._told[row], cache.where_now[row]), _Tables(told[row], cache.where[row])
            few = _Experts(module, part, cache, homes, at_home, hand_over, layers.scratch, (here, there))
            few.open(of_token, self._every if few.can_link else never)
            layers.of[layer].few = few
            self._few.append(few)

    @property
    def can_link(self) -> bool:
        """Whether the GPU can read experts in RAM."""
        return any(few.can_link for few in self._few)

    @property
    def every(self) -> int:
        """One in this many pairs without a slot is the GPU's, which reads the expert in RAM; 0: none."""
        return int(self._every[0])

    @every.setter
    def every(self, count: int) -> None:
        assert not count or self.can_link
        for counts in self._every:
            counts.fill_(count)

    def run(self, every: int | None) -> None:
        """Have passes run so, one in `every` pairs without a slot (0: none) multiplied by the GPU; None: not so."""
        self.is_on = every is not None
        if every is not None:
            self.every = every

    def decide(self, every: int, *, is_on: bool) -> None:
        """End the trial: passes run like this, or not so at all, and slots follow what is chosen."""
        self.every, self.is_on, self._adapts = every, is_on, True

    def unlink(self) -> None:
        """Have no pair multiplied by the GPU from RAM in passes that are made from now on."""
        self.every = 0
        for few in self._few:
            few.can_link = False

    def begin(self, tokens: int) -> None:
        """Prepare for a pass of this many tokens, which is queued next; the pass before it has run. Raises EngineError
        if an expert could not be read, and gives that expert up."""
        self._chosen, self._where = self._told[:, : self._pairs].clone(), self._cache.where_now.clone()
        self._pairs = tokens * self._of_token
        try:
            self._cache.settle(self._copies)
        except BaseException as error:
            self._cache.abort(after(error))
            raise
        self._layers.is_few = True

    def check(self) -> None:
        """EngineError when results of the pass that has run are not there."""
        failure = self._products.take_failure()
        if self.drive is not None:
            self.drive.check()
        if failure:
            raise EngineError(f"the CPU could not multiply experts: {failure}")

    def end(self) -> None:
        """The pass is queued."""
        self._layers.is_few = False
        self._cache.used()
        if self._adapts and self._chosen.numel():
            self._cache.adapt(self._chosen, self._where, MOST_SWAPS)


@dataclass(frozen=True)
class _AtHome:
    """Addresses of a layer's experts in RAM, for the CPU's kernels."""

    first: torch.Tensor
    """Bytes of the first, with the others behind it, or what `scattered` counts places from."""
    scattered: Scattered | None = None


@dataclass(frozen=True)
class _Tables:
    """Tables of a layer's pairs for one side, the CPU or the device."""

    told: torch.Tensor
    """Experts of the pairs."""
    where: torch.Tensor
    """Slots of all experts."""


class _Experts:
    """One layer's. `tables`: the CPU's and the device's."""

    def __init__(
        self,
        module: nn.Module,
        part: Part,
        cache: ExpertCache,
        homes: WeightHomes,
        at_home: _AtHome,
        hand_over: HandOver,
        scratch: GroupMemory,
        tables: tuple[_Tables, _Tables],
    ) -> None:
        self._module: Any = module
        self._hand_over, (self._here, self._there) = hand_over, tables
        self._every: tuple[torch.Tensor, torch.Tensor] | None = None
        self._matrices: dict[str, _Matrix] = {}
        self._biases: dict[str, torch.Tensor] = {}
        for number, (slot, owners) in enumerate(zip(part.layout.slots, part.owners, strict=True)):
            name = owners[0][1]
            if slot.packed is not None:
                if slot.packed.is_transposed != module.is_transposed:
                    raise ValueError(f"{name} of {part.name} is not packed along what its products sum over")
                self._matrices[name] = _Matrix(part, number, cache, at_home, scratch)
            elif name.endswith("_bias"):
                self._biases[name.removesuffix("_bias")] = homes.read(slot.name).to(cache.memory.device)
        if set(self._matrices) != {first_matrix(module), "down_proj"}:
            raise ValueError(f"the experts of {part.name} are not two packed matrices each")
        self.can_link = all(matrix.can_link for matrix in self._matrices.values())
        """Whether the GPU can read them in RAM."""

    def open(self, of_token: int, every: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Tell the CPU of the matrices. `every`: pairs without a slot, of which one is the GPU's, as both sides know
        it."""
        self._every = every
        for name, matrix in self._matrices.items():
            share = of_token if name == first_matrix(self._module) else 1
            task = self._hand_over.products.task_of_chosen
            matrix.task = task(matrix.stack, self._here.told, share, self._here.where, every[0])

    def __call__(self, hidden: torch.Tensor, choice: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [N, H], choice [N, K], weights [N, K] -> [N, H]."""
        assert self._every is not None
        numbers, there = choice.reshape(-1), self._there
        slots, links = share_out(numbers, there.where, self._every[1], there.told)

        def bias(name: str) -> torch.Tensor | None:
            return self._biases[name][numbers] if name in self._biases else None

        def product(name: str, rows: torch.Tensor) -> torch.Tensor:
            return self._product(self._matrices[name], rows, slots, links)

        return run_pairs(self._module, hidden, choice, weights, product, bias)

    def _product(self, matrix: _Matrix, rows: torch.Tensor, slots: torch.Tensor, links: torch.Tensor) -> torch.Tensor:
        """Rows [P / share, columns] times the matrix of each pair: [P, results]."""
        self._hand_over.ask_chosen(matrix.task, rows, len(slots))
        linked = matrix.product(matrix.linked, rows, links) if self.can_link else None
        in_slots = matrix.product(matrix.slots, rows, slots)
        return collect(slots, links, in_slots, linked, self._hand_over.chosen(len(slots), matrix.one.shape[0]))


class _Matrix:
    """One matrix of each of a layer's experts."""

    def __init__(self, part: Part, number: int, cache: ExpertCache, at_home: _AtHome, scratch: GroupMemory) -> None:
        packed, device, form = part.layout.slots[number].packed, cache.memory.device, form_of(part)
        assert packed is not None
        self.one = PackedSpec(packed.format, packed.shape[1:])
        if not PackedProducts.can(self.one):
            raise ValueError(f"there are no kernels for {packed.format.name} of {self.one.shape[1]} columns")
        self.slots = planes_of(part, cache.memory)[number]
        """Planes [slots, blocks, per_block]."""
        num_experts = form.num_experts if at_home.scattered is None else 1
        in_ram = at_home.first[: num_experts * form.size_bytes].view(num_experts, form.size_bytes)
        planes = [plane[0] for plane in planes_of(part, in_ram)[number]]
        self.stack = stack_of(packed, planes, [form.size_bytes] * len(planes), at_home.scattered)
        """Descriptions of the matrices for the CPU's kernels."""
        self.task = -1
        self._has_kernel = device.type == "cuda" and DeviceProducts.can(self.one)
        self.can_link = self._has_kernel and at_home.scattered is None and in_ram.is_pinned()
        self.linked: list[torch.Tensor] = []
        """Planes [experts, blocks, per_block] in RAM, as the device reads them."""
        if self.can_link:
            there = device_view(in_ram.view(-1), device).view(in_ram.shape)
            self.linked = planes_of(part, there)[number]
        self._scratch, self._group = scratch, cache.group

    def product(self, planes: list[torch.Tensor], rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Row n / share of `rows` [P / share, columns] times the matrix at `places[n]` of these planes: [P, results].
        Undefined where that is negative."""
        if self._has_kernel:
            return device_products(rows.device).multiply_chosen(self.one, planes, places, rows)
        found, at = [], places.clamp(min=0)
        given = rows[:, None].expand(-1, len(places) // len(rows), -1).flatten(0, 1)[..., None]
        for start in range(0, len(places), self._group):
            some = at[start : start + self._group]
            spec = PackedSpec(self.one.format, (len(some), *self.one.shape))
            self._scratch.used_bytes = 0
            values = self._scratch.take(spec.shape, rows.dtype)
            spec.expand_planes([plane[some].flatten(0, 1) for plane in planes], values)
            found.append(torch.bmm(values, given[start : start + self._group]).squeeze(-1))
        return found[0] if len(found) == 1 else torch.cat(found)
