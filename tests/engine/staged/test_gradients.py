"""Gradients on NVMe: the bits of gradients in RAM, the bytes that were said, and every fault stops the run."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import outcore.engine.deepspeed.staged.gradients as room
import outcore.engine.deepspeed.staged.optimizer as homes_room
from outcore.engine.base import EngineError
from outcore.engine.deepspeed.staged.gradients import StagedGradients
from outcore.engine.deepspeed.staged.optimizer import StagedOptimizer
from outcore.flow.weights import Scratch
from outcore.staging import PinnedPool
from outcore.storage import StorageError, open_engine
from tests.engine.staged.jobs import job, passed, run_jobs, same
from tests.engine.staged.test_nvme import MIB, SMALL, infinity
from tests.refused import refused
from tests.storage.faulty import FaultyEngine

HALVES = [["train", 1], ["eval"], ["train", 1]]
STEPS = 2
SMALL_CHUNKS = {"chunk_numel": 4096, "flight_bytes": 40_000}
BACKWARD_READS = 38
"""Slots of 8 KiB that the second micro-batch of a step reads, before the update does; each of both writes as many."""
FAULTS = {
    "the drive is full": ["fail", "write", {"errno": errno.ENOSPC, "store": "gradients"}],
    "the last write fails": ["fail", "write", {"store": "gradients", "after": 2 * BACKWARD_READS - 1}],
    "a read fails": ["fail", "read", {"store": "gradients"}],
    "a read fails in the update": ["fail", "read", {"store": "gradients", "after": BACKWARD_READS + 7}],
    "a read comes back short": ["short", "read", {"got": 512, "store": "gradients"}],
}
PAIRS = {"two micro-batches": {}, "one micro-batch": {"gradient_accumulation_steps": 1}}
"""Runs with gradients in RAM and on the drive that differ in nothing else: fields of RunFacts."""
PRESETS = {"tiny-moe": {}, "tiny-t5": {"num_layers": 1}}
"""Mixture of experts, encoder-decoder: what is smaller than in the preset."""
SUMMED_IN_FP32 = {**SMALL, "data_types": {"grad_accum_dtype": "fp32"}}


def on_drive(nvme: Path, **more: Any) -> dict[str, Any]:
    return infinity(nvme, nvme_offload_gradients=True, **more)


def test_ranks_agree_which_gradients_go_to_the_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank's share of the first has one element less, which would keep its gradient in RAM on that rank."""
    monkeypatch.setattr(room, "MIN_BYTES", 4140)
    params = [
        SimpleNamespace(ds_id=1, ds_numel=6208, partition_numel=lambda: 2070),
        SimpleNamespace(ds_id=2, ds_numel=6207, partition_numel=lambda: 2069),
    ]
    optimizer = SimpleNamespace(gradient_accumulation_dtype=torch.bfloat16)
    found = []
    for rank in range(3):
        monkeypatch.setattr(homes_room.dist, "get_rank", lambda rank=rank: rank)
        found.append(StagedOptimizer._large_shares(optimizer, params))  # type: ignore[arg-type]
    assert found == [{1: 2070}, {1: 2070}, {1: 2068}]


def jobs_of_pairs(pairs: dict[str, dict[str, Any]], zero: dict[str, Any]) -> list[dict[str, Any]]:
    jobs = []
    for name, run in pairs.items():
        jobs.append(job(f"RAM, {name}", HALVES, config=SMALL, **run))
        jobs.append(job(f"NVMe, {name}", HALVES, zero=zero, config=SMALL, small=SMALL_CHUNKS, **run))
    return jobs


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("staged-gradients")
    nvme = folder / "nvme"
    saved = str(folder / "saved")
    zero = on_drive(nvme)
    jobs = [
        *jobs_of_pairs(PAIRS, zero),
        job("parameters in RAM", HALVES, zero=on_drive(nvme, nvme_offload_params=False), config=SMALL),
        job(
            "part of the states in RAM", HALVES, config=SMALL, zero=on_drive(nvme, nvme_offload_params=False),
            outcore={"staging_bytes": 64 * MIB, "ram_budget_gib": 3 + (65.12 + 128) / 1024},
        ),
        job("small ones in RAM", HALVES, zero=zero, config=SMALL, min_bytes=15_000),
        job("RAM, summed in fp32", HALVES, config=SUMMED_IN_FP32),
        job("NVMe, summed in fp32", HALVES, zero=zero, config=SUMMED_IN_FP32, small=SMALL_CHUNKS),
        job("first half", [["train", 1], ["save", saved]], zero=zero, config=SMALL),
        job("resumed", [["load", saved], ["train", 1]], zero=zero, config=SMALL),
        job("resumed in RAM", [["load", saved], ["train", 1]], config=SMALL),
    ]  # fmt: skip
    for preset, smaller in PRESETS.items():
        go, model = [["train", 2]], {"preset": preset, "config_overrides": {"vocab_size": 512, **smaller}}
        jobs.append(job(f"RAM, {preset}", go, model=model, config=SMALL))
        small = {**SMALL_CHUNKS, "slot_bytes": 32768, "chunk_numel": 32768}
        jobs.append(job(f"NVMe, {preset}", go, model=model, zero=zero, config=SMALL, min_bytes=65536, small=small))
    for name, fault in FAULTS.items():
        do = [["train", 1], ["fault", *fault], ["train", 1]]
        jobs.append(job(name, do, zero=zero, config=SMALL, small=SMALL_CHUNKS) | {"may_fail": True})
    jobs.append(job("after the faults", [["load", saved], ["train", 1]], zero=zero, config=SMALL))
    found = run_jobs(folder / "jobs", jobs)[0]
    found["left on the drive"] = [str(path) for path in nvme.rglob("*") if path.is_file()]
    return found


@pytest.mark.more
@pytest.mark.parametrize("name", [*PAIRS, "summed in fp32"])
def test_the_drive_does_not_change_a_bit(results: dict[str, Any], name: str) -> None:
    drive = passed(results, f"NVMe, {name}")
    same(drive, passed(results, f"RAM, {name}"))
    assert drive["moved"]["gradient_bytes"] > 0
    assert drive["losses"] != passed(results, "NVMe, two micro-batches")["losses"] or name == "two micro-batches"


@pytest.mark.more
@pytest.mark.parametrize(
    "name", ["parameters in RAM", "part of the states in RAM", "small ones in RAM"],
)  # fmt: skip
def test_nor_does_what_else_is_on_the_drive(results: dict[str, Any], name: str) -> None:
    found = passed(results, name)
    same(found, passed(results, "RAM, two micro-batches"))
    gradient_bytes, all_bytes = (
        result["moved"]["gradient_bytes"] for result in (found, passed(results, "NVMe, two micro-batches"))
    )
    assert 0 < gradient_bytes < all_bytes if name == "small ones in RAM" else gradient_bytes == all_bytes
    if name == "part of the states in RAM":
        assert 0 < found["nvme_state_bytes"] < found["state_bytes"]


@pytest.mark.more
@pytest.mark.parametrize(("name", "count"), [("one micro-batch", 1), ("two micro-batches", 2)])
def test_each_micro_batch_writes_once_and_all_but_the_first_read(results, name, count):
    moved = passed(results, f"NVMe, {name}")["moved"]
    assert moved["gradient_written"] == STEPS * count * moved["gradient_bytes"]
    assert moved["gradient_read"] == STEPS * (count - 1) * moved["gradient_bytes"]  # nothing was read ahead in vain


@pytest.mark.more
def test_the_update_reads_gradients_once(results: dict[str, Any]) -> None:
    """Those of all steps; of the states at least the first step's, and no more than every step's."""
    drive = passed(results, "parameters in RAM")
    moved, blocks = drive["moved"], 30 * 4096
    update_reads = moved["state_read"] - STEPS * moved["gradient_bytes"]
    assert drive["state_bytes"] <= update_reads <= STEPS * (drive["state_bytes"] + blocks)


@pytest.mark.more
def test_a_checkpoint_continues_bit_by_bit(results: dict[str, Any]) -> None:
    for name in ("resumed", "resumed in RAM", "after the faults"):
        same(passed(results, name), passed(results, "RAM, two micro-batches"), trained=1)


@pytest.mark.more
@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_of_the_drive_stops_the_run_with_the_reason(results: dict[str, Any], name: str) -> None:
    result = passed(results, name)
    assert "stopped" in result, "the run went on as if nothing had happened"
    kind, message = result["stopped"]
    assert kind == ("EngineError" if name.endswith("in the update") else "StorageError"), message
    expected = "ENOSPC" if "full" in name else "EIO" if "fails" in name else "wanted"
    assert expected in message and "gradients" in message, message


@pytest.mark.more
def test_nothing_is_left_on_the_drive(results: dict[str, Any]) -> None:
    assert results["left on the drive"] == []


@pytest.mark.more
@pytest.mark.parametrize("preset", PRESETS)
def test_mixture_of_experts_and_encoder_decoder(results: dict[str, Any], preset: str) -> None:
    drive = passed(results, f"NVMe, {preset}")
    same(drive, passed(results, f"RAM, {preset}"))
    assert drive["moved"]["gradient_bytes"] > 0 and drive["moved"]["params_on_nvme"] > 0


@pytest.mark.more
def test_two_ranks_keep_a_share_each(tmp_path: Path, results: dict[str, Any]) -> None:
    nvme = tmp_path / "nvme"
    go = [["train", 2]]
    jobs = [
        job("NVMe", go, zero=on_drive(nvme), config=SMALL, small=SMALL_CHUNKS, per_device_train_batch_size=1),
        job("RAM", go, config=SMALL, per_device_train_batch_size=1),
    ]
    ranks = run_jobs(tmp_path / "jobs", jobs, world_size=2)
    whole = passed(results, "NVMe, two micro-batches")["moved"]["gradient_bytes"]
    for rank in ranks:
        same(passed(rank, "NVMe"), passed(ranks[0], "RAM"))
        assert passed(rank, "NVMe")["moved"]["gradient_bytes"] == pytest.approx(whole / 2, rel=0.3)


# --- StagedGradients alone


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(room, "GRADIENT_SLOT_BYTES", 4096)
    monkeypatch.setattr(room, "GRADIENT_SLOTS", 2)
    engine = FaultyEngine(open_engine("posix"))
    with PinnedPool(MIB, device="cpu") as pool, Scratch([tmp_path], engine) as scratch:
        gradients = StagedGradients(pool, torch.device("cpu"))
        gradients.open(scratch, {1: 3000, 2: 5001, 3: 10}, torch.bfloat16)
        yield gradients, engine, scratch
        assert gradients.close()
    engine.close()


def add(gradients: StagedGradients, ds_id: int, part: torch.Tensor, micro_step: int, *, is_last: bool) -> torch.Tensor:
    return gradients.add(ds_id, part, micro_step=micro_step, is_first=micro_step == 0, is_last=is_last)


def sums_of(gradients: StagedGradients, order: list[int], micro_steps: int, seed: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    numel = {1: 3000, 2: 5001, 3: 10}
    expected: dict[int, torch.Tensor] = {}
    for micro_step in range(micro_steps):
        for ds_id in order:
            part = torch.randn(numel[ds_id], generator=generator).bfloat16()
            expected[ds_id] = expected[ds_id] + part if micro_step else part.clone()
            value = add(gradients, ds_id, part, micro_step, is_last=micro_step == micro_steps - 1)
            assert torch.equal(value, expected[ds_id])
            part.fill_(float("nan"))  # DeepSpeed uses that memory again
    gradients.settle()
    return expected


def stored(gradients: StagedGradients, ds_id: int, numel: int, start: int = 0) -> torch.Tensor:
    place = gradients.place(ds_id, start)
    found = torch.empty(numel - start, dtype=place.dtype)
    place.store.submit_read(place.name, found.view(torch.uint8), place.offset_bytes).wait(60)
    return found


def test_sums_lie_on_the_drive_whatever_the_order(drive: Any) -> None:
    gradients, _, _ = drive
    for seed, order in enumerate([[3, 2, 1], [3, 2, 1], [1, 3, 2], [2, 1, 3]]):
        expected = sums_of(gradients, order, micro_steps=1 + seed % 3, seed=seed)
        for ds_id, value in expected.items():
            assert torch.equal(stored(gradients, ds_id, len(value)), value)
    assert torch.equal(stored(gradients, 2, 5001, 2048), expected[2][2048:])


def test_a_share_that_only_later_micro_batches_use_begins_there(drive: Any) -> None:
    gradients, _, _ = drive
    sums_of(gradients, [1, 2, 3], micro_steps=2, seed=0)  # what came after what, and old values on the drive
    one, two = torch.full((3000,), 2.0).bfloat16(), torch.full((5001,), 3.0).bfloat16()
    gradients.add(1, one, micro_step=0, is_first=True, is_last=False)
    gradients.add(1, one, micro_step=1, is_first=False, is_last=False)
    gradients.add(2, two, micro_step=1, is_first=True, is_last=False)
    gradients.add(2, two, micro_step=2, is_first=False, is_last=True)
    gradients.settle()
    assert torch.equal(stored(gradients, 1, 3000), 2 * one) and torch.equal(gradients.read(1), 2 * one)
    assert torch.equal(stored(gradients, 2, 5001), 2 * two)
    assert torch.equal(gradients.zeros(3), torch.zeros(10).bfloat16()) and not gradients.zeros(2).any()


def test_a_failed_write_is_raised_before_the_update(drive: Any) -> None:
    gradients, engine, _ = drive
    engine.fail("write", times=None)
    add(gradients, 1, torch.ones(3000), 0, is_last=True)
    refused(StorageError, "EIO", gradients.settle)


def test_a_failed_write_is_not_forgotten_when_the_share_comes_again(drive: Any) -> None:
    gradients, engine, _ = drive
    engine.fail("write", times=1)
    add(gradients, 3, torch.ones(10), 0, is_last=True)
    refused(StorageError, "EIO", lambda: add(gradients, 3, torch.ones(10), 0, is_last=True))


def test_a_failed_read_ahead_is_raised_where_the_sum_needs_it(drive: Any) -> None:
    gradients, engine, _ = drive
    sums_of(gradients, [1, 2], micro_steps=2, seed=0)
    add(gradients, 1, torch.ones(3000), 0, is_last=False)
    add(gradients, 2, torch.ones(5001), 0, is_last=False)
    engine.fail("read", times=None)
    refused(StorageError, "EIO", lambda: add(gradients, 1, torch.ones(3000), 1, is_last=True))


def test_room_is_reserved_at_once_and_a_full_drive_is_said(drive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, _, scratch = drive
    assert scratch.size_bytes >= 8192 + 12288 + 4096
    refused(EngineError, "no room for the gradients", lambda: gradients.open(scratch, {1: 1 << 45}, torch.bfloat16))
