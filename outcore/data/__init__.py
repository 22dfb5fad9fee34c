"""The data room: sources, shapes, tokenizers, the token cache, packing, and the streams of micro-batches.

Door: `DataSettings` -> `load_or_train_tokenizer` -> `prepare_data` -> `BatchStream` / `EvalStream`. What the model must
be given so that packed documents stay apart is in `isolation`.
"""

from __future__ import annotations

from outcore.data.errors import CacheError, DataError, TemplateError
from outcore.data.layout import (
    IGNORE_INDEX,
    BatchStream,
    EvalStream,
    MicroBatch,
    RowDataset,
    document_ids,
    isolates,
    packed_attention_mask,
    varlen_kwargs,
)
from outcore.data.prepare import DataSummary, PreparedData, prepare_data
from outcore.data.render import render_sample
from outcore.data.settings import DataSettings
from outcore.data.tokenizer import load_or_train_tokenizer, load_tokenizer, train_byte_bpe

__all__ = [
    "IGNORE_INDEX",
    "BatchStream",
    "CacheError",
    "DataError",
    "DataSettings",
    "DataSummary",
    "EvalStream",
    "MicroBatch",
    "PreparedData",
    "RowDataset",
    "TemplateError",
    "document_ids",
    "isolates",
    "load_or_train_tokenizer",
    "load_tokenizer",
    "packed_attention_mask",
    "prepare_data",
    "render_sample",
    "train_byte_bpe",
    "varlen_kwargs",
]
