"""The data room: sources, shapes, tokenizers, the token cache, packing, and the streams of micro-batches.

Door: `DataSettings` -> `load_or_train_tokenizer` -> `prepare_data` -> `BatchStream` / `EvalStream`."""

from outcore.data.basis import DEFAULT_TEXT_EXTENSIONS, CacheError, DataError, DataSettings, TemplateError
from outcore.data.layout import IGNORE_INDEX, BatchStream, EvalStream, MicroBatch, RowDataset
from outcore.data.mix import prepare_mixture, weighted_source
from outcore.data.prepare import PreparedData, prepare_data
from outcore.data.show import render_sample
from outcore.data.summary import DataSummary
from outcore.data.tokenizer import ids_hash, load_or_train_tokenizer, load_tokenizer, train_byte_bpe
