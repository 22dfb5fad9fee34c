"""Homes of the streamed layers' parameters in RAM, whose memory lives as long as anybody looks at it.

A caller may hold what `state_dict` gave him long after we have moved on, so a home is never handed out twice: its
memory is unpinned and freed with the last tensor over it. Each parameter has a storage of its own over its stretch of
the home, so that whoever saves a model finds separate tensors."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from outcore.common.quantities import GIB, round_up
from outcore.flow.parts import Part
from outcore.flow.weights import Scratch, WeightHomes
from outcore.formats import PackedTensor
from outcore.machine import available_ram_bytes
from outcore.sizing.streaming import STAGING_BYTES
from outcore.staging.pool import ALIGNMENT_BYTES, CudaRuntime, MappedSlab, PinRefused, refusal_is_harmless
from outcore.storage import TensorStore

logger = logging.getLogger(__name__)
FREE_RAM_BYTES = 2 * GIB
"""Left for everything else when memory is pinned as far as RAM reaches."""


class LastingMemory:
    """RAM for homes (a `HomeMemory`): pinned up to a limit where there is a GPU, pageable beyond it."""

    def __init__(self, device: torch.device, pinned_bytes: int | None = None) -> None:
        self._runtime = CudaRuntime(device) if device.type == "cuda" else None
        if pinned_bytes is None:
            most = max(0, available_ram_bytes() - FREE_RAM_BYTES)
            pinned_bytes = most if refusal_is_harmless() else min(most, STAGING_BYTES)
        self._left_bytes = pinned_bytes if self._runtime is not None else 0

    def which_pinned(self, sizes: Sequence[tuple[int, int]]) -> frozenset[int]:
        return frozenset(index for index, _ in sizes)

    def take(self, n_bytes: int, owner: str, *, pinned: bool = True, touch: bool = True) -> torch.Tensor:
        """1-D uint8 of `n_bytes` zeros, freed with the last tensor over it."""
        size = round_up(max(1, n_bytes), ALIGNMENT_BYTES)
        runtime = self._runtime if pinned and size <= self._left_bytes else None
        try:
            slab = MappedSlab(size, runtime, touch=touch)
        except PinRefused as refused:
            logger.warning("%s and all that follows is in pageable RAM: %s", owner, refused)
            self._left_bytes, slab = 0, MappedSlab(size, None, touch=touch)
        memory = slab.tensor.numpy()  # lives as long as any tensor over it
        if slab.is_pinned:
            self._left_bytes -= size
            weakref.finalize(memory, self._free, slab)
        return torch.from_numpy(memory)[:n_bytes]

    def _free(self, slab: MappedSlab) -> None:
        try:
            slab.close()
        except PinRefused as refused:  # after a fatal error of CUDA nothing can be unpinned any more
            logger.warning("%s", refused)
        self._left_bytes += slab.size_bytes


class GradientMemory:
    """RAM for gradients: what a caller has let go of, usually all of it after a step, holds the next step's."""

    def __init__(self, memory: LastingMemory) -> None:
        self._memory = memory
        self._free: dict[int, list[Any]] = {}
        """Slabs that nobody looks at, by their bytes, as numpy arrays."""

    def take(self, n_bytes: int) -> torch.Tensor:
        """1-D uint8 of `n_bytes`, of any values; handed out again once the last tensor over it is gone."""
        free = self._free.setdefault(n_bytes, [])
        slab = free.pop() if free else self._memory.take(n_bytes, "gradients").numpy()
        view = slab[:]
        weakref.finalize(view, free.append, slab).atexit = False
        return torch.from_numpy(view)


class Elsewhere(torch.Tensor):
    """Stands for a frozen weight that is packed or lies on a drive: it has a shape, and no values to read or change."""

    why: str
    packed: PackedTensor | None
    """Values, until a home has taken them."""

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, why: str, packed: PackedTensor | None = None
    ) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        made.why, made.packed = why, packed
        return made

    @classmethod
    def of(cls, packed: PackedTensor, dtype: torch.dtype) -> torch.nn.Parameter:
        """A frozen parameter of a packed weight that has no home yet."""
        made = cls(packed.spec.value_shape, dtype, f"packed in {packed.spec.format.name}", packed)
        return torch.nn.Parameter(made, requires_grad=False)

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"Elsewhere({tuple(self.shape)}, {self.dtype})"

    def refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{what}: the streamed layers' frozen weights are {self.why} and cannot be read, changed, copied or saved "
            "one by one; do it to the model before outcore.hf.stream, or stream it without quantize and nvme"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.refusal("pickle")

    def untyped_storage(self) -> Any:
        raise self.refusal("save")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = next(one for one in args if isinstance(one, cls))
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(given.shape, given.dtype, given.why, given.packed)
        raise given.refusal(str(func).removeprefix("aten.").partition(".")[0])


class Owned(NamedTuple):
    """A parameter, and where modules hold it."""

    name: str
    parameter: torch.nn.Parameter
    places: list[tuple[torch.nn.Module, str]]

    @property
    def mark(self) -> tuple[Any, ...]:
        """Values that change when the parameter is another one, or has other memory, or is held by another module."""
        p, places = self.parameter, tuple((id(module), attribute) for module, attribute in self.places)
        return id(p), p.data_ptr(), p.dtype, p.shape, p.stride(), places


class _Packed:
    """A part's weights that come packed (a `WeightFeed`)."""

    def __init__(self, part: Part) -> None:
        named = zip(part.layout.slots, part.parameters, strict=True)
        self._values = {slot.name: p.packed for slot, p in named if isinstance(p, Elsewhere) and p.packed is not None}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._values)

    def groups(self) -> Iterator[dict[str, Any]]:
        yield dict(self._values)


class SlabHome:
    """The home of one part. Its parameters are views of it, or, frozen and packed or on a drive, `Elsewhere`."""

    def __init__(
        self, part: Part, owned: list[Owned], memory: LastingMemory, scratch: Scratch | None, ram_share: float
    ) -> None:
        self.part = part
        numel = part.layout.home_numel
        cut = numel if scratch is None else int(numel * ram_share) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        feed = _Packed(part)
        self._homes = WeightHomes(
            [part],
            memory,
            {part.index: cut},
            scratch,
            feed if feed.names else None,
            kind=f"weights-{part.name}-{part.index}",
        )
        self._homes.adopt()
        self.ram, self.rest = self._homes.ram(part), self._homes.rest(part)
        data = self.ram.view(torch.uint8).numpy()
        for number, slot in enumerate(part.layout.slots):
            start, n_bytes = slot.home_offset * part.dtype.itemsize, slot.numel * part.dtype.itemsize
            if slot.packed is None and start + n_bytes <= len(data):
                own = torch.from_numpy(data[start : start + n_bytes])
                part.parameters[number].data = own.view(part.dtype).view(slot.shape)
                continue
            why = "on a drive" if slot.packed is None else f"packed in {slot.packed.format.name}"
            stand_in = torch.nn.Parameter(Elsewhere(slot.shape, part.dtype, why), requires_grad=False)
            part.parameters[number] = stand_in
            for module, attribute in part.owners[number]:
                module._parameters[attribute] = stand_in
        by_name = {slot.name: p for slot, p in zip(part.layout.slots, part.parameters, strict=True)}
        self._marks = [Owned(one.name, by_name[one.name], one.places).mark for one in owned]

    def holds(self, owned: Sequence[Owned]) -> bool:
        """Whether it is still the home of exactly these, none of which got other memory since."""
        return self._marks == [one.mark for one in owned]

    @property
    def nvme_bytes(self) -> int:
        return self._homes.nvme_bytes


class HomeSource:
    """Says where the parts of a stack are to be uploaded from (a `WeightSource`): RAM, and the drive behind it."""

    def __init__(self) -> None:
        self.homes: dict[int, SlabHome] = {}

    def ram(self, unit: Part) -> torch.Tensor:
        return self.homes[unit.index].ram

    def stored(self, unit: Part) -> tuple[TensorStore, str] | None:
        return self.homes[unit.index].rest

    def cached(self, unit: Part) -> None:
        return None

    def is_current(self, unit: Part) -> bool:
        return True

    def wait_current(self, unit: Part) -> None:
        return
