"""What a run does with drives, a piece each and without a model to train: save, export, resume, caches, scratch.

Each prepares what was there before, works while a fault may strike, and says what it made; errors become words by the
same function as in the program. `check` looks at what is left, as the next start would.
"""

import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from outcore.checkpoint import (
    ShardReader,
    TensorPlan,
    newest_checkpoint,
    open_checkpoint,
    save_checkpoint,
    write_shard,
)
from outcore.checkpoint.export import export_checkpoint
from outcore.common import explain_error
from outcore.common.listing import damaged_weights
from outcore.data import DataSettings, load_or_train_tokenizer
from outcore.data.cache import open_or_build
from outcore.flow.weights import Scratch
from outcore.monitor import MetricsLog
from outcore.storage import TensorSpec

SHARD = "model-00001-of-00001.safetensors"
N_BYTES = 3 << 18


class Phase(NamedTuple):
    """`prepare(root)`; `work(root)`: what it says; `check(root, done)`: AssertionError where something was lost."""

    prepare: Callable[[Path], None]
    work: Callable[[Path], str]
    check: Callable[[Path, bool], None]


def run_phase(name: str, root: str, fault: str) -> int:
    """Exit code: 0 done, 1 told, 3 a trace (printed)."""
    phase, folder = PHASES[name], Path(root)
    os.environ["OUTCORE_FAULT"] = fault
    try:
        print(f"done: {phase.work(folder)}")
        return 0
    except Exception as error:
        words = explain_error(error, name)
        if words is None and not isinstance(error, RuntimeError | ValueError):
            import traceback

            traceback.print_exc()
            return 3
        print(f"error: {words or error}")
        return 1
    finally:
        os.environ["OUTCORE_FAULT"] = ""
        sys.stdout.flush()


# --- checkpoints


def _value(step: int) -> torch.Tensor:
    return torch.full((N_BYTES // 4,), float(step))


def save(root: Path, step: int, keep: int = 2, say: Callable[[str], None] = print) -> None:
    def write(folder: Path, on_file: Callable[[Path, int], None]) -> dict[str, Any]:
        plan = TensorPlan("a", torch.float32, (N_BYTES // 4,))
        on_file(folder / SHARD, write_shard(folder / SHARD, [plan], lambda name: _value(step)))
        (folder / "export").mkdir()
        (folder / "export/tokenizer_config.json").write_text('{"model_max_length": 9}')
        return {"engine": {}}

    save_checkpoint(root / "run", step, write, needed_bytes=N_BYTES, keep=keep, say=say)


def _saved(root: Path) -> None:
    save(root, 1)
    save(root, 2)


def _save(root: Path) -> str:
    save(root, 3)
    return "step 3"


def _check_saves(root: Path, done: bool) -> None:
    said: list[str] = []
    found = newest_checkpoint(root / "run", said.append)
    assert found is not None and found.step == 3 if done else found is not None and found.step in (2, 3), said
    assert not said and not found.damaged_export, (said, found.damaged_export)
    assert torch.equal(ShardReader(found.path, "model").read("a"), _value(found.step))


def _resume(root: Path) -> str:
    found = newest_checkpoint(root / "run", lambda words: print(f"note: {words}"))
    assert found is not None
    value = ShardReader(found.path, "model").read("a")
    assert torch.equal(value, _value(found.step)), "other numbers than were saved"
    return f"step {found.step}"


def _check_kept(root: Path, done: bool) -> None:
    for step in (1, 2):
        assert open_checkpoint(root / f"run/step-0000000{step}").damaged_export == ()


def _export(root: Path) -> str:
    found = newest_checkpoint(root / "run", lambda words: print(f"note: {words}"))
    assert found is not None
    export_checkpoint(found, root / "final_model/r")
    return "exported"


def _check_export(root: Path, done: bool) -> None:
    folder = root / "final_model/r"
    assert folder.is_dir() or not done
    if folder.is_dir():
        assert damaged_weights(folder) == ([], [])
        assert sorted(path.name for path in folder.iterdir())[0] == "model.safetensors"
    _check_kept(root, done)


# --- caches and logs


def _build(root: Path) -> tuple[Any, bool]:
    def build(writer: Any) -> dict[str, Any]:
        writer.array("tokens", np.uint16).append(np.arange(30000, dtype=np.uint16))
        return {"rows": 3}

    return open_or_build(root / "cache/tokens", build, timeout_s=300.0, say=print, what="the tokens")


def _cache(root: Path) -> str:
    arrays, _ = _build(root)
    return f"tokens {zlib.crc32(arrays['tokens'].tobytes())} {arrays.meta}"


def _check_cache(root: Path, done: bool) -> None:
    arrays, _ = _build(root)
    assert np.array_equal(arrays["tokens"], np.arange(30000, dtype=np.uint16))


def _data(root: Path) -> DataSettings:
    return DataSettings(dataset=str(root / "text.txt"), cache_dir=str(root / "cache"), seq_length=32)


def _text(root: Path) -> None:
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)


def _tokenizer(root: Path) -> str:
    found = load_or_train_tokenizer(_data(root), vocab_size=512, say=print)
    return f"ids {found('a lazy dog')['input_ids']}"


def _check_tokenizer(root: Path, done: bool) -> None:
    said: list[str] = []
    found = load_or_train_tokenizer(_data(root), vocab_size=512, say=said.append)
    assert found.chat_template and len(said) <= 2, said


def _metrics(root: Path) -> str:
    with MetricsLog(root / "log/metrics.jsonl", resume_step=2) as log:
        log.write_header({"run": "r"})
        for step in (3, 4):
            log.write_step({"step": step, "loss": 1.0 / step})
        log.sync()
    return "4 steps"


def _some_metrics(root: Path) -> None:
    with MetricsLog(root / "log/metrics.jsonl") as log:
        log.write_header({"run": "r"})
        for step in (1, 2, 3):
            log.write_step({"step": step, "loss": 1.0 / step})


def _check_metrics(root: Path, done: bool) -> None:
    import json

    lines = [json.loads(line) for line in (root / "log/metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "event" not in line]
    assert steps[:2] == [1, 2] and steps == sorted(set(steps)) and (steps == [1, 2, 3, 4] or not done), steps


# --- scratch


def _scratch(root: Path) -> str:
    data = torch.arange(N_BYTES, dtype=torch.int32).to(torch.uint8)
    with Scratch([root / "drive"]) as scratch:
        store = scratch.store("states", [TensorSpec("states of layer 0", torch.uint8, (N_BYTES,))])
        for round_ in range(3):
            store.submit_write("states of layer 0", data + round_).wait(60)
            back = torch.empty_like(data)
            store.submit_read("states of layer 0", back).wait(60)
            assert torch.equal(back, data + round_), "other bytes than were written"
    return "scratch"


def _other_files(root: Path) -> None:
    """Of the user, in the folder that is given for scratch, and a link from it to a folder of his."""
    (root / "mine").mkdir(parents=True)
    (root / "mine/thesis.txt").write_text("years of work")
    (root / "drive/outcore-scratch/papers").mkdir(parents=True)
    (root / "drive/notes.txt").write_text("keep")
    (root / "drive/outcore-scratch/papers/draft.txt").write_text("keep")
    (root / "drive/outcore-scratch/link").symlink_to(root / "mine")


def _check_scratch(root: Path, done: bool) -> None:
    assert (root / "mine/thesis.txt").read_text() == "years of work"
    assert (root / "drive/notes.txt").read_text() == "keep"
    assert (root / "drive/outcore-scratch/papers/draft.txt").read_text() == "keep"


PHASES = {
    "save": Phase(_saved, _save, _check_saves), "resume": Phase(_saved, _resume, _check_kept),
    "export": Phase(_saved, _export, _check_export), "cache": Phase(lambda root: None, _cache, _check_cache),
    "tokenizer": Phase(_text, _tokenizer, _check_tokenizer), "metrics": Phase(_some_metrics, _metrics, _check_metrics),
    "scratch": Phase(_other_files, _scratch, _check_scratch),
}  # fmt: skip
