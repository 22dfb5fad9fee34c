"""The harness's own command with our engine among its models."""

import importlib.metadata
import json
import sys
import tomllib

import datasets
import pytest

from outcore.evaluate.lm_eval import main
from outcore.evaluate.settings import EvaluationError, EvaluationSettings
from tests.forked import ROOT

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("lm_eval.tasks")

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_harness_finds_the_model_by_its_entry_point():
    """Versions after 0.4.13 register every entry point of this group as it stands here."""
    from lm_eval.api.registry import Registry

    from outcore.evaluate.harness import OutcoreLM

    (name, value), = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "lm_eval.models"
    ].items()  # fmt: skip
    registry = Registry("model")
    registry.register(name, target=importlib.metadata.EntryPoint(name, value, "lm_eval.models"))
    assert name == "outcore" and registry.get("outcore") is OutcoreLM


class Task:
    """As much of a task of the harness as settings change."""

    def __init__(self, **config):
        self.config, self.set_fewshot_seed = config, lambda seed: None
        self.get_config = config.get

    def set_config(self, key, value, update=False):
        self.config[key] = value


@pytest.mark.parametrize(("said", "taken"), [(None, [0, 0, 5]), (3, [0, 3, 3])])
def test_examples_are_as_many_as_said_but_for_a_task_that_takes_none(monkeypatch, said, taken):
    from outcore.evaluate.harness import run_suite

    tasks = {str(own): Task(num_fewshot=own) for own in (0, None, 5)}
    empty = {name: {} for name in ("higher_is_better", "versions", "n-samples", "results")}
    monkeypatch.setattr("outcore.evaluate.harness.suite.evaluate", lambda *_, **__: empty)
    settings = EvaluationSettings(("t",), num_fewshot=said)
    run_suite(None, settings, lambda *_: None, lambda *_: None, {"t": {"tasks": tasks}})
    assert [task.config["num_fewshot"] for task in tasks.values()] == taken


SCORES = "metric_list:\n  - metric: "
FOREIGN = {
    "unsafe": ("unsafe_code: true\n", "runs the Python that the model writes", True),
    "hub_metric": (f"{SCORES}acc\n    hf_evaluate: true\n", "its metric 'acc' is a script", False),
    "unknown_metric": (f"{SCORES}code_eval\n", "its metric 'code_eval' is a script", False),
    "imports": (f"{SCORES}!function uses.score\n", "uses.py beside it loads a script", False),
    "beside": ("process_results: !function near.score\n", "near.py beside it loads a script", False),
    "trusts": ("doc_to_text: !function trusts.text\n", "trusts.py beside it loads a script", False),
}


@pytest.mark.parametrize("way", ["itself", "in a group", "by its tag"])
@pytest.mark.parametrize("name", FOREIGN)
def test_tasks_that_run_strangers_code_are_refused_before_theirs_is_imported(tmp_path, monkeypatch, name, way):
    """humaneval imported its metric's script before the harness looked whether it may."""
    from outcore.evaluate.harness import load_tasks

    manager = lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **given: manager(**{**given, "include_defaults": False}))
    ran = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    more, words, is_never_loaded = FOREIGN[name]
    (tmp_path / "uses.py").write_text(f"{ran}import evaluate\n")
    (tmp_path / "near.py").write_text(f"{ran}from uses import score\n")
    (tmp_path / "trusts.py").write_text(f"{ran}X.from_pretrained('x', trust_remote_code=True)\n")
    (tmp_path / "t.yaml").write_text(f"task: {name}\ntag: tagged\ndataset_path: json\n{more}")
    (tmp_path / "g.yaml").write_text(f"group: whole\ntask:\n  - group: inner\n    task: [{name}]\n")
    settings = EvaluationSettings(
        ({"itself": name, "in a group": "whole", "by its tag": "tagged"}[way],), include_path=str(tmp_path)
    )
    with pytest.raises(EvaluationError, match=words):
        load_tasks(settings)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(EvaluationError, match=words if is_never_loaded else "cannot be loaded"):
        load_tasks(settings, trust_remote_code=True)


@pytest.mark.more
def test_lm_eval_with_our_model(tiny, adapter, tmp_path, monkeypatch):
    """The real command, a task of a user's own, a preset and an adapter; its scores are those of `--model hf`."""
    rows = [{"q": f"The quick brown {n}", "a": [" fox", " dog", f" {n}"], "y": n % 3} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
        f"{tmp_path / 'rows.jsonl'}\ntest_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{{{q}}}}'\n"
        "doc_to_choice: '{{a}}'\ndoc_to_target: y\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    ours = f"pretrained={tiny},preset=throughput,context=256,ram_gib=1,precision=fp32,adapter={adapter}"
    manager = lm_eval.tasks.TaskManager  # without the harness's own tasks, which take half a minute to index
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda *a, **k: manager(*a, **{**k, "include_defaults": False}))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))

    def scores_of(model: str, arguments: str) -> dict[str, float]:
        output = tmp_path / model
        given = [
            "--model", model, "--model_args", arguments, "--tasks", "mine", "--include_path", str(tmp_path), "--device",
            "cpu",
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["lm_eval", *given, "--output_path", str(output)])
        main()
        (result,) = output.rglob("results_*.json")
        return json.loads(result.read_text())["results"]["mine"]

    theirs = scores_of("hf", f"pretrained={tiny},dtype=float32,peft={adapter}")
    found = scores_of("outcore", ours)
    assert {k: v for k, v in found.items() if k.startswith("acc")} == {
        k: v for k, v in theirs.items() if k.startswith("acc")
    }
