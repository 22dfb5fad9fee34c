"""From what a user calls a model (a hub id, a folder, a run, a checkpoint, a LoRA adapter on its base) to one whose
weights are about to come."""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from outcore.checkpoint import CheckpointError, ShardReader, list_checkpoints, open_checkpoint
from outcore.checkpoint.export import base_of, export_checkpoint, model_folder
from outcore.checkpoint.materials import base_material, check_material
from outcore.common.files import check_utf8
from outcore.common.hub import ask_hub_once, near_models
from outcore.common.output import say
from outcore.data import load_tokenizer
from outcore.data.chat import end_tokens_of
from outcore.data.pictures import PictureEncoder
from outcore.formats import open_packed
from outcore.model import LoadedModel, ModelSettings, load_model, max_positions
from outcore.model.adapters import RowChoice, add_to_products, by_rows
from outcore.model.facts import checkpoint_name, read_end_tokens
from outcore.model.forward import Pooling, read_pooling, unwrap

ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXPORT, MANIFEST = "export", "manifest.json"
_OF_BASE = re.compile(r"(\w+)(?:\.base_layer)?\.(?:weight|bias|token_adapter\.\w+)$")
"""Names in an adapter's file, but for LoRA's: a layer's own weight or bias, rows that replace an embedding's."""


@dataclass(frozen=True)
class FoundModel:
    """A model without values yet, and how one speaks with it."""

    loaded: LoadedModel
    tokenizer: Any
    words: str
    end_tokens: frozenset[int]
    max_context: int | None
    folders: tuple[str, ...] = ()
    """Hub id or folder of its weights, and of the adapter where one lies beside them."""
    adapters: tuple[str, ...] = ()
    """Folders of adapters among which requests choose, by number from 1."""
    choice: RowChoice | None = None
    """Asks for each row's, where there are such."""
    pooling: Pooling = "mean"
    """Way from a text's hidden states to its vector."""
    pictures: PictureEncoder | None = None
    """Encoder that makes pictures the model's input; None: it takes none."""


@dataclass(frozen=True)
class ModelPlace:
    """Places of the parts of a model."""

    weights: str
    """Hub id or folder with weights; '' for a checkpoint's."""
    tokenizer: str
    words: str
    checkpoint: Path | None = None
    """Holds the weights, 16 bits of each."""
    adapter: Path | None = None
    """Folder in peft's format, or a checkpoint of a LoRA run."""
    quantize: str | None = None
    """Format that the adapter's base was packed into when it was trained."""

    @property
    def sees(self) -> bool:
        """Whether transformers knows its kind as an image-text model, and as none of text."""
        if not self.weights or Path(self.weights).suffix.lower() == ".gguf":
            return False
        try:
            kind = PreTrainedConfig.get_config_dict(self.weights)[0].get("model_type")
        except (OSError, ValueError, RecursionError):  # what opens it says why
            return False
        return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


class CheckpointWeights:
    """The feed of a checkpoint's 16-bit weights, a layer at a time."""

    def __init__(self, folder: Path, wanted: frozenset[str]) -> None:
        self._reader = ShardReader(folder, "model")
        missing = sorted(wanted - set(self._reader.names()))
        if missing:
            raise RuntimeError(f"{folder}: lacks {missing[0]}, so it holds no whole model.")
        self._names = wanted

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def groups(self) -> Iterator[dict[str, torch.Tensor]]:
        for name in self._reader.names():
            if name in self._names:
                yield {name: self._reader.read(name)}


def find_place(name: str, adapter: str | None = None) -> ModelPlace:
    """Find where `name` is: a folder, a run (its finished model, else its newest checkpoint), else a hub id.
    ValueError for a folder that holds no model, a GGUF file that is not there, or a name that is no UTF-8."""
    check_utf8(name, "model")
    check_utf8(adapter or "", "adapter")
    path = model_folder(name)
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise ValueError(f"{name} is no file here.{near_models(name)} Give the path of the GGUF file.")
        place = ModelPlace(str(path), str(path), f"{path}")
    elif not path.is_dir():
        ask_hub_once(say)
        place = ModelPlace(name, name, f"{name}")
    elif (path / ADAPTER).is_file() and not _has_whole_model(path):
        place = _adapter_place(path)
    elif (path / MANIFEST).is_file() or list_checkpoints(path):
        place = _checkpoint_place(path)
    else:
        place = ModelPlace(str(path), str(path), f"{path}")
    if adapter is None:
        return place
    folder = Path(adapter).expanduser()
    if (folder / MANIFEST).is_file() and (folder / EXPORT / ADAPTER).is_file():
        folder = open_checkpoint(folder).path
    elif place.adapter is not None or not (folder / ADAPTER).is_file():
        why = "the model brings an adapter already" if place.adapter is not None else f"{folder} holds no {ADAPTER}"
        raise ValueError(f"adapter {adapter!r}: {why}.")
    return replace(place, adapter=folder, words=f"{place.words} with the adapter {folder}")


def open_model(
    name: str,
    *,
    precision: str,
    adapter: str | None = None,
    adapters: Sequence[str] = (),
    quantize: str | None = None,
    trust_remote_code: bool = False,
) -> FoundModel:
    """The model with stand-ins for weights and a feed of their values. `adapters`: folders of those among which
    requests choose; `quantize`: what its weights are packed into as they come. ValueError or RuntimeError, in words."""
    place = find_place(name, adapter)
    if place.quantize is not None and quantize not in (None, place.quantize):
        raise ValueError(
            f"quantize is {quantize}, but the adapter was trained over a base in {place.quantize}. Leave it out."
        )
    common: dict[str, Any] = {"precision": precision, "trust_remote_code": trust_remote_code, "seq_length": 2}
    common["quantize"] = quantize or place.quantize
    if place.checkpoint is not None:
        config = place.checkpoint / EXPORT / "config.json"
        loaded = load_model(ModelSettings(config_file=str(config), **common), lazy=True)
        wanted = frozenset(checkpoint_name(n) for n, _ in loaded.model.named_parameters())
        loaded = replace(loaded, feed=CheckpointWeights(place.checkpoint, wanted), words=place.words)
    else:
        loaded = load_model(
            ModelSettings(model_name_or_path=place.weights, **common),
            lazy=True,
            packed_feed=open_packed,
            keeps_labels=True,
        )
    choice = None
    if place.adapter is not None:
        loaded = replace(loaded, model=_with_adapter(loaded.model, place.adapter))
    elif adapters:
        causal: Any = unwrap(loaded.model)
        head = causal.get_output_embeddings()
        names = [f"adapter{number}" for number in range(1, len(adapters) + 1)]
        for name, folder in zip(names, adapters, strict=True):
            loaded = replace(loaded, model=_with_adapter(loaded.model, Path(folder), name))
        choice = by_rows(loaded.model, names, head)
    for folder in (place.checkpoint, place.adapter):
        if folder is not None:
            read_end_tokens(unwrap(loaded.model), folder / EXPORT if (folder / EXPORT).is_dir() else folder)
    loaded.model.eval()
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(False)
    tokenizer = load_tokenizer(place.tokenizer, trust_remote_code)
    folders = (str(place.checkpoint or place.weights), *([] if place.adapter is None else [str(place.adapter)]))
    ends = end_tokens_of(unwrap(loaded.model), tokenizer)
    most = max_positions(loaded.config)
    pooling: Pooling = "mean"
    for folder in folders:  # an adapter's own word after its base's
        pooling = read_pooling(folder) or pooling
    return FoundModel(loaded, tokenizer, place.words, ends, most, folders, tuple(adapters), choice, pooling)


def _checkpoint_place(path: Path) -> ModelPlace:
    found = path if (path / MANIFEST).is_file() else list_checkpoints(path)[-1]
    try:
        opened = open_checkpoint(found)
        opened.check_readable()
        checkpoint = opened.path
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    files = checkpoint / EXPORT
    if (files / ADAPTER).is_file():
        check_material(opened, "base", base_material(_base_of(files)))
        packed = opened.trainer_state()["fingerprint"].get("quantize")
        return replace(
            _adapter_place(files),
            words=f"{_base_of(files)} with the adapter of {checkpoint}",
            adapter=checkpoint,
            quantize=None if packed == "none" else packed,
        )
    if not (files / "config.json").is_file():
        raise ValueError(
            f"{checkpoint} holds no {EXPORT}/config.json, so its model is not known here: it is your own module, or "
            "the checkpoint was made by an older version."
        )
    return ModelPlace("", str(files), f"checkpoint {checkpoint}", checkpoint)


def _has_whole_model(folder: Path) -> bool:
    """Whether there are weights beside an adapter's; a configuration alone lies beside our own adapters, too."""
    return any(file.name != ADAPTER_WEIGHTS for file in folder.glob("*.safetensors"))


def _adapter_place(path: Path) -> ModelPlace:
    base = _base_of(path)
    has_tokenizer = (path / "tokenizer_config.json").is_file()
    return ModelPlace(base, str(path) if has_tokenizer else base, f"{base} with the adapter {path}", None, path)


def _base_of(path: Path) -> str:
    base = base_of(path)
    if not base:
        raise ValueError(f"{path / ADAPTER} names no base model. Name the base, and this folder with --adapter.")
    return base


def _check_adapter(folder: Path) -> None:
    """ValueError in words for an adapter that cannot be put beside a base whose weights are to come."""
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"{folder} has no {ADAPTER_WEIGHTS}: adapters are read as safetensors only.")
    config = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    kind = "ALORA" if config.get("alora_invocation_tokens") else config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"the adapter {folder} is of the kind {kind}; only LORA is put beside a base. Merge it first.")
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        names = list(file.keys())
    of_base = (_OF_BASE.search(name) for name in names if ".lora_" not in name)
    whole = {*(config.get("modules_to_save") or ()), *(match[1] for match in of_base if match)}
    if whole:
        raise ValueError(
            f"the adapter {folder} brings {', '.join(sorted(whole))} whole, in rows or with a bias (modules_to_save, "
            "trainable_token_indices, bias, or adapted embeddings, which peft saves whole), and only adapters are put "
            "beside a base. Merge it first: by peft's merge_and_unload, or a run of ours by outcore export RUN --merge."
        )


def _with_adapter(model: Any, folder: Path, name: str = "default") -> Any:
    from peft import PeftModel

    if (folder / MANIFEST).is_file():
        with tempfile.TemporaryDirectory() as aside:  # as peft reads it; small
            return _with_adapter(model, export_checkpoint(open_checkpoint(folder), Path(aside) / "adapter"), name)
    _check_adapter(folder)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is missing is refused below
            adapted = model
            if not isinstance(model, PeftModel):
                adapted = PeftModel.from_pretrained(model, str(folder), name, autocast_adapter_dtype=False)
            found = adapted.load_adapter(str(folder), name, autocast_adapter_dtype=False)  # which tells what it found
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"the adapter {folder} does not fit the model: {error}") from error
    if stray := [*found.unexpected_keys, *found.missing_keys]:
        raise ValueError(
            f"the adapter {folder} does not fit the model: {len(stray)} weights are in one of both only ({stray[0]}, "
            "...). It was trained on another model: name that one."
        )
    add_to_products(adapted)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    return adapted
