"""Parameters on the drive in the memory of their gradients: what is not read for it, and that no bit depends on it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from outcore.common.deadline import Deadline
from outcore.engine.deepspeed.staged.param_store import STORE_NAME, Loans
from outcore.engine.deepspeed.staged.params import StagedParams
from outcore.engine.deepspeed.staged.session import StagedMemory, StagedSession
from outcore.flow.weights import Scratch
from outcore.staging import PinnedPool
from outcore.storage import PosixEngine, TensorSpec
from tests.engine.staged.jobs import job, passed, run_jobs, same
from tests.engine.staged.test_nvme import SMALL as SMALL_SUB_GROUPS
from tests.engine.staged.test_nvme import infinity
from tests.storage.faulty import FaultyEngine

NOTHING_STAYS = {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
"""On the device between forward and backward, so that a micro-batch fetches everything twice."""
SMALL = {"zero_optimization": {**SMALL_SUB_GROUPS["zero_optimization"], **NOTHING_STAYS}}
ONE = {"gradient_accumulation_steps": 1}
LONG = [["train", 3], ["eval"], ["train", 2]]
SKIP = [["train", 1], ["loss scale", float("inf")], ["train", 1], ["loss scale", 1.0], ["train", 2]]
"""A step whose gradients overflow, with steps before and after it."""
SUMMED_IN_FP32 = {**SMALL, "data_types": {"grad_accum_dtype": "fp32"}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("staged-loans")
    nvme = folder / "nvme"
    zero, saved = infinity(nvme), str(folder / "saved")
    back = [["train", 1], ["save", saved], ["train", 2], ["load", saved], ["train", 2]]
    jobs = [
        job("drive, short", [["train", 1]], zero=zero, config=SMALL, **ONE),
        job("drive, two, short", [["train", 1]], zero=zero, config=SMALL),
        job("drive, two, long", LONG, zero=zero, config=SMALL),
    ]
    for where, more in (("RAM", {}), ("drive", {"zero": zero})):
        jobs += [
            job(f"{where}, long", LONG, config=SMALL, **more, **ONE),
            job(f"{where}, summed in fp32", LONG, config=SUMMED_IN_FP32, **more, **ONE),
            job(f"{where}, a step is skipped", SKIP, config=SMALL, **more, **ONE),
            job(f"{where}, going back", back, config=SMALL, **more, **ONE),
        ]
    late = [["train", 1], ["fault", "late writes", 0.3], ["train", 2]]
    jobs += [
        job("RAM, two", [["train", 3]], config=SMALL),
        job("drive, two, written late", late, zero=zero, config=SMALL),
    ]
    return run_jobs(folder / "jobs", jobs)[0]


@pytest.mark.more
@pytest.mark.parametrize("name", ["long", "summed in fp32", "a step is skipped", "going back"])
def test_loans_change_no_bit(results: dict[str, Any], name: str) -> None:
    same(passed(results, f"drive, {name}"), passed(results, f"RAM, {name}"))


def read_bytes(results: dict[str, Any], name: str) -> int:
    return passed(results, name)["moved"]["param_read"]


@pytest.mark.more
def test_with_one_micro_batch_only_the_first_step_reads_parameters(results: dict[str, Any]) -> None:
    """Later steps and evaluations find them where their gradients were."""
    assert 0 < read_bytes(results, "drive, short") == read_bytes(results, "drive, long")


def micro_batch_bytes(results: dict[str, Any]) -> int:
    """Read in forward and backward of one micro-batch: of the second in a first step, where nothing is lent yet."""
    return read_bytes(results, "drive, two, short") - read_bytes(results, "drive, short")


@pytest.mark.more
def test_with_two_micro_batches_the_second_reads_them(results: dict[str, Any]) -> None:
    later = read_bytes(results, "drive, two, long") - read_bytes(results, "drive, two, short")
    assert later == 4 * micro_batch_bytes(results) > 0  # four more steps; the evaluation reads nothing


@pytest.mark.more
def test_wider_sums_leave_no_memory_of_the_right_size(results: dict[str, Any]) -> None:
    more = read_bytes(results, "drive, summed in fp32") - read_bytes(results, "drive, short")
    assert more > 4.5 * micro_batch_bytes(results)  # four steps and the evaluation


@pytest.mark.more
def test_after_a_skipped_step_and_after_going_back_to_a_checkpoint_the_drive_is_read(results: dict[str, Any]) -> None:
    """Gradients of a skipped step are where they were; what was lent is older than the checkpoint."""
    assert not math.isfinite(passed(results, "drive, a step is skipped")["losses"][1][1])
    for name in ("a step is skipped", "going back"):
        more = read_bytes(results, f"drive, {name}") - read_bytes(results, "drive, short")
        assert more == micro_batch_bytes(results), name


@pytest.mark.more
def test_a_share_is_read_only_after_it_was_written(results: dict[str, Any]) -> None:
    """The update returns while shares are being written; the second micro-batch reads them."""
    same(passed(results, "drive, two, written late"), passed(results, "RAM, two"))


def new_share(ds_id: int) -> Any:
    return SimpleNamespace(
        ds_id=ds_id, dtype=torch.bfloat16, data=torch.empty(0), ds_status=ZeroParamStatus.NOT_AVAILABLE,
        ds_tensor=SimpleNamespace(data=None, status=PartitionedParamStatus.AVAILABLE),
    )  # fmt: skip


def test_a_lent_share_that_is_changed_from_outside_goes_to_the_drive(tmp_path: Path) -> None:
    """As DeepSpeed writes a share after `GatheredParameters(..., modifier_rank=0)`."""
    scratch = Scratch([tmp_path])
    pool = PinnedPool(1 << 16, device=torch.device("cpu"))
    store = scratch.store("parameters", [TensorSpec(STORE_NAME, torch.bfloat16, (1 << 14,))])
    params = StagedParams(store, pool, ahead_bytes=0, element_bytes=2, world_size=1)
    param = new_share(7)
    params.get_buffer(param, 3000)[:] = 1.0
    params.swap_out_and_release([param])
    gradient, waited = torch.full((3000,), 2.0, dtype=torch.bfloat16), []
    params.loans.lend(param, gradient)
    params.written_behind({7}, lambda: waited.append(True))
    param.ds_tensor.data[:] = 3.0
    params.swap_out_and_release([param])
    assert param.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE and 7 not in params.loans
    gradient[:] = 4.0
    params.swap_in([param], async_op=False)
    assert param.ds_tensor.data.tolist() == [3.0] * 3000 and waited == [True]
    params.close()
    scratch.close()
    pool.close()


def test_a_weight_that_lies_in_lent_memory_outlives_the_loan() -> None:
    """As DeepSpeed on the CPU gathers a single rank's share without a copy: a gradient may come while it is in use."""
    param, memory, absent = new_share(7), torch.full((8,), 2.0, dtype=torch.bfloat16), []
    loans = Loans(absent.append)
    loans.lend(param, memory)
    param.data = param.ds_tensor.data.view(2, 4)
    loans.reclaim(param)
    memory[:] = 4.0
    assert param.data.tolist() == [[2.0] * 4] * 2 and absent == [param] and 7 not in loans


def test_closing_ends_although_the_drive_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is still being read or written keeps its memory and its file."""
    drive = FaultyEngine(PosixEngine(2))
    session = StagedSession.__new__(StagedSession)
    session.gradients, session.scratch = None, Scratch([tmp_path], drive)
    session.memory = StagedMemory(torch.device("cpu"), home_bytes=0, staging_bytes=1 << 16, pin=False)
    pool = session.memory.pool
    assert pool is not None
    store = session.scratch.store("parameters", [TensorSpec(STORE_NAME, torch.bfloat16, (1 << 14,))])
    params = session.params = StagedParams(store, pool, ahead_bytes=0, element_bytes=2, world_size=1)
    shares = [new_share(ds_id) for ds_id in range(3)]
    for share in shares:
        params.get_buffer(share, 3000)[:] = 1.0
        params.swap_out_and_release([share])
    params.swap_in(shares[:1], async_op=False)
    held_bytes = pool.capacity_bytes - pool.free_bytes
    params.synchronize_writes()
    drive.delay(math.inf, "read")
    params.swap_in(shares[1:])
    session.close(Deadline(0.1))
    assert pool.capacity_bytes - pool.free_bytes == 2 * held_bytes // 3 > 0, (
        "only what nobody moves any more is given back"
    )
    assert session.scratch.folders[0].exists() and str(tmp_path) in caplog.text and "did not end" in caplog.text
    drive.let_go()
    drive.close()
