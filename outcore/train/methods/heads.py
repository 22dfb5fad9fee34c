"""The model of a method: with another head where it wants one, with adapters, streamed; and the trainers that are ours.

A classifier is the decoder under one matrix that reads a text's last token, or the last one of each word where words
are labelled, as transformers has it. An embedder is the decoder alone: the mean of a text's hidden states, or its last
token's, normalised, as `outcore serve` answers /v1/embeddings. Its loss is InfoNCE: the cross-entropy of finding each
query's partner among those of the whole batch (and all negatives), summed over the sizes to which vectors may be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from outcore.config import ConfigError
from outcore.data.cache import DocumentEncoder
from outcore.model import LoadedModel, ModelSettings, Origin, load_model
from outcore.model.adapters import apply_lora
from outcore.model.forward import Pooling
from outcore.train.methods.address import IGNORED

HEAD = "score"
"""Name that transformers gives a classifier's matrix."""
TEMPERATURE = 0.05
"""Cosines are divided by it before the cross-entropy; https://arxiv.org/abs/2104.08821, section 3."""


def method_model(
    settings: ModelSettings,
    tokenizer: Any,
    labels: Mapping[int, str] | None,
    problem: str | None,
    *,
    is_by_word: bool = False,
    on_loaded: Callable[[LoadedModel], None] = lambda loaded: None,
) -> tuple[Any, Origin | None]:
    """The plain model in RAM, with a head for `labels` where there are some, and adapters on it where they are asked
    for; and where its weights came from. `on_loaded` sees it before that. ValueError or RuntimeError, in words."""
    lora = settings.lora
    plain = replace(settings, lora=None, quantize=None, gradient_checkpointing=False)
    loaded = load_model(plain, tokenizer=tokenizer)
    model = loaded.model
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError("method: an encoder-decoder is trained by --method sft alone.")
    on_loaded(loaded)
    if labels is not None:
        model = _with_head(model, labels, problem, settings.seed, is_by_word)
        if lora is not None:
            lora = replace(lora, modules_to_save=(*lora.modules_to_save, HEAD))
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return (model if lora is None else apply_lora(model, lora, settings.seed)), loaded.origin


def settle_ends(tokenizer: Any, *, ends_answers: bool) -> None:
    """Have the tokenizer know what pads rows and, with `ends_answers`, what ends an answer (TRL asks for it). DataError
    where it has no token that ends a text."""
    for name in ("pad_token", *["eos_token"] * ends_answers):
        if getattr(tokenizer, name) is None:
            end = DocumentEncoder(tokenizer).end_token_id()
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(end))


def _with_head(model: Any, labels: Mapping[int, str], problem: str | None, seed: int, is_by_word: bool) -> Any:
    import transformers

    config = model.config
    which = "TOKEN" if is_by_word else "SEQUENCE"
    kinds = getattr(transformers, f"MODEL_FOR_{which}_CLASSIFICATION_MAPPING")
    if type(config) not in kinds:
        raise ConfigError(f"method: transformers has no classifier over a {config.model_type} model.")
    config.num_labels, config.problem_type = len(labels), problem
    config.id2label, config.label2id = dict(labels), {name: number for number, name in labels.items()}
    kind: Any = kinds[type(config)]
    with torch.device("meta"):
        made = kind._from_config(config, dtype=model.dtype)
    head = getattr(made, HEAD, None)
    if not isinstance(head, nn.Linear):
        raise ConfigError(f"method: the classifier over a {config.model_type} model is more than one matrix.")
    setattr(made, made.base_model_prefix, model.base_model)
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(head.weight.shape, generator=draw) * config.get_text_config().initializer_range
    fresh = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None, dtype=model.dtype)
    fresh.weight.data.copy_(weight)
    if fresh.bias is not None:
        fresh.bias.data.zero_()
    setattr(made, HEAD, fresh)
    config.architectures = [kind.__name__]
    return made.train()


def label_names(rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Names of the labels by their numbers, in order. 1 and "1" are one label."""
    each = [row["label"] if isinstance(row["label"], list) else [row["label"]] for row in rows]
    found = sorted({label for labels in each for label in labels}, key=lambda label: (isinstance(label, str), label))
    return dict(enumerate(dict.fromkeys(map(str, found))))


def encoded(rows: Sequence[Mapping[str, Any]], tokenizer: Any, length: int, numbers: Mapping[str, int]) -> list[Any]:
    """Texts (with documents) as tokens, cut to `length`, and labels as what the head is to say."""
    found = []
    for row in rows:
        if "words" in row:
            found.append(_encoded_words(row, tokenizer, length, numbers))
            continue
        texts = [row["text"], *([row["document"]] if "document" in row else [])]
        ids = tokenizer(*texts, truncation=True, max_length=length)
        label = [row["label"]] if "document" in row else numbers[str(row["label"])]
        found.append({"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"], "labels": label})
    return found


def _encoded_words(row: Mapping[str, Any], tokenizer: Any, length: int, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Words as a text; each word's label at its last token, which has read all of it."""
    ids = tokenizer(" ".join(row["words"]), truncation=True, max_length=length, return_offsets_mapping=True)
    spans, labels, end = ids["offset_mapping"], [IGNORED] * len(ids["input_ids"]), -1
    for word, label in zip(row["words"], row["label"], strict=True):
        start, end = end + 1, end + 1 + len(word)
        within = [at for at, (first, last) in enumerate(spans) if first < end and last > start]
        if within and spans[within[-1]][1] >= end:  # else the word was cut off
            labels[within[-1]] = numbers[str(label)]
    return {"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"], "labels": labels}


def accuracy(outcome: Any) -> dict[str, float]:
    """Share of texts, or of words, that got their label."""
    scores, wanted = outcome.predictions, outcome.label_ids
    if scores.ndim == 3:
        scores, wanted = scores[wanted != IGNORED], wanted[wanted != IGNORED]
    right = (scores > 0) == (wanted > 0.5) if scores.shape[-1] == 1 else scores.argmax(-1) == wanted
    return {"accuracy": float(right.mean())}


class Partners:
    """Collates texts and their partners (a data collator): queries first, then positives, then negatives."""

    def __init__(self, tokenizer: Any, length: int) -> None:
        self._tokenizer, self._length = tokenizer, length

    def __call__(self, rows: Sequence[Mapping[str, str]]) -> dict[str, torch.Tensor]:
        columns = ["query", "positive", *["negative"] * all("negative" in row for row in rows)]
        texts = [row[column] for column in columns for row in rows]
        found = self._tokenizer(texts, truncation=True, max_length=self._length, padding=True, return_tensors="pt")
        return {**found, "labels": torch.arange(len(rows))}


def vector_sizes(smallest: int | None, width: int) -> list[int]:
    """Sizes to which vectors are cut in training: all of them, and each half of it down to `smallest`."""
    if smallest is not None and smallest > width:
        raise ConfigError(f"matryoshka: the model's vectors have {width} numbers, fewer than {smallest}.")
    sizes = [width]
    while smallest is not None and sizes[-1] > smallest:
        sizes.append(max(smallest, sizes[-1] // 2))
    return sizes


def embedding_loss(
    pooling: Pooling, sizes: Sequence[int], model: Any, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, cosines of whole vectors [queries, partners])."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    mask = batch["attention_mask"]
    hidden_BTH = base.base_model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False).last_hidden_state
    if pooling == "last":
        places_T = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        last_B = (mask * places_T).argmax(1)  # on whichever side it is padded
        vectors_BH = hidden_BTH[torch.arange(len(last_B), device=mask.device), last_B].float()
    else:
        weights_BT1 = mask.unsqueeze(-1).to(torch.float32)
        vectors_BH = (hidden_BTH.float() * weights_BT1).sum(1) / weights_BT1.sum(1)
    wanted = batch["labels"]
    cosines: list[torch.Tensor] = []
    for size in sizes:
        cut = functional.normalize(vectors_BH[:, :size], dim=-1)
        cosines.append(cut[: len(wanted)] @ cut[len(wanted) :].T)
    losses = [functional.cross_entropy(some / TEMPERATURE, wanted) for some in cosines]
    return torch.stack(losses).sum(), cosines[0]


def trainer_by(loss_of: Callable[[Any, Any], tuple[torch.Tensor, Any]]) -> Any:
    """transformers' Trainer with a loss of ours: (model, batch) -> (loss, what an evaluation looks at)."""
    from transformers import Trainer

    class OwnLossTrainer(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss, scores = loss_of(model, inputs)
            return (loss, {"logits": scores}) if return_outputs else loss

    return OwnLossTrainer
