"""Staged offload on a GPU: the CPU tests' core, with pinned memory, streams and several ranks where there are GPUs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.staged.jobs import job, passed, run_jobs
from tests.engine.staged.test_nvme import infinity

pytestmark = pytest.mark.gpu
MODEL = {
    "preset": "llama-1b",
    "config_overrides": {
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 4096,
    },
}  # fmt: skip
"""Weights of up to 4 MiB, so that reads, copies and compute really overlap."""
GRADIENTS = {"slot_bytes": 1 << 20, "flight_bytes": 6 << 20}
SMALL = {"zero_optimization": {"stage3_param_persistence_threshold": 600, "sub_group_size": 2_000_000}}


def jobs_of(folder: Path, **run: Any) -> list[dict[str, Any]]:
    nvme, checkpoint = folder / "nvme", str(folder / "checkpoint")
    nvme.mkdir(parents=True, exist_ok=True)
    common: dict[str, Any] = {"model": MODEL, "config": SMALL, "min_bytes": 65536, **run}
    halves = [["train", 3], ["eval"], ["train", 3]]
    return [
        job("RAM", [["train", 3], ["save", checkpoint], ["eval"], ["train", 3]], **common),
        job("states", halves, zero=infinity(nvme, nvme_offload_params=False), **common),
        job("all", halves, zero=infinity(nvme), **common),
        job("gradients", halves, zero=infinity(nvme, nvme_offload_gradients=True), small=GRADIENTS, **common),
        job(
            "gradients, one micro-batch", halves, zero=infinity(nvme, nvme_offload_gradients=True), small=GRADIENTS,
            **common, gradient_accumulation_steps=1,
        ),
        job("RAM, one micro-batch", halves, **common, gradient_accumulation_steps=1),
        job("little staging", halves, zero=infinity(nvme), outcore={"staging_bytes": 1 << 24}, **common),
        job("not pinned", halves, zero={"zero_stage": "zero3", "pin_memory": False}, **common),
        job("parameters on the GPU", halves, zero={"zero_stage": "zero3", "offload_params": "none"}, **common),
        job("resumed on NVMe", [["load", checkpoint], ["train", 3]], zero=infinity(nvme), **common),
        job("stock", halves, outcore={"offload": "stock"}, **common),
    ]  # fmt: skip


def check(found: dict[str, Any]) -> None:
    ram = passed(found, "RAM")
    pairs = [(name, ram) for name in ("states", "all", "gradients", "little staging", "not pinned")]
    pairs += [("parameters on the GPU", ram), ("gradients, one micro-batch", passed(found, "RAM, one micro-batch"))]
    for name, same in pairs:
        other = passed(found, name)
        assert other["losses"] == same["losses"], name
        assert other["fingerprint"] == same["fingerprint"], name
        assert other["evals"] == same["evals"], name
    for name, count in (("gradients", 2), ("gradients, one micro-batch", 1)):
        moved = passed(found, name)["moved"]
        assert moved["gradient_written"] == 6 * count * moved["gradient_bytes"] > 0
        assert moved["gradient_read"] == 6 * (count - 1) * moved["gradient_bytes"]
    resumed = passed(found, "resumed on NVMe")
    assert resumed["losses"] == ram["losses"][3:] and resumed["fingerprint"] == ram["fingerprint"]
    for (loss, norm), (their_loss, their_norm) in zip(ram["losses"], passed(found, "stock")["losses"], strict=True):
        assert loss == pytest.approx(their_loss, rel=5e-3) and norm == pytest.approx(their_norm, rel=5e-2)


def test_residency_does_not_change_a_bit_on_a_gpu(tmp_path: Path) -> None:
    check(run_jobs(tmp_path / "jobs", jobs_of(tmp_path), device="cuda", timeout_s=800)[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one(tmp_path: Path) -> None:
    alone = run_jobs(tmp_path / "one", jobs_of(tmp_path / "a")[:1], device="cuda")[0]
    jobs = jobs_of(tmp_path / "b", per_device_train_batch_size=1)
    ranks = run_jobs(tmp_path / "two", jobs, world_size=2, device="cuda", timeout_s=800)
    check(ranks[0])
    for (loss, _), (one, _) in zip(ranks[0]["RAM"]["losses"], passed(alone, "RAM")["losses"], strict=True):
        assert loss == pytest.approx(one, rel=5e-3)
    half = [rank["all"]["moved"]["state_written"] for rank in ranks]
    assert half[0] == pytest.approx(half[1], rel=0.05)
