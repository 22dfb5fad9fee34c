"""docs/recipes.md: what the planner says today, and commands that run, on a tiny copy of each model."""

import io
import json
import re
import shlex
from pathlib import Path

import pytest

from outcore.cli import main
from outcore.train.loop import TrainingLoop
from tests.docs.recipes import PAGE, SHELVES, Recipe, page
from tests.engine.stream.runs.job import try_once
from tests.infer.models import save_tiny_model

RECIPES = [recipe for shelf in SHELVES.values() for recipe in shelf]
PAIRS = [{"prompt": f"the fox {i}", "chosen": " jumps over", "rejected": " is lazy"} for i in range(24)]
ROWS = {
    "chats.jsonl": [
        {"messages": [{"role": "user", "content": f"the fox {i}"}, {"role": "assistant", "content": "jumps"}]}
        for i in range(24)
    ],
    "pairs.jsonl": PAIRS,
    "judged.jsonl": [{"prompt": f"the fox {i}", "completion": " jumps", "label": i % 2 == 0} for i in range(24)],
    "partners.jsonl": [{"query": f"the fox {i}", "positive": f"the dog {i}"} for i in range(24)],
    "questions.jsonl": [{"prompt": f"the fox {i}"} for i in range(3)],
    "texts.jsonl": [{"text": f"the fox {i} jumps"} for i in range(3)],
}
TABLES = {"questions.csv": "question,answer", "labels.csv": "text,label"}
SMALL = {"--seq_length": "64", "--max_steps": "2", "--batch_size": "2"}
MODELS = re.compile(r"\b(Qwen|meta-llama)/\S+")
OTHERS_RUN = ("serve", "start")
"""Commands that wait for clients: tests of the server start them."""


@pytest.mark.more
def test_the_page_is_what_the_planner_says_and_long_enough() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "run: python -m tests.docs.recipes"
    assert len(RECIPES) >= 20 and len({recipe.goal for recipe in RECIPES}) == len(RECIPES)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and data of every shape that the recipes name."""
    folder = tmp_path_factory.mktemp("recipes")
    save_tiny_model(folder / "model")
    for name, rows in ROWS.items():
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    for name, columns in TABLES.items():
        (folder / name).write_text("\n".join([columns, *(f"the fox {i},{'ab'[i % 2]}" for i in range(24))]))
    for name in ("notes", "books"):
        (folder / name).mkdir()
        (folder / name / "one.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    return folder


def words_of(command: str, recipe: Recipe, home: Path) -> list[str]:
    """A command's words for the tiny model, two short steps, in this folder."""
    words = shlex.split(MODELS.sub("model", command))[1:]
    words = [str(home / "drive") if word.startswith("/mnt/") else word for word in words]
    if words[0] == "train":
        for flag, value in SMALL.items():
            if flag in words:
                words[words.index(flag) + 1] = value
            elif flag != "--batch_size":
                words += [flag, value]
        words += ["--precision", "bf16"] if "--state_format" in words else []  # what a GPU would choose
        words += [] if "--method" in words else ["--sample_tokens", "0"]
        words += ["--report_to", "none", "--run_name", re.sub(r"\W+", "-", recipe.goal)]
    return words


@pytest.mark.more(after=1)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "recipe",
    list(
        {
            MODELS.sub("model", recipe.command): recipe
            for recipe in RECIPES
            if recipe.command.split()[1] not in OTHERS_RUN
        }.values()
    ),
    ids=lambda recipe: re.sub(r"\W+", "-", recipe.goal),
)
def test_it_runs(
    recipe: Recipe, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr("sys.stdin", io.StringIO("the fox\n"))
    monkeypatch.setattr(TrainingLoop, "plot", lambda trainer: None)  # loss.png takes longer than the steps
    try_once(monkeypatch)
    for command in recipe.command.splitlines():
        assert main(words_of(command, recipe, home)) == 0
        said = capfd.readouterr().out
        assert "done: 2 steps" in said or not command.startswith("outcore train"), said
