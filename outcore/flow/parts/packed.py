"""Which parameters of a model are packed at home: frozen matrices of its layers.

With `quantize` those of linear layers (Conv1D too) and stacked experts, as bitsandbytes chooses them: embedding, head,
norms, biases and what routes between experts stay in 16 bits, and so does a matrix whose rows do not divide into the
format's blocks. A checkpoint that is packed as published says it by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn
from transformers.pytorch_utils import Conv1D

from outcore.flow.parts.layout import Slot
from outcore.flow.parts.shell import Owner
from outcore.flow.parts.units import Part
from outcore.formats import PLAIN_FORMATS, PackedProducts, PackedSpec, packed_format
from outcore.model import LoadedModel

Packing = Callable[[str, nn.Parameter, Sequence[Owner]], PackedSpec | None]
"""(checkpoint name, parameter, where modules hold it) -> how it is packed; None: as it is."""
ADAPTER = "lora_"
"""In the names of an adapter's own matrices, which stay as they are when nothing is trained, too."""
STACKED_DIMS = 3
"""Dimensions of a weight that holds all experts of a layer."""


def packing_of(loaded: LoadedModel, *, as_published: bool = False) -> Packing:
    """The rule for this model; `as_published`: what its checkpoint packs, and nothing else."""
    return packing_rule(None if as_published else loaded.quantize, loaded.packed)


def cpu_specs(part: Part) -> list[PackedSpec | None]:
    """What each slot's weight is to the CPU's kernels, where its bytes are: packed as it is, or a frozen 16-bit matrix
    of linear layers as it stands; None for what goes to the device."""
    return [_cpu_spec(part, slot, owners) for slot, owners in zip(part.layout.slots, part.owners, strict=True)]


def _cpu_spec(part: Part, slot: Slot, owners: Sequence[Owner]) -> PackedSpec | None:
    plain = PLAIN_FORMATS.get(part.dtype)
    if slot.packed is not None or plain is None or slot.trainable or ADAPTER in slot.name:
        return slot.packed
    spec, is_linear = PackedSpec(plain, slot.shape), [type(module) is nn.Linear for module, _ in owners]
    is_table = all(linear or isinstance(module, nn.Embedding) for linear, (module, _) in zip(is_linear, owners))
    return spec if any(is_linear) and is_table and PackedProducts.can(spec) else None


def packing_rule(quantize: str | None, packed: Mapping[str, PackedSpec]) -> Packing:
    """Frozen matrices as `packed` has them by name, and with `quantize` the others that fit its blocks."""
    wanted = None if quantize is None else packed_format(quantize)

    def packing(name: str, parameter: nn.Parameter, owners: Sequence[Owner]) -> PackedSpec | None:
        if parameter.requires_grad or ADAPTER in name:
            return None
        if name in packed:
            return packed[name]
        if (
            wanted is None
            or not parameter.ndim
            or parameter.shape[-1] % wanted.block
            or not _is_matrix(parameter, owners)
        ):
            return None
        return PackedSpec(wanted, tuple(parameter.shape))

    return packing


def _is_matrix(parameter: nn.Parameter, owners: Sequence[Owner]) -> bool:
    if parameter.ndim == STACKED_DIMS:
        return True
    return parameter.ndim == 2 and all(isinstance(module, (nn.Linear, Conv1D)) for module, _ in owners)
