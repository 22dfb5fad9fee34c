"""kill -9 anywhere in a run of the streaming engine: resumed, with states elsewhere too, it ends with the same bits."""

from pathlib import Path

import pytest

from tests.engine.stream.runs.job import flags, losses, run_killed, same, states, train, write_corpus

STEPS = 4
RUN = ["--max_steps", str(STEPS), "--save_steps", "2", "--save_total_limit", "9"]
RAM: dict = {}
SPLIT = {"states": "split"}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("my data"))


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The run that nothing happens to: fp32 states in RAM."""
    root = tmp_path_factory.mktemp("straight")
    assert train(flags(root, corpus, *RUN)) == 0
    return root


def nvme(root: Path) -> dict:
    """Everything that can live on a drive does."""
    drive = str(root / "drive")
    return {"nvme_path": drive, "state_ram_bytes": 0, "weight_ram_bytes": 0, "activations": "nvme"}


def half_on_nvme(root: Path) -> dict:
    return {**nvme(root), "state_ram_bytes": 1 << 24, "states": "split"}


def lending(root: Path) -> dict:
    """New parameters wait behind what checkpoints are lent of the gradients' homes."""
    return {**nvme(root), "activations": "ram"}


HOMES = {
    "RAM": lambda root: RAM, "split": lambda root: SPLIT, "NVMe": nvme, "half split": half_on_nvme, "lending": lending,
}  # fmt: skip

MORE_KILLS = [
    ("forward", 3, "RAM", "split"), ("drive write", 4, "NVMe", "half split"), ("update", 2, "split", "RAM"),
    ("backward", 5, "NVMe", "RAM"), ("gradient", 2, "RAM", "NVMe"), ("update", 7, "NVMe", "NVMe"),
    ("drive write", 9, "half split", "half split"), ("shard", 1, "RAM", "split"), ("manifest", 1, "NVMe", "NVMe"),
    ("renamed", 1, "split", "half split"), ("between", 1, "RAM", "NVMe"), ("kept weights", 2, "half split", "lending"),
    ("waiting weights", 3, "half split", "NVMe"), ("waiting weights", 2, "lending", "RAM"),
]  # fmt: skip


def kill_and_resume(tmp_path: Path, corpus: Path, straight: Path, kill: tuple, run: list[str] = RUN) -> None:
    moment, count, first, then = kill
    argv = flags(tmp_path, corpus, *run)
    after = 1 if moment == "renamed" else 3
    run_killed(argv, tmp_path / "log.txt", (moment, count, after), **HOMES[first](tmp_path))
    assert [p.name for p in (tmp_path / "checkpoint/r").glob("step-*")] == ["step-00000002"]
    assert train([*argv, "--resume_from_checkpoint", "auto"], **HOMES[then](tmp_path)) == 0
    end = f"checkpoint/r/step-{STEPS:08d}"
    assert same(states(tmp_path / end), states(straight / end))
    assert losses(tmp_path) == losses(straight)
    if "nvme_path" in HOMES[then](tmp_path):  # what the killed run left there is gone as well
        assert not (tmp_path / "drive/outcore-scratch").exists()


@pytest.mark.more
@pytest.mark.parametrize("kill", [("shard", 3, "half split", "NVMe"), ("kept weights", 4, "NVMe", "lending")])
def test_killed_and_resumed_elsewhere(tmp_path: Path, corpus: Path, straight: Path, kill: tuple) -> None:
    """In a save, and when new parameters wait where their gradient was and the drive has not got them yet."""
    kill_and_resume(tmp_path, corpus, straight, kill)


@pytest.mark.more
@pytest.mark.parametrize("moment", ["drive write", pytest.param("kept weights", marks=pytest.mark.slow)])
def test_killed_when_layers_are_of_two_steps(tmp_path: Path, corpus: Path, moment: str) -> None:
    """Without clipping, layers are updated and written to the drive while the backward pass goes on."""
    run = [*RUN, "--max_grad_norm", "0"]
    assert train(flags(tmp_path / "straight", corpus, *run)) == 0
    kill_and_resume(tmp_path, corpus, tmp_path / "straight", (moment, 4, "NVMe", "half split"), run)


@pytest.mark.slow
@pytest.mark.parametrize("kill", MORE_KILLS, ids=lambda kill: f"{kill[0]}, {kill[2]} then {kill[3]}")
def test_killed_at_more_places(tmp_path: Path, corpus: Path, straight: Path, kill: tuple) -> None:
    kill_and_resume(tmp_path, corpus, straight, kill)
