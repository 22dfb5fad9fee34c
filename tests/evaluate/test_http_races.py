"""Who looks at an evaluation just as it begins, ends or is cancelled sees it as it is."""

import asyncio
from concurrent.futures import wait

import pytest

pytest.importorskip("fastapi")
from fastapi import FastAPI
from starlette.testclient import TestClient

from outcore.common.journal import LineJournal
from outcore.evaluate.http import Evaluations, routes
from outcore.evaluate.jobs import PROGRESS, progress_of
from tests.evaluate.running import record_of
from tests.serve.running import until


@pytest.fixture
def evaluations(tmp_path):
    found = Evaluations(lambda: None, tmp_path / "evaluations")
    found.history.save(record_of("eval-1", host="server"))
    yield found
    asyncio.run(found.end())


class Quick:
    """A job that is done before whoever began it goes on."""

    def __init__(self, history, record, subject):
        self.history, self.record, self.progress = history, record, None

    def run(self):
        self.history.save(self.record | {"status": "completed"})

    def cancel(self, *, keep=False):
        pass


def test_one_that_ends_while_it_is_looked_at_was_not_interrupted(evaluations, monkeypatch):
    def ends(path):
        evaluations.history.save(record_of("eval-1", host="server", status="completed"))
        return False

    monkeypatch.setattr(routes, "is_held", ends)
    assert evaluations.get("eval-1")["status"] == "completed"


def test_one_that_is_done_at_once_is_not_under_way_for_ever(evaluations, monkeypatch):
    submit = evaluations._worker.submit

    def late(*args):
        future = submit(*args)
        wait([future], 0.5)
        return future

    monkeypatch.setattr(evaluations._worker, "submit", late)
    monkeypatch.setattr(routes, "Job", Quick)
    evaluations._start(record_of("eval-1", host="server"), None)
    until(lambda: not evaluations._jobs)
    assert evaluations.get("eval-1")["status"] == "completed"


def test_cancelled_is_said_when_it_can_be_gone_on_with(evaluations):
    evaluations.history.save(record_of("eval-1", host="server", status="cancelled"))
    evaluations._jobs["eval-1"] = (Quick(evaluations.history, {}, None), None)
    assert evaluations.get("eval-1")["status"] == "running"
    evaluations._jobs.clear()
    assert evaluations.get("eval-1")["status"] == "cancelled"


def test_names_are_complete_only_when_all_are_in_the_answer(evaluations, monkeypatch):
    app = FastAPI()
    evaluations.add_to(app)

    def find(query, limit):
        evaluations.names.is_complete = True  # while the answer is put together
        return []

    monkeypatch.setattr(evaluations.names, "find", find)
    told = [TestClient(app).get("/v1/evaluation_tasks").json()["is_complete"] for _ in range(2)]
    assert told == [False, True]


def test_the_end_is_told_before_the_journal_goes(evaluation, monkeypatch):
    """Another process takes the journal for the sign that it is under way."""
    told, remove = [], LineJournal.remove
    monkeypatch.setattr(
        LineJournal, "remove", lambda self: (told.append(progress_of(self.path.with_name(PROGRESS))), remove(self))
    )
    evaluation.run("outcore_sums", limit=1)
    assert told[0]["stage"] == "done"
