"""Weights one group at a time, for models that are made without memory: a layer, an embedding, a head.

`load_model(..., lazy=True)` gives a model whose parameters are stand-ins, and a feed beside it. Whoever gives the
parameters their homes runs through the feed once and puts each weight away as it comes, so memory is at most the homes
and one group. Values are those of a whole load, bit by bit: from scratch the same initialiser runs region by region;
trained weights go through transformers' own renaming and conversion (fused experts, old names), one group of
checkpoint keys at a time. The shards are opened for a group and closed behind it, so mapped pages do not add up."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from outcore.model.weights.initialise import InitPlan

_LAYER = re.compile(r"^(.*?\.\d+)\.")
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class WeightFeed(Protocol):
    """Feed of weights, one part after another."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters that will come, as the plain model (no adapters) calls them."""
        ...

    def groups(self) -> Iterator[dict[str, torch.Tensor]]:
        """name -> CPU tensor of the parameter's shape, perhaps wider than its type; every name once. RuntimeError."""
        ...


class InitialWeights:
    """From scratch: `outcore.model.weights.initialise`, a region at a time."""

    def __init__(self, skeleton: nn.Module, seed: int) -> None:
        self._plan = InitPlan(skeleton)
        self._seed = seed

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._plan.canonical.values())

    def groups(self) -> Iterator[dict[str, torch.Tensor]]:
        for index, values in enumerate(self._plan.values(self._seed)):
            unset = sorted(set(self._plan.names(index)) - set(values))
            if unset:
                raise RuntimeError(
                    f"{unset[0]} is set by the model's constructor and by no initialiser, so it cannot be made without "
                    "the whole model in RAM. Train it with the engine deepspeed, or start from trained weights."
                )
            yield values


class TrainedWeights:
    """From safetensors shards, by transformers' rules for this architecture.

    `skeleton`: the plain transformers model on the meta device, tied; it is used to convert and left as it was."""

    def __init__(self, skeleton: Any, files: list[Path], dtype: torch.dtype) -> None:
        self._skeleton, self._dtype = skeleton, dtype
        self._file_of = _keys_of(files)
        self._canonical = {id(p): name for name, p in skeleton.named_parameters()}
        self._parameters = dict(skeleton.named_parameters(remove_duplicate=False))
        self._targets = {key: target for key, (target, _) in target_names(skeleton, self._file_of).items()}
        self._groups = by_layer(self._targets)
        self._check_ties()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._canonical.values())

    @property
    def keys(self) -> frozenset[str]:
        """Names in the checkpoint."""
        return frozenset(self._file_of)

    def groups(self) -> Iterator[dict[str, torch.Tensor]]:
        given: set[str] = set()
        for keys in self._groups.values():
            found = {}
            for name, value in self._converted(keys).items():
                if name not in self._parameters:
                    continue
                found[self._canonical[id(self._parameters[name])]] = value
            given |= found.keys()
            yield found
        missing = sorted(self.names - given)
        if missing:
            raise RuntimeError(
                f"The checkpoint lacks {len(missing)} weights ({missing[0]}, ...): it does not hold a whole "
                f"{type(self._skeleton).__name__}. Download it again, or check config_overrides."
            )

    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers that the checkpoint holds, by name."""
        names = {name for name, _ in self._skeleton.named_buffers()}
        keys = [key for key, target in self._targets.items() if target in names]
        return {name: value for name, value in self._converted(keys).items() if name in names} if keys else {}

    def _converted(self, keys: list[str]) -> dict[str, torch.Tensor]:
        """Convert the checkpoint's tensors `keys` to the model's: name -> tensor. RuntimeError where that fails."""
        from safetensors import SafetensorError, safe_open
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        mapping: Any = get_model_conversion_mapping(self._skeleton)
        plan = self._skeleton._get_dtype_plan(self._dtype)
        config = LoadStateDictConfig(dtype=self._dtype, dtype_plan=plan, weight_mapping=mapping)
        with ExitStack() as stack, _as_it_was(self._skeleton) as filled, _no_progress_bar():
            try:
                opened = {
                    path: stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                    for path in {self._file_of[key] for key in keys}
                }
                slices = {key: opened[self._file_of[key]].get_slice(key) for key in keys}
                report, _ = convert_and_load_state_dict_in_model(self._skeleton, slices, config)
            except (OSError, SafetensorError) as error:
                raise RuntimeError(f"{self._file_of[keys[0]].parent}: its weights cannot be read: {error}") from error
            wrong = [*report.error_msgs, *map(str, report.conversion_errors.values())]
            if report.mismatched_keys:
                wrong.append(f"other shapes for {sorted(report.mismatched_keys)[:2]}")
            if wrong:
                raise RuntimeError(f"The checkpoint does not fit {type(self._skeleton).__name__}: {wrong[0]}")
            return filled()

    def _check_ties(self) -> None:
        """A checkpoint may hold both ends of a tied weight; they must be equal then."""
        ends: dict[int, dict[str, str]] = {}
        for key, target in self._targets.items():
            if target in self._parameters:
                ends.setdefault(id(self._parameters[target]), {})[target] = key
        for both in ends.values():
            (first, *others), values = sorted(both), []
            for name in (first, *others) if others else ():
                values.append(self._converted([both[name]])[name])
            if any(not torch.equal(values[0], value) for value in values[1:]):
                raise RuntimeError(
                    f"The config ties {first} and {others[0]}, but the checkpoint holds different values for them. Set "
                    'config_overrides {"tie_word_embeddings": false}.'
                )
            for name in others:
                for keys in self._groups.values():
                    if both[name] in keys:
                        keys.remove(both[name])
        self._groups = {name: keys for name, keys in self._groups.items() if keys}


def by_layer(targets: Mapping[str, str]) -> dict[str, list[str]]:
    """Keys by the layer (or the single weight) that they make, where `targets` has each one's parameter."""
    groups: dict[str, list[str]] = {}
    for key, target in targets.items():
        match = _LAYER.match(target)
        groups.setdefault(match[1] if match else target, []).append(key)
    return groups


def target_names(skeleton: Any, keys: Iterable[str]) -> dict[str, tuple[str, str | None]]:
    """(first parameter or buffer that it goes into, pattern of the converter's rule that says so) of each checkpoint
    key, by transformers' rules for this model; a name that the model lacks where the key is not used."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping, state = get_model_conversion_mapping(skeleton), skeleton.state_dict()
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    targets: dict[str, tuple[str, str | None]] = {}
    for key in keys:
        renamed, pattern = rename_source_key(key, renamings, converters, skeleton.base_model_prefix, state)
        targets[key] = (key, None) if renamed not in state and key in state else (renamed, pattern)
    return targets


def shard_files(path: str) -> list[Path]:
    """The safetensors files of a local folder or (downloaded) of a hub id, or a file itself. RuntimeError when there
    are none."""
    if Path(path).is_file():
        return [Path(path)]
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    index = cached_file(path, INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        found, _ = get_checkpoint_shard_files(path, index)
        return [Path(file) for file in found or ()]
    single = cached_file(path, SINGLE_NAME, _raise_exceptions_for_missing_entries=False)
    if single is None:
        raise RuntimeError(f"{path} holds no {INDEX_NAME} and no {SINGLE_NAME}: weights are read as safetensors only.")
    return [Path(single)]


def _keys_of(files: list[Path]) -> dict[str, Path]:
    from safetensors import SafetensorError, safe_open

    found: dict[str, Path] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                names = set(file.keys())
        except (OSError, SafetensorError) as error:
            raise RuntimeError(
                f"{path} cannot be read: it is damaged, or was cut short ({error}). Download or copy it again."
            ) from error
        if twice := sorted(names & found.keys()):
            raise RuntimeError(
                f"{path}: holds {twice[0]}, which {found[twice[0]].name} holds as well. Which of the two counts is not "
                "known: download the model again, or remove the file that is left over."
            )
        found |= dict.fromkeys(names, path)
    return found


@contextmanager
def _as_it_was(skeleton: nn.Module) -> Iterator[Any]:
    """Gives a function that takes what has been filled since: name -> tensor. Afterwards the skeleton is as before."""
    before = [
        (path, module, dict(module._parameters), dict(module._buffers)) for path, module in skeleton.named_modules()
    ]

    def filled() -> dict[str, torch.Tensor]:
        return {
            f"{path}.{name}" if path else name: value.detach()
            for path, module, parameters, buffers in before
            for held, old in ((module._parameters, parameters), (module._buffers, buffers))
            for name, value in held.items()
            if value is not None and value is not old.get(name)
        }

    try:
        yield filled
    finally:
        for _, module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """A bar for each layer would be noise."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
