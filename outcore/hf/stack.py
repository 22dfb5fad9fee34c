"""A list of layers whose weights arrive layer by layer, whoever calls the layers and in whatever order.

Parameters live in RAM, where callers read and change them; the device gets a copy for each visit. Before a pass begins
the layers are looked through: what has new memory, another type or other parameters (an adapter came, a checkpoint was
assigned, a merge replaced the weights) gets its home anew. So nothing that a caller does is trained past.

A layer's parameters are grouped by type and by whether they are packed; each group arrives through buffers of its own.
A pass is a run of layers up or down; a call out of turn ends it and begins another one there."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from outcore.common.deadline import after
from outcore.flow.parts import Part, SlabLayout, packing_rule
from outcore.flow.weights import SlabRanges, WeightPrefetcher
from outcore.hf.compiled import CompiledForwards
from outcore.hf.ground import MOST_GOING, Streaming
from outcore.hf.homes import Elsewhere, HomeSource, Owned, SlabHome
from outcore.hf.rows import layer_token_bytes
from outcore.sizing.streaming import STAY_LAYERS, layers_that_stay
from outcore.sizing.tiles import Holding
from outcore.staging import UploadLane

NUM_BUFFERS = 2
"""Layers on the device at once: one is used, one arrives."""
GRADIENTS = 2 + MOST_GOING
"""A layer's gradients on the device at once: their sum, those of the next cut (or all as one stretch), and those on
their way to RAM."""
UP, DOWN = 1, -1
Group = tuple[torch.dtype, bool, bool]
"""(type, whether packed, whether it stays in RAM where others lie on a drive)"""


class Weight(NamedTuple):
    """One parameter of a layer, and its values on the device."""

    parameter: nn.Parameter
    owners: Sequence[tuple[nn.Module, str]]
    value: torch.Tensor


class _Layers:
    """Parts of one group, as the prefetcher wants them."""

    ends: tuple[Part, ...] = ()

    def __init__(self, parts: Sequence[Part]) -> None:
        self.all = self.layer_units = list(parts)


class LayerStack:
    """The layers of one list. One pass at a time, from one thread."""

    def __init__(self, path: str, layers: Sequence[nn.Module], streaming: Streaming) -> None:
        self.path, self.layers, self.streaming = path, list(layers), streaming
        self._owners = frozenset(
            index for index, layer in enumerate(layers) if next(layer.parameters(), None) is not None
        )
        """Layers that have weights."""
        self._start()

    def _start(self) -> None:
        """Own nothing yet: the first pass opens it all."""
        self._source, self._parts = HomeSource(), dict[tuple[int, Group], Part]()
        self._arrivals, self._uses = dict[Group, WeightPrefetcher](), dict[Group, dict[int, int]]()
        self._drives = dict[Group, UploadLane | None]()
        self._numbers = itertools.count()
        self._staying = dict[int, torch.Tensor]()
        """Bytes of homes on the device by part (`staying`)."""
        self._gradient_bytes = 0
        """Gradients of the layer that has the most."""
        self._seen: list[list[tuple[Any, ...]]] = []
        """Values by which the layers are known (`_look`), as they were when they were last looked through."""
        self._going = 0
        """UP or DOWN in a pass."""
        self._next = -1
        """Layer whose turn it is."""
        self._busy = threading.Lock()
        self.compiled: CompiledForwards | None = None
        if self.streaming.compiles:
            self.compiled = CompiledForwards(self.path)
        self.last_visit: Any = None
        """Weak reference to the call before, of those that are differentiated."""

    def __getstate__(self) -> dict[str, Any]:
        """For a copy or a pickle: the layers with their own values, and how they are streamed."""
        for layer in self.layers:
            for p in layer.parameters():
                if isinstance(p, Elsewhere):
                    raise p.refusal("copy or pickle")
        return {"path": self.path, "layers": self.layers, "streaming": self.streaming, "_owners": self._owners}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def device_bytes(self) -> int:
        """Buffers for the weights; before they are there, what unpacked ones will take."""
        if not self._arrivals:
            return NUM_BUFFERS * max(sum(p.nbytes for p in layer.parameters()) for layer in self.layers)
        return sum(arrival.device_bytes for arrival in self._arrivals.values())

    @property
    def room_bytes(self) -> int | None:
        """Device memory for what a layer computes. None: nobody limits it."""
        if (budget := self.streaming.budget_bytes) is None:
            return None
        if not self._going:  # a caller may have frozen something, or had it trained, since the last pass
            self._settle_for_good()
        gradients = GRADIENTS * self._gradient_bytes + self.streaming.ends_gradient_bytes
        return max(0, budget - self.streaming.ends_bytes - self.device_bytes - gradients) // 2

    @contextmanager
    def staying(self, kv_bytes: int, hidden_size: int, element_bytes: int) -> Iterator[bool]:
        """Within this context passes find the weights of as many layers on the device as fit there beside keys and
        values of `kv_bytes` and what a pass computes (hidden states of this size and type); gives whether all do. What
        weights are changed to meanwhile is not seen. A device without a limit is a CPU, which has them at home."""
        try:
            with self._busy:
                self._abort(None)
                self._settle_for_good()
                if (budget := self.streaming.budget_bytes) is None:
                    homes = self._source.homes
                    self._staying = {at: homes[at].ram for at in homes if not homes[at].nvme_bytes}
                else:
                    sizes = [0] * len(self.layers)
                    for (index, _), part in self._parts.items():
                        sizes[index] += part.layout.home_bytes
                    token = max(layer_token_bytes(layer, hidden_size, element_bytes) for layer in self.layers)
                    free_bytes = budget - self.streaming.ends_bytes - self.device_bytes
                    self._bring(range(layers_that_stay(sizes, free_bytes, kv_bytes, token)))
            yield len(self._staying) == len(self._parts)
        finally:
            self._staying.clear()
            self._abort(None)  # a failure between two layers leaves their pass open
            for arrival in self._arrivals.values():
                arrival.begin(())  # which lets go of what stayed in the last pass

    def _bring(self, layers: Container[int]) -> None:
        """Copy these layers' weights to the device."""
        lane, uploads = self.streaming.ground.upload, []
        for (index, group), part in self._parts.items():
            if index in layers:
                room = torch.empty(part.layout.home_numel, dtype=part.dtype, device=self.streaming.device)
                uploads.append(SlabRanges(self._source, lane, self._drives[group]).submit(part, 0, len(room), room))
                self._staying[part.index] = room
        for upload in uploads:
            upload.wait_stream()

    def sends_away(self, n_bytes: int, layer: int) -> bool:
        """Whether a layer's hidden states wait in RAM for its backward: where all layers' would take more than half of
        the room that layers have. The last layers' are needed at once and stay."""
        room, num_layers = self.room_bytes, len(self.layers)
        return room is not None and n_bytes * num_layers > room // 2 and layer < num_layers - STAY_LAYERS

    @contextmanager
    def visit(self, index: int, going: int) -> Iterator[list[Weight]]:
        """Within this context the weights of a layer are on the device."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                f"{self.path}: two threads run this streamed model at once; let them take turns, or load it twice"
            )
        try:
            if (going, index) != (self._going, self._next):
                self._begin(index, going)
            found = list[Weight]()
            for group, arrival in self._arrivals.items():
                if (part := self._parts.get((index, group))) is not None:
                    views = part.layout.views(arrival.acquire(self._uses[group][index]))
                    found += map(Weight, part.parameters, part.owners, views)
            yield found
            for group, arrival in self._arrivals.items():
                if (index, group) in self._parts:
                    arrival.release(self._uses[group][index])
            self._next = index + going
            if not 0 <= self._next < len(self.layers):
                self._end()
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            self._busy.release()

    def expect(self, index: int, going: int) -> None:
        """Begin a pass that will come: its first weights are on their way meanwhile."""
        with self._busy:
            self._begin(index, going, is_settled=True)

    def settle(self) -> None:
        """Give homes to what has none, or got other memory since."""
        if self._seen == [_look(layer) for layer in self.layers]:
            return
        for layer in self.layers:  # an adapter may have brought its own
            buffers_to(layer, self.streaming.device)
        found: dict[tuple[int, Group], list[Owned]] = {}
        seen = dict[int, int]()
        for index, layer in enumerate(self.layers):
            ones = owned_by(layer, self.path, index)
            # FSDP takes parameters out of their modules, or leaves tensors there; sharded ones have placements.
            odd = [p for _, p, _ in ones if not isinstance(p, nn.Parameter) or hasattr(p, "placements")]
            if odd or (index in self._owners and not ones):
                raise RuntimeError(
                    f"{self.path}.{index}: its weights are sharded (FSDP, tensor parallelism), and a streamed layer's "
                    "lie whole in RAM: leave the sharding out, streaming takes its place"
                )
            for owned in ones:
                if seen.setdefault(id(owned.parameter), index) != index:
                    raise RuntimeError(f"{self.path}: {owned.name} belongs to two of its layers; each must own its own")
                found.setdefault((index, self._group(owned)), []).append(owned)
        gone = [key for key in self._parts if key not in found]
        for key in gone:
            self._drop(key)
        made = [key for key, owned in found.items() if not self._holds(key, owned)]
        if (made or gone) and self._going:
            self._abort(None)
        for key in made:
            self._make(key, found[key])
        if made or gone:
            self._open_arrivals()
        trained = [[p.nbytes for p in layer.parameters() if p.requires_grad] for layer in self.layers]
        self._gradient_bytes = max(map(sum, trained))
        self.streaming.ground.forget_gradients()
        self._seen = [_look(layer) for layer in self.layers]

    # ------------------------------------------------------------------ parts

    def _group(self, owned: Owned) -> Group:
        packed = (
            packing_rule(self.streaming.options.quantize, {})(owned.name, owned.parameter, owned.places) is not None
        )
        return owned.parameter.dtype, packed, bool(self.streaming.options.folders) and owned.parameter.requires_grad

    def _holds(self, key: tuple[int, Group], owned: list[Owned]) -> bool:
        part = self._parts.get(key)
        return part is not None and self._source.homes[part.index].holds(owned)

    def _make(self, key: tuple[int, Group], named: list[Owned]) -> None:
        index, (_, is_packed, stays) = key
        if elsewhere := [
            one.name for one in named if isinstance(one.parameter, Elsewhere) and not one.parameter.packed
        ]:
            raise RuntimeError(
                f"{self.path}.{index}: {elsewhere[0]} is packed or on a drive and cannot become trainable, change its "
                "type or move to another module; load the model again as it is to be"
            )
        rule, ground = packing_rule(self.streaming.options.quantize, {}), self.streaming.ground
        found = {one.name: rule(one.name, one.parameter, one.places) for one in named if is_packed}
        layout = SlabLayout(
            [(one.name, one.parameter) for one in named],
            {name: spec for name, spec in found.items() if spec is not None},
        )
        by_name = {one.name: one for one in named}
        ordered = [by_name[slot.name] for slot in layout.slots]
        part = Part(
            next(self._numbers),
            f"{self.path}.{index}",
            layout,
            [one.places for one in ordered],
            [one.parameter for one in ordered],
        )
        self._drop(key)
        scratch = None if stays else ground.scratch
        self._source.homes[part.index] = SlabHome(part, named, ground.memory, scratch, ground.ram_share)
        self._parts[key] = part

    def _drop(self, key: tuple[int, Group]) -> None:
        if (old := self._parts.pop(key, None)) is not None:
            del self._source.homes[old.index]

    def _open_arrivals(self) -> None:
        ground, by_group = self.streaming.ground, dict[Group, list[Part]]()
        for (_, group), part in sorted(self._parts.items(), key=lambda item: item[0][0]):
            by_group.setdefault(group, []).append(part)
        self._arrivals, self._drives = {}, {}
        for group, parts in by_group.items():
            stored_bytes = sum(self._source.homes[part.index].nvme_bytes for part in parts)
            self._drives[group] = drive = ground.drive((self.path, group), stored_bytes) if stored_bytes else None
            self._arrivals[group] = WeightPrefetcher(
                _Layers(parts), self._source, ground.upload, Holding(layer_buffers=NUM_BUFFERS), drive_lane=drive,
                resident=lambda part: self._staying.get(part.index),
            )  # fmt: skip

    # ------------------------------------------------------------------ passes

    def _begin(self, index: int, going: int, *, is_settled: bool = False) -> None:
        if self._going:
            self._abort(None)
        if not is_settled:
            self._settle_for_good()
        ahead = range(index, len(self.layers) if going == UP else -1, going)
        self._uses = {}
        for group, arrival in self._arrivals.items():
            layers = [layer for layer in ahead if (layer, group) in self._parts]
            self._uses[group] = {layer: at for at, layer in enumerate(layers)}
            arrival.begin([self._parts[layer, group] for layer in layers])
        self._going, self._next = going, index

    def _settle_for_good(self) -> None:
        """Settle, also where a caller is in inference mode: what is made there could not be differentiated later."""
        with torch.inference_mode(False):
            self.settle()

    def _end(self) -> None:
        """A pass is over: whoever changes weights from here on changes what nobody reads any more."""
        self._going = 0
        self.streaming.ground.upload.drain()

    def _abort(self, error: BaseException | None) -> None:
        self._going = 0
        for arrival in self._arrivals.values():
            arrival.abort(None if error is None else after(error))


def buffers_to(layer: nn.Module, device: torch.device) -> None:
    """Have a layer's buffers on the device for good."""
    for module in layer.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def _look(layer: nn.Module) -> list[tuple[Any, ...]]:
    """Collect values that change when a layer gets other parameters, or one other memory. Quick: before every pass."""
    found, modules = [], [layer]
    for module in modules:
        modules += [child for child in module._modules.values() if child is not None]
        for p in module._parameters.values():
            if p is not None:
                found.append((id(module), id(p), p.data_ptr(), p.dtype, p.shape, p.stride(), p.requires_grad))
    return found


def owned_by(layer: nn.Module, path: str, index: int) -> list[Owned]:
    """The parameters of a layer, each once, in the layer's own order."""
    found: dict[int, Owned] = {}
    for prefix, module in layer.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                name = ".".join([path, str(index), *([prefix] if prefix else []), attribute])
                found.setdefault(id(parameter), Owned(name, parameter, [])).places.append((module, attribute))
    return list(found.values())
