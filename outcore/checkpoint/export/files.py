"""Export of a checkpoint as a model that others load: configuration and tokenizer beside its weights.

`save_export_files` puts configuration and tokenizer into `export/` beside the `model-*` shards of a checkpoint, and
`export_checkpoint` takes both into a folder of their own. The weights go there under the names of a published
checkpoint: mostly those in the shards, which are copied then (no cost at all where the file system shares blocks: XFS,
Btrfs); of mixtures of experts and a few others they are converted, a layer at most in memory. No GPU is needed, and no
weights are loaded beside those.

A LoRA checkpoint is merged into its base without a run: the base is read from where it came from.

RAM: the base in the precision that it is stored in. Merged weights are computed one layer at a time, as they are
written (`export_model`)."""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.checkpoint.export.carried import Carried, carried, carry_files, copy_file, tell_lost
from outcore.checkpoint.export.model import export_model, write_config, write_index, write_model
from outcore.checkpoint.folders import Checkpoint, check_space, list_checkpoints
from outcore.checkpoint.manifest import ExportRefused
from outcore.checkpoint.materials import SOURCE, base_material, check_material, kept_material
from outcore.checkpoint.published import Tensors, published
from outcore.checkpoint.shards import CheckpointError, ShardReader, TensorPlan, write_shard
from outcore.common import file_errors, make_folder, publish_folder, remove_tree
from outcore.common.hub import RUN_FOLDERS
from outcore.common.listing import damaged_weights, write_checksums
from outcore.common.words import own_command
from outcore.model import Origin
from outcore.model.adapters import settle_trained_modules
from outcore.model.facts import adapter_name, model_class_of, read_end_tokens, set_end_tokens

logger = logging.getLogger(__name__)

FOLDER = "export"
ADAPTER = "adapter_config.json"
FINISHED, UNFINISHED = RUN_FOLDERS
"""Folders of runs: their models, and what they go on from."""


def model_folder(name: str | Path) -> Path:
    """The folder of this name; else, of the run of this name, that of its finished model, else of its checkpoints. The
    path as it is where there is none of them."""
    path = Path(name).expanduser()
    found = [folder for folder in (path, FINISHED / name, UNFINISHED / name) if folder.is_dir()]
    return found[0] if found else path


def configured(name: str) -> str:
    """Folder with the configuration of the model called `name`: its `model_folder`, of checkpoints the newest's, of a
    LoRA adapter what it names as its base; `name` itself where there is no such folder."""
    folder = model_folder(name)
    if not folder.is_dir():
        return name
    if (folder / "config.json").is_file():
        return str(folder)
    steps = list_checkpoints(folder)
    inside = next((path / FOLDER for path in (folder, *reversed(steps)) if (path / FOLDER).is_dir()), folder)
    if (inside / ADAPTER).is_file():
        return base_of(inside) or str(inside)
    return str(inside)


def save_export_files(folder: Path, model: Any, tokenizer: Any) -> None:
    """Configuration (with LoRA the adapter's as well) and tokenizer into `folder/export`. A model of the user's own
    without a transformers configuration leaves only the tokenizer."""
    target = folder / FOLDER
    with file_errors("writing configuration and tokenizer", target):
        target.mkdir()
        adapters = getattr(model, "peft_config", None)
        write_config(target, model.get_base_model() if adapters else model)
        if adapters:
            adapters["default"].save_pretrained(str(target))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(target))


def export_checkpoint(checkpoint: Checkpoint, target: Path) -> Path:
    """Copy a verified checkpoint's weights, configuration and tokenizer to `target`, which must not exist yet.

    A LoRA checkpoint gives its adapter in peft's format. ExportRefused where `target` is there, CheckpointError when it
    cannot be exported or the drive is too full; `target` appears only when it is whole."""
    checkpoint.check_readable()
    _check_free(target)
    files = checkpoint.path / FOLDER
    names = checkpoint.files(f"{FOLDER}/")
    if not names and not checkpoint.files("model-"):
        raise CheckpointError(f"{checkpoint.path}: holds no weights.")
    if not files.is_dir():
        raise CheckpointError(
            f"{checkpoint.path}: holds no {FOLDER}/ with the model's configuration: it was made by an older version. "
            f"Resume it with {own_command('train')}, which exports at the end."
        )
    if checkpoint.damaged_export:
        raise CheckpointError(
            f"{checkpoint.damaged_export[0]} Resume the run with {own_command('train')} "
            "(--resume_from_checkpoint auto), which makes these files again; the weights are whole."
        )
    shards = [checkpoint.path / name for name in checkpoint.files("model-")]
    architecture = None if (files / ADAPTER).is_file() else _architecture(files)
    if architecture is not None:
        _check_complete(checkpoint.path, architecture)
    elif not (files / ADAPTER).is_file():
        _check_own(checkpoint)
    origin = None if (files / ADAPTER).is_file() else _origin(checkpoint)
    rest = Carried() if architecture is None else carried(origin, architecture)
    needed_bytes = sum(shard.stat().st_size for shard in shards) + sum(plan.n_bytes for plan, _ in rest.rest.values())
    phase = f"exporting {checkpoint.path}"
    with file_errors(phase, target):
        make_folder(target.parent)
        check_space(target.parent, needed_bytes)
        aside = target.with_name(f".{target.name}.part")
        remove_tree(aside)
    try:
        with file_errors(phase, target):
            known: dict[Path, int] = {}
            for name in names:
                copied = aside / Path(name).relative_to(FOLDER)
                copied.parent.mkdir(parents=True, exist_ok=True)
                copy_file(checkpoint.path / name, copied)
                known[copied] = checkpoint.manifest.files[name].crc32
            aside.mkdir(parents=True, exist_ok=True)
            if (files / ADAPTER).is_file():
                _write_adapter(checkpoint.path, aside)
            else:
                known |= _write_weights(checkpoint, shards, aside, architecture, rest)
                carry_files(origin, aside)
            write_checksums(aside, known)
            publish_folder(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return target


def how_to_load(folder: Path) -> str:
    """Tell in words what loads the exported `folder`."""
    if (folder / ADAPTER).is_file():
        return "peft.PeftModel.from_pretrained(base, ...) loads it"
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "model.safetensors").is_file():
            return "a model of your own: safetensors.torch.load_model loads it into what your function builds"
        return "a model of your own: its weights in shards, for load_state_dict"
    with file_errors("reading the exported configuration", path):
        config = json.loads(path.read_text(encoding="utf-8"))
    kind = "AutoModelForSeq2SeqLM" if config.get("is_encoder_decoder") else "AutoModelForCausalLM"
    heads = ("ForSequenceClassification", "ForTokenClassification")
    kind = next((f"AutoModel{head}" for head in heads if head in str(config.get("architectures"))), kind)
    if (folder / "processor_config.json").is_file() and "ForCausalLM" not in str(config.get("architectures")):
        kind = "AutoModelForImageTextToText"
    return f"{kind}.from_pretrained loads it"


def _origin(checkpoint: Checkpoint) -> Origin | None:
    """Find the model that the run began from. None, with a warning, where it is gone or has other content now."""
    kept = kept_material(checkpoint, SOURCE)
    origin = None if kept is None else _origin_at(kept.path, kept.commit)
    if kept is None or origin is None or origin.path.endswith(".gguf"):
        return origin
    with _told_lost(kept.path):
        if base_material(str(origin.folder)).content == kept.content:
            return origin
        tell_lost(kept.path, "it has changed since the run began from it")
    return None


def _origin_at(path: str, commit: str | None = None) -> Origin | None:
    with _told_lost(path):
        if not Path(path).exists():  # a hub id: as far as it lies here, nothing is downloaded for an export
            from huggingface_hub import snapshot_download

            path = snapshot_download(path, revision=commit, local_files_only=True)
        return Origin.of(path)
    return None


@contextmanager
def _told_lost(path: str) -> Iterator[None]:
    """Context: a model at `path` that is gone or cannot be read is warned of, not raised."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        tell_lost(path, str(error))
        return None


def _write_weights(
    checkpoint: Checkpoint, shards: list[Path], folder: Path, architecture: nn.Module | None, origin: Carried
) -> dict[Path, int]:
    """The checksums of what was written."""
    reader = ShardReader(checkpoint.path, "model")
    tensors: Tensors = {
        name: (TensorPlan(name, reader.dtypes[name], reader.shapes[name]), lambda name=name: reader.read(name))
        for name in reader.names()
    }
    trained = set(ShardReader(checkpoint.path, "master").names())
    untrained = tensors.keys() - trained if trained else ()
    found = tensors if architecture is None else published(architecture, tensors, origin.known, untrained)
    if not origin.rest and all(name in tensors and entry[1] is tensors[name][1] for name, entry in found.items()):
        return _copy_shards(checkpoint, shards, reader, folder)
    return write_model(folder, origin.rest | found)


def _architecture(folder: Path) -> nn.Module | None:
    """The model without weights; None where transformers does not know it: it converts nothing of it either."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        return None
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            return model_class_of(config)(config)
    except Exception as error:  # code that came with the model, or transformers' for one architecture
        logger.warning(
            "%s: its weights are exported under the names of the checkpoint: %s: %s",
            folder,
            type(error).__name__,
            error,
        )
        return None


_WHOLE = f"Resume it with {own_command('train')}, which exports the whole model at the end."


def _check_complete(checkpoint: Path, architecture: nn.Module) -> None:
    """CheckpointError where weights are missing: a checkpoint has what was trained."""
    reader = ShardReader(checkpoint, "model")
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in architecture.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    missing = [names[0] for names in names_of.values() if not any(name in reader for name in names)]
    if missing:
        raise CheckpointError(
            f"{checkpoint}: holds the weights that were trained, and {len(missing)} of {len(names_of)} were not "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}). {_WHOLE}"
        )


def _check_own(checkpoint: Checkpoint) -> None:
    """CheckpointError where a model that only its own code can build has parameters that were not trained."""
    all_of_it = checkpoint.trainer_state().get("fingerprint", {}).get("parameters")
    trained = sum(math.prod(shape) for shape in ShardReader(checkpoint.path, "master").shapes.values())
    if trained and all_of_it is not None and trained < all_of_it:
        raise CheckpointError(
            f"{checkpoint.path}: holds the weights that were trained, {trained:,} of the model's {all_of_it:,}. "
            f"{_WHOLE}"
        )


def _copy_shards(checkpoint: Checkpoint, shards: list[Path], reader: ShardReader, folder: Path) -> dict[Path, int]:
    known: dict[Path, int] = {}
    new_names = {shard: "model.safetensors" if len(shards) == 1 else shard.name for shard in shards}
    for shard, name in new_names.items():
        copy_file(shard, folder / name)
        # Of the checkpoint's manifest: what was copied wrongly is found when the export is read.
        known[folder / name] = checkpoint.manifest.files[shard.name].crc32
    if len(shards) > 1:
        write_index(folder, {name: new_names[reader.file_of(name)] for name in reader.names()}, reader.n_bytes)
    return known


def _write_adapter(checkpoint: Path, folder: Path) -> None:
    reader = ShardReader(checkpoint, "model")
    config = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    saved = {name: name for name in reader.names() if "lora_" in name}
    for wanted in config.get("modules_to_save") or ():
        saved |= {name: name for name in reader.names() if f".{wanted}." in f".{name}"}
    if config.get("ensure_weight_tying"):
        saved |= _tied(folder, saved)
    found = {f"base_model.model.{adapter_name(name)}": held for name, held in saved.items()}
    plans = [TensorPlan(name, reader.dtypes[held], reader.shapes[held]) for name, held in found.items()]
    write_shard(folder / "adapter_model.safetensors", plans, lambda name: reader.read(found[name]))


def _tied(folder: Path, saved: Mapping[str, str]) -> dict[str, str]:
    """Further names of tied weights among `saved` -> the name that they are saved under. CheckpointError."""
    architecture = _architecture(folder)
    if architecture is None:
        raise CheckpointError(f"{folder}: the base's architecture is not known, so its tied weights cannot be named.")
    known = dict(architecture.named_parameters(remove_duplicate=False))
    holders = {id(known[name]): name for name in saved if name in known}
    return {name: holders[id(p)] for name, p in known.items() if id(p) in holders and name not in saved}


def has_adapter(checkpoint: Checkpoint) -> bool:
    """True for a checkpoint of a LoRA run."""
    return (checkpoint.path / FOLDER / ADAPTER).is_file()


def merge_checkpoint(checkpoint: Checkpoint, target: Path) -> Path:
    """The whole model with the adapter in it, in `target`, which must not exist yet. ExportRefused where it does or
    there is no adapter, CheckpointError where there is no base to merge it into, or another one."""
    checkpoint.check_readable()
    if not has_adapter(checkpoint):
        raise ExportRefused(f"{checkpoint.path}: all weights were trained, nothing is to merge: leave --merge out.")
    base = base_of(checkpoint.path / FOLDER)
    if base:
        check_material(checkpoint, "base", base_material(base))
    _check_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        return merge_adapter(export_checkpoint(checkpoint, aside / "adapter"), target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def merge_adapter(adapter: Path, target: Path) -> Path:
    """Merge an exported adapter, in peft's format, into its base as `merge_checkpoint` does."""
    from peft import PeftModel
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
        AutoProcessor,
        AutoTokenizer,
    )

    _check_free(target)
    if damaged := damaged_weights(adapter)[0]:
        raise CheckpointError(f"{damaged[0]} Export the adapter again.")
    base = base_of(adapter)
    if not base or base.lower().endswith(".gguf"):
        raise CheckpointError(
            f"The adapter names no base to merge into ({base or 'none'}): it was made from scratch, or is a GGUF file, "
            "into which only the run itself merges, at its end (--lora_export merged, the default)."
        )
    config = AutoConfig.from_pretrained(base)
    sees = (adapter / "processor_config.json").is_file()
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    auto = AutoModelForImageTextToText if sees else auto
    with warnings.catch_warnings():  # an attribute's old name, which peft asks for
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        network = PeftModel.from_pretrained(auto.from_pretrained(base, dtype="auto"), str(adapter), is_trainable=True)
    settle_trained_modules(network)
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    read_end_tokens(network.get_base_model(), adapter)
    set_end_tokens(network.get_base_model(), tokenizer, ())
    written: Any = AutoProcessor.from_pretrained(adapter) if sees else tokenizer
    weight_of = lambda parameter: parameter.detach()  # noqa: E731
    export_model(target, network, weight_of, tokenizer=written, origin=_origin_at(base))
    return target


def is_adapter(folder: Path) -> bool:
    """True for a folder with an exported adapter alone."""
    return (folder / ADAPTER).is_file() and not list_checkpoints(folder)


def base_of(adapter: Path) -> str:
    """Name of an adapter's base; '' where it was made from scratch."""
    with file_errors("reading the adapter's configuration", adapter / ADAPTER):
        return json.loads((adapter / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path") or ""


def _check_free(target: Path) -> None:
    if target.exists():
        raise ExportRefused(f"{target}: exists already. Give another folder with --out, or remove it.")
