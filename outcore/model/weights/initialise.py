"""Initial weights as a function of seed and parameter name alone, whoever holds the parameters.

transformers draws initial weights from one global stream while it builds the model, so what a parameter gets depends
on the order of construction, the device and the dtype, and under ZeRO-3 on the rank. Here a skeleton without memory
(meta device) is walked instead: region by region (a layer at a time) its parameters are made in fp32 on the CPU,
every module's own `_init_weights` runs with a generator seeded by (seed, module name), and the values are handed out.
The model's published distribution is kept; the values are the same for every engine, ZeRO stage and world size. Layers
are made ahead by several threads (the same values, since every module has its own seed), so memory stays at one layer
or `AHEAD_BYTES`, whichever is more.

Cost: about 100 M normal numbers a second and core. Parameters that `_init_weights` leaves alone keep what the
model's constructor gave them.

Stand-ins: tensors with shape and type but the memory of one element, for parameters that live elsewhere.

Zero strides over a single zero. They run through a model's code (embedding lookups, products) like real weights of
zeros, so a model's structure can be traced with them, and refuse to be written to, so nothing is lost in them silently.

A stream of random numbers that belongs to one thread, for code that asks torch's default generator.

Initialisers of models call `weight.normal_()` and the like without a generator, so two of them can run at the same
time only if each is given one of its own on the way. `RandomStream(seed)` does that for every draw made in its thread
while it is entered: the numbers are those that the default generator gives after `torch.manual_seed(seed)`, bit by bit.
Draws that take no generator (`torch.rand(n)`) raise `SharedStreamNeeded` before anything is drawn.

Whether a folder of weights is what was written: no shard outside it, and checksums where an export left them.

outcore's exports carry `outcore-checksums.json`; reading every byte once against it costs a second for some GB. A
configuration or a chat template may have been edited since: that is said, damaged weights are refused."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.common import file_errors, inside
from outcore.common.listing import DamagedListing, damaged_weights
from outcore.model.making import made_of


def stand_in(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros on the CPU that takes no memory."""
    return torch.zeros((), dtype=dtype).expand(shape)


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Whether the tensor has shape only. Never of one element, which any tensor has memory for."""
    return tensor.numel() > 1 and not any(tensor.stride())


def without_memory(build: Callable[[], Any]) -> Any:
    """`build()`'s module with stand-ins for parameters and with real buffers.

    While it is built, each parameter is real only for the moment of its making, untouched, which costs address space
    and no memory; then it is on the meta device, where a constructor may write to it without effect."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = _like(parameter, parameter.detach().to("meta"))

    nn.Module.register_parameter = register_on_meta  # pyright: ignore[reportAttributeAccessIssue]
    try:
        model = build()
    finally:
        nn.Module.register_parameter = register
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = _like(parameter, stand_in(parameter.shape, parameter.dtype))
                module._parameters[name] = made[id(parameter)]
    return model


def _like(parameter: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """With the marks that a constructor has set on the parameter."""
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    vars(new).update(vars(parameter))
    return new


class SharedStreamNeeded(RuntimeError):
    """The code draws in a way that only the default generator serves; run it alone, with that one seeded."""


class RandomStream(TorchDispatchMode):
    """Random numbers in torch's order. A context manager; other threads are not touched."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("generator") is None:
            target = args[0] if args else None
            takes_one = any(argument.name == "generator" for argument in func._schema.arguments)
            if not isinstance(target, torch.Tensor) or (target.is_cpu and not takes_one):
                raise SharedStreamNeeded(f"{func} takes no generator")
            if target.is_cpu:
                given["generator"] = self._generator
        return func(*args, **given)


INDEX = "model.safetensors.index.json"


def check_weight_files(path: str | None) -> tuple[str, ...]:
    """Notes for people. RuntimeError for damaged weights, ValueError for an index that leads out of the folder."""
    if path is None or not Path(path).is_dir():
        return ()
    folder = Path(path)
    _check_index(folder)
    try:
        with file_errors("verifying the weights", folder):
            damaged, changed = damaged_weights(folder)
    except DamagedListing as error:
        raise RuntimeError(f"{error} Remove it if you trust the weights, or export the model again.") from error
    if damaged:
        raise RuntimeError(
            f"The weights are damaged or cut short: {damaged[0]} Copy or download them again, or export the model "
            "again from its checkpoint."
        )
    return tuple(f"changed since the export: {words}" for words in changed)


def _check_index(folder: Path) -> None:
    index = folder / INDEX
    if not index.is_file():
        return
    try:
        with file_errors("reading the index of the weights", index):
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        for name in names:
            inside(folder, name, follow_links=True)  # the hub's own cache is made of links
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: its weight_map cannot be used: {error}.") from error


AHEAD_BYTES = 1 << 30
"""Initial values in fp32 that may wait for their place."""

Gather = Callable[[list[nn.Parameter]], AbstractContextManager]


@dataclass
class InitRegion:
    """Parameters that are initialised together: `modules` in the order their init runs, each with its initialiser."""

    modules: list[tuple[str, nn.Module, Callable[[nn.Module], None]]] = field(default_factory=list)
    holders: list[tuple[str, nn.Module]] = field(default_factory=list)
    is_member: bool = False
    """One of a module list: it knows nothing of the others, so they may be initialised at the same time."""

    def n_bytes(self) -> int:
        """Bytes of its values in fp32."""
        return 4 * sum(p.numel() for _, module in self.holders for p in module._parameters.values() if p is not None)

    def parameter_names(self) -> list[str]:
        """Full names of the region's parameters; a shared one under each of its names."""
        return [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self.holders
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def generate(self, seed: int) -> dict[str, torch.Tensor]:
        """Run the initialisers: name -> fp32 CPU tensor. Parameters none of them sets are left out."""
        return self._generate(lambda name: seeded_cpu(seed, name))

    def generate_beside_others(self, seed: int) -> dict[str, torch.Tensor]:
        """Generate the same in a thread of its own, without the default generator. SharedStreamNeeded."""
        return self._generate(lambda name: RandomStream(seed_of(seed, name)))

    @torch.no_grad()
    def _generate(self, seeded: Callable[[str], AbstractContextManager]) -> dict[str, torch.Tensor]:
        made: dict[int, nn.Parameter] = {}
        swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
        values: dict[str, torch.Tensor] = {}
        try:
            for _, module in self.holders:
                for name, parameter in module._parameters.items():
                    if parameter is None:
                        continue
                    if id(parameter) not in made:
                        blank = torch.full(parameter.shape, float("nan"), dtype=torch.float32, device="cpu")
                        made[id(parameter)] = nn.Parameter(blank, requires_grad=False)
                    swapped.append((module, name, parameter))
                    module._parameters[name] = made[id(parameter)]
            for module_name, module, initialiser in self.modules:
                with seeded(module_name):
                    initialiser(module)
            for prefix, module in self.holders:
                for name, parameter in module._parameters.items():
                    if parameter is not None and not parameter.sum().isnan():  # a mask of it would take a quarter more
                        values[f"{prefix}.{name}" if prefix else name] = parameter.detach()
        finally:
            for module, name, parameter in swapped:
                module._parameters[name] = parameter
        return values


def seed_of(seed: int, name: str) -> int:
    """A module's own seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "little") >> 1


@contextmanager
def seeded_cpu(seed: int, name: str) -> Iterator[None]:
    """The default CPU generator seeded by (seed, name) inside, as it was before outside; no other device is touched."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed_of(seed, name))
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def meta_skeleton(model_class: type[nn.Module], config: object) -> nn.Module:
    """The model without any memory: every parameter and buffer on the meta device. ValueError as `made_of`."""
    with made_of(config), torch.device("meta"):
        return model_class(config)


def init_regions(skeleton: nn.Module) -> list[InitRegion]:
    """Cut a skeleton into regions: each member of a module list alone (a layer), the rest module by module.

    Within a region modules are initialised children first, as transformers does, so that a parent's correction of a
    child (GPT-2's scaled projections) comes last. A parent above a module list sees its own parameters and those of
    its childless children, which covers tied embeddings and heads."""
    regions: list[InitRegion] = []
    _walk(skeleton, "", _initialiser_of(skeleton, None), regions)
    return [region for region in regions if region.parameter_names()]


def _initialiser_of(module: nn.Module, inherited: Callable[[nn.Module], None] | None) -> Callable[[nn.Module], None]:
    own: Any = getattr(module, "_init_weights", None)
    return own if own is not None else (inherited or _torch_reset)


def _torch_reset(module: nn.Module) -> None:
    """Plain torch modules: what their own constructor does."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _whole_subtree(module: nn.Module, prefix: str, initialiser: Callable, region: InitRegion) -> None:
    for name, child in module.named_children():
        _whole_subtree(child, _join(prefix, name), _initialiser_of(child, initialiser), region)
    region.modules.append((prefix, module, initialiser))
    region.holders.append((prefix, module))


def _holds_list(module: nn.Module) -> bool:
    return any(isinstance(inner, (nn.ModuleList, nn.ModuleDict)) for inner in module.modules())


def _walk(module: nn.Module, prefix: str, initialiser: Callable, regions: list[InitRegion]) -> None:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for name, child in module.named_children():
            region = InitRegion(is_member=True)
            _whole_subtree(child, _join(prefix, name), _initialiser_of(child, initialiser), region)
            regions.append(region)
        return
    own = InitRegion()
    for name, child in module.named_children():
        child_init, child_prefix = _initialiser_of(child, initialiser), _join(prefix, name)
        if _holds_list(child):
            _walk(child, child_prefix, child_init, regions)
        elif any(True for _ in child.children()):
            region = InitRegion()
            _whole_subtree(child, child_prefix, child_init, region)
            regions.append(region)
        else:
            _whole_subtree(child, child_prefix, child_init, own)
    own.modules.append((prefix, module, initialiser))
    own.holders.append((prefix, module))
    regions.append(own)


class InitPlan:
    """The regions of a skeleton in order, and which of them hands out each parameter.

    A shared (tied) parameter is handed out once, under its first name, by the last region that has it: as in
    transformers the last initialiser wins. Until then its value is kept."""

    def __init__(self, skeleton: nn.Module):
        self.regions = init_regions(skeleton)
        self.canonical = {id(parameter): name for name, parameter in skeleton.named_parameters()}
        by_name = dict(skeleton.named_parameters(remove_duplicate=False))
        self._ids = {name: id(parameter) for name, parameter in by_name.items()}
        self._last: dict[int, int] = {}
        for index, region in enumerate(self.regions):
            self._last.update({self._ids[name]: index for name in region.parameter_names()})

    def names(self, index: int) -> list[str]:
        """First names of the parameters that region `index` hands out."""
        return [self.canonical[key] for key, last in self._last.items() if last == index]

    def values(self, seed: int) -> Iterator[dict[str, torch.Tensor]]:
        """For each region: first name -> fp32 CPU tensor; parameters that nobody sets are left out."""
        kept: dict[int, torch.Tensor] = {}
        for index, made in enumerate(_generated(self.regions, seed)):
            kept.update({self._ids[name]: made.pop(name) for name in list(made)})  # here alone, and freed when used
            ready = [key for key in kept if self._last[key] == index]
            yield {self.canonical[key]: kept.pop(key) for key in ready}


def _generated(regions: list[InitRegion], seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield each region's tensors, in order; members of module lists are made ahead, by torch's number of threads."""
    start = 0
    while start < len(regions):
        stop = start
        while stop < len(regions) and regions[stop].is_member:
            stop += 1
        members = regions[start:stop]
        num_ahead = AHEAD_BYTES // max((region.n_bytes() for region in members), default=1)
        num_threads = min(torch.get_num_threads(), num_ahead, len(members))
        if num_threads > 1 and _are_apart(members):
            yield from _generated_ahead(members, seed, num_threads)
        else:
            stop = max(stop, start + 1)
            yield from (region.generate(seed) for region in regions[start:stop])
        start = stop


def _generated_ahead(regions: list[InitRegion], seed: int, num_threads: int) -> Iterator[dict[str, torch.Tensor]]:
    """At most `num_threads` regions are under way or waiting to be taken."""
    left = deque(regions)
    waiting: deque[tuple[InitRegion, Future[dict[str, torch.Tensor]]]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="initial-weights") as threads:
        while left or waiting:
            while left and len(waiting) < num_threads:
                region = left.popleft()
                waiting.append((region, threads.submit(region.generate_beside_others, seed)))
            region, future = waiting.popleft()
            try:
                made = future.result()
            except SharedStreamNeeded:
                made = region.generate(seed)
            del future  # the values are the caller's alone
            yield made


def _are_apart(regions: list[InitRegion]) -> bool:
    """No module and no parameter is in two regions: each can be filled without a look at the others."""
    seen: set[int] = set()
    for region in regions:
        own = {id(module) for _, module in region.holders}
        own |= {id(p) for _, module in region.holders for p in module._parameters.values() if p is not None}
        if own & seen:
            return False
        seen |= own
    return True


@torch.no_grad()
def initialise_weights(model: nn.Module, skeleton: nn.Module, seed: int, gather: Gather | None = None) -> list[str]:
    """Fill `model` with the initial weights of `skeleton` (same architecture), rounding to the model's dtype.

    `gather(parameters)`: context in which partitioned parameters are whole, written back on exit from the first rank
    (ZeRO-3); every rank calls this function, only the first one draws numbers. Returns the names that no initialiser
    set and that therefore keep their constructor's values."""
    from outcore.model.weights.zero3 import is_first_rank

    parameters = dict(model.named_parameters(remove_duplicate=False))
    plan = InitPlan(skeleton)
    missing = [name for name in plan.canonical.values() if name not in parameters]
    if missing:
        raise RuntimeError(
            f"The skeleton has parameters that the model lacks: {missing[:3]}. Build both from one config."
        )
    writer = gather is None or is_first_rank()
    values_of = plan.values(seed) if writer else None
    unset: list[str] = []
    for index in range(len(plan.regions)):
        names = plan.names(index)
        values = next(values_of) if values_of is not None else {}
        unset += [name for name in names if writer and name not in values]
        for name in names:  # one at a time: offloaded parameters are gathered through few buffers
            with gather([parameters[name]]) if gather is not None else nullcontext():
                if name in values:
                    _write(name, parameters[name], values.pop(name))
    return sorted(unset)


def _write(name: str, target: torch.Tensor, value: torch.Tensor) -> None:
    if target.shape != value.shape:
        raise RuntimeError(f"{name} has shape {tuple(target.shape)}, its initial value {tuple(value.shape)}.")
    target.data.copy_(value)
