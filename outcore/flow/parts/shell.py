"""Running parts of a decoder by its own code: everything before its layers, or everything after them.

A *shell* is a second module object that shares all weights and submodules with the first, but has some submodules
replaced; the model itself is never touched. Before the layers: each layer is a `Recorder`, which notes what the decoder
calls it with (masks by kind of layer, rotary tables, positions: whatever the model's own code makes) and passes the
hidden states on; the last one ends the run. After the layers: each layer is a `Relay` that returns the given hidden
states, and the modules of the embedding are `Blank`, so that their weights need not be on the device.

Attention masks of micro-batches that wait: boolean [B, 1, T, T], held as bits.

The vertical schedule runs every micro-batch through a layer before the next layer, so a layer's arguments wait for a
whole step. A mask of packed or padded rows is by far the largest part of that: B x T x T bytes for each kind of layer,
268 MB at 8 micro-batches of 2 x 4,096 tokens, 34 MB as bits. Each use makes the mask anew: two kernels that write B x T
x T bytes, little beside the attention that reads it. Nothing is asked of the device, so nothing waits for it. Masks of
numbers (eager attention adds them) stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from outcore.common.errors import line_of
from outcore.model.weights import is_stand_in

MIN_MASK_NUMEL = 1 << 20
"""Smaller masks are kept as they are, because replacing them gains nothing."""


@dataclass(frozen=True)
class BitMask:
    """A boolean mask as bits, eight in a byte."""

    bits: torch.Tensor
    """uint8, 1-D."""
    whole: torch.Size
    """Shape of the mask, with size 1 along dimensions in which it was expanded."""
    shape: torch.Size

    @classmethod
    def of(cls, mask: torch.Tensor) -> BitMask:
        whole = mask[tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.stride())]
        flat = torch.nn.functional.pad(whole.reshape(-1), (0, -whole.numel() % 8))
        bits = (flat.view(-1, 8) * _places(mask.device)).sum(1, dtype=torch.uint8)
        return cls(bits, whole.shape, mask.shape)

    def mask(self) -> torch.Tensor:
        """The mask again, expanded where it was."""
        flat = (self.bits[:, None] & _places(self.bits.device)) != 0
        return flat.view(-1)[: self.whole.numel()].view(self.whole).expand(self.shape)


def _places(device: torch.device) -> torch.Tensor:
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)


class MaskShrinker:
    """Replaces masks among the arguments of calls; one that several layers share is shrunk once."""

    def __init__(self, min_numel: int = MIN_MASK_NUMEL) -> None:
        self._min_numel = min_numel
        self._known: dict[int, tuple[torch.Tensor, BitMask]] = {}

    @property
    def has_shrunk(self) -> bool:
        """Whether there was any large mask."""
        return bool(self._known)

    def shrunk(self, value: Any) -> Any:
        """`value`, or what stands for it when it is a large mask."""
        if not isinstance(value, torch.Tensor) or value.dtype != torch.bool or value.ndim != 4:
            return value
        if value.numel() < self._min_numel:
            return value
        if id(value) not in self._known:
            self._known[id(value)] = (value, BitMask.of(value))  # the first keeps the id taken
        return self._known[id(value)][1]


def restored(value: Any) -> Any:
    """`value`, or the mask that it stands for."""
    return value.mask() if isinstance(value, BitMask) else value


class StreamUnsupported(ValueError):
    """Refusal of a model that cannot be streamed layer by layer; the message says why. DeepSpeed's engine trains it."""


class LayersReached(Exception):
    """Ends a decoder's forward when its last layer is called; never leaves this package."""


@contextmanager
def models_own_code() -> Iterator[None]:
    """Around a trial call of the model's code: whatever it raises becomes StreamUnsupported, with its words."""
    try:
        yield
    except StreamUnsupported:
        raise
    except Exception as error:  # any model's own code may fail in any way on a shell of itself
        raise StreamUnsupported(f"its own code fails when it is run layer by layer: {line_of(error)}") from error


@dataclass
class LayerCall:
    """Arguments that the decoder calls a layer with, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def ledgers(self) -> dict[int | str, MutableMapping[Any, Any]]:
        """Arguments of the call that a layer can write to for others to read, by place or name."""
        values = (*enumerate(self.args), *self.kwargs.items())
        return {name: value for name, value in values if isinstance(value, MutableMapping)}

    def mapped(self, change: Callable[[Any], Any]) -> LayerCall:
        """Make the same call with `change` made to each argument."""
        return LayerCall(tuple(map(change, self.args)), {name: change(value) for name, value in self.kwargs.items()})


@dataclass
class CallLog:
    """One recording of a decoder's forward."""

    first: torch.Tensor | None = None
    calls: list[LayerCall] = field(default_factory=list)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    """Output shape of each embedding module, for `Blank`."""
    has_bits: bool = False
    """Whether masks among the arguments are held as bits."""

    @property
    def hidden(self) -> torch.Tensor:
        """Input of the first layer: the embedding unit's output."""
        assert self.first is not None, "the decoder has not called its first layer yet"
        return self.first

    def shrink_masks(self, min_numel: int = MIN_MASK_NUMEL) -> None:
        """Hold large masks as bits from now on: for a log that waits while other micro-batches run. See `masks`."""
        shrinker = MaskShrinker(min_numel)
        shrunk = [call.mapped(shrinker.shrunk) for call in self.calls]
        if shrinker.has_shrunk:
            self.calls, self.has_bits = shrunk, True

    def call(self, layer: int) -> LayerCall:
        """Arguments for a call of layer `layer`, masks whole. A mapping is a copy of its own each time: what a layer
        leaves there is seen by no other and not kept."""
        call = self.calls[layer]
        if call.ledgers:
            call = call.mapped(lambda value: copy.copy(value) if isinstance(value, MutableMapping) else value)
        return call.mapped(restored) if self.has_bits else call


@dataclass(frozen=True)
class ReturnForm:
    """Form in which the layers return hidden states: bare, or first in a tuple (or list) of `length`."""

    length: int | None

    @classmethod
    def of(cls, output: Any) -> ReturnForm:
        """StreamUnsupported when `output` is neither a tensor nor a sequence that begins with one."""
        if isinstance(output, torch.Tensor):
            return cls(None)
        if isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor):
            return cls(len(output))
        raise StreamUnsupported(f"its layers return {type(output).__name__}, not hidden states")

    def wrap(self, hidden: torch.Tensor) -> Any:
        return hidden if self.length is None else (hidden, *(None for _ in range(self.length - 1)))


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, LayerCall]:
    """(hidden states, the rest) of a layer's arguments."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0], LayerCall(args[1:], kwargs)
    hidden = kwargs.get("hidden_states")
    if not isinstance(hidden, torch.Tensor):
        raise StreamUnsupported("its layers do not take the hidden states as their first argument")
    return hidden, LayerCall(args, {k: v for k, v in kwargs.items() if k != "hidden_states"})


def _is_all_of(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether they are the same numbers at the same place (`tensor` itself, or all of it as a slice)."""
    places = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (view, tensor)]
    return view is tensor or places[0] == places[1]


class Stand(nn.Module):
    """Stands for a module and answers for its attributes (a decoder may ask a layer for its kind of attention)."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["_original"] = original  # not a submodule: its weights are not the stand's

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)


@dataclass
class Tape:
    """Tape that the recorders of one model write to, and what they return at present."""

    log: CallLog = field(default_factory=CallLog)
    form: ReturnForm | None = None


class Recorder(Stand):
    """Notes the call of layer `index` and passes the hidden states on."""

    def __init__(self, layer: nn.Module, index: int, num_layers: int, tape: Tape) -> None:
        super().__init__(layer)
        self.__dict__.update(_index=index, _num_layers=num_layers, _tape=tape)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        index, tape = self.__dict__["_index"], self.__dict__["_tape"]
        log, form = tape.log, tape.form
        hidden, call = split_call(args, kwargs)
        if index != len(log.calls):
            raise StreamUnsupported(
                f"its layers are not called once each in their order (layer {index} came as number {len(log.calls)}): "
                "layers are skipped at random (layerdrop) or shared"
            )
        if index == 0:
            log.first = hidden
        elif not _is_all_of(hidden, log.hidden):
            raise StreamUnsupported(f"it computes on the hidden states between layers {index - 1} and {index}")
        log.calls.append(call)
        if form is None or index == self.__dict__["_num_layers"] - 1:
            raise LayersReached
        return form.wrap(hidden)


@dataclass
class Held:
    """Values that the relays of one model return at present."""

    hidden: torch.Tensor | None = None
    form: ReturnForm | None = None


class Relay(Stand):
    """Returns the held hidden states, whatever it is called with."""

    def __init__(self, layer: nn.Module, held: Held) -> None:
        super().__init__(layer)
        self.__dict__["_held"] = held

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        held = self.__dict__["_held"]
        return held.form.wrap(held.hidden)


class ShapeNote(Stand):
    """Runs an embedding module and notes the shape it returns. Its weights are the note's, for a decoder that asks
    what type or device its own parameters have."""

    def __init__(self, original: nn.Module, path: str, log: CallLog) -> None:
        super().__init__(original)
        self._modules["original"] = original
        self.__dict__.update(_path=path, _log=log)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.__dict__["_original"](*args, **kwargs)
        if not isinstance(output, torch.Tensor):
            raise StreamUnsupported(f"{self.__dict__['_path']} in its embedding returns {type(output).__name__}")
        self.__dict__["_log"].shapes[self.__dict__["_path"]] = output.shape
        return output


class Blank(Stand):
    """Returns zeros of the shape that the embedding module returned; they reach nothing that is used.

    `has_memory`: the model may write to them. Otherwise they are one zero, expanded."""

    def __init__(self, original: nn.Module, shape: torch.Size, like: torch.Tensor, *, has_memory: bool) -> None:
        super().__init__(original)
        zeros = like.new_zeros(shape) if has_memory else like.new_zeros(()).expand(shape)
        self.__dict__["_zeros"] = zeros

    @property
    def is_written(self) -> bool:
        """Whether the model has changed the zeros in place."""
        return self.__dict__["_zeros"]._version > 0

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.__dict__["_zeros"]


def shell_of(module: nn.Module, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """A module that shares everything with `module` but the submodules at the paths in `replaced`."""
    if "" in replaced:
        return replaced[""]
    inner: dict[str, dict[str, nn.Module]] = {}
    for path, substitute in replaced.items():
        head, _, rest = path.partition(".")
        inner.setdefault(head, {})[rest] = substitute
    shell = object.__new__(type(module))
    shell.__dict__.update(module.__dict__)
    children = dict(module._modules)
    for name, substitutes in inner.items():
        child = children[name]
        assert child is not None
        children[name] = shell_of(child, substitutes)
    shell.__dict__["_modules"] = children
    return shell


Owner = tuple[nn.Module, str]
"""A module and the attribute under which it holds a parameter."""


@contextmanager
def bound(owners: Sequence[Sequence[Owner]], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within this context each parameter (under all its owners) is the given tensor; outside, it is what it was."""
    before: list[tuple[nn.Module, str, Any]] = []
    try:
        for places, tensor in zip(owners, tensors, strict=True):
            for module, attribute in places:
                before.append((module, attribute, module._parameters[attribute]))
                module._parameters[attribute] = tensor  # pyright: ignore[reportArgumentType]
        yield
    finally:
        for module, attribute, parameter in reversed(before):
            module._parameters[attribute] = parameter


@contextmanager
def with_memory(layer: nn.Module) -> Iterator[nn.Module]:
    """The layer, fit to be run: inside, parameters that are stand-ins are zeros of their own (one layer's memory),
    because some kernels take no tensor without strides."""
    places = [
        (module, name, p)
        for module in layer.modules()
        for name, p in module._parameters.items()
        if p is not None and is_stand_in(p)
    ]
    zeros = {id(p): torch.zeros(p.shape, dtype=p.dtype) for _, _, p in places}
    with bound([[(module, name)] for module, name, _ in places], [zeros[id(p)] for _, _, p in places]):
        yield layer
