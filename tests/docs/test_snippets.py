"""The Python of the docs runs as it is printed; only names of models, folders and ports are filled in."""

import ast
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest

from outcore import apart
from tests import tiny_vision
from tests.docs.pages import PAGES, snippets
from tests.forked import ROOT
from tests.infer.models import save_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    apart.begin()  # in a folder that stays: its processes begin there
    """A tiny model's folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder)
    return folder


def run_snippet(page: str, filled: dict[str, str], **names: Any) -> dict[str, Any]:
    """Run the page's only snippet with these texts replaced; returns its names."""
    (snippet,) = snippets(ROOT / "docs" / page)
    for printed, real in filled.items():
        assert printed in snippet, printed
        snippet = snippet.replace(printed, real)
    exec(snippet, names)
    return names


@contextmanager
def served(tiny: Path, logs: Path, **infer: Any) -> Iterator[str]:
    """The URL of a server of the tiny model."""
    from outcore.serve import ServeSettings
    from tests.serve.running import Running

    server = Running(tiny, ServeSettings(logs=logs, name="MODEL", max_answer_tokens=8), **infer)
    try:
        yield server.url
    finally:
        server.stop()


def infinity(tiny: Path, tmp_path: Path, stack: ExitStack) -> None:
    base: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    run_snippet(
        "deepspeed_config.md",
        {"/mnt/nvme/outcore": str(tmp_path), "8_000_000_000": "1_000", '"my_config.json"': f'"{tmp_path}/config.json"'},
        base=base,
    )
    assert (tmp_path / "config.json").is_file()


def inference(tiny: Path, tmp_path: Path, stack: ExitStack) -> None:
    run_snippet("inference.md", {"final_model/my-run": str(tiny)})


def own_code(tiny: Path, tmp_path: Path, stack: ExitStack) -> None:
    run_snippet("from_your_own_code.md", {"Qwen/Qwen3-8B": str(tiny), '"my_model"': f'"{tmp_path}/my_model"'})
    assert (tmp_path / "my_model/model.safetensors").is_file()


def models(tiny: Path, tmp_path: Path, stack: ExitStack) -> None:
    import torch
    from torch.nn import functional

    names = run_snippet("models.md", {}, MyModel=lambda size: f"model of {size}", F=functional)
    assert names["build"]({"vocab_size": 7}, None) == "model of 7"
    losses = names["token_loss"](torch.zeros(3, 5), torch.tensor([0, 1, 4]))
    assert losses.shape == (3,) and losses.isfinite().all()


def monitoring(tiny: Path, tmp_path: Path, stack: ExitStack) -> None:
    from outcore.monitor import MetricsLog

    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write_header({"model": {"name": "tiny"}})
        log.write_step({"step": 1, "loss": 2.5})
    run_snippet("monitoring.md", {"logs/my-run": str(tmp_path)})


def planning(tiny: Path, tmp_path: Path, stack: ExitStack) -> None:
    names = run_snippet("planning.md", {})
    assert names["answer"].plan.time.step_s > 0


def python_api(tiny: Path, tmp_path: Path, stack: ExitStack) -> None:
    stack.enter_context(chdir(tmp_path))
    assert run_snippet("python_api.md", {"MODEL": str(tiny)})["result"].finished


def runs(tiny: Path, tmp_path: Path, stack: ExitStack) -> None:
    assert run_snippet("runs.md", {"my_model": str(tiny)})["model"].config.vocab_size > 0


def serving(tiny: Path, tmp_path: Path, stack: ExitStack) -> None:
    pytest.importorskip("openai")
    run_snippet("serving.md", {"http://127.0.0.1:8000": stack.enter_context(served(tiny, tmp_path))})


def vision(tiny: Path, tmp_path: Path, stack: ExitStack) -> None:
    pytest.importorskip("openai")
    stack.enter_context(chdir(tmp_path))
    Path("cat.jpg").write_bytes(tiny_vision.picture(kind="JPEG"))
    url = stack.enter_context(served(tiny_vision.save(tmp_path / "sees"), tmp_path, context=None, ram_gib=None))
    filled = {"http://127.0.0.1:8000": url, "Qwen/Qwen3-VL-8B-Instruct": "MODEL"}
    assert run_snippet("vision.md", filled)["answer"].choices[0].message.content is not None


RUN: dict[str, Callable[[Path, Path, ExitStack], None]] = {
    "deepspeed_config.md": infinity, "inference.md": inference, "models.md": models, "monitoring.md": monitoring,
    "planning.md": planning, "python_api.md": python_api, "from_your_own_code.md": own_code, "runs.md": runs,
    "serving.md": serving, "vision.md": vision,
}  # fmt: skip


@pytest.mark.parametrize("page", RUN)
def test_a_snippet_runs(page: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        RUN[page](tiny, tmp_path, stack)
    (snippet,) = snippets(ROOT / "docs" / page)
    assert capsys.readouterr().out.strip() or "print(" not in snippet


def test_every_page_with_a_snippet_is_run() -> None:
    by_cells = {"first_notebook.md"}  # test_notebook.py
    assert {page.name for page in PAGES if snippets(page)} == set(RUN) | by_cells
    for page in PAGES:
        for snippet in snippets(page):
            ast.parse(snippet)
