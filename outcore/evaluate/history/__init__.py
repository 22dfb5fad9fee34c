"""Evaluations that were made, with the exact settings: kept in SQLite, compared, exported."""

from outcore.evaluate.history.comparison import Comparison, compare, diff_of
from outcore.evaluate.history.database import History, HistoryError
from outcore.evaluate.history.export import as_csv, as_table, when
