"""`stream(model)`: the lists of layers of a transformers model, streamed in place."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from outcore.common.quantities import format_gib
from outcore.flow import StreamUnsupported
from outcore.flow.parts import module_lists, packing_rule
from outcore.formats import PackedSpec
from outcore.hf.ground import Streaming, StreamOptions, device_of
from outcore.hf.homes import Elsewhere
from outcore.hf.layer import become_streamed, is_streamed
from outcore.hf.stack import LayerStack, buffers_to, owned_by

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


def stream(
    model: Model,
    *,
    vram_gib: float | None = None,
    ram_gib: float | None = None,
    nvme_offload_path: str | Path | Sequence[str | Path] | None = None,
    quantize: str | None = None,
    compile: str = "auto",
    nvme: str | Path | Sequence[str | Path] | None = None,
) -> Model:
    """Have the layers of a transformers model pass through the device one by one; returns the model itself.

    Layers' weights stay in RAM (frozen ones, with `nvme_offload_path`, on a drive, but for `ram_gib` of them), where
    callers read and change them as before; what lies around the layers goes to the GPU if there is one. The model
    trains and answers as the plain one does, with any caller; gradients of the layers' parameters are in RAM.
    `vram_gib`: device memory for all of it: larger batches are cut inside the layers. `quantize`: nf4 or int8 for the
    layers' frozen matrices; a model of which everything is still trainable is frozen for it. `compile`: layers that
    are in training mode run through torch.compile (auto: on a GPU), eagerly where that cannot be. `nvme`: the former
    name of `nvme_offload_path`.

    StreamUnsupported (a ValueError) says why a model cannot be streamed, ValueError what is wrong with an argument."""
    options = StreamOptions(vram_gib, ram_gib, nvme_offload_path or nvme, quantize, compile)
    device = device_of(None)
    lists = find_lists(model, device)
    _warn_of_other_devices(device)
    streaming = Streaming(options, device)
    if quantize is not None and all(p.requires_grad for p in model.parameters() if not isinstance(p, Elsewhere)):
        model.requires_grad_(False)
    if quantize is not None:
        rule = packing_rule(quantize, {})
        if not any(rule(one.name, one.parameter, one.places) for ones in _layers(lists) for one in ones):
            raise ValueError(
                f"quantize {quantize}: no frozen matrix of the layers divides into its blocks; leave it out"
            )
    stacks = [LayerStack(path, layers, streaming) for path, layers in lists.items()]
    streaming.layers_bytes = sum(one.parameter.nbytes for ones in _layers(lists) for one in ones)
    inside = {id(p) for layers in lists.values() for layer in layers for p in layer.parameters()}
    streaming.see_ends([p for p in model.parameters() if id(p) not in inside])
    if (budget := streaming.ground.budget_bytes) is not None and streaming.ends_bytes > budget:
        raise ValueError(
            f"what lies around the layers takes {format_gib(streaming.ends_bytes)}, and the device has "
            f"{format_gib(budget)} for all of it: raise vram_gib"
        )
    for stack in stacks:
        for index, layer in enumerate(stack.layers):
            buffers_to(layer, device)
            become_streamed(layer, stack, index)
    for module in model.modules():
        module.__dict__.pop("hf_device_map", None)  # it has been all on one device, and a trainer goes by it
    model.to(device)
    if quantize is not None:
        for stack in stacks:
            stack.settle()
    streaming.buffers_bytes = sum(stack.device_bytes for stack in stacks)
    return model


def find_lists(model: nn.Module, device: torch.device) -> dict[str, list[nn.Module]]:
    """The lists of layers by path. StreamUnsupported when there is none, or the model is in no state to be streamed."""
    found = lists_that_own(model)
    if any(is_streamed(module) for module in model.modules()):
        raise StreamUnsupported("it is streamed already: call stream once, or load the model again")
    if (method := getattr(model, "quantization_method", None)) not in (None, "outcore"):
        raise StreamUnsupported(f"its weights are packed by {method}: load it in 16 bits and give quantize='nf4'")
    if any(p.is_meta for p in model.parameters()):
        raise StreamUnsupported("its parameters are not in memory: load it without device_map")
    if device.type == "cuda" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise StreamUnsupported(
            "it streams in one process only, and this is one of several: start it without a launcher"
        )
    if not found:
        raise StreamUnsupported(f"{type(model).__name__} has no list of layers that own their weights")
    if replaced := [path for path, layers in found.items() if any("forward" in layer.__dict__ for layer in layers)]:
        raise StreamUnsupported(
            f"somebody has replaced the forward of {replaced[0]}, as accelerate's device_map does: load the model "
            "without it"
        )
    return found


def lists_that_own(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The outermost lists of modules with parts of their own, whose parameters are nobody else's, by path."""
    named = {id(p): 0 for p in model.parameters()}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                named[id(p)] += 1
    return {
        path: list(layers)
        for path, layers in module_lists(model).items()
        if all(next(layer.children(), None) is not None for layer in layers) and not _shares(layers, named)
    }


def packed_on_arrival(model: nn.Module, quantize: str) -> dict[str, PackedSpec]:
    """Choose the packing of the layers' matrices, by name, of a model whose weights have not been loaded."""
    rule, found = packing_rule(quantize, {}), dict[str, PackedSpec]()
    for ones in _layers(lists_that_own(model)):
        for one in ones:
            frozen = nn.Parameter(one.parameter.detach(), requires_grad=False)
            if (spec := rule(one.name, frozen, one.places)) is not None:
                found[one.name] = spec
    return found


def _warn_of_other_devices(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        logger.warning(
            "the model streams through %s alone, and transformers' Trainer would spread it over all GPUs that it sees, "
            "where it fails: for a Trainer start the program with CUDA_VISIBLE_DEVICES set to one",
            device,
        )


def _layers(lists: dict[str, list[nn.Module]]) -> list[list]:
    return [owned_by(layer, path, at) for path, layers in lists.items() for at, layer in enumerate(layers)]


def _shares(layers: nn.ModuleList, uses: dict[int, int]) -> bool:
    """Whether a parameter of these layers is also another layer's, or somebody else's."""
    within: dict[int, int] = {}
    for layer in layers:
        here: dict[int, int] = {}
        for module in layer.modules():
            for p in module._parameters.values():
                if p is not None:
                    here[id(p)] = here.get(id(p), 0) + 1
        for key, count in here.items():
            if key in within or count < uses[key]:
                return True
            within[key] = count
    return False
