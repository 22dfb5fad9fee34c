"""The units of a causal language model, discovered by structure: embedding, each layer, head.

The decoder stack is the module list that the decoder's own forward calls member by member with the hidden states. What
the first layer gets is the embedding unit's result; what happens to the last one's is the head. Which parameters belong
to which is read off autograd's graph of a run on two tokens (no gradient is computed), so no name matters and tied
weights are seen as what they are: one home that two parts share. Values do not matter, so a model that was loaded
lazily is traced with its stand-ins. Cost: one embedding, layer and head evaluation of two tokens on the CPU. A model
that does not work this way is refused with the reason (`StreamUnsupported`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from outcore.engine.stream.layout import SlabLayout
from outcore.engine.stream.packing import packing_known
from outcore.engine.stream.shell import (
    Blank,
    CallLog,
    Held,
    LayersReached,
    Owner,
    Recorder,
    Relay,
    ReturnForm,
    ShapeNote,
    StreamUnsupported,
    Tape,
    bound,
    shell_of,
    with_memory,
)
from outcore.model.head import CausalParts, unwrap
from outcore.model.inputs import Isolation, forward_inputs
from outcore.model.load import LoadedModel
from outcore.model.names import checkpoint_name


@dataclass
class Unit:
    """What is uploaded, updated and saved together."""

    index: int
    """Its place in the order of need: embedding 0, layers from 1 on, head last."""
    name: str
    layout: SlabLayout
    owners: list[list[Owner]]
    """For each slot of the layout, where the model holds that parameter (a tied one in several places)."""
    parameters: list[nn.Parameter]
    """The model's own parameter objects, in slot order."""

    @property
    def is_trainable(self) -> bool:
        return self.layout.trainable_numel > 0


@dataclass
class Units:
    """A causal language model as units, and what is needed to run them by the model's own code."""

    parts: CausalParts
    stack: str
    """Path of the layers' module list within the decoder."""
    layers: list[nn.Module]
    embed_paths: tuple[str, ...]
    """Modules within the decoder that hold the embedding unit's parameters."""
    form: ReturnForm
    embed: Unit
    layer_units: list[Unit]
    head: Unit
    """The same object as `embed` when weights are tied."""
    isolation: Isolation

    def __post_init__(self) -> None:  # once: they are used by every micro-batch
        self._tape, self._held = Tape(), Held()
        self._recorders = recorders_of(self.layers, self._tape)
        self._relays = nn.ModuleList([Relay(layer, self._held) for layer in self.layers])

    @property
    def tied(self) -> bool:
        return self.head is self.embed

    @property
    def all(self) -> list[Unit]:
        """Every unit once, in order of need."""
        return [self.embed, *self.layer_units, *([] if self.tied else [self.head])]

    def record(
        self, batch: dict[str, torch.Tensor], form: ReturnForm | None = None, *, with_masks: bool = True
    ) -> CallLog:
        """Run what comes before the layers (with whatever is bound to the embedding's parameters).

        `with_masks` False: the layers' masks are not wanted, so documents are not told apart for them.
        """
        log = CallLog()
        decoder = self.parts.decoder
        shell = shell_of(
            decoder,
            {path: ShapeNote(decoder.get_submodule(path), path, log) for path in self.embed_paths}
            | {self.stack: self._recorders},
        )
        isolation: Isolation = self.isolation if with_masks else "position_ids"
        self._tape.log, self._tape.form = log, form or self.form
        is_packed = getattr(batch, "is_packed", None) if with_masks else False
        with packing_known(is_packed, getattr(batch, "borders", None)):
            _run_to_layers(shell, forward_inputs(decoder, batch, isolation))
        self._tape.log = CallLog()
        if len(log.calls) != len(self.layers):
            raise StreamUnsupported(f"its decoder called {len(log.calls)} of its {len(self.layers)} layers")
        return log

    def finish(self, hidden: torch.Tensor, batch: dict[str, torch.Tensor], log: CallLog) -> torch.Tensor:
        """What the decoder does after its last layer: hidden [B, T, H] -> hidden [B, T, H'] for the head."""
        decoder = self.parts.decoder
        self._held.hidden, self._held.form = hidden, self.form
        blanks = {p: Blank(decoder.get_submodule(p), log.shapes[p], hidden) for p in self.embed_paths}
        maskless = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
        with packing_known(False):
            output = shell_of(decoder, {self.stack: self._relays} | blanks)(**forward_inputs(decoder, maskless))
        self._held.hidden = None
        return output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]


def recorders_of(layers: Sequence[nn.Module], tape: Tape) -> nn.ModuleList:
    """What stands for the layers while a decoder's calls are recorded."""
    return nn.ModuleList([Recorder(layer, index, len(layers), tape) for index, layer in enumerate(layers)])


def _run_to_layers(shell: nn.Module, inputs: dict[str, Any]) -> None:
    try:
        shell(**inputs)
    except LayersReached:
        return
    raise StreamUnsupported("its decoder's forward ended without calling its last layer")


def discover_units(loaded: LoadedModel) -> Units:
    """Take a loaded model apart. Its parameters must be whole, on the CPU, or stand-ins. StreamUnsupported says why
    not."""
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
        raise StreamUnsupported(f"its head cannot be run apart: {loaded.abilities.chunked_reason}")
    try:
        parts = CausalParts(causal)
    except ValueError as error:
        raise StreamUnsupported(str(error)) from error
    stack, layers = find_stack(parts.decoder)
    isolation: Isolation = loaded.abilities.isolation or "position_ids"
    return _Discovery(causal, parts, stack, layers, isolation).run()


def find_stack(decoder: nn.Module) -> tuple[str, list[nn.Module]]:
    """(path, members) of the outermost module list that could be the layers. StreamUnsupported when unclear."""
    found: list[tuple[str, nn.ModuleList]] = []
    for path, module in decoder.named_modules():
        if not isinstance(module, nn.ModuleList) or next(module.parameters(), None) is None:
            continue
        if not any(path.startswith(f"{outer}.") for outer, _ in found):
            found.append((path, module))
    if len(found) != 1:
        names = ", ".join(path for path, _ in found) or "none"
        raise StreamUnsupported(f"its decoder should have one list of layers, it has {len(found)} ({names})")
    path, stack = found[0]
    layers = list(stack)
    if len({type(layer) for layer in layers}) > 1:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise StreamUnsupported(f"its layers are of several classes ({kinds})")
    if len({id(layer) for layer in layers}) < len(layers):
        raise StreamUnsupported("some of its layers are one and the same module")
    return path, layers


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
        self, causal: nn.Module, parts: CausalParts, stack: str, layers: list[nn.Module], isolation: Isolation
    ) -> None:
        self.causal, self.parts, self.stack, self.layers = causal, parts, stack, layers
        self.isolation: Isolation = isolation
        self.names = {id(p): checkpoint_name(name) for name, p in causal.named_parameters()}
        self.owners: dict[int, list[Owner]] = {}
        for module in causal.modules():
            for attribute, p in module._parameters.items():
                if p is not None:
                    self.owners.setdefault(id(p), []).append((module, attribute))

    def run(self) -> Units:
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
            self._unit(i + 1, f"layer {i}", list(layer.parameters())) for i, layer in enumerate(self.layers)
        ]
        return units

    def _trace(self) -> tuple[list[nn.Parameter], list[nn.Parameter], Units]:
        first = next(self.causal.parameters())
        if first.is_meta:
            raise StreamUnsupported("its parameters are not in memory")
        batch = {"input_ids": torch.zeros((1, 2), dtype=torch.long)}
        empty = self._unit(0, "", [])
        units = Units(
            self.parts, self.stack, self.layers, (), ReturnForm(None), empty, [], empty, isolation=self.isolation
        )
        with torch.enable_grad():
            log = CallLog()
            shell = shell_of(self.parts.decoder, {self.stack: recorders_of(self.layers, Tape(log))})
            _run_to_layers(shell, forward_inputs(self.parts.decoder, batch, self.isolation))
            call = log.calls[0]
            with torch.no_grad(), with_memory(self.layers[0]) as layer:
                units.form = ReturnForm.of(layer(log.hidden.detach(), *call.args, **call.kwargs))
            embed = parameters_behind([log.hidden])
            units.embed_paths = self._paths(embed)
            log = units.record(batch)
            learned = [t for call in log.calls for t in tensors_in([call.args, call.kwargs]) if t.requires_grad]
            if learned:
                raise StreamUnsupported("its layers get a learned tensor besides the hidden states")
            leaf = log.hidden.detach().requires_grad_()
            final = units.finish(leaf, batch, log)
            logits = self.parts.logits(final.reshape(1, -1, final.shape[-1]))
            return embed, parameters_behind([logits]), units

    def _paths(self, embed: list[nn.Parameter]) -> tuple[str, ...]:
        """Modules of the decoder that own these parameters, outermost only."""
        wanted = {id(p) for p in embed}
        paths = [
            path
            for path, module in self.parts.decoder.named_modules()
            if any(p is not None and id(p) in wanted for p in module._parameters.values())
        ]
        if "" in paths or any(self.stack == path or self.stack.startswith(f"{path}.") for path in paths):
            raise StreamUnsupported("its decoder holds parameters of the embedding itself, not in a module of its own")
        return tuple(p for p in paths if not any(p.startswith(f"{outer}.") for outer in paths))

    def _check_complete(self, embed: list[nn.Parameter], head: list[nn.Parameter]) -> None:
        names = sorted(self.names.values())
        for name, following in pairwise(names):
            if name == following:
                raise StreamUnsupported(
                    f"two of its parameters would both be saved as {name} (adapters on experts that are one weight: "
                    "set lora target_modules to the attention's)"
                )
        ends = {id(p) for p in (*embed, *head)}
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
        idle = [self.names[key] for key in self.names if key not in ends and key not in seen]
        if idle:
            raise StreamUnsupported(
                f"{idle[0]}{f' and {len(idle) - 1} more parameters' if len(idle) > 1 else ''} take no part in its "
                "language-model forward"
            )

    def _unit(self, index: int, name: str, parameters: list[nn.Parameter]) -> Unit:
        wanted = {id(p): p for p in parameters}
        once = {key: wanted[key] for key in self.names if key in wanted}  # in the model's own order
        try:
            layout = SlabLayout([(self.names[key], p) for key, p in once.items()])
        except ValueError as error:
            raise StreamUnsupported(f"{name}: {error}") from error
        by_name = {self.names[key]: p for key, p in once.items()}
        ordered = [by_name[slot.name] for slot in layout.slots]
        return Unit(index, name, layout, [self.owners[id(p)] for p in ordered], ordered)


__all__ = ["StreamUnsupported", "Unit", "Units", "bound", "discover_units", "find_stack"]
