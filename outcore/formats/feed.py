"""Weights of a packed checkpoint one layer at a time, as `load_model(..., packed_feed=open_packed)` gives them.

Keys of the checkpoint get the model's names by transformers' own renaming rules. One weight goes to one parameter as it
is; matrices of single experts are stacked as transformers stacks them (gate and up one above the other), which for
packed bytes is to lay their planes one behind the other. Whatever else transformers would convert is refused by name.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from outcore.formats.checkpoint import GGUF, Entry, PackedCheckpoint, PackedEntry, method_of, open_safetensors
from outcore.formats.gguf_files import open_gguf
from outcore.formats.packed import PackedSpec, PackedTensor
from outcore.model.weights import by_layer, target_names

READERS = 4
"""Weights that are read at once."""
_DIGITS = re.compile(r"(\d+)")
Source = tuple[str, str | None, Entry]
"""(key in the checkpoint, pattern of the rule that takes it or None, entry)."""


def open_packed(skeleton: Any, files: list[Path], quantization: Mapping[str, Any]) -> PackedWeights:
    """The feed of a safetensors checkpoint with this `quantization_config`, or of a GGUF file. RuntimeError."""
    if method_of(quantization) == GGUF:
        names = [name for name, _ in skeleton.named_parameters(remove_duplicate=False)]
        return PackedWeights(skeleton, open_gguf(files[0], skeleton.config, names))
    return PackedWeights(skeleton, open_safetensors(files, dict(quantization)))


class PackedWeights:
    """The `WeightFeed` of a packed checkpoint. `skeleton`: the plain transformers model on the meta device, tied.

    RuntimeError for weights that are missing or do not fit."""

    def __init__(self, skeleton: Any, checkpoint: PackedCheckpoint) -> None:
        self.notes = (f"packed as published ({checkpoint.method})", *checkpoint.notes)
        self._canonical = {id(p): name for name, p in skeleton.named_parameters()}
        self._parameters = dict(skeleton.named_parameters(remove_duplicate=False))
        self._sources, self._orders = self._find_sources(skeleton, checkpoint.entries)
        missing = sorted(self.names - self._sources.keys())
        if missing:
            raise RuntimeError(
                f"The checkpoint lacks {len(missing)} weights ({missing[0]}, ...): it does not hold a whole "
                f"{type(skeleton).__name__}. Download it again, or check config_overrides."
            )
        self.specs: dict[str, PackedSpec] = {}
        """Parameters that stay packed."""
        for name, sources in self._sources.items():
            if (spec := self._spec(name, sources)) is not None:
                self.specs[name] = spec

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._canonical.values())

    def groups(self) -> Iterator[dict[str, Any]]:
        """name -> `PackedTensor`, or a tensor on the CPU. One group is read ahead, several of its weights at once."""
        with ThreadPoolExecutor(READERS, thread_name_prefix="packed-weights") as readers:
            coming: deque[dict[str, Future[Any]]] = deque()
            for names in by_layer({name: name for name in self._sources}).values():
                coming.append({name: readers.submit(self._value, name) for name in names})
                if len(coming) > 1:
                    yield {name: value.result() for name, value in coming.popleft().items()}
            for group in coming:
                yield {name: value.result() for name, value in group.items()}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers: packed checkpoints of language models have none."""
        return {}

    def _find_sources(
        self, skeleton: Any, entries: Mapping[str, Entry]
    ) -> tuple[dict[str, list[Source]], dict[str, list[str]]]:
        from transformers.conversion_mapping import get_model_conversion_mapping

        rules = get_model_conversion_mapping(skeleton)
        sources: dict[str, list[Source]] = {}
        orders: dict[str, list[str]] = {}
        for key, (renamed, pattern) in target_names(skeleton, entries).items():
            if renamed not in self._parameters:
                continue
            name = self._canonical[id(self._parameters[renamed])]
            if pattern is not None:
                rule = next(rule for rule in rules if pattern in rule.source_patterns)
                orders[name] = list(rule.source_patterns)
            if name not in sources or pattern is not None:  # of a tied weight the first one
                sources.setdefault(name, []).append((key, pattern, entries[key]))
        return sources, orders

    def _in_order(self, name: str, sources: list[Source]) -> list[Source]:
        """Order by expert, and within one by the place of its pattern in the rule."""
        order = self._orders.get(name, [])

        def place(source: Source) -> tuple[list[int], int]:
            key, pattern, _ = source
            return [int(digits) for digits in _DIGITS.findall(key)], order.index(pattern) if pattern in order else 0

        return sorted(sources, key=place)

    def _spec(self, name: str, sources: list[Source]) -> PackedSpec | None:
        """Choose how the parameter is packed; None: not at all."""
        shape = tuple(self._parameters[name].shape)
        first = sources[0][2]
        if len(sources) == 1 and tuple(first.shape) == shape:
            return first.spec if isinstance(first, PackedEntry) else None
        if len(shape) != 3 or sum(entry.shape[0] for _, _, entry in sources) != shape[0] * shape[1]:
            raise RuntimeError(
                f"{sources[0][0]}: a weight of shape {list(first.shape)} would have to be converted to the model's "
                f"{name} of shape {list(shape)}, which is not done with packed weights"
            )
        packed = [entry.spec for _, _, entry in sources if isinstance(entry, PackedEntry)]
        alike = len(packed) == len(sources) and len({spec.format.name for spec in packed}) == 1
        return PackedSpec(packed[0].format, shape) if alike else None

    def _value(self, name: str) -> torch.Tensor | PackedTensor:
        sources, spec = self._in_order(name, self._sources[name]), self.specs.get(name)
        if len(sources) == 1:
            return sources[0][2].read()
        values = [entry.read() for _, _, entry in sources]
        if spec is None:
            plain = [value.unpack() if isinstance(value, PackedTensor) else value.float() for value in values]
            return torch.cat(plain).view(self._parameters[name].shape)
        planes = zip(
            *(value.spec.planes(value.data) for value in values if isinstance(value, PackedTensor)), strict=True
        )
        return PackedTensor(spec, spec.assemble([torch.cat(plane) for plane in planes]))
