"""DeepSpeed with outcore's staged offload: against stock DeepSpeed, against itself, over checkpoints and ranks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.engine.base import EngineError
from outcore.engine.deepspeed.staged.binding import check_version
from outcore.engine.deepspeed.staged.optimizer import StagedOptimizer
from outcore.sizing.staged import NORM_NUMEL
from tests.engine.staged.jobs import TINY, job, passed, run_jobs, same

CHUNKED = ["a head of its own", "a tied head"]


def chunked_jobs(do: list) -> list[dict[str, Any]]:
    """The head in one chunk, where autograd makes its gradient, and in four, where `head_gradient` does."""
    jobs = []
    for tied in (False, True):
        model = {**TINY, "config_overrides": {**TINY["config_overrides"], "tie_word_embeddings": tied}}
        for name, chunks, stage in (("one chunk", 1, "zero3"), ("four chunks", 4, "zero3"), ("stage 1", 4, "zero1")):
            zero, small = {"zero_stage": stage}, {"num_chunks": chunks}
            jobs.append(job(f"{CHUNKED[tied]}, {name}", do, model=model, zero=zero, small=small, precision="fp32"))
    return jobs


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything in RAM, one rank, one child process for all of it."""
    folder = tmp_path_factory.mktemp("staged")
    checkpoint = str(folder / "checkpoint")
    go = [["train", 4]]
    fp32 = {"precision": "fp32"}
    jobs = [
        job("stock", go, outcore={"offload": "stock"}),
        job("split", [["train", 2], ["save", checkpoint], ["eval"], ["train", 2], ["eval"]]),
        job("fp32 states", go, outcore={"state_format": "fp32"}),
        job("resumed", [["load", checkpoint], ["train", 2], ["eval"]]),
        job("resumed in another format", [["load", checkpoint], ["train", 2]], outcore={"state_format": "fp32"}),
        job("resumed by stock", [["load", checkpoint], ["train", 2]], outcore={"offload": "stock"}),
        job("stock fp32", go, outcore={"offload": "stock"}, **fp32), job("staged fp32", go, **fp32),
        job("parameters on the device", go, zero={"zero_stage": "zero3", "offload_params": "none"}),
        job("no clipping", go, max_grad_norm=0.0),
        job("no clipping, stock", go, outcore={"offload": "stock"}, max_grad_norm=0.0),
        job("8-bit", go, outcore={"state_format": "split8"}), *chunked_jobs([["train", 3]]),
        job("only stock", [["train", 1]], config={"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
    ]  # fmt: skip
    return run_jobs(folder, jobs)[0]


@pytest.mark.more
def test_losses_and_norms_are_those_of_stock_deepspeed(one_rank: dict[str, Any]) -> None:
    for ours, stock, tolerance in (
        ("split", "stock", 5e-3),
        ("staged fp32", "stock fp32", 1e-5),
        ("no clipping", "no clipping, stock", 5e-3),
    ):
        mine, theirs = passed(one_rank, ours), passed(one_rank, stock)
        assert mine["optimizer"] == "StagedOptimizer" and theirs["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"
        for (loss, norm), (their_loss, their_norm) in zip(mine["losses"], theirs["losses"], strict=True):
            assert loss == pytest.approx(their_loss, rel=tolerance)
            assert norm == pytest.approx(their_norm, rel=10 * tolerance)
    clipped, free = passed(one_rank, "split"), passed(one_rank, "no clipping")
    assert clipped["losses"][0][1] > 1.0  # the norm is above the limit, so clipping is at work
    assert clipped["losses"][-1] != free["losses"][-1]


def test_a_norm_needs_little_memory_beside_the_gradient() -> None:
    class Largest(TorchDispatchMode):
        wide = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
                self.wide = max(self.wide, out.numel())
            return out

    gradient = torch.full((2 * NORM_NUMEL + 3,), 0.5, dtype=torch.bfloat16)
    with Largest() as seen:
        norm = StagedOptimizer._constant_buffered_norm2(StagedOptimizer.__new__(StagedOptimizer), gradient)
    assert seen.wide == NORM_NUMEL and float(norm) == pytest.approx(0.5 * math.sqrt(gradient.numel()), rel=1e-12)


@pytest.mark.more
def test_formats_and_homes_do_not_change_a_bit(one_rank: dict[str, Any]) -> None:
    for name in ("fp32 states", "parameters on the device"):
        same(passed(one_rank, name), passed(one_rank, "split"))


@pytest.mark.more
def test_a_resumed_run_continues_bit_by_bit_in_any_format(one_rank: dict[str, Any]) -> None:
    split = passed(one_rank, "split")
    resumed = passed(one_rank, "resumed")
    same(resumed, split, trained=2)
    assert resumed["evals"] == split["evals"][1:]
    same(passed(one_rank, "resumed in another format"), split, trained=2)


@pytest.mark.more
def test_stock_deepspeed_resumes_our_checkpoint(one_rank: dict[str, Any]) -> None:
    theirs = passed(one_rank, "resumed by stock")
    for (loss, _), (ours, _) in zip(theirs["losses"], passed(one_rank, "split")["losses"][2:], strict=True):
        assert loss == pytest.approx(ours, rel=5e-3)


@pytest.mark.more
def test_8_bit_moments_train(one_rank: dict[str, Any]) -> None:
    eight, exact = passed(one_rank, "8-bit"), passed(one_rank, "split")
    assert eight["losses"][0] == exact["losses"][0] and eight["losses"] != exact["losses"]
    assert eight["losses"][-1][0] == pytest.approx(exact["losses"][-1][0], rel=0.02)


@pytest.mark.more
@pytest.mark.parametrize("case", ["four chunks", "stage 1"])
@pytest.mark.parametrize("head", CHUNKED)
def test_chunks_of_the_head_do_not_change_training(one_rank: dict[str, Any], head: str, case: str) -> None:
    whole, chunked = passed(one_rank, f"{head}, one chunk"), passed(one_rank, f"{head}, {case}")
    for mine, theirs in zip(chunked["losses"], whole["losses"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.more
def test_what_only_deepspeed_does_is_left_to_it_and_said(one_rank: dict[str, Any]) -> None:
    result = passed(one_rank, "only stock")
    assert not result["staged"] and result["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"
    assert any("bf16_master_weights_and_grads" in line for line in result["warnings"])


@pytest.mark.more
def test_two_ranks_train_as_one(tmp_path: Path, one_rank: dict[str, Any]) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    jobs = [
        job("two", [["train", 2], ["save", checkpoint], ["train", 2]], per_device_train_batch_size=1),
        job("resumed", [["load", checkpoint], ["train", 2]], per_device_train_batch_size=1),
    ]
    ranks = run_jobs(tmp_path / "two", jobs, world_size=2)
    assert ranks[0]["two"].get("fingerprint") == ranks[1]["two"].get("fingerprint")
    two = passed(ranks[0], "two")
    same(passed(ranks[0], "resumed"), two, trained=2)
    for (loss, norm), (their_loss, their_norm) in zip(two["losses"], passed(one_rank, "split")["losses"], strict=True):
        assert loss == pytest.approx(their_loss, rel=5e-3) and norm == pytest.approx(their_norm, rel=5e-2)
    alone = run_jobs(tmp_path / "one", [job("alone", [["load", checkpoint], ["train", 2]])])[0]
    for (loss, _), (their_loss, _) in zip(passed(alone, "alone")["losses"], two["losses"][2:], strict=True):
        assert loss == pytest.approx(their_loss, rel=5e-3)


def test_an_untested_deepspeed_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match=r"DeepSpeed 0\.20\.0 is installed.*tested with 0\.19\.8.*stock"):
        check_version("0.20.0")
    check_version("0.19.8")
    check_version("0.19.8+cu128")
