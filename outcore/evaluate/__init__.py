"""Models of any size measured: lm-evaluation-harness over `outcore.infer`, jobs that survive a kill, a history.

Below: `settings` (what is asked for), `tasks` (names, documents), `asking` (questions, their journal, the engine that
answers), `harness` (questions and scores by lm-evaluation-harness; importing it imports that), `history` (JSON, diff,
export), `jobs` (one evaluation from start to end), `parity` (against the harness's own backend), `http` (routes).
Importing this room needs neither the harness nor the server's packages."""

from outcore.evaluate.history import Comparison, History, HistoryError, compare
from outcore.evaluate.settings import EvaluationError, EvaluationSettings
