"""The history: two processes write it, a damaged or read-only one says what to do."""

import csv
import io
import json
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from outcore.evaluate.history import History, HistoryError, as_csv, compare, diff_of
from tests.evaluate.running import record_of, result_of
from tests.refused import refused

FORK = multiprocessing.get_context("fork")
NOBODY = 65534


def in_child(work, *args) -> None:
    """Run `work` in a process of its own, to its end."""
    child = FORK.Process(target=work, args=args)
    child.start()
    child.join(600)
    assert child.exitcode == 0


def test_what_is_kept_comes_back(history):
    record = history.get("eval-b")
    scores, documents = result_of((1.0, 1.0, 1.0, 0.0))
    assert record == record_of("eval-b", status="completed") | {"scores": scores}
    assert history.samples("eval-b") == documents
    assert history.samples("eval-b", "t", 1, 2) == documents[1:3] and len(history.samples("eval-b")) == 4
    assert {one["id"] for one in history.all()} == {"eval-a", "eval-b"}
    with pytest.raises(KeyError):
        history.get("eval-")  # both begin so
    with pytest.raises(KeyError):
        history.get("%")


def test_two_processes_write_at_once(tmp_path):
    path = tmp_path / "new" / "evaluations"

    def write(name: str) -> None:
        history = History(path)
        for number in range(15):
            history.finish(record_of(f"eval-{name}{number}", status="completed"), *result_of((1.0, 0.0)))

    children = [FORK.Process(target=write, args=(name,)) for name in "ab"]
    for child in children:
        child.start()
    for child in children:
        child.join(600)
        assert child.exitcode == 0
    found = History(path).all()
    assert len(found) == 30 and all(one["scores"][0]["value"] == 0.5 for one in found)


def test_a_damaged_record_is_said(history):
    path = history.folder_of("eval-a") / "record.json"
    path.write_text('{"id": "eval-a"')
    refused(HistoryError, "record.json cannot be read .*Move its folder away", history.all)
    assert history.get("eval-b")["status"] == "completed"


def test_a_folder_that_cannot_be_written_is_said(history):
    """As another user, because root may write everything."""
    with tempfile.TemporaryDirectory() as open_to_all:
        folder = Path(open_to_all)
        shutil.copytree(history.folder, folder, dirs_exist_ok=True)
        folder.chmod(0o555)

        def look() -> None:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            kept = History(folder)
            assert len(kept.all()) == 2
            for ask in (kept.check_writable, lambda: kept.finish(record_of("eval-c"), *result_of((1.0,)))):
                refused(HistoryError, "cannot be written", ask)

        in_child(look)
        folder.chmod(0o755)


def test_diff(history):
    found = diff_of(history, history.get("eval-a"), history.get("eval-b"))
    assert found["settings"] == {"preset": ["a", "b"]}
    (task,) = found["tasks"]
    assert (task["a"], task["b"], task["difference"], task["unit"]) == (0.5, 0.75, 25.0, "points")
    assert (task["changed"], task["better"], task["worse"], task["p_value"]) == (3, 2, 1, 1.0)
    assert task["max_logprob_difference"] == 1.0


def test_csv_has_a_line_for_each_score(history):
    rows = list(csv.DictReader(io.StringIO(as_csv(history.all()))))
    assert {(row["id"], row["task"], row["metric"], row["value"], row["limit"]) for row in rows} == {
        ("eval-a", "t", "acc", "0.5", "4"),
        ("eval-b", "t", "acc", "0.75", "4"),
    }
    assert rows[0]["world_size"] == "1" and rows[0]["lm_eval"] == "0.4.13"


def test_the_command(history, evaluation):
    assert json.loads(evaluation.history("list", "--json"))[0]["status"] == "completed"
    shown = evaluation.history("show", "eval-a", "--samples", "1")
    assert '"world_size": 1' in shown and "Frage 0 ü" in shown and "weights in RAM" in shown
    assert "25" in evaluation.history("diff", "eval-a", "eval-b")
    exported = json.loads(evaluation.history("export", "eval-a"))
    assert len(exported[0]["samples"]) == 4
    assert evaluation.history("export", "--csv").startswith("id,created,")
    history.save(record_of("eval-c"))
    assert "interrupted" in evaluation.history("list")  # nobody works on it
    evaluation.history("delete", "eval-c")
    evaluation.history("show", "eval-c", code=2)
    assert "no evaluation 'eval-c'" in evaluation.said


def test_documents_do_not_steer_the_terminal_that_shows_them(history, evaluation, monkeypatch):
    scores, kept = result_of((1.0,))
    kept[0]["prompt"] = "c1 \x9b2J turned \u202e del \x7f"
    record = record_of("eval-d", error="red \x1b[31m")
    history.save(record)
    history.finish(record | {"status": "failed"}, scores, kept)
    assert "\x9b" in evaluation.history("show", "eval-d", "--samples", "1"), "a file gets the text as it is"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shown = evaluation.history("show", "eval-d", "--samples", "1")
    assert r"c1 \x9b2J turned \u202e del \x7f" in shown and r"error: red \x1b[31m" in shown
    assert not set(shown) & set("\x1b\x7f\x9b\u202e")


def documents(values):
    return [
        {"task": "t", "filter": "none", "doc_id": n, "answers": [], "metrics": {"bits": value}}
        for n, value in enumerate(values)
    ]


def test_shares_are_compared_over_the_documents_that_both_have():
    score = {"task": "t", "metric": "bits", "filter": "none", "value": 0.25, "higher_is_better": True}
    (found,) = compare([score], documents([1.0, 0, 0, 0]), [score | {"value": 0.5}], documents([1.0, 0]))
    assert (found.a, found.b, found.difference, found.documents, found.changed) == (0.5, 0.5, 0, 2, 0)


def test_the_paired_test_of_a_metric_that_is_no_share():
    """Gaps of 1, 2 and 4: their mean is 2.65 standard errors from 0."""
    score = {"task": "t", "metric": "bits", "filter": "none", "value": 2.0, "higher_is_better": False}
    (found,) = compare([score], documents([1.0, 3.0, 5.0]), [score | {"value": 3.0}], documents([2.0, 5.0, 9.0]))
    assert (found.unit, found.difference, found.better, found.worse) == ("%", 50.0, 0, 3)
    assert found.p_value == pytest.approx(0.00815, rel=2e-3)
    for mine, theirs in ((None, 3.0), (2.0, None)):  # a metric that had no value is not compared
        assert not compare([score | {"value": mine}], [], [score | {"value": theirs}], [])
