"""From the settings to a transformers config and class, with the questions asked that can be asked before any weight.

Folder without a model, a Windows spelling under Linux, a hub that does not answer, a gated repository, a sequence
longer than the model's positions, a misspelt override: each ends here with words that say what to do."""

from __future__ import annotations

import copy
import json
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outcore.common.errors import line_of
from outcore.common.hub import ask_hub_once, near_models
from outcore.common.output import say
from outcore.common.words import did_you_mean, nearest
from outcore.model.facts import gguf_config_fields, gguf_header, language_config
from outcore.model.making import made_of
from outcore.model.presets import PRESETS, check_preset_name, preset_config
from outcore.model.settings import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GGUF = ".gguf"
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip
"""Fields of a config that count what a model is made of."""
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_WINDOWS_DRIVE = re.compile(r"^([A-Za-z]):[\\/](.*)$")
_WSL_SHARE = re.compile(r"^\\\\(?:wsl\.localhost|wsl\$)\\[^\\]+\\(.*)$", re.IGNORECASE)
_LOCAL_ADVICE = "the folder of a model on this machine (to train, also a shape from scratch: --preset tiny)"
"""Worded for every command: some take the model as a flag, others by its place."""


@dataclass(frozen=True)
class ModelSource:
    """Resolved source of a model to be made: `config` is final, `path` is where weights are read from (or None)."""

    config: PreTrainedConfig
    path: str | None
    words: str
    notes: tuple[str, ...] = ()

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(getattr(self.config, "is_encoder_decoder", False))


def windows_path_hint(spelling: str) -> str | None:
    """For a Windows or UNC spelling used on another system: what it is and how it is spelt here; None for others."""
    if os.name == "nt":
        return None
    if match := _WSL_SHARE.match(spelling):
        return f"is a Windows network spelling; inside WSL it is /{match[1].replace(chr(92), '/')}"
    if match := _WINDOWS_DRIVE.match(spelling):
        rest = match[2].replace("\\", "/")
        drive, mounted = match[1].upper(), f"/mnt/{match[1].lower()}"
        return f"is a Windows spelling; under WSL2 drive {drive}: is {mounted}, so try {mounted}/{rest}"
    if spelling.startswith("\\\\"):
        return "is a Windows network spelling; mount that share here first and give the mounted folder"
    if "\\" in spelling:
        return f"has backslashes; here folders are separated by /, so try {spelling.replace(chr(92), '/')}"
    return None


def resolve_source(settings: ModelSettings, tokenizer: Any | None = None, *, sees: bool = False) -> ModelSource:
    """The final config of a model that transformers builds.

    `tokenizer` (optional): its length and special tokens go into a config from scratch. Raises ValueError for bad
    settings and RuntimeError when the hub cannot give what was asked. Not for model_module: its hook builds alone.
    `sees`: take image-text models, too, which are refused otherwise."""
    if settings.model_module is not None:
        raise ValueError("model_module builds its own model; there is no config to resolve.")
    vocab_size = settings.vocab_size or (len(tokenizer) if tokenizer is not None else None)
    if settings.preset is not None:
        preset = check_preset_name(settings.preset)
        config = preset_config(settings.preset, vocab_size)
        source = ModelSource(config, None, f"{settings.preset} from scratch ({preset.summary})")
    elif settings.config_file is not None:
        config = _config_from_file(Path(settings.config_file).expanduser())
        source = ModelSource(config, None, f"{config.model_type} from scratch by {settings.config_file}")
        if vocab_size is not None and vocab_size > config.vocab_size:
            source = replace(
                source, notes=(f"vocabulary grown from {config.vocab_size} to the tokenizer's {vocab_size}",)
            )
            config.vocab_size = vocab_size
    else:
        source = _trained_source(settings)
        if not sees:
            _check_it_reads_text_alone(source)
    _apply_overrides(source.config, settings)
    if source.path is None:
        _apply_tokenizer(source.config, tokenizer)
    else:
        _check_vocabulary(source, vocab_size)
    _check_sizes(source.config, settings.config_file or source.path or source.words)
    check_seq_length(source.config, settings.seq_length)
    return source


def _check_it_reads_text_alone(source: ModelSource) -> None:
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    )

    kind = type(source.config)
    is_text = kind in MODEL_FOR_CAUSAL_LM_MAPPING or kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not is_text:
        raise ValueError(
            f"{source.path} ({source.config.model_type}) is an image-text model, which this command does not take. "
            "outcore train trains it with --train_vision none, lora or full; outcore generate and chat (--image) and "
            "outcore serve ask it."
        )


def max_positions(config: PreTrainedConfig) -> int | None:
    """The longest sequence the config promises, or None where positions are relative and unbounded (T5)."""
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "relative_attention_num_buckets", None):
        return None
    limit = getattr(text_config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def check_seq_length(config: PreTrainedConfig, seq_length: int) -> None:
    """ValueError when a sample would be longer than the positions the model knows."""
    limit = max_positions(config)
    if limit is not None and seq_length > limit:
        raise ValueError(
            f"seq_length is {seq_length}, but this {config.model_type} model knows {limit} positions. "
            f"Set --seq_length {limit} or less, or choose a model with a longer context."
        )


def _config_from_file(path: Path) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig

    if hint := windows_path_hint(str(path)):
        raise ValueError(f"config_file {str(path)!r} {hint}.")
    if not path.is_file():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ValueError(f"config_file {str(path)!r} is not a file.{did_you_mean(path.name, siblings)}")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() in (".yaml", ".yml"):
            import yaml

            fields = yaml.safe_load(text)
        else:
            fields = json.loads(text)
    except Exception as error:  # yaml's own error classes; pyyaml may be absent for JSON users
        raise ValueError(f"config_file {str(path)!r} cannot be read as {path.suffix or 'JSON'}: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ValueError(
            f"config_file {str(path)!r} must be a mapping with a model_type, such as "
            '{"model_type": "llama", "hidden_size": 512, ...}.'
        )
    model_type = fields.pop("model_type")
    known = sorted(CONFIG_MAPPING.keys())
    if model_type not in known:
        raise ValueError(
            f"config_file {str(path)!r}: transformers knows no model_type {model_type!r}."
            f"{did_you_mean(model_type, known)}"
        )
    try:
        return language_config(AutoConfig.for_model(model_type, **fields))
    except Exception as error:  # each model's config class judges in its own way
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"config_file {str(path)!r} is not a valid {model_type} config: {words}") from error


def _check_sizes(config: PreTrainedConfig, where: object) -> None:
    """ValueError for counts of nothing, of which transformers makes a model that divides by zero or learns nothing."""
    text_config = config.get_text_config(decoder=True)
    for name in SIZES:
        size = vars(text_config).get(name)  # of some models a count differs by layer, and asking for it raises
        if isinstance(size, int) and size < 1:
            raise ValueError(f"{where}: {name} is {size}, but must be at least 1.")


def _trained_source(settings: ModelSettings) -> ModelSource:
    name = str(settings.model_name_or_path)
    expanded = os.path.expanduser(name)
    if (hint := windows_path_hint(name)) and not os.path.isdir(name):
        raise ValueError(f"model_name_or_path {name!r} {hint}.")
    if os.path.isdir(expanded):
        _check_folder(Path(expanded))
        return ModelSource(_read_config(settings, expanded), expanded, f"weights from the folder {expanded}")
    if os.path.isfile(expanded):
        if expanded.lower().endswith(GGUF):
            config = copy.deepcopy(_gguf_config(Path(expanded), os.stat(expanded).st_mtime_ns))
            config.name_or_path = expanded  # which an adapter names as its base
            return ModelSource(config, expanded, f"weights from the file {expanded}")
        raise ValueError(
            f"model_name_or_path {name!r} is a file. Give the folder that holds config.json and the safetensors "
            "weights, or a GGUF file; rows to train on are named by --dataset."
        )
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local or not _HUB_ID.match(name):
        parent = Path(expanded).parent
        where = "" if parent.is_dir() else f" (nor is there a folder {str(parent)!r})"
        raise ValueError(
            f"model_name_or_path {name!r} is not a folder here{where} and no hub id either (those look like "
            f"name or owner/name).{near_models(name)}"
        )
    return ModelSource(_read_config(settings, name), name, f"weights of {name} from the hub")


@cache
def _gguf_config(file: Path, changed_ns: int) -> PreTrainedConfig:
    """The configuration that the file's header tells, with a `quantization_config` that names the type that most of its
    weights have, and those of embedding and head."""
    from transformers import AutoConfig

    try:
        header, counts = gguf_header(file), Counter[str]()
        kinds = {name: tensor.kind.lower() for name, tensor in header.tensors.items()}
        for name, tensor in header.tensors.items():
            counts[kinds[name]] += prod(tensor.shape)
        config = AutoConfig.for_model(**gguf_config_fields(header))
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(
            f"{file} cannot be read as a GGUF file with a model that is known: {error}. "
            "If it is cut off, download it again"
        ) from error
    embedding = kinds.get("token_embd.weight", "")
    ends = [embedding, kinds.get("output.weight", embedding)]
    config.quantization_config = {"quant_method": "gguf", "format": counts.most_common(1)[0][0], "ends": ends}
    return config


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        inside = [p for p in sorted(folder.iterdir()) if p.is_dir() and (p / "config.json").is_file()]
        hint = f" Its subfolder {str(inside[0])!r} does: use that." if inside else ""
        if (folder / "adapter_config.json").is_file():
            hint = " It holds a LoRA adapter only: merge it into its base model first, or name the base model."
        raise ValueError(f"The folder {str(folder)!r} holds no config.json, so it is not a transformers model.{hint}")
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        why = f" It has {pickles[0]}, a pickle, which is not read: convert it to safetensors first." if pickles else ""
        way = " Download them again, or train this shape from scratch: --config_file "
        way += f"{folder / 'config.json'}."
        raise ValueError(f"The folder {str(folder)!r} holds no *.safetensors weights.{why or way}")


def _read_config(settings: ModelSettings, name: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    if not os.path.isdir(name):
        ask_hub_once(say)
    try:
        return language_config(AutoConfig.from_pretrained(name, trust_remote_code=settings.trust_remote_code))
    except Exception as error:  # the hub's errors, and those of each model's config class
        raise hub_error(name, error, settings.trust_remote_code) from error


def hub_error(name: str, error: BaseException, trust_remote_code: bool = False) -> Exception:
    """Turn what transformers or the hub client raised for model `name` into an error with words and a way out."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or at.__context__
    kinds = {cls.__name__ for link in chain for cls in type(link).__mro__}
    text = " ".join(str(link) for link in chain).lower()
    is_told = isinstance(error, (OSError, ValueError)) and str(error).strip()
    first_line = str(error).strip().splitlines()[0] if is_told else line_of(error)
    if "SafetensorError" in kinds:
        return RuntimeError(
            f"The weights of {name} are damaged or cut short ({first_line}). Copy or download them again."
        )
    if os.path.isdir(name) and (isinstance(error, OSError) or "model type" not in text):
        return ValueError(f"The model in {name!r} cannot be read: {first_line}")
    if "GatedRepoError" in kinds or "gated" in text:
        return RuntimeError(
            f"{name} is gated: its makers want you to accept their terms on its hub page first. Do that, log in with "
            f"`hf auth login`, and try again; or use {_LOCAL_ADVICE}."
        )
    if name in PRESETS:
        return ValueError(
            f"{name} is a preset, a shape without weights, which `outcore plan` and training take as --preset {name}. "
            "Name a published model, a folder or a run."
        )
    shapes = nearest(name.split("/")[-1], PRESETS)
    near = near_models(name) or "".join(f" Training and plans have a preset {shape!r}." for shape in shapes)
    if "RepositoryNotFoundError" in kinds or "not a valid model identifier" in text:
        return RuntimeError(
            f"The hub has no model {name!r}, or it is private and you are not logged in (`hf auth login`). It is no "
            f"folder here either, and no preset.{near} Check the spelling, or use {_LOCAL_ADVICE}."
        )
    offline = any(word in kind for kind in kinds for word in ("Offline", "LocalEntryNotFound", "Connect", "Timeout"))
    if offline or "couldn't connect" in text or "connection" in text or "offline" in text:
        return RuntimeError(
            f"{name} is no folder here and not in the local cache, and the hub cannot be reached.{near} Check the "
            f"spelling, the network or the proxy, and try again; without a network use {_LOCAL_ADVICE}."
        )
    if "trust_remote_code" in text and not trust_remote_code:
        return ValueError(
            f"{name} comes with its own Python code, which is run only when you ask for it. Read that code, then add "
            "--trust_remote_code true."
        )
    if "model type" in text or "model_type" in text:
        return ValueError(
            f"{name} has a model type that the installed transformers does not know ({first_line}). It may need a "
            "newer transformers, or --trust_remote_code true if it brings its own code."
        )
    return RuntimeError(f"The model {name} cannot be loaded: {first_line}. Check the name, or use {_LOCAL_ADVICE}.")


def _apply_overrides(config: PreTrainedConfig, settings: ModelSettings) -> None:
    with made_of(config):
        known = sorted(set(config.to_dict()) | set(getattr(config, "attribute_map", {})))
    for key, value in settings.config_overrides.items():
        if key not in known:
            raise ValueError(f"config_overrides: {config.model_type} has no field {key!r}.{did_you_mean(key, known)}")
        setattr(config, key, value)
    if settings.config_overrides:
        layers = getattr(config, "num_hidden_layers", None)
        types = getattr(config, "layer_types", None)
        if types is not None and layers is not None and "layer_types" not in settings.config_overrides:
            config.layer_types = (list(types) * -(-layers // len(types)))[:layers]


def _apply_tokenizer(config: PreTrainedConfig, tokenizer: Any | None) -> None:
    """Special tokens of the tokenizer into a config from scratch, so that the exported model starts and stops right."""
    if tokenizer is None:
        return
    for field_name in ("bos_token_id", "eos_token_id"):
        setattr(config, field_name, getattr(tokenizer, field_name, None))
    if getattr(config, "is_encoder_decoder", False):
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        config.pad_token_id = pad if pad is not None else 0
        config.decoder_start_token_id = config.pad_token_id
    else:
        # A pad token in the config would zero that embedding's row and its gradient, wrong where pad is also eos.
        config.pad_token_id = None


def _check_vocabulary(source: ModelSource, vocab_size: int | None) -> None:
    model_vocab = getattr(source.config.get_text_config(decoder=True), "vocab_size", None)
    if vocab_size is not None and model_vocab is not None and vocab_size > model_vocab:
        raise ValueError(
            f"The tokenizer has {vocab_size} entries, but the model has embeddings for {model_vocab}: they do not "
            f"belong together. Use the tokenizer that comes with {source.path}."
        )
