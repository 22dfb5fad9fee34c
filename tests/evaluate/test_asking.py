"""Questions, their journal, progress: each answered once, whatever happens in between."""

import pytest

from outcore.common.journal import is_held
from outcore.evaluate import EvaluationError, EvaluationSettings
from outcore.evaluate.asking import AnswerJournal, Cancelled, Desk, Progress, ScoreQuestion, WriteQuestion
from outcore.evaluate.jobs import JobProgress, progress_of
from outcore.evaluate.tasks import endings, files, sums
from tests.refused import refused

HEADER = {"model": "m", "seed": 1}


class Counting:
    """Answers from the question alone, and counts."""

    def __init__(self, fails_after: int = 1000) -> None:
        self.asked: list[object] = []
        self._left = fails_after

    def score(self, questions, check):
        self._count(questions)
        return [[-float(sum(q.context)), True] for q in questions]

    def write(self, questions, told, check):
        for number, question in enumerate(questions):
            self._count([question])
            told(number, f"text {sum(question.prompt)} {question.repeat}")

    def _count(self, questions) -> None:
        check_left = self._left - len(questions)
        if check_left < 0:
            raise RuntimeError("killed")
        self._left = check_left
        self.asked += questions


def questions_of(count: int):
    """Scores and texts; each third is asked twice."""
    scores = [ScoreQuestion((number - number % 3, 7), (1, 2)) for number in range(count)]
    return scores + [WriteQuestion((number, 9), {"max_tokens": 2}, number % 2) for number in range(count)]


@pytest.mark.parametrize("fails_after", [0, 1, 3, 4, 6, 9])
def test_a_journal_goes_on_where_it_was(tmp_path, fails_after):
    asked = questions_of(6)
    expected = Desk(Counting(), None, 8).ask(asked)
    first = Counting(fails_after)
    journal = AnswerJournal(tmp_path / "journal", HEADER)
    try:
        Desk(first, journal, 8).ask(asked)
    except RuntimeError:
        pass
    journal.close()
    with open(tmp_path / "journal", "ab") as file:
        file.write(b'0000 ["torn')
    again = Counting()
    journal = AnswerJournal(tmp_path / "journal", HEADER)
    desk = Desk(again, journal, 8)
    assert desk.ask(asked) == expected
    assert len(first.asked) + len(again.asked) == 2 + 6  # two different texts to score, each question once
    assert desk.asked == len(again.asked)
    journal.close()


def test_a_half_noted_portion_is_asked_whole(tmp_path):
    """The same rows meet in the same calls, so that the scores are the same to the last bit."""
    asked = [ScoreQuestion((number,), (1,)) for number in range(4)]
    journal = AnswerJournal(tmp_path / "journal", HEADER)
    journal.add({asked[1].key: [-5.0, False]})
    model = Counting()
    assert Desk(model, journal, 8).ask(asked)[1] == [-1.0, True]
    assert model.asked == asked
    journal.close()


def test_a_journal_is_of_one_model_and_one_process(tmp_path):
    journal = AnswerJournal(tmp_path / "journal", HEADER)
    assert is_held(tmp_path / "journal")
    refused(EvaluationError, "runs already", lambda: AnswerJournal(tmp_path / "journal", HEADER))
    journal.close()
    assert not is_held(tmp_path / "journal")
    refused(EvaluationError, "another model", lambda: AnswerJournal(tmp_path / "journal", {**HEADER, "seed": 2}))


def test_cancelled_before_the_next_portion():
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) > 2:
            raise Cancelled

    model = Counting()
    with pytest.raises(Cancelled):
        Desk(model, None, 2, check=check).ask([ScoreQuestion((number,), (1,)) for number in range(9)])
    assert len(model.asked) == 2


def test_progress_counts_documents_and_is_kept_for_others(tmp_path):
    heard = []
    progress = JobProgress(tmp_path / "progress.json", heard.append, 1)
    progress.start_task("t", 0)
    progress.start_requests("tokenizing", [("t", 0), ("t", 0), ("t", 1)])
    progress.move(Progress("scoring", 1, 3, (0,)))
    assert progress.figures["documents_done"] == 0
    progress.move(Progress("scoring", 3, 3, (1, 2)))
    assert (progress.figures["documents_done"], progress.figures["documents"]) == (2, 2)
    progress.tell("failed", message="the drive is full", **progress.figures)
    assert {"stage", "progress", "failed"} <= {event["event"] for event in heard}
    assert progress_of(tmp_path / "progress.json") == progress.figures


def test_own_documents():
    found = endings()
    assert len(found) > 900 and all(len(set(one["endings"])) == 4 for one in found)
    assert all(200 < sum(one["right"] == place for one in found) < 300 for place in range(4))
    assert len(files()) == 40 and all(1000 < len(one["page"]) <= 6000 for one in files())
    assert len(sums()) == 550
    for one in sums():
        a, sign, b, _ = one["question"].split()
        assert int(one["answer"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b)) >= 0


WRONG = [
    ({}, "tasks is empty"), ({"tasks": "a,a"}, "names a twice"), ({"tasks": ["a", 3]}, "list of names"),
    ({"tasks": "a", "limit": 0}, "limit is 0"), ({"tasks": "a", "limit": 1.5}, "limit is 1.5"),
    ({"tasks": "a", "num_fewshot": -1}, "num_fewshot is -1"), ({"tasks": "a", "seed": True}, "seed is True"),
    ({"tasks": "a", "gen_kwargs": "x"}, "gen_kwargs must be an object"),
    ({"tasks": "a", "system_instruction": "s"}, "apply_chat_template"),
    ({"tasks": "a", "shots": 3}, "shots is no setting"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_settings(fields, words):
    refused(EvaluationError, words, lambda: EvaluationSettings.from_fields(fields))
