"""Runs of the main job for tests: a corpus, flags, one run without interruption by each engine, what a run left."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from outcore.train.loop import TrainingLoop
from outcore.train.run import main
from tests.engine.stream.runs.job import REPOSITORY, SMALL_MODEL, same, states, try_once, write_corpus

FAST = ["--seq_length", "32", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
FAST += ["--sample_steps", "0", "--sample_tokens", "4", "--report_to", "none", "--logging_steps", "100"]
PLOT = TrainingLoop.plot
NAMES_A_MODEL = ("--preset", "--model_name_or_path", "--model_module")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the runs of `straight_by` draw loss.png: it takes longer than their steps."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(TrainingLoop, "plot", lambda trainer: None)
    try_once(monkeypatch)


def fresh_env(**more: str) -> dict[str, str]:
    """The environment without this process's own ranks and port, for child processes."""
    ours = ("MASTER_PORT", "MASTER_ADDR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    return {**{k: v for k, v in os.environ.items() if k not in ours}, **more}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("my data"))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def flags(root: Path, corpus: Path, *extra: str) -> list[str]:
    """Flags of a run below `root`; of the small model where `extra` names none."""
    small = () if set(NAMES_A_MODEL) & set(extra) else ("--config_overrides", SMALL_MODEL, "--random_base")
    folders = [f"--{name}_dir={root / name}" for name in ("checkpoint", "log", "export")]
    cache = f"--data_cache_dir={corpus.parent / 'cache'}"
    return [*FAST, *small, "--dataset", str(corpus), *folders, cache, *extra]


def weights(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("model*.safetensors"))
    assert files, folder
    return {k: v for file in files for k, v in load_file(file).items()}


def metrics(root: Path, run: str = "r") -> list[dict]:
    return [json.loads(line) for line in (root / "log" / run / "metrics.jsonl").read_text().splitlines()]


ENGINES = {"stream": [], "deepspeed": ["--engine", "deepspeed"]}
"""Flags by the engine that trains with them: nothing said on one process is the streaming engine."""


def engine_of(root: Path, run: str = "r") -> dict[str, str]:
    return json.loads((root / "log" / run / "plan.json").read_text())["engine"]


@pytest.fixture(scope="session")
def straight_by(shared: Path, corpus: Path) -> Callable[[str], Path]:
    """Six steps without interruption, bf16 with fp32 masters in RAM, by an engine; each is trained once."""

    def run(engine: str) -> Path:
        root = shared / engine
        if not root.exists():
            os.chdir(REPOSITORY)
            argv = flags(root, corpus, "--run_name", "r", "--max_steps", "6", "--save_steps", "2", *ENGINES[engine])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(TrainingLoop, "plot", PLOT)
                assert main([*argv, "--precision", "bf16", "--save_total_limit", "9", "--eval_steps", "3"]) == 0
        return root

    return run


@pytest.fixture
def straight(straight_by: Callable[[str], Path]) -> Path:
    """By the default engine."""
    return straight_by("stream")


__all__ = ["REPOSITORY", "same", "states"]
fixtures = (corpus, shared, straight, straight_by, in_the_repository)
"""For the modules that use them: a fixture is found by its name in a module."""
