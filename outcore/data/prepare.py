"""`prepare_data`: from settings and a tokenizer to training and evaluation rows, a summary and one rendered sample.

source -> documents of tokens on the drive (token_cache) -> split, windows, packing (layout, cached beside) ->
RowDataset. Several processes may call it at once with the same settings: one builds, the others wait, all get the
same rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outcore.data.basis import EMBEDDED, DataError, DataSettings
from outcore.data.cache import (
    Arrays,
    ArraysWriter,
    DocumentEncoder,
    RowLimit,
    TokenCache,
    cache_folder,
    digest_of,
    open_or_build,
    open_token_cache,
    token_ids,
)
from outcore.data.chat import ensure_chat_template
from outcore.data.layout import (
    LAYOUT_VERSION,
    RowDataset,
    Rows,
    Segments,
    choose_rows,
    labels_of,
    merged,
    rows_of,
    seq2seq_segments,
    split_documents,
    supervised_segments,
    text_windows,
)
from outcore.data.show import render_sample
from outcore.data.sources import open_source
from outcore.data.summary import DataSummary
from outcore.data.tokenizer import tokenizer_hash

EMBEDDED_MAX_EVAL_SAMPLES = 64
"""Rows that the built-in text is evaluated on unless max_eval_samples says otherwise: seconds, not minutes."""


@dataclass(frozen=True)
class PreparedData:
    """`eval` is None when evaluation is off or the data is too little to share."""

    train: Rows
    eval: Rows | None
    summary: DataSummary
    sample_text: str
    """One document of each shape of rows, what bears loss in brackets."""
    cache: TokenCache
    """Every document of the training source."""


def prepare_data(
    settings: DataSettings,
    tokenizer: Any,
    *,
    encoder_decoder: bool = False,
    packing_allowed: bool = True,
    say: Callable[[str], None] | None = None,
) -> PreparedData:
    """Reads, tokenises (or finds the cache), splits and packs. `say` gets progress in words (default: the log).

    `packing_allowed`: False for models that cannot keep packed documents apart. A tokenizer
    without a chat template is given the default one. Raises DataError (data, settings) and CacheError (folder,
    drive, lock)."""
    say = say or logging.getLogger(__name__).info
    kind = _kind(settings, encoder_decoder, packing_allowed)
    template_note = ensure_chat_template(tokenizer)
    encoder = DocumentEncoder(tokenizer, settings.train_on_prompt, encoder_decoder, settings.train_on_last_turn)
    encoder.end_token_id()
    hashed = tokenizer_hash(tokenizer)
    source = open_source(settings)
    cache = open_token_cache(source, settings, encoder, hashed, _limit(settings, kind), say)
    notes = [*source.notes(), *cache.meta["templates"]]
    if template_note and not cache.meta["uses_template"]:
        tokenizer.chat_template = None  # not needed here, and an export should not claim one
    elif template_note:
        notes.append(template_note)
    elif not cache.meta["uses_template"] and "prompt_completion" in cache.meta["shape"]:
        notes.append(
            "prompts and completions are joined as they are, without the chat template: --as_chat true puts them "
            "through it, as a model for chats expects its questions"
        )
    if settings.as_chat and not cache.meta["uses_template"]:
        notes.append("--as_chat changes nothing: no row here is a prompt with its completion")
    eval_cache = None
    if settings.eval_dataset is not None or settings.eval_split is not None:
        eval_source = open_source(settings, evaluation=True)
        limit = (
            RowLimit(settings.max_eval_samples, settings.seq_length, kind == "packed")
            if settings.max_eval_samples
            else None
        )
        eval_cache = open_token_cache(eval_source, settings, encoder, hashed, limit, say)
    layout = _open_layout(cache, eval_cache, settings, kind, say)
    pad = tokenizer.pad_token_id
    pad = encoder.end_token_id() if pad is None else int(pad)
    train = _dataset(cache, layout, "train", settings, kind, pad)
    evaluation = _dataset(eval_cache or cache, layout, "eval", settings, kind, pad)
    if len(train) == 0:
        raise _all_cut_off(f"{source.name} leaves no row to train on", cache, settings)
    if eval_cache and len(evaluation) == 0:
        flag = "--eval_dataset" if settings.eval_dataset else "--eval_split"
        raise _all_cut_off(f"{flag}: {eval_cache.meta['source']} leaves no row to evaluate on", eval_cache, settings)
    if len(evaluation) == 0 and settings.eval_fraction > 0:
        notes.append("no evaluation: the data is a single row; name --eval_dataset to have one")
    summary = _summary(cache, train, evaluation, layout, kind, settings, notes)
    if eval_cache is not None:
        summary = replace(summary, max_token_id=max(summary.max_token_id, eval_cache.meta["max_token_id"]))
    return PreparedData(
        train, evaluation if len(evaluation) else None, summary, _sample(tokenizer, cache, train), cache
    )


def _all_cut_off(what: str, cache: TokenCache, settings: DataSettings) -> DataError:
    return DataError(
        f"{what}: all {cache.documents} documents have their answer behind seq_length {settings.seq_length} "
        f"(long_rows: {settings.long_rows}). Raise seq_length"
    )


def _kind(settings: DataSettings, encoder_decoder: bool, packing_allowed: bool) -> str:
    if encoder_decoder:
        if settings.long_rows != "keep_start":
            raise DataError(
                f"long_rows {settings.long_rows} does not go with an encoder-decoder model, whose source and target "
                "are cut to seq_length each: use --long_rows keep_start"
            )
        if settings.packing == "on":
            raise DataError("packing on does not go with an encoder-decoder model: use --packing auto or off")
        return "seq2seq"
    if settings.packing == "on" and not packing_allowed:
        raise DataError(
            "packing on, but this model cannot keep packed documents apart (they would see each other): use --packing "
            "auto or off"
        )
    return "packed" if packing_allowed and settings.packing != "off" else "padded"


def _limit(settings: DataSettings, kind: str) -> RowLimit | None:
    """Rows to read when only some are wanted, the share for evaluation included."""
    if settings.max_train_samples is None:
        return None
    shared = 0.0 if settings.eval_dataset or settings.eval_split else settings.eval_fraction
    rows = int(settings.max_train_samples / (1 - shared)) + 1
    return RowLimit(rows, settings.seq_length, kind == "packed")


def _open_layout(
    cache: TokenCache, eval_cache: TokenCache | None, settings: DataSettings, kind: str, say: Callable[[str], None]
) -> Arrays:
    max_eval = settings.max_eval_samples
    if max_eval is None and settings.dataset == EMBEDDED and eval_cache is None:
        max_eval = EMBEDDED_MAX_EVAL_SAMPLES
    fraction = 0.0 if eval_cache else settings.eval_fraction
    key = digest_of(
        [
            LAYOUT_VERSION,
            cache.key,
            eval_cache.key if eval_cache else None,
            [settings.seq_length, kind, settings.seed, fraction, settings.max_train_samples, max_eval],
            settings.long_rows,
        ]
    )

    def build(writer: ArraysWriter) -> dict[str, Any]:
        segments = _split_segments(cache, eval_cache, settings, kind, fraction)
        meta: dict[str, Any] = {"truncated": 0, "dropped": 0, "split": 0}
        for part, rows in (("train", settings.max_train_samples), ("eval", max_eval)):
            placed, row_ends = rows_of(segments[part], settings.seq_length, kind == "packed")
            placed, row_ends = choose_rows(placed, row_ends, rows, settings.seed)
            for name, values in (("starts", placed.starts), ("lengths", placed.lengths), ("row_ends", row_ends)):
                writer.array(f"{part}_{name}", np.int64).append(values)
            meta["truncated"] += segments[part].truncated
            meta["dropped"] += segments[part].dropped
            meta["split"] += segments[part].split
        return meta

    path = cache_folder(settings) / f"layout-{key}"
    arrays, _ = open_or_build(path, build, timeout_s=settings.lock_timeout_s, say=say, what="the rows")
    return arrays


def _split_segments(
    cache: TokenCache, eval_cache: TokenCache | None, settings: DataSettings, kind: str, fraction: float
) -> dict[str, Segments]:
    train_documents, eval_documents = split_documents(cache.documents, fraction, settings.seed)
    train = _segments(cache, train_documents, settings, kind)
    evaluation = _segments(eval_cache or cache, eval_documents, settings, kind)
    if eval_cache:
        evaluation = _segments(eval_cache, np.arange(eval_cache.documents), settings, kind)
    elif fraction > 0 and len(eval_documents) == 0 and len(train) > 1:
        # Fewer documents than would make one for evaluation: the tail of the segments, in document order.
        kept = len(train) - max(1, int(len(train) * fraction))
        evaluation = replace(train.take(slice(kept, None)), truncated=0, dropped=0, split=0)
        train = train.take(slice(0, kept))
    return {"train": train, "eval": evaluation}


def _segments(cache: TokenCache, documents: np.ndarray, settings: DataSettings, kind: str) -> Segments:
    is_text = np.asarray(cache.is_text[documents], dtype=bool)
    if kind == "seq2seq":
        if is_text.all():
            return text_windows(cache.offsets, documents, 2 * settings.seq_length)
        if is_text.any():
            raise DataError("an encoder-decoder model reads plain text or prompts with answers, not both in one folder")
        return seq2seq_segments(cache.offsets, cache.first_loss, documents, settings.seq_length)
    windows = text_windows(cache.offsets, documents[is_text], settings.seq_length)
    return merged(windows, supervised_segments(cache, documents[~is_text], settings.seq_length, settings.long_rows))


def _dataset(
    cache: TokenCache, layout: Arrays, part: str, settings: DataSettings, kind: str, pad_token_id: int
) -> RowDataset:
    names = [f"{part}_{name}" for name in ("starts", "lengths", "row_ends")]
    content = [cache.arrays.checksums["tokens"], *(layout.checksums[name] for name in names)]
    return RowDataset(
        tokens=cache.tokens,
        # In RAM, a few bytes a row: a map would follow whatever becomes of the file while the run goes on.
        starts=np.array(layout[f"{part}_starts"]),
        lengths=np.array(layout[f"{part}_lengths"]),
        row_ends=np.array(layout[f"{part}_row_ends"]),
        seq_length=settings.seq_length,
        kind=kind,
        pad_token_id=pad_token_id,
        # Of the content, not of the settings: what does not change the training rows does not hinder a resume.
        fingerprint=digest_of([content, settings.seq_length, kind]),
        is_text=bool(cache.meta["is_text"]),
    )


def _summary(
    cache: TokenCache,
    train: RowDataset,
    evaluation: RowDataset,
    layout: Arrays,
    kind: str,
    settings: DataSettings,
    notes: list[str],
) -> DataSummary:
    meta = cache.meta
    return DataSummary(
        source=meta["source"],
        shape=meta["shape"],
        kind=kind,
        seq_length=settings.seq_length,
        documents=meta["documents"],
        tokens=meta["tokens"],
        loss_tokens=meta["loss_tokens"],
        max_token_id=max(meta["max_token_id"], train.pad_token_id),
        train_rows=len(train),
        train_tokens=train.total_tokens,
        eval_rows=len(evaluation),
        padding_share=train.padding_share,
        bad_rows=meta["bad_rows"],
        bad_row_examples=list(meta["bad_row_examples"]),
        empty_documents=meta["empty_documents"],
        truncated_documents=layout.meta["truncated"],
        dropped_documents=layout.meta["dropped"],
        split_documents=layout.meta["split"],
        long_rows=settings.long_rows,
        cache_hit=cache.hit,
        cache_path=str(cache.arrays.path),
        loss_shares=list(meta["loss_share_counts"]),
        loss_tokens_range=dict(meta["loss_tokens_range"]),
        unused_columns=dict(meta["unused_columns"]),
        notices=dict(meta["notices"]),
        end_tokens=list(meta["end_tokens"]),
        notes=notes,
    )


def _sample(tokenizer: Any, cache: TokenCache, train: RowDataset) -> str:
    """The first document of each shape, as far as a row holds it."""
    if train.kind == "seq2seq":
        batch = train.batch([0])
        source = batch["input_ids"][0][batch["attention_mask"][0].bool()].tolist()
        target = [label for label in batch["labels"][0].tolist() if label >= 0]
        return render_sample(tokenizer, source + target, [-100] * len(source) + target)
    found = []
    for document in cache.meta["shape_firsts"].values():
        start, end = int(cache.offsets[document]), int(cache.offsets[document + 1])
        tokens = np.asarray(cache.tokens[start : min(end, start + train.seq_length)])
        found.append(render_sample(tokenizer, token_ids(tokens), labels_of(tokens)))
    return "\n\n".join(found)
