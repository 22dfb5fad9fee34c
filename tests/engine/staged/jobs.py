"""Jobs for `child.py`, and how its processes are started."""

import json
import os
from pathlib import Path
from typing import Any

from outcore.common.ports import free_port
from tests.forked import start_script

CHILD = Path(__file__).with_name("child.py")
TINY = {
    "preset": "llama-1b",
    "config_overrides": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128,
    },
}  # fmt: skip
"""Weights of some KiB."""


def job(
    name: str, do: list, *, model: dict | None = None, zero: dict | None = None, outcore: dict | None = None,
    config: dict | None = None, min_bytes: int = 4096, small: dict | None = None, **run: Any,
) -> dict[str, Any]:  # fmt: skip
    """One entry of jobs.json; `outcore` is that block of deepspeed_config.json, `config` its other keys, `small` sizes
    to the measure of tiny models."""
    if zero is not None and outcore is None:
        outcore = {"staging_bytes": 4 << 20}  # the default of a GB would be filled with zeros for each job
    return {
        "name": name, "model": model or TINY, "zero": zero or {"zero_stage": "zero3"},
        "config": {**(config or {}), "outcore": outcore or {}}, "run": run, "do": do,
        "min_bytes": min_bytes, **(small or {}),
    }  # fmt: skip


def environment(
    rank: int = 0, world_size: int = 1, port: int | None = None, device: str = "cpu"
) -> dict[str, str]:  # fmt: skip
    """Of a child process: this process's own without a launcher's marks."""
    path = os.pathsep.join(filter(None, [str(CHILD.parents[3]), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "STAGED_DEVICE": device}
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    else:
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    ranks = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port or free_port(),
    }  # fmt: skip
    return {**env, **{name: str(value) for name, value in ranks.items()}}


def run_jobs(
    folder: Path, jobs: list[dict[str, Any]], world_size: int = 1, timeout_s: float = 500, device: str = "cpu"
) -> list[dict]:
    """Results of every rank, by job name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    port = free_port()
    children = [
        start_script(CHILD, [str(folder)], environment(rank, world_size, port, device), folder / f"log-{rank}.txt")
        for rank in range(world_size)
    ]
    try:
        codes = [child.wait(timeout_s) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert codes == [0] * world_size, (folder / "log-0.txt").read_text()[-4000:]
    return [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(world_size)]


def passed(results: dict[str, Any], name: str) -> dict[str, Any]:
    """A job's result; fails the test with the child's trace when the job failed."""
    result = results[name]
    assert "error" not in result, result["trace"]
    return result


def same(one: dict[str, Any], other: dict[str, Any], trained: int = 0) -> None:
    """Both ended in the same bits; `one` began where the other had made `trained` steps."""
    assert repr(one["losses"]) == repr(other["losses"][trained:])  # a skipped step's norm is not a number
    assert one["fingerprint"] == other["fingerprint"]
    if not trained and "evals" in one and "evals" in other:
        assert one["evals"] == other["evals"]
