"""Staged offload with states and parameters on NVMe: the bits of RAM, through checkpoints, budgets, faults, ranks."""

import errno
from pathlib import Path
from typing import Any

import pytest

from tests.engine.staged.jobs import TINY, job, passed, run_jobs, same

SLOW = pytest.mark.slow
SMALL = {"zero_optimization": {"stage3_param_persistence_threshold": 100, "sub_group_size": 20_000}}
"""Sub-groups and persistence to the measure of the tiny model."""
MIB = 1 << 20
FAULTS = {
    "the drive is full": ["fail", "write", {"errno": errno.ENOSPC}], "a read fails": ["fail", "read", {}],
    "a write is short": ["short", "write", {"got": 512}], "the states are truncated": ["truncate", "optimizer states"],
    "the parameters are truncated": ["truncate", "parameters"],
}  # fmt: skip


def infinity(nvme: Path, **more: Any) -> dict[str, Any]:
    """Flags by which everything lies in this folder, which is made."""
    nvme.mkdir(exist_ok=True)
    return {
        "zero_stage": "infinity", "nvme_offload_path": str(nvme), "strict_offload": True, "max_in_cpu_gb": 0.0, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("staged-nvme")
    nvme = folder / "nvme"
    from_ram, from_nvme, exported = (str(folder / name) for name in ("from-ram", "from-nvme", "exported"))
    halves = [["train", 2], ["eval"], ["train", 2]]
    everything = infinity(nvme)
    small_staging = {"staging_bytes": 64 * MIB, "ram_budget_gib": 3 + 65.4 / 1024}
    jobs = [
        job("RAM", [["train", 2], ["save", from_ram], ["eval"], ["train", 2]], config=SMALL),
        job("states", halves, zero=infinity(nvme, nvme_offload_params=False), config=SMALL),
        job("parameters", halves, zero=infinity(nvme, nvme_offload_optimizer=False), config=SMALL),
        job(
            "all", [["train", 2], ["save", from_nvme], ["eval"], ["train", 2], ["export", exported]],
            zero=everything, config=SMALL,
        ),
        job("part", halves, zero=infinity(nvme, nvme_offload_params=False), config=SMALL, outcore=small_staging),
        job("part of parameters", halves, zero=infinity(nvme, max_in_cpu_gb=0.00015), config=SMALL),
        job("RAM to NVMe", [["load", from_ram], ["train", 2]], zero=everything, config=SMALL),
        job("NVMe to RAM", [["load", from_nvme], ["train", 2]], config=SMALL),
        job("little staging", halves, zero=everything, config=SMALL, outcore={"staging_bytes": MIB}),
    ]  # fmt: skip
    one_chunk = {"staging_bytes": 64 * MIB, "ram_budget_gib": 3 + 66.05 / 1024}
    twice = {where: [str(folder / f"{where}-{save}") for save in range(2)] for where in ("ram", "chunk")}
    for where, more in (("ram", {}), ("chunk", {"outcore": one_chunk})):
        do = [["train", 1], ["save", twice[where][0]], ["train", 1], ["save", twice[where][1]]]
        zero = infinity(nvme, nvme_offload_params=False) if more else None
        jobs.append(job(f"{where}, saved twice", do, zero=zero, config=SMALL, **more))
    for name, fault in FAULTS.items():
        do = [["train", 1], ["fault", *fault], ["train", 2]]
        jobs.append(job(name, do, zero=everything, config=SMALL) | {"may_fail": True})
    jobs.append(job("after the faults", [["load", from_nvme], ["train", 2]], zero=everything, config=SMALL))
    found = run_jobs(folder / "jobs", jobs)[0]
    found["left on the drive"] = [str(path) for path in nvme.rglob("*")]
    found["checkpoints"] = (from_ram, from_nvme)
    found["exported"] = exported
    found["saved twice"] = twice
    return found


@pytest.mark.more
@pytest.mark.parametrize("name", ["states", "parameters", "all", "part", "part of parameters", "little staging"])
def test_residency_does_not_change_a_bit(results: dict[str, Any], name: str) -> None:
    same(passed(results, name), passed(results, "RAM"))


@pytest.mark.more
def test_everything_is_where_it_was_asked_to_be(results: dict[str, Any]) -> None:
    states, everything, part = (passed(results, name) for name in ("states", "all", "part"))
    assert states["nvme_state_bytes"] == states["state_bytes"]
    assert "params_on_nvme" not in states["moved"]
    assert everything["nvme_state_bytes"] == everything["state_bytes"]
    assert everything["moved"]["params_on_nvme"] >= 14 and everything["moved"]["param_read"] > 0
    assert 0.2 < part["nvme_state_bytes"] / part["state_bytes"] < 0.8
    assert passed(results, "RAM")["nvme_state_bytes"] == 0
    some = passed(results, "part of parameters")["moved"]["params_on_nvme"]
    assert 0 < some < everything["moved"]["params_on_nvme"]


@pytest.mark.more
@pytest.mark.parametrize("name", ["RAM to NVMe", "NVMe to RAM", "after the faults"])
def test_a_checkpoint_continues_bit_by_bit_in_the_other_residency(results: dict[str, Any], name: str) -> None:
    same(passed(results, name), passed(results, "RAM"), trained=2)


@pytest.mark.more
def test_checkpoints_of_both_residencies_are_the_same_files(results: dict[str, Any]) -> None:
    first, second = (Path(folder) for folder in results["checkpoints"])
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir()) and len(names) >= 4
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


@pytest.mark.more
def test_a_second_checkpoint_is_not_of_the_first_ones_states(results: dict[str, Any]) -> None:
    """With one chunk on the drive, the one that a save read last is the one that the next save begins with."""
    assert passed(results, "chunk, saved twice")["nvme_state_bytes"] == 128 * 64 * 10  # the embedding's
    for ram, drive in zip(*results["saved twice"].values(), strict=True):
        for path in Path(ram).glob("*.safetensors"):
            assert path.read_bytes() == (Path(drive) / path.name).read_bytes(), path


@pytest.mark.more
def test_nothing_is_left_on_the_drive(results: dict[str, Any]) -> None:
    assert results["left on the drive"] == []


@pytest.mark.more
def test_two_ranks_have_a_share_and_a_store_each(tmp_path: Path, results: dict[str, Any]) -> None:
    nvme = tmp_path / "nvme"
    go = [["train", 3]]
    jobs = [
        job("all", go, zero=infinity(nvme), config=SMALL, per_device_train_batch_size=1, run_name="run"),
        job("RAM", go, config=SMALL, per_device_train_batch_size=1),
    ]
    ranks = run_jobs(tmp_path / "jobs", jobs, world_size=2)
    ram = passed(ranks[0], "RAM")
    for rank in ranks:
        drive = passed(rank, "all")
        same(drive, ram)
        assert drive["nvme_state_bytes"] == pytest.approx(passed(results, "all")["state_bytes"] / 2, rel=0.2)
    assert list(nvme.iterdir()) == [], "the ranks' folders and the run's go with the run, the user's stays"
    for (loss, _), (one, _) in zip(ram["losses"], passed(results, "RAM")["losses"], strict=False):
        assert loss == pytest.approx(one, rel=5e-3)


@SLOW
@pytest.mark.parametrize("preset", ["tiny-moe", "tiny-t5"])
def test_vocabularies_that_go_to_the_drive_train_with_weights_tied_after_they_are_made(tmp_path, preset):
    nvme = tmp_path / "nvme"
    model = {"preset": preset, "config_overrides": {"vocab_size": 16384}}  # x 128 x 2 B: 4 MiB, 2 MiB of two ranks
    go = [["train", 2]]
    jobs = [
        job("all", go, model=model, zero=infinity(nvme), config=SMALL, per_device_train_batch_size=1, min_bytes=MIB),
        job("RAM", go, model=model, config=SMALL, per_device_train_batch_size=1),
    ]
    for world_size in (1, 2):
        for rank in run_jobs(tmp_path / f"jobs-{world_size}", jobs, world_size):
            drive = passed(rank, "all")
            same(drive, passed(rank, "RAM"))
            made = {"tiny-moe": 2, "tiny-t5": 4}[preset]  # embedding and head; T5: those of encoder and decoder too
            assert drive["moved"]["params_on_nvme"] == made
            store, filled = drive["moved"]["param_store"], made * 4 * MIB / world_size
            assert filled <= store <= filled + 4 * MIB / world_size  # the rest of the model has 1.5 MiB


@pytest.mark.more
def test_adapters_that_go_to_the_drive_have_a_place_there(tmp_path: Path) -> None:
    nvme = tmp_path / "nvme"
    model = TINY | {"lora": {"r": 64, "alpha": 128}}  # of width 64 and 96: as large as the weights they adapt
    go = [["train", 2]]
    found = run_jobs(
        tmp_path / "jobs",
        [job("all", go, model=model, zero=infinity(nvme), config=SMALL), job("RAM", go, model=model, config=SMALL)],
    )[0]
    same(passed(found, "all"), passed(found, "RAM"))
    assert passed(found, "all")["moved"]["params_on_nvme"] >= 40


@pytest.mark.more
@pytest.mark.parametrize(
    ("ranks", "ahead"), [pytest.param(1, True, marks=SLOW), (1, False), pytest.param(2, True, marks=SLOW)]
)
def test_the_base_under_adapters_is_in_ram_as_far_as_that_was_allowed(tmp_path: Path, ranks: int, ahead: bool) -> None:
    """In the order of the model, each weight that still fits: the embedding, the first layer, and of the second one k,
    where q does not fit any more. What is fetched ahead stays on the device if it is used again."""
    nvme = tmp_path / "nvme"
    small = 2 * (5 * 64 + 2 * 4 * (2 * (64 + 256) + 2 * (64 + 128) + 3 * (64 + 96)))  # norms and adapters
    embedding, q, k, mlp = 2 * 64 * 128, 2 * 64 * 256, 2 * 64 * 128, 2 * 64 * 3 * 96
    layer = 2 * q + 2 * k + mlp
    allowed = {"all": 1e9, "half": (small + embedding + layer + k + 500) / ranks, "none": 0.0}
    more = {} if ahead else {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    do = [["train", 2], ["eval"], ["train", 2]]
    jobs = [
        job(
            name, do, model=TINY | {"lora": {"r": 4, "alpha": 8}}, zero=zero, min_bytes=4096 // ranks,
            config={"zero_optimization": SMALL["zero_optimization"] | more}, per_device_train_batch_size=2 // ranks,
        )
        for name, zero in [
            ("RAM", None), *((n, infinity(nvme, max_in_cpu_gb=n_bytes / 1e9)) for n, n_bytes in allowed.items())
        ]
    ]  # fmt: skip
    for found in run_jobs(tmp_path / "jobs", jobs, world_size=ranks):
        for name in allowed:
            same(passed(found, name), passed(found, "RAM"))
        moved = [passed(found, name)["moved"] for name in allowed]
        assert [m["params_on_nvme"] for m in moved] == [1, 7, 16]  # one is the head, made and then tied away
        read = [m["param_read"] - m["param_read_before"] for m in moved]
        assert 0 == read[0] < read[1] < read[2]
        if not ahead:
            forward, backward = 9, 8  # an evaluation, and four steps of two micro-batches
            head, unused = (
                (forward + backward) * embedding,
                backward * (q + 2 * k),
            )  # nothing is behind layer 0's q, k, v
            assert read[1] == (forward + backward) * (layer - k)
            assert read[2] == forward * embedding + head + (forward + backward) * 2 * layer - unused


@pytest.mark.more
@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_of_the_drive_stops_the_run_with_the_reason(results: dict[str, Any], name: str) -> None:
    result = passed(results, name)
    assert "stopped" in result, "the run went on as if nothing had happened"
    kind, message = result["stopped"]
    assert kind in ("EngineError", "StorageError"), message
    expected = {"the drive is full": "ENOSPC", "a read fails": "EIO"}.get(name, "wanted")
    assert expected in message, message
