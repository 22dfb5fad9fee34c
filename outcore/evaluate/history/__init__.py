"""Evaluations that were made, with the exact settings: kept as JSON, compared, exported."""

from outcore.evaluate.history.comparison import Comparison, compare, diff_of
from outcore.evaluate.history.export import as_csv, as_table, when
from outcore.evaluate.history.history import History, HistoryError
