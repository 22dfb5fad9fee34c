"""Search for the units of a causal language model, by structure.

The decoder stack is the module list that the decoder's own forward calls member by member with the hidden states. What
the first layer gets is the embedding unit's result; what happens to the last one's is the head. Which parameters belong
to which is read off autograd's graph of a run on two tokens (no gradient is computed), so no name matters and tied
weights are seen as what they are: one home that two parts share. Values do not matter, so a model that was loaded
lazily is traced with its stand-ins. Cost: one embedding, layer and head evaluation of two tokens on the CPU. A model
that does not work this way is refused with the reason (`StreamUnsupported`).

Which parameters of a model are packed at home: frozen matrices of its layers.

With `quantize` those of linear layers (Conv1D too) and stacked experts, as bitsandbytes chooses them: embedding, head,
norms, biases and what routes between experts stay in 16 bits, and so does a matrix whose rows do not divide into the
format's blocks. A checkpoint that is packed as published says it by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from outcore.flow.parts.layout import SlabLayout, Slot, several_types
from outcore.flow.parts.shell import (
    CallLog,
    Owner,
    Recorder,
    ReturnForm,
    StreamUnsupported,
    Tape,
    models_own_code,
    shell_of,
    with_memory,
)
from outcore.flow.parts.units import ModelParts, Part, recorders_of, run_to_layers
from outcore.formats import PLAIN_FORMATS, PackedProducts, PackedSpec, packed_format
from outcore.model import LoadedModel
from outcore.model.facts import checkpoint_name
from outcore.model.forward import CausalParts, Isolation, forward_inputs, unwrap

Packing = Callable[[str, nn.Parameter, Sequence[Owner]], PackedSpec | None]
"""(checkpoint name, parameter, where modules hold it) -> how it is packed; None: as it is."""
ADAPTER = "lora_"
"""Text in the names of an adapter's own matrices, which stay as they are when nothing is trained, too."""
STACKED_DIMS = 3
"""Dimensions of a weight that holds all experts of a layer."""


def packing_of(loaded: LoadedModel, *, as_published: bool = False) -> Packing:
    """The rule for this model; `as_published`: what its checkpoint packs, and nothing else."""
    return packing_rule(None if as_published else loaded.quantize, loaded.packed)


def cpu_specs(part: Part) -> list[PackedSpec | None]:
    """Format of each slot's weight if the CPU can multiply it in place (packed, or a frozen 16-bit matrix of a linear
    layer); None if it goes to the device."""
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


TABLES = (nn.Embedding, nn.Linear)
"""Modules that use a weight by its rows alone."""


def discover_units(loaded: LoadedModel, *, packs_ends: bool = False) -> ModelParts:
    """Take a loaded model apart. Its parameters must be whole, on the CPU, or stand-ins. `packs_ends`: embedding and
    head stay packed where the checkpoint has them so. StreamUnsupported says why not; ValueError for a `quantize` that
    fits no matrix."""
    causal = unwrap(loaded.model)
    if loaded.facts.is_encoder_decoder:
        raise StreamUnsupported("an encoder-decoder has two stacks of layers; only decoder-only models are streamed")
    if loaded.loss_fn is not None:
        raise StreamUnsupported(
            "it comes with its own loss(model, batch), which may look at the whole model; a loss(logits, labels) of "
            "each token can be streamed"
        )
    if loaded.config is None:
        raise StreamUnsupported("it is an own module without a transformers config")
    if not loaded.abilities.chunked_head:
        raise StreamUnsupported(loaded.abilities.chunked_reason)
    try:
        parts = CausalParts(causal)
    except ValueError as error:
        raise StreamUnsupported(str(error)) from error
    if next(causal.parameters()).is_meta:
        raise StreamUnsupported("its parameters are not in memory")
    if why := several_types({checkpoint_name(name): p.dtype for name, p in causal.named_parameters()}):
        raise StreamUnsupported(why)
    isolation = loaded.abilities.isolation or "position_ids"
    of_ends = packing_of(loaded, as_published=True) if packs_ends else lambda *_: None
    units = _Discovery(causal, parts, isolation, packing_of(loaded), of_ends).run()
    kinds = {slot.packed.format.name for part in units.all for slot in part.layout.packed_slots if slot.packed}
    if loaded.quantize is not None and loaded.quantize not in kinds:
        why = f"its matrices are packed in {', '.join(sorted(kinds))} already"
        why = why if kinds else "no matrix of this model divides into its blocks"
        raise ValueError(f"quantize {loaded.quantize}: {why}. Leave it out.")
    return units


def module_lists(decoder: nn.Module) -> dict[str, nn.ModuleList]:
    """The outermost module lists by path, those with parameters."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in decoder.named_modules():
        if not isinstance(module, nn.ModuleList) or next(module.parameters(), None) is None:
            continue
        if not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return found


def find_stack(decoder: nn.Module, inputs: dict[str, Any]) -> tuple[str, list[nn.Module]]:
    """(path, members) of the module list that could be the layers; of several (a vision tower has its own) the one that
    the decoder reaches first with `inputs`. StreamUnsupported when there is none."""
    found = module_lists(decoder)
    if not found:
        raise StreamUnsupported(f"its decoder ({type(decoder).__name__}) has no list of layers")
    path = next(iter(found)) if len(found) == 1 else _first_reached(decoder, found, inputs)
    layers = list(found[path])
    if len({id(layer) for layer in layers}) < len(layers):
        first = {id(layer): index for index, layer in reversed(list(enumerate(layers)))}
        index, layer = next((i, layer) for i, layer in enumerate(layers) if first[id(layer)] != i)
        raise StreamUnsupported(f"its layers {first[id(layer)]} and {index} of {path} are one and the same module")
    return path, layers


def _first_reached(decoder: nn.Module, lists: dict[str, nn.ModuleList], inputs: dict[str, Any]) -> str:
    tapes = {path: Tape() for path in lists}
    stops = {f"{path}.0": Recorder(stack[0], 0, 1, tapes[path]) for path, stack in lists.items()}
    with models_own_code(), torch.no_grad():
        run_to_layers(shell_of(decoder, stops), inputs)
    return next(path for path, tape in tapes.items() if tape.log.calls)


def parameters_behind(tensors: Iterable[Any]) -> list[nn.Parameter]:
    """The leaf parameters that autograd's graph of these tensors reaches, each once."""
    seen: set[Any] = set()
    found: dict[int, nn.Parameter] = {}
    todo = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(variable := getattr(node, "variable", None), nn.Parameter):
            found[id(variable)] = variable
        todo += [parent for parent, _ in node.next_functions if parent is not None]
    return list(found.values())


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors_in(item)] if isinstance(value, (list, tuple)) else []


class _Discovery:
    """One run over a model; see the module docstring."""

    def __init__(
        self, causal: nn.Module, parts: CausalParts, isolation: Isolation, packing: Packing, of_ends: Packing
    ) -> None:
        self.causal, self.parts, self.packing, self.of_ends = causal, parts, packing, of_ends
        self.isolation: Isolation = isolation
        self.stack: str = ""
        self.layers: list[nn.Module] = []
        self.names = {id(p): checkpoint_name(name) for name, p in causal.named_parameters()}
        self.owners: dict[int, list[Owner]] = {}
        for module in causal.modules():
            for attribute, p in module._parameters.items():
                if p is not None:
                    self.owners.setdefault(id(p), []).append((module, attribute))

    def run(self) -> ModelParts:
        trainable = {id(p): p.requires_grad for p in self.causal.parameters()}
        was_training = self.causal.training
        self.causal.eval()
        try:
            for p in self.causal.parameters():
                p.requires_grad_(p.is_floating_point())
            embed, head, units = self._trace()
        finally:
            for p in self.causal.parameters():
                p.requires_grad_(trainable[id(p)])
            self.causal.train(was_training)
        self._check_complete(embed, head)
        shared = {id(p) for p in embed} & {id(p) for p in head}
        if shared:
            ends = [*embed, *(p for p in head if id(p) not in shared)]
            units.embed = units.head = self._unit(0, "embedding and head", ends)
        else:
            units.embed = self._unit(0, "embedding", embed)
            units.head = self._unit(len(self.layers) + 1, "head", head)
        units.layer_units = [
            self._unit(i + 1, f"layer {i}", list(layer.parameters()), is_layer=True)
            for i, layer in enumerate(self.layers)
        ]
        return units

    def _trace(self) -> tuple[list[nn.Parameter], list[nn.Parameter], ModelParts]:
        batch = {"input_ids": torch.zeros((1, 2), dtype=torch.long)}
        inputs = forward_inputs(self.parts.decoder, batch, self.isolation)
        self.stack, self.layers = find_stack(self.parts.decoder, inputs)
        empty = self._unit(0, "", [])
        units = ModelParts(
            self.parts, self.stack, self.layers, (), ReturnForm(None), empty, [], empty, isolation=self.isolation
        )
        with torch.enable_grad():
            log = CallLog()
            shell = shell_of(self.parts.decoder, {self.stack: recorders_of(self.layers, Tape(log))})
            with models_own_code():
                run_to_layers(shell, inputs)
            call = log.calls[0]
            with torch.no_grad(), with_memory(self.layers[0]) as layer:
                with models_own_code():
                    output = layer(log.hidden.detach(), *call.args, **call.kwargs)
                units.form = ReturnForm.of(output)
            embed = parameters_behind([log.hidden])
            units.embed_paths = self._paths(embed)
            with models_own_code():
                log = units.record(batch)
            learned = [t for call in log.calls for t in tensors_in([call.args, call.kwargs]) if t.requires_grad]
            if learned:
                raise StreamUnsupported(
                    f"its layers get a learned tensor besides the hidden states{self._made_of(learned, embed)}"
                )
            leaf = log.hidden.detach().requires_grad_()
            with models_own_code():
                final = units.finish(leaf, batch, log)
                logits = self.parts.logits(final.reshape(1, -1, final.shape[-1]))
            return embed, parameters_behind([logits]), units

    def _made_of(self, learned: list[torch.Tensor], embed: list[nn.Parameter]) -> str:
        """Text in brackets: parameters that these tensors are made of and the hidden states are not."""
        known = {id(p) for p in embed}
        own = {self.names[id(p)] for p in parameters_behind(learned) if id(p) not in known}
        return f" (made of {_holders(sorted(own), [n for n in self.names.values() if n not in own])})" if own else ""

    def _paths(self, embed: list[nn.Parameter]) -> tuple[str, ...]:
        """Modules of the decoder that own these parameters, outermost only; a module with its adapters is one."""
        wanted = {id(p) for p in embed}
        modules = dict(self.parts.decoder.named_modules())
        adapted = [path for path, module in modules.items() if path and hasattr(module, "base_layer")]
        paths = [
            next((outer for outer in adapted if path.startswith(f"{outer}.")), path)
            for path, module in modules.items()
            if any(p is not None and id(p) in wanted for p in module._parameters.values())
        ]
        around = [path for path in paths if not path or f"{self.stack}.".startswith(f"{path}.")]
        if around:
            held = [n for p in around for n, q in modules[p].named_parameters(p, recurse=False) if id(q) in wanted]
            raise StreamUnsupported(
                f"its {type(self.parts.decoder).__name__} holds parameters of the embedding itself "
                f"({', '.join(held)}), not in a module of its own"
            )
        return tuple(p for p in dict.fromkeys(paths) if not any(p.startswith(f"{outer}.") for outer in paths))

    def _check_complete(self, embed: list[nn.Parameter], head: list[nn.Parameter]) -> None:
        names = sorted(self.names.values())
        for name, following in pairwise(names):
            if name == following:
                raise StreamUnsupported(f"two of its parameters would both be saved as {name}")
        ends = {id(p) for p in (*embed, *head)}
        lists = module_lists(self.parts.decoder)
        run = [path for path in lists if path == self.stack or any(id(p) in ends for p in lists[path].parameters())]
        if len(run) > 1:
            raise StreamUnsupported(
                f"its decoder should have one list of layers, it runs {len(run)} ({', '.join(run)})"
            )
        seen: dict[int, int] = {}
        for index, layer in enumerate(self.layers):
            for p in layer.parameters():
                if id(p) in ends:
                    raise StreamUnsupported(f"{self.names[id(p)]} is shared by a layer and the embedding or head")
                if id(p) in seen:
                    raise StreamUnsupported(
                        f"{self.names[id(p)]} is shared by layers {seen[id(p)]} and {index}, which must own theirs"
                    )
                seen[id(p)] = index
        used = [self.names[key] for key in self.names if key in ends or key in seen]
        idle = [self.names[key] for key in self.names if key not in ends and key not in seen]
        if idle:
            raise StreamUnsupported(f"{_holders(idle, used)} take no part in its language-model forward")

    def _unit(self, index: int, name: str, parameters: list[nn.Parameter], *, is_layer: bool = False) -> Part:
        wanted = {id(p): p for p in parameters}
        once = {key: wanted[key] for key in self.names if key in wanted}  # in the model's own order
        packing = self.packing if is_layer else self.of_ends
        packed = {
            self.names[key]: packing(self.names[key], p, self.owners[key])
            for key, p in once.items()
            if is_layer or all(isinstance(owner, TABLES) for owner, _ in self.owners[key])
        }
        found = {name: spec for name, spec in packed.items() if spec is not None}
        layout = SlabLayout([(self.names[key], p) for key, p in once.items()], found)
        by_name = {self.names[key]: p for key, p in once.items()}
        ordered = [by_name[slot.name] for slot in layout.slots]
        return Part(index, name, layout, [self.owners[id(p)] for p in ordered], ordered)


def _holders(idle: Sequence[str], used: Sequence[str]) -> str:
    """The largest modules that hold idle parameters only, three by name."""
    prefixes = {name[:i] for name in used for i, letter in enumerate(name) if letter == "."}
    holders: dict[str, None] = {}
    for name in idle:
        ends = [i for i, letter in enumerate(name) if letter == "."]
        holders[next((name[:i] for i in ends if name[:i] not in prefixes), name)] = None
    names = list(holders)
    return f"parameters of {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
