"""The main job with `--engine stream` in this process or in one that is killed at a chosen moment."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.forked import fork_server

REPOSITORY = Path(__file__).resolve().parents[4]
TEXT = "the quick brown fox jumps over the lazy dog and runs away from the {} {} bears\n"
SMALL_MODEL = (
    '{"num_hidden_layers":3,"hidden_size":64,"intermediate_size":160,"num_attention_heads":4,"num_key_value_heads":2}'
)
"""What makes the preset `tiny` a tenth of its size: with states on a drive a run then costs an eighth."""
FAST = "--seq_length 32 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --precision bf16 --run_name r"
FAST += " --engine stream --sample_steps 0 --sample_tokens 0 --eval_steps 0 --report_to none --logging_steps 100"
SMALL: dict[str, Any] = {"optimizer_backend": "torch", "optimizer_threads": 2, "chunk_numel": 1 << 14, "states": "fp32"}
SMALL |= {"slot_bytes": 1 << 18, "weight_read_ahead_bytes": 1 << 20, "state_ring_bytes": 1 << 20}
"""Python threads, so that a kill can be placed within an update; several chunks to a layer."""
OUR_ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")


def write_corpus(folder: Path) -> Path:
    path = folder / "a text.txt"
    path.write_text("\n\n".join(TEXT.format(i, i * i) * 12 for i in range(60)))
    return path


def flags(root: Path, corpus: Path, *extra: str) -> list[str]:
    folders = [f"--{name}_dir={root / name}" for name in ("checkpoint", "log", "export")]
    cache = f"--data_cache_dir={corpus.parent / 'cache'}"
    return [*FAST.split(), "--config_overrides", SMALL_MODEL, "--dataset", str(corpus), *folders, cache, *extra]


def states(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for family in ("model", "master", "exp_avg", "exp_avg_sq"):
        for file in sorted(folder.glob(f"{family}-*.safetensors")):
            found.update({f"{family}:{name}": value for name, value in load_file(file).items()})
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return len(a) > 0 and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def losses(root: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (root / "log/r/metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "event" not in line}


TRIED: dict[tuple, str] = {}
"""What trials of tiny copies said of a config; they cost a third of such a run and know nothing else of it."""


def try_once(patch: pytest.MonkeyPatch) -> None:
    """Have each config tried once in this process, before a run and in its engine."""
    from outcore.engine import decide
    from outcore.engine.stream import blueprint

    asked, copied = decide.why_config_not_trained, blueprint.try_tiny_copy

    def of_config(config: Any, *args: Any, **more: Any) -> str:
        key = (config.to_json_string(use_diff=False), args, tuple(more.items()))
        if key not in TRIED:
            TRIED[key] = asked(config, *args, **more)
        return TRIED[key]

    def of_model(loaded: Any, trial: Any) -> None:
        key = (loaded.config.to_json_string(use_diff=False), type(loaded.model).__name__)
        if key not in TRIED or hasattr(loaded.model, "peft_config"):
            copied(loaded, trial)
            TRIED[key] = ""

    patch.setattr(decide, "why_config_not_trained", of_config)
    patch.setattr(blueprint, "try_tiny_copy", of_model)


@contextmanager
def stream_settings(**fields: Any) -> Iterator[None]:
    """The main job's streaming engine gets these settings as well, whether or not there is a flag for them."""
    from outcore.engine.stream.decision import decide as decision

    original = decision.build_stream_engine

    def built(loaded: Any, settings: Any, **more: Any) -> Any:
        return original(loaded, replace(settings, **{**SMALL, **fields}), **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decision, "build_stream_engine", built)
        yield


def train(argv: list[str], **fields: Any) -> int:
    """The main job in this process; its exit code."""
    from outcore.train.loop import TrainingLoop
    from outcore.train.run import main

    os.chdir(REPOSITORY)
    with stream_settings(**fields), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "plot", lambda trainer: None)  # loss.png takes longer than the steps
        try_once(patch)
        return main(argv)


# --- processes that are killed

COUNTS: dict[str, Callable[..., bool]] = {
    "kept weights": lambda result, arena, chunk, param: arena.weights(chunk.unit) is not None,
    "waiting weights": lambda result, arena, unit: result is not None,
}
"""Whether a call counts, by what it gave and got: new parameters wait where their gradient was."""


def _count_down(owner: Any, name: str, moment: str, count: int, armed: Callable[[], bool]) -> None:
    """SIGKILL for this process after the `count`-th call of owner.name once `armed`, or in its middle."""
    original = getattr(owner, name)
    left = [count]

    def counted(*args: Any, **kwargs: Any) -> Any:
        if moment == "drive write" and left[0] == 1 and armed():  # a torn one
            file, piece, offset = args
            args = (file, piece[: len(piece) // 2 // 4096 * 4096], offset)
        result = original(*args, **kwargs)
        if armed() and COUNTS.get(moment, lambda *_: True)(result, *args):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)


def _place_kill(moment: str, count: int, after_step: int) -> None:
    from outcore.checkpoint import folders as checkpoint
    from outcore.checkpoint.manifest import Manifest
    from outcore.engine.stream import state
    from outcore.engine.stream.backward.layer import BackwardRunner
    from outcore.engine.stream.gradients.arena import GradientArena
    from outcore.engine.stream.gradients.download import GradientDownload
    from outcore.flow.layers import PartRunner
    from outcore.optim import reference as torch_backend
    from outcore.storage.block_file import BlockFile
    from outcore.train.loop import TrainingLoop

    places: dict[str, tuple[Any, str]] = {
        "forward": (PartRunner, "layer"), "backward": (BackwardRunner, "layer"), "gradient": (GradientDownload, "ship"),
        "update": (torch_backend, "update_chunk"), "drive write": (BlockFile, "write_from"),
        "shard": (state, "write_shard"), "manifest": (Manifest, "save"), "renamed": (checkpoint, "rotate"),
        "between": (TrainingLoop, "train_one"), "kept weights": (GradientArena, "keep_weights"),
        "waiting weights": (GradientArena, "weights"),
    }  # fmt: skip
    done = [0]
    owner, name = places[moment]
    _count_down(owner, name, moment, count, lambda: done[0] >= after_step)
    original = TrainingLoop.train_one

    def counts(self: TrainingLoop, batches: Any) -> Any:
        result = original(self, batches)
        done[0] = self.step
        return result

    TrainingLoop.train_one = counts  # type: ignore[method-assign]


def _child(argv: list[str], fields: dict[str, Any], kill: tuple[str, int, int] | None, log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for name in OUR_ENVIRONMENT:
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    if kill is not None:
        _place_kill(*kill)
    raise SystemExit(train(argv, **fields))


def start(argv: list[str], log: Path, kill: tuple[str, int, int] | None = None, **fields: Any) -> Any:
    """The main job in a process of its own. `kill`: (moment, its how-maniest time, once this step is done)."""
    process = fork_server().Process(target=_child, args=(argv, fields, kill, str(log)), daemon=True)
    process.start()
    return process


def run_killed(argv: list[str], log: Path, kill: tuple[str, int, int], **fields: Any) -> None:
    """Until it has killed itself."""
    process = start(argv, log, kill, **fields)
    process.join(600)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"was not killed at {kill}:\n{log.read_text()[-3000:]}")
    assert process.exitcode == -signal.SIGKILL, f"{kill}: {process.exitcode}\n{log.read_text()[-3000:]}"
