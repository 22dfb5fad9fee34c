"""Write a trained model the way `from_pretrained` reads it: shard by shard, config and tokenizer beside it.

Every rank calls `export_model` (gathering a partitioned weight needs all of them); rank 0 writes, into a folder aside
that takes the final name only when it is whole. Memory: one tensor at a time. LoRA: merged weights are computed per
layer (W + scale * B A) while they are written, or the adapter alone in peft's format.

`--push_to_hub ORG/NAME`: the finished model to the Hugging Face hub, through huggingface_hub's own client.

The login is looked at before training, so that nobody trains for a day to learn that a token is missing. A failed
upload loses nothing: the model is in `final_model/`, and the message says how to send it."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights

from outcore.checkpoint.export.carried import carried, carry_files
from outcore.checkpoint.published import Tensors, published
from outcore.checkpoint.shards import MAX_SHARD_BYTES, TensorPlan, plan_shards, write_shard
from outcore.common import file_errors, finish_publishing, make_folder, publish_folder, remove_tree, write_json
from outcore.common.listing import write_checksums
from outcore.config import ConfigError
from outcore.model import Origin
from outcore.model.adapters import adapted_layers, merge_stack, row_lengths, tied_apart
from outcore.model.facts import adapter_name, checkpoint_name, parameter_types
from outcore.model.weights import full_shape

WeightOf = Callable[[nn.Parameter], torch.Tensor]


def export_model(
    folder: Path,
    network: nn.Module,
    weight_of: WeightOf,
    *,
    tokenizer: Any = None,
    rank: int = 0,
    adapter_only: bool = False,
    origin: Origin | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Export `network` (plain, user's own, or a PeftModel) to `folder`; an older export there is replaced.

    `origin`: where the weights came from before they were trained. What was not trained of it goes on as it is there.
    What is merged has the type in which it is stored, though the run computed in fp32, as `outcore export --merge`
    gives it; None: the run's own."""
    aside = folder.with_name(f".{folder.name}.part")
    is_peft = hasattr(network, "peft_config")
    phase = "exporting the model"
    try:
        with file_errors(phase, folder):
            if rank == 0:
                make_folder(folder.parent)
                finish_publishing(folder)
                remove_tree(aside)
                aside.mkdir()
            if is_peft and adapter_only:
                known = _export_adapter(aside, network, weight_of, rank)
            else:
                tensors, untied = (
                    _merged_tensors(network, weight_of) if is_peft else (_plain_tensors(network, weight_of), False)
                )
                base: Any = network.get_base_model() if is_peft else network  # pyright: ignore[reportCallIssue]
                dtype = origin.dtype if is_peft and origin is not None else None
                if dtype in (torch.bfloat16, torch.float16):
                    tensors = _in_types(tensors, _types_of(base, dtype))
                else:
                    dtype = None
                found = carried(origin, base)
                tensors = published(base, tensors, found.known, tensors.keys() - _trained(network))
                known = write_model(aside, found.rest | tensors, rank, max_shard_bytes)
                found.check()
                if rank == 0:
                    write_config(aside, base, untied=untied, dtype=dtype)
            if rank == 0:
                if tokenizer is not None:
                    tokenizer.save_pretrained(str(aside))
                if not (is_peft and adapter_only):
                    carry_files(origin, aside)
                write_checksums(aside, known)
                publish_folder(aside, folder)
    except BaseException:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _trained(network: nn.Module) -> set[str]:
    """Names of the weights that training, or merging, changes; buffers may have changed, too."""
    adapted = adapted_layers(network)
    changed = {
        checkpoint_name(name)
        for name, parameter in network.named_parameters(remove_duplicate=False)
        if parameter.requires_grad or name in adapted
    }
    return changed | {checkpoint_name(name) for name, _ in network.named_buffers()}


def _plain_tensors(network: nn.Module, weight_of: WeightOf) -> Tensors:
    """Every parameter once, and persistent buffers, by name."""
    tensors: Tensors = {}
    for name, param in network.named_parameters():
        plan = TensorPlan(name, param.dtype, tuple(full_shape(param)))
        tensors[name] = (plan, lambda p=param: weight_of(p))
    return tensors | _buffers(network, lambda name: name)


def _buffers(network: nn.Module, name_of: Callable[[str], str]) -> Tensors:
    """Persistent ones of the base model."""
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    return {
        name_of(name): (TensorPlan(name_of(name), value.dtype, tuple(value.shape)), lambda v=value: v)
        for name, value in network.state_dict().items()
        if name not in parameters and isinstance(value, torch.Tensor) and "lora_" not in name
    }


def _merged_tensors(network: nn.Module, weight_of: WeightOf) -> tuple[Tensors, bool]:
    """The base model's tensors by their own names, adapters merged in; computed in fp32, rounded once.

    Also whether tied weights are there under each of their names, because not all uses of one have the same adapter."""
    layers = adapted_layers(network)
    untied = bool(tied_apart(network))
    tensors: Tensors = {}
    for full_name, param in network.named_parameters(remove_duplicate=not untied):
        if "lora_" in full_name:
            continue
        plan = TensorPlan(checkpoint_name(full_name), param.dtype, tuple(full_shape(param)))
        layer = layers.get(full_name)
        if layer is None:
            tensors[plan.name] = (plan, lambda p=param: weight_of(p))
        else:
            tensors[plan.name] = (plan, lambda p=param, layer=layer: _merge(layer, p, weight_of))
    return tensors | _buffers(network, checkpoint_name), untied


def _types_of(base: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Types of the parameters, by name, as transformers has them in a model of this type: some stay in fp32."""
    with torch.device("meta"), no_init_weights():
        return parameter_types(type(base)._from_config(copy.deepcopy(base.config), dtype=dtype), dtype, trained=True)


def _in_types(tensors: Tensors, types: dict[str, torch.dtype]) -> Tensors:
    """The tensors in these types; buffers, which have none there, as they are."""
    return {
        name: (
            replace(plan, dtype=types.get(name, plan.dtype)),
            lambda get=get, own=plan.dtype, name=name: get().to(types.get(name, own)),
        )
        for name, (plan, get) in tensors.items()
    }


def _merge(layer: Any, base: nn.Parameter, weight_of: WeightOf) -> torch.Tensor:
    adapter = next(iter(layer.scaling))
    weight = weight_of(base)
    if adapter in layer.lora_A:
        a, b = weight_of(layer.lora_A[adapter].weight), weight_of(layer.lora_B[adapter].weight)
        if hasattr(layer, "parameter_name"):
            return merge_stack(layer, weight, a, b)
        delta = b.float() @ a.float()
    else:
        a, b = weight_of(layer.lora_embedding_A[adapter]), weight_of(layer.lora_embedding_B[adapter])
        delta = (b.float() @ a.float()).T
    is_transposed = bool(getattr(layer, "fan_in_fan_out", False))  # Conv1D stores [in, out]
    if is_transposed:
        delta = delta.T
    merged = weight.float() + layer.scaling[adapter] * delta.to(weight.device)
    if adapter in layer.lora_magnitude_vector:
        lengths = weight_of(layer.lora_magnitude_vector[adapter].weight).float().to(weight.device)
        factor = (lengths / row_lengths(merged, is_transposed=is_transposed))[:, None]
        merged *= factor.T if is_transposed else factor
    return merged.to(weight.dtype)


def write_model(
    folder: Path, tensors: Tensors, rank: int = 0, max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[Path, int]:
    """Shards and their index, by rank 0; the other ranks only take part in getting the values. Returns checksums."""
    shards = plan_shards([plan for plan, _ in tensors.values()], "model", max_shard_bytes)
    weight_map: dict[str, str] = {}
    known: dict[Path, int] = {}
    for file_name, group in shards:
        if len(shards) == 1:
            file_name = "model.safetensors"  # what transformers looks for when there is one file
        if rank == 0:
            known[folder / file_name] = write_shard(folder / file_name, group, lambda name: tensors[name][1]())
        else:
            for plan in group:
                tensors[plan.name][1]()
        weight_map.update({plan.name: file_name for plan in group})
    if rank == 0 and len(shards) > 1:
        write_index(folder, weight_map, sum(plan.n_bytes for plan, _ in tensors.values()))
    return known


def write_index(folder: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    """model.safetensors.index.json: which shard holds which tensor."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def write_config(folder: Path, network: Any, *, untied: bool = False, dtype: torch.dtype | None = None) -> None:
    """config.json and generation_config.json of a transformers model, as inference wants them; nothing without them.

    `untied`: embedding and head are tied in `network` and not in what is written. `dtype`: the type of what is written,
    where it is another than `network`'s."""
    config: Any = getattr(network, "config", None)
    if config is None or not hasattr(config, "save_pretrained"):
        return  # a user's own module: the weights are there, its code builds it
    written = copy.deepcopy(config)
    written.use_cache = True
    if dtype is not None:
        written.dtype = dtype
    if not written.architectures:
        written.architectures = [type(network).__name__]
    if untied:
        written.tie_word_embeddings = written.get_text_config().tie_word_embeddings = False
    written.save_pretrained(str(folder))
    write_generation_config(folder, network)


def write_generation_config(folder: Path, network: Any) -> None:
    """generation_config.json, which says among others what ends an answer; nothing of a model that has none."""
    generation = getattr(network, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(str(folder))


def _export_adapter(folder: Path, network: Any, weight_of: WeightOf, rank: int) -> dict[Path, int]:
    # Both names of a tied weight that is trained whole: peft looks for each.
    names = {
        f"base_model.model.{adapter_name(checkpoint_name(name))}": param
        for name, param in network.named_parameters(remove_duplicate=False)
        if param.requires_grad
    }
    plans = [TensorPlan(name, p.dtype, tuple(full_shape(p))) for name, p in names.items()]
    path = folder / "adapter_model.safetensors"
    if rank == 0:
        known = {path: write_shard(path, plans, lambda name: weight_of(names[name]))}
        network.peft_config["default"].save_pretrained(str(folder))
        write_generation_config(folder, network.get_base_model())
        return known
    for param in names.values():
        weight_of(param)
    return {}


def check_login(repository: str) -> str:
    """The user's name at the hub. ConfigError without a token, or with one that the hub does not take."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    if huggingface_hub.get_token() is None:
        raise ConfigError(
            f"push_to_hub {repository}: there is no token for the hub on this machine. Log in with `hf auth login` (or "
            "set HF_TOKEN), or leave --push_to_hub out."
        )
    try:
        return str(api.whoami()["name"])
    except Exception as error:  # the client's own kinds: no network, a token that was revoked
        raise ConfigError(
            f"push_to_hub {repository}: the hub cannot be asked who you are ({type(error).__name__}: {error}). Check "
            "the network and `hf auth whoami`, or leave --push_to_hub out."
        ) from error


def push(folder: Path, repository: str, run: str) -> str:
    """Upload an exported model; its address. RuntimeError that says where the model is, and how to send it."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message=f"outcore run {run}")
    except Exception as error:
        raise RuntimeError(
            f"push_to_hub {repository}: the upload failed ({type(error).__name__}: {error}). The model is whole in "
            f"{folder}: send it with `hf upload {repository} {folder}`."
        ) from error
    return str(address)
