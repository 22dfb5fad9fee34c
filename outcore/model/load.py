"""`load_model`: from settings to a model that is ready to train, whole or partitioned while it is made.

From scratch: the architecture without values, then our own initial weights (equal for every engine and ZeRO stage).
Trained weights: transformers' loader (safetensors only), straight into the parameters. Never two copies in RAM: under
ZeRO-3 each weight is partitioned as soon as it exists. Lazy: parameters are stand-ins without memory, and their values
come later, a layer at a time, from a feed (`outcore.model.weights.feed`), for models that do not fit in RAM."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.model.adapters import apply_lora
from outcore.model.facts import (
    ModelFacts,
    model_class_of,
    model_facts,
    parameter_types,
    quantization_of,
    resolve_attention,
)
from outcore.model.forward import attention_of
from outcore.model.hook import build_from_module, is_head_loss
from outcore.model.loss import HeadLoss, LossModule, SmoothedLoss, TokenLoss, UserLoss
from outcore.model.making import made_of
from outcore.model.origin import Origin
from outcore.model.settings import ModelSettings
from outcore.model.source import ModelSource, hub_error, resolve_source
from outcore.model.trial import Abilities, check_abilities, freeze
from outcore.model.weights import (
    InitialWeights,
    TrainedWeights,
    WeightFeed,
    check_weight_files,
    gathered,
    initialise_weights,
    meta_skeleton,
    partition_while_loading,
    shard_files,
    stand_in,
    without_memory,
)

OpenPacked = Callable[[Any, list[Path], dict[str, Any]], WeightFeed]
"""(skeleton, safetensors files, quantization_config) -> a feed that also has `specs` and `notes`."""


HEAD = "score"
"""Module of transformers' classifiers over a decoder: a matrix from the last token's hidden states to the labels."""


@dataclass
class LoadedModel:
    """A model ready for an engine, and what is known about it."""

    model: Any
    """An nn.Module: the transformers model, a PeftModel around it, or the user's module."""
    config: Any
    """The transformers config; None for a user's module without one."""
    facts: ModelFacts
    abilities: Abilities
    words: str
    """Origin of the model: where it came from, for people."""
    loss_fn: UserLoss | None = None
    """The user's loss of the whole model."""
    head_loss: HeadLoss | None = None
    """The user's loss of each token's logits."""
    notes: tuple[str, ...] = field(default_factory=tuple)
    load_s: float = 0.0
    """Seconds that making or reading it took."""
    quantize: str | None = None
    """Format into which the frozen matrices of its layers are packed (streaming engine); None: they stay in 16 bits."""
    packed: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that the feed gives packed, as published: name -> `outcore.formats.PackedSpec`."""
    origin: Origin | None = None
    """Files that a trained model's weights were read from; None: it is new."""
    feed: WeightFeed | None = None
    """Feed from which the values of the parameters come from when the model was loaded lazily; None: they are there."""
    has_labels: bool = False
    """Whether its head gives labels of a text in place of tokens."""

    def token_loss(self, num_chunks: int | None = None) -> TokenLoss:
        """The loss that fits this model; see `outcore.model.loss`."""
        return TokenLoss(
            self.model,
            loss_fn=self.loss_fn,
            isolation=self.abilities.isolation or "position_ids",
            chunked=self.abilities.chunked_head,
            num_chunks=num_chunks,
            head_loss=self.head_loss,
            terms=self.abilities.terms,
        )

    def loss_module(self, num_chunks: int | None = None) -> LossModule:
        """Model and loss as one module, for engines that wrap `forward`."""
        return LossModule(self.model, self.token_loss(num_chunks))


def load_model(
    settings: ModelSettings,
    *,
    tokenizer: Any | None = None,
    zero3_config: dict[str, Any] | None = None,
    device: torch.device | str = "cpu",
    lazy: bool = False,
    packed_feed: OpenPacked | None = None,
    keeps_labels: bool = False,
) -> LoadedModel:
    """Make or read the model. With `zero3_config` (complete DeepSpeed configuration, stage 3) it comes partitioned.

    `lazy`: parameters without memory and a feed of their values, for the streaming engine; adapters are real. A user's
    own module and an encoder-decoder are made whole all the same. `packed_feed`: who reads a checkpoint whose weights
    are stored quantized, lazily (`outcore.formats.open_packed`); None: such a checkpoint is refused. `keeps_labels`: a
    checkpoint that classifies keeps its labels as the head, lazily.

    Weights are in `settings.dtype` on `device` (ZeRO-3: where DeepSpeed keeps them). ValueError for settings that
    cannot work, RuntimeError when the hub or the files cannot give what was asked; both before memory is spent where
    possible."""
    began_s = time.perf_counter()
    if settings.model_module is not None:
        loaded = _load_own(settings, tokenizer, device)
        return replace(loaded, load_s=time.perf_counter() - began_s)
    source = resolve_source(settings, tokenizer)
    checked = check_weight_files(source.path)
    stored_dtype = _stored_dtype(source)  # before it is made, which changes the configuration
    model_class = model_class_of(source.config) if source.path is None else None
    attention, notes = resolve_attention(source.config, settings.attn_implementation)
    abilities = _abilities(check_abilities(source.config, attention, settings.trust_remote_code), settings)
    lazy = lazy and not source.is_encoder_decoder
    feed: WeightFeed | None = None
    has_labels = lazy and keeps_labels and source.path is not None and _classifies(source.config)
    with partition_while_loading(zero3_config):
        if lazy:
            model, feed = _lazily(model_class, source, settings, attention, packed_feed, has_labels=has_labels)
        elif model_class is not None:
            model: Any = _from_scratch(model_class, source, settings, attention, device, zero3_config is not None)
        else:
            model = _from_weights(source, settings, attention, device, zero3_config is not None)
    gather = gathered if zero3_config is not None else None
    model.config.use_cache = False
    notes += _frozen(model, abilities)
    if settings.lora is not None:
        model = apply_lora(model, settings.lora, settings.seed, gather)
    if settings.gradient_checkpointing and feed is None:  # the streaming engine recomputes every layer by itself
        enable_activation_checkpointing(model)
    _add_noise(model, settings)
    model.train()
    notes = source.notes + checked + notes + getattr(feed, "notes", ())
    load_s = time.perf_counter() - began_s
    facts = model_facts(model)
    smoothed = SmoothedLoss(settings.label_smoothing) if settings.label_smoothing else None
    return LoadedModel(
        model,
        source.config,
        facts,
        abilities,
        source.words,
        head_loss=smoothed,
        notes=notes,
        load_s=load_s,
        quantize=settings.quantize,
        packed=getattr(feed, "specs", {}),
        origin=Origin.of(source.path, stored_dtype) if source.path is not None else None,
        feed=feed,
        has_labels=has_labels,
    )


def _stored_dtype(source: ModelSource) -> torch.dtype | None:
    """Type of a trained model's weights as stored, 16 bits of packed ones; None where its configuration says none."""
    if source.path is None:
        return None
    return getattr(source.config, "dtype", None) or (torch.bfloat16 if quantization_of(source.config) else None)


def enable_activation_checkpointing(model: nn.Module) -> None:
    """Recompute every layer in the backward pass (torch's non-reentrant checkpoint, RNG state kept for dropout).

    Also needed with adapters only: the non-reentrant form lets gradients pass frozen layers. ValueError where the
    model has no support for it."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    arguments: dict[str, Any] = {"activation_checkpointing_kwargs": {"use_reentrant": False}}
    if enable is None:  # transformers before 5.20 and remote code
        enable = getattr(model, "gradient_checkpointing_enable", None)
        arguments = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if enable is None:
        raise ValueError(
            f"{type(model).__name__} offers no activation checkpointing. Set --gradient_checkpointing false, or give "
            "your module a method gradient_checkpointing_enable(gradient_checkpointing_kwargs)."
        )
    try:
        enable(**arguments)
    except ValueError as error:
        raise ValueError(f"{error} Set --gradient_checkpointing false.") from error
    config = getattr(model, "config", None)
    if config is not None:
        config.use_cache = False


def _from_scratch(
    model_class: type[Any],
    source: ModelSource,
    settings: ModelSettings,
    attention: str,
    device: torch.device | str,
    zero3: bool,
) -> nn.Module:
    from transformers.initialization import no_init_weights

    try:
        with torch.device("cpu") if zero3 else torch.device(device), no_init_weights(), made_of(source.config):
            torch.manual_seed(settings.seed)
            model = model_class._from_config(source.config, dtype=settings.dtype, attn_implementation=attention)
            model.tie_weights()
    except (ValueError, ImportError) as error:
        raise _attention_error(error, source, settings) from error
    skeleton = meta_skeleton(model_class, source.config)
    initialise_weights(model, skeleton, settings.seed, gathered if zero3 else None)
    return model


def _from_weights(
    source: ModelSource, settings: ModelSettings, attention: str, device: torch.device | str, zero3: bool
) -> nn.Module:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    auto = AutoModelForSeq2SeqLM if source.is_encoder_decoder else AutoModelForCausalLM
    assert source.path is not None
    if Path(source.path).is_file():
        raise ValueError(f"{source.path}: GGUF is for --engine stream with --method sft. Give a folder or a hub id.")
    try:
        loaded: Any = auto.from_pretrained(
            source.path,
            config=source.config,
            dtype=settings.dtype,
            attn_implementation=attention,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
        model, report = loaded
    except (ValueError, ImportError) as error:
        raise _attention_error(error, source, settings) from error
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise hub_error(source.path, error, settings.trust_remote_code) from error
    missing, mismatched = sorted(report.get("missing_keys") or ()), sorted(report.get("mismatched_keys") or ())
    if missing or mismatched:
        what = (
            f"lacks {len(missing)} weights ({missing[0]}, ...)" if missing else f"has other shapes for {mismatched[:2]}"
        )
        raise RuntimeError(
            f"The checkpoint {source.path} {what}: it does not hold a whole {type(model).__name__}. Download it again, "
            "or check config_overrides."
        )
    return model if zero3 else model.to(device)


def _classifies(config: Any) -> bool:
    """Whether the checkpoint's own class gives labels to texts. RuntimeError for one that labels words."""
    own = " ".join(map(str, getattr(config, "architectures", None) or ()))
    if "ForTokenClassification" in own:
        raise RuntimeError(
            "this model gives labels to the words of a text, which is not answered here: transformers' "
            "AutoModelForTokenClassification loads it."
        )
    return "ForSequenceClassification" in own


def _lazily(
    model_class: type[Any] | None,
    source: ModelSource,
    settings: ModelSettings,
    attention: str,
    packed_feed: OpenPacked | None,
    *,
    has_labels: bool = False,
) -> tuple[Any, WeightFeed]:
    """The model with stand-ins for parameters, and the feed of their values. RuntimeError."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    quantization = quantization_of(source.config) if source.path is not None else None
    if quantization is not None:
        if packed_feed is None:
            raise RuntimeError(
                f"{source.path}: its weights are stored quantized ({quantization.get('quant_method')}), and are read "
                "in 16 or 32 bits only here. Take a checkpoint that is not quantized."
            )
        source.config.__dict__.pop("quantization_config")  # what is exported has weights in 16 bits

    if has_labels:
        source.config.get_text_config(decoder=True).tie_word_embeddings = source.config.tie_word_embeddings = False

    def build() -> Any:
        arguments = {"dtype": settings.dtype, "attn_implementation": attention}
        with no_init_weights(), made_of(source.config):
            torch.manual_seed(settings.seed)
            if model_class is not None:
                model = model_class._from_config(source.config, **arguments)
            else:
                trust = settings.trust_remote_code
                model = AutoModelForCausalLM.from_config(source.config, trust_remote_code=trust, **arguments)
            if has_labels:
                width = model.get_output_embeddings().in_features
                head = nn.Linear(width, len(source.config.id2label or ()), bias=False, dtype=settings.dtype)
                model.set_output_embeddings(head)
                model.add_module(HEAD, head)  # by the name in the checkpoint, too
            model.tie_weights()
            return model

    try:
        model = without_memory(build)
        if source.path is None:
            assert model_class is not None
            return model, InitialWeights(meta_skeleton(model_class, source.config), settings.seed)
        with torch.device("meta"):
            skeleton = build()
        files = shard_files(source.path)
        if quantization is not None and packed_feed is not None:
            feed: Any = packed_feed(skeleton, files, quantization)
        else:
            feed = TrainedWeights(skeleton, files, settings.dtype)
        if has_labels and f"{HEAD}.weight" not in getattr(feed, "keys", (f"{HEAD}.weight",)):
            raise RuntimeError(
                f"{source.path} classifies by a head that is not one matrix `{HEAD}` over a decoder's last token, and "
                "only such models are read."
            )
        types = parameter_types(skeleton, settings.dtype, trained=True)
        for name, parameter in model.named_parameters():
            if parameter.dtype != types[name]:
                parameter.data = stand_in(parameter.shape, types[name])
    except (ValueError, ImportError) as error:
        raise _attention_error(error, source, settings) from error
    except OSError as error:
        raise hub_error(source.path or "", error, settings.trust_remote_code) from error
    for name, value in feed.buffers().items():
        model.get_buffer(name).data = value
    if not os.path.isfile(source.path or ""):  # a GGUF file has none, and its name would be looked up at the hub
        with contextlib.suppress(OSError):  # many checkpoints have none
            model.generation_config = GenerationConfig.from_pretrained(source.path)
    return model, feed


def _load_own(settings: ModelSettings, tokenizer: Any | None, device: torch.device | str) -> LoadedModel:
    torch.manual_seed(settings.seed)
    model, loss_fn = build_from_module(settings, tokenizer)
    model = model.to(device=device, dtype=settings.dtype)
    config = getattr(model, "config", None)
    config = config if hasattr(config, "to_dict") else None
    abilities = _abilities(_own_abilities(model), settings)
    notes = _frozen(model, abilities)
    if settings.lora is not None:
        model = apply_lora(model, settings.lora, settings.seed)
    if settings.gradient_checkpointing:
        enable_activation_checkpointing(model)
    _add_noise(model, settings)
    model.train()
    words, facts = f"own model {settings.model_module}", model_facts(model)
    of_tokens = is_head_loss(loss_fn)
    whole: Any = None if of_tokens else loss_fn
    per_token = loss_fn if of_tokens else None
    return LoadedModel(
        model, config, facts, abilities, words, whole, per_token, notes=notes, quantize=settings.quantize
    )


def _add_noise(model: nn.Module, settings: ModelSettings) -> None:
    """NEFTune's noise on what the input embedding gives in training. ValueError for a model that does not name it.

    It is drawn from torch's default generators, which engines seed or save, so a resumed run draws the same."""
    if settings.neftune_noise_alpha is None:
        return
    from transformers.integrations.neftune import activate_neftune

    try:
        activate_neftune(model, settings.neftune_noise_alpha)
    except (AttributeError, NotImplementedError) as error:  # own modules, and a few of transformers'
        raise ValueError(
            "neftune_noise_alpha: the model does not say which of its modules embeds tokens (get_input_embeddings). "
            "Leave it out, or give your module that method."
        ) from error


def _abilities(found: Abilities, settings: ModelSettings) -> Abilities:
    return replace(found, terms=replace(found.terms, per_micro_batch=settings.router_loss == "micro_batch"))


def _frozen(model: nn.Module, abilities: Abilities) -> tuple[str, ...]:
    """Freeze what the loss never reaches; a note about it for people."""
    names = freeze(model, abilities.without_gradient)
    if not names:
        return ()
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (f"left alone: {names[0]}{more}, which no loss of tokens reaches (torch's AdamW leaves such weights alone)",)


def _own_abilities(model: Any) -> Abilities:
    """A transformers model made by the user is tried as any other; what else there is runs whole."""
    build = getattr(type(model), "_from_config", None)
    if build is None or not hasattr(getattr(model, "config", None), "get_text_config"):
        return Abilities(False, "an own module runs whole", None, "an own module is not checked for packing")
    return check_abilities(model.config, attention_of(model) or "auto", build=build)


def _attention_error(error: ValueError | ImportError, source: ModelSource, settings: ModelSettings) -> Exception:
    text = str(error)
    said = settings.attn_implementation != "auto"
    if said and any(word in text.lower() for word in ("attention", "sdpa", "flash")):
        return ValueError(
            f"This {source.config.model_type} model does not run with attn_implementation "
            f"{settings.attn_implementation!r}: {text.strip().splitlines()[0]} Use --attn_implementation auto."
        )
    if source.path is None or Path(source.path).is_file():
        return error
    return hub_error(source.path, error, settings.trust_remote_code)
