"""Questions to a model, each answered once whatever happens in between."""

from outcore.evaluate.asking.desk import PORTION_TOKENS, AnswerJournal, Cancelled, Desk, Progress
from outcore.evaluate.asking.engine import EngineAnswerer
from outcore.evaluate.asking.question import Question, ScoreQuestion, WriteQuestion
