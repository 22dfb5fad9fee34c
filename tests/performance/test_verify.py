"""`outcore verify`: the same bits of a sound run; of a changed byte it says where; of the run nothing is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from outcore import cli
from outcore.checkpoint.manifest import Manifest, crc32_of
from outcore.train.run import main as train
from tests.train.jobs import fixtures, flags

corpus, shared, straight, straight_by, in_the_repository = fixtures
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(straight: Path, tmp_path: Path) -> Path:
    """Six steps, with checkpoints of 2, 4 and 6."""
    return Path(shutil.copytree(straight, tmp_path / "run"))


def verify(root: Path, *more: str) -> int:
    return cli.main(
        ["verify", "r", "--checkpoint_dir", str(root / "checkpoint"), "--log_dir", str(root / "log"), *more]
    )


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_sound_run_has_the_same_bits_and_is_left_as_it_was(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(run)
    assert verify(run) == 0
    said = capsys.readouterr().out
    assert "the same bits: 2 steps from" in said and "to step 6; every tensor of its checkpoint compared" in said
    assert verify(run, "--step", "3") == 0
    assert "the same bits: 1 step from" in (said := capsys.readouterr().out) and "(no checkpoint was kept)" in said
    assert tree(run) == before


@pytest.mark.more
def test_a_run_of_deepspeeds(straight_by: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(straight_by("deepspeed")) == 0
    assert "every tensor of its checkpoint compared" in capsys.readouterr().out


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def list_again(folder: Path) -> None:
    """Have the manifest agree with what the files are."""
    manifest = Manifest.load(folder)
    sums = {folder / name: crc32_of(folder / name) for name in manifest.files}
    Manifest.of(folder, manifest.step, manifest.order, sums, manifest.config_sha256).save(folder)


@pytest.mark.parametrize("step", [4, 6])
def test_a_flipped_byte_of_a_checkpoint(run: Path, step: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Its checksum tells; where that agrees, the steps that are taken again do."""
    folder = run / f"checkpoint/r/step-{step:08d}"
    shard = next(folder.glob("master-*.safetensors"))
    flip(shard, -5)
    assert verify(run) == 1
    assert shard.name in capsys.readouterr().err
    list_again(folder)
    assert verify(run) == 1
    said = capsys.readouterr().err
    assert "not the same bits: " in said
    assert (
        "master of model." in said if step == 6 else "of step 5 was" in said or "model of" in said or "master" in said
    )


def test_another_loss_in_the_log(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = run / "log/r/metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line.get("step") == 5 and "loss" in line:
            line["loss"] += 1e-9
    lines[0]["machine"]["threads"] += 1
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert verify(run) == 1
    said = capsys.readouterr()
    assert "loss of step 5 was" in said.err and f"made with threads {lines[0]['machine']['threads']}, this" in said.out


def other_text(run: Path, corpus: Path) -> tuple[str, ...]:
    corpus.write_text(corpus.read_text().replace("quick", "quack", 1))
    return ()


def no_checkpoint_before(run: Path, corpus: Path) -> tuple[str, ...]:
    return "--step", "2"


def no_such_step(run: Path, corpus: Path) -> tuple[str, ...]:
    return "--step", "7"


def no_log(run: Path, corpus: Path) -> tuple[str, ...]:
    shutil.rmtree(run / "log/r")
    return ()


@pytest.mark.parametrize(("change", "words"), [
    (other_text, "data"), (no_checkpoint_before, "no checkpoint before step 2 to start from; it has those of 2, 4, 6"),
    (no_such_step, "the log has steps 1 to 6"), (no_log, "metrics.jsonl"),
])  # fmt: skip
def test_what_cannot_be_taken_again_is_refused(
    run: Path,
    corpus: Path,
    change: Callable[[Path, Path], tuple[str, ...]],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = corpus.read_text()
    try:
        code = verify(run, *change(run, corpus))
    finally:
        corpus.write_text(text)
    said = capsys.readouterr()
    assert code in (1, 2) and words in said.err and "the same bits" not in said.out
    assert not list((run / "checkpoint").glob(".verify-*"))


@pytest.mark.more
def test_a_run_over_a_base(straight: Path, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same bits with adapters and dropout; without the base it says that this is missing."""
    base = Path(shutil.copytree(straight / "export/r", tmp_path / "base"))
    lora = ["--model_name_or_path", str(base), "--lora_r", "4", "--lora_dropout", "0.2", "--quantize", "nf4"]
    assert train(flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "4", "--save_steps", "2", *lora)) == 0
    assert verify(tmp_path) == 0
    capsys.readouterr()
    base.rename(tmp_path / "moved")
    assert verify(tmp_path) == 2
    assert str(base) in capsys.readouterr().err


def test_a_run_by_another_trainer_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (run / "checkpoint" / "r").glob("step-*"):
        state = folder / "trainer.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"method": "dpo"}))
        list_again(folder)
    assert verify(run) == 2
    assert "only its trainer takes its steps" in capsys.readouterr().err
