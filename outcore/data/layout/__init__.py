"""Documents cut, packed and ordered into rows, and rows into micro-batches."""

from outcore.data.layout.dataset import IGNORE_INDEX, MicroBatch, RowDataset, labels_of
from outcore.data.layout.mixture import MixedRows, Rows
from outcore.data.layout.segments import (
    LAYOUT_VERSION,
    Segments,
    choose_rows,
    merged,
    rows_of,
    seq2seq_segments,
    split_documents,
    supervised_segments,
    text_windows,
)
from outcore.data.layout.stream import BatchStream, EvalStream
