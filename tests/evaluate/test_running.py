"""`outcore evaluate` on a tiny model: parity with the harness's own backend, adapters, presets, kills, wrong input."""

import json
import os
import random
import time

import pytest

from outcore.evaluate.history import History
from tests.evaluate.running import SMALL
from tests.forked import ROOT, start_script

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("lm_eval.tasks")
pytestmark = pytest.mark.usefixtures("one_thread")
OWN = "outcore_endings,outcore_stdlib,outcore_sums"


def test_parity_on_the_offline_tasks(evaluation):
    """Per document within 1e-3 of a nat, scores equal; with few-shot examples where a task has them."""
    said = evaluation.call(evaluation.argv(OWN, "--parity", "--note_tokens", "300", limit=2))
    assert "scores equal" in said
    (kept,) = evaluation.folder.glob("*/parity.json")
    parity = json.loads(kept.read_text())
    assert parity["is_equal"] and len(parity["comparisons"]) == 6
    for one in parity["comparisons"]:
        assert abs(one["difference"]) <= 0.1 and one["documents"] == 2 and not one["changed"]
    assert all(one["max_logprob_difference"] < 1e-3 for one in parity["comparisons"][:5])
    (record,) = History(evaluation.folder).all()
    texts = [one["answers"] for one in History(evaluation.folder).samples(record["id"], "outcore_sums")]
    assert all(isinstance(text, str) for (text,) in texts)


def test_parity_with_an_adapter(evaluation, adapter):
    """An unmerged adapter is evaluated as PEFT has it, and other weights are found out."""
    with_it = evaluation.argv("outcore_endings", "--parity", "--adapter", str(adapter), limit=3)
    assert "scores equal" in evaluation.call(with_it)
    record, _ = evaluation.run("outcore_endings", limit=3)
    assert any("scored only" in line for line in record["placement"])  # no room for answers
    diff = json.loads(evaluation.history("diff", *ids_of(evaluation), "--json"))
    assert {"adapter", "model_hash"} <= set(diff["settings"]) and record["launch"]["adapter"] == ""
    assert diff["tasks"][0]["max_logprob_difference"] > 0.1


def ids_of(evaluation) -> list[str]:
    return [record["id"] for record in History(evaluation.folder).all()]


def test_parity_tells_other_scores(tiny, tmp_path):
    """Weights that differ a little are not within 0.1 points, and the exit code would say so."""
    import torch
    from safetensors.torch import load_file, save_file

    from outcore.evaluate import EvaluationSettings
    from outcore.evaluate.parity import Parity, Reference, compare_with_reference, run_reference

    other = tmp_path / "other"
    other.mkdir()
    for path in tiny.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    weights = load_file(tiny / "model.safetensors")
    weights["lm_head.weight"] += 0.1 * torch.randn_like(weights["lm_head.weight"])
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    settings = EvaluationSettings(("outcore_stdlib",), limit=1)
    whole, changed = (Reference(str(folder), None, "float32", "cpu", 255, 4) for folder in (tiny, other))
    ours = run_reference(changed, settings)
    parity = compare_with_reference(whole, settings, ours, lambda line: None)
    assert not parity.is_equal and "NOT within 0.1 points" in parity.words()
    assert not Parity((), 1.0, 1.0).is_equal  # nothing compared is no parity


@pytest.mark.more
def test_presets_and_cuts_give_the_same_scores(evaluation):
    """Where weights and keys lie is noted; what is answered is the same."""
    found = [
        evaluation.run("outcore_endings,outcore_sums", *flags, limit=3)[0]
        for flags in (
            (),
            ("--preset", "throughput", "--note_tokens", "64"),
            ("--preset", "latency", "--max_sequences", "2", "--draft_tokens", "0"),
        )
    ]
    assert [record["launch"]["preset"] for record in found] == ["balanced", "throughput", "latency"]
    assert found[0]["scores"] == found[1]["scores"] == found[2]["scores"]
    launch = found[0]["launch"]
    assert launch["zero"] == {"stage": 0, "offload_param": "none", "num_buffers": 3} and launch["world_size"] == 1
    diff = json.loads(evaluation.history("diff", *ids_of(evaluation)[:2], "--json"))
    assert "preset" in diff["settings"] and all(one["max_logprob_difference"] in (None, 0.0) or
        one["max_logprob_difference"] < 1e-4 for one in diff["tasks"])  # fmt: skip


def test_a_suite_shares_what_is_loaded(evaluation, monkeypatch):
    """Three tasks, one model opened once; each task's events follow the one before."""
    from outcore.evaluate.commands import evaluate

    opened, really = [], evaluate.open_engine
    monkeypatch.setattr(evaluate, "open_engine", lambda *args: opened.append(1) or really(*args))
    record, events = evaluation.run(OWN, limit=1)
    assert len(opened) == 1 and record["status"] == "completed" and "scored only" not in str(record["placement"])
    kinds = [(event["event"], event.get("task")) for event in events]
    ended = [kinds.index(("score", name)) for name in OWN.split(",")]
    assert ended == sorted(ended) and kinds[-1][0] == "completed"
    assert {"tasks", "tokenizing", "scoring", "writing"} <= {event.get("stage") for event in events}
    assert events[-1]["tasks_done"] == events[-1]["num_tasks"] == 3


WRONG = [
    (("--tasks", "outcore_endngs"), "Did you mean 'outcore_endings'"),
    (("--tasks", ""), "tasks is empty"),
    (("--tasks", "outcore_sums", "--gen_kwargs", "{"), "must be a JSON object"),
    (("--tasks", "outcore_sums", "--gen_kwargs", '{"max_gen_toks": 300}'), "context is 256"),
    (("--tasks", "outcore_sums", "--limit", "0"), "limit is 0"),
]


@pytest.mark.parametrize(("flags", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_input_is_said(evaluation, flags, words, monkeypatch):
    manager = lm_eval.tasks.TaskManager  # without the harness's own tasks, which take half a minute to index
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **given: manager(**{**given, "include_defaults": False}))
    argv = ["evaluate", str(evaluation.model), *SMALL, "--history", str(evaluation.folder), *flags]
    evaluation.call(argv, 2)
    assert words in evaluation.said and "Traceback" not in evaluation.said


@pytest.mark.slow
def test_data_that_cannot_be_had(evaluation):
    argv = ["evaluate", str(evaluation.model), *SMALL, "--history", str(evaluation.folder), "--offline"]
    evaluation.call([*argv, "--tasks", "hellaswag"], 1)
    assert "'hellaswag' cannot be loaded" in evaluation.said and not History(evaluation.folder).all()
    assert "hellaswag" in evaluation.call(["evaluate", "--list_tasks", "hellaswag"])


def test_a_server_that_is_not_there(evaluation):
    evaluation.call(["evaluate", "http://127.0.0.1:9", "--tasks", "outcore_sums"], 1)
    assert "cannot be reached" in evaluation.said


def kill_and_go_on(evaluation, tmp_path, kills: int, limit: int) -> None:
    """Kill the command at so many moments; the scores and documents in the end are those of an undisturbed one."""
    flags = ("--note_tokens", "120", "--max_sequences", "2")
    whole, _ = evaluation.run("outcore_endings,outcore_sums", *flags, limit=limit)
    documents = History(evaluation.folder).samples(whole["id"])
    evaluation.folder = tmp_path / "killed" / "evaluations"
    argv = evaluation.argv("outcore_endings,outcore_sums", *flags, limit=limit)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    history, draws, killed = History(evaluation.folder), random.Random(1), 0

    def journaled() -> int:
        """Bytes of answers; the first line names what they depend on."""
        return sum(len(path.read_bytes().partition(b"\n")[2]) for path in history.folder.glob("*/journal"))

    for turn in range(kills + 1):
        child = start_script(ROOT / "outcore/cli.py", argv, environ, tmp_path / "log")
        wanted = journaled() + draws.randint(1, 700)
        while turn < kills and child.poll() is None:
            if journaled() >= wanted:
                child.kill()
                killed += 1
                break
            time.sleep(0.005)
        child.wait(600)
    log = (tmp_path / "log").read_text()
    assert killed == kills, log[-2000:]
    (record,) = history.all()
    assert record["status"] == "completed" and record["scores"] == whole["scores"]
    assert history.samples(record["id"]) == documents
    assert " answered already" in log


@pytest.mark.more
def test_a_killed_evaluation_goes_on(evaluation, tmp_path):
    kill_and_go_on(evaluation, tmp_path, kills=1, limit=5)


@pytest.mark.slow
def test_killed_at_ten_points(evaluation, tmp_path):
    kill_and_go_on(evaluation, tmp_path, kills=10, limit=80)


@pytest.mark.parametrize(
    ("flags", "compiles"), [((), "auto"), (("--parity",), "off"), (("--parity", "--compile", "on"), "on")]
)
def test_parity_runs_the_other_backends_operations(evaluation, monkeypatch, flags, compiles):
    """Uncompiled layers, unless compiled ones were asked for."""
    from outcore.evaluate.commands import evaluate

    asked = []

    def refused(model, settings, say):
        asked.append(settings.compile)
        raise ValueError("enough")

    monkeypatch.setattr(evaluate, "open_engine", refused)
    evaluation.call(evaluation.argv("outcore_sums", *flags), 2)
    assert asked == [compiles]
