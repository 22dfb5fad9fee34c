"""lm-evaluation-harness over our engine. Importing this imports the harness: `tasks.check_harness` first."""

from outcore.evaluate.harness.loading import load_tasks, only_score
from outcore.evaluate.harness.suite import OutcoreLM, register, run_suite, samples_of, scores_of
