"""Several ranks of one host train what one rank trains, to the bit where the order of sums is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.engine.stream.ranks.world import (
    SETTINGS,
    build_that_breaks,
    run_ranks,
    same_weights,
    train,
    train_alone,
    train_each,
)

IMMEDIATE = replace(SETTINGS, max_grad_norm=0.0)
SAME_BITS = {
    "clipping": (2, {"dtype": "bfloat16"}), "four ranks": (4, {"dtype": "bfloat16", "steps": 2}), "fp32": (2, {}),
    "dropout": (2, {"model": "phi", "dropout": 0.3, "dtype": "bfloat16"}),
    "no clipping": (2, {"settings": IMMEDIATE, "dtype": "bfloat16"}),
    "split states": (2, {"settings": replace(SETTINGS, states="split8"), "dtype": "bfloat16"}),
    "mixture": (2, {"model": "mixtral"}), "fp16": (2, {"dtype": "float16", "steps": 3}),
    "large gradients": (2, {"dtype": "bfloat16", "steps": 2, "sums": (1, 0)}),
    "no slot is free": (2, {"dtype": "bfloat16", "steps": 2, "sums": (1 << 40, 0)}),
    "LoRA": (2, {"lora": 4, "dtype": "bfloat16"}), "eight ranks": (8, {"dtype": "bfloat16", "steps": 2}),
}  # fmt: skip
NEARLY = {
    "two micro-batches a rank": {"micro": 4}, "tied": {"model": "gpt2"},
    "tiles": {"settings": replace(SETTINGS, tiling="on", tile_bytes=4096)},
    "tiles, tied": {"model": "gpt2", "settings": replace(SETTINGS, tiling="on", tile_bytes=4096)},
    "activations in RAM": {"settings": replace(SETTINGS, activations="ram")},
}  # fmt: skip
SLOWLY = {"eight ranks"}
"""Four take the same way."""


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    """What each of two ranks found in every case that is for two and is run this time, one after another."""
    tests = [item for item in request.session.items if item.path == request.path and "case" in item.fixturenames]
    chosen = {item.callspec.params["case"] for item in tests if item.get_closest_marker("skip") is None}
    cases = {name: {**job, "micro": 2} for name, (size, job) in SAME_BITS.items() if size == 2}
    cases |= {name: {"micro": 2, **job} for name, job in NEARLY.items()}
    cases = {name: case for name, case in cases.items() if name in chosen}
    ranks = run_ranks(2, tmp_path_factory.mktemp("pair"), train_each, cases=cases)
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    return ranks


@pytest.mark.more(after=4)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOWLY else case for case in SAME_BITS]
)
def test_ranks_with_a_micro_batch_each_equal_one_rank_to_the_bit(pair, tmp_path, case):
    world_size, job = SAME_BITS[case]
    job = {**job, "micro": world_size}
    alone = train_alone(**job)
    for rank in [rank[case] for rank in pair] if world_size == 2 else run_ranks(world_size, tmp_path, train, **job):
        assert rank["losses"] == alone["losses"] and rank["aux"] == alone["aux"]
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-12)  # squares are added up share by share
        assert same_weights(rank, alone) == [] and rank["tokens"] == alone["tokens"]
        assert rank["evaluated"][1] == alone["evaluated"][1]
        assert rank["evaluated"][0] == pytest.approx(alone["evaluated"][0], rel=1e-6)


def test_a_build_that_fails_at_its_end_leaves_no_thread(tmp_path):
    assert run_ranks(2, tmp_path, build_that_breaks) == [set(), set()]


@pytest.mark.more(after=2)
@pytest.mark.parametrize("case", NEARLY)
def test_where_sums_come_in_another_order_results_agree(pair, case):
    alone = train_alone(**{"micro": 2, **NEARLY[case]})
    for rank in (rank[case] for rank in pair):
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        off = torch.cat([(w - alone["weights"][n]).flatten() for n, w in rank["weights"].items()])
        assert float(off.square().mean().sqrt()) < 1e-5  # of weights that moved by 3e-3 a step


@pytest.mark.more
def test_states_on_nvme_are_each_ranks_own(tmp_path):
    drives = tmp_path / "drive", tmp_path / "other"
    settings = replace(SETTINGS, nvme_path=tuple(map(str, drives)), state_ram_bytes=0)
    alone = train_alone(dtype="bfloat16")
    found = run_ranks(2, tmp_path / "ranks", train, settings=settings, dtype="bfloat16")
    for rank in found:
        assert rank["losses"] == alone["losses"] and same_weights(rank, alone) == []
        assert "NVMe" in rank["words"] and "share" in rank["words"]
    assert [list(drive.iterdir()) for drive in drives] == [[], []]  # each rank had one, and has cleaned up


def test_two_ranks_one_rank_two_ranks_go_on_from_each_others_checkpoints(tmp_path):
    job = {"dtype": "bfloat16", "steps": 2}
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    whole = train_alone(dtype="bfloat16", steps=6)
    first = run_ranks(2, tmp_path / "a", train, save=two, **job)
    second = train_alone(load=two, save=one, first=2, **job)
    third = run_ranks(2, tmp_path / "b", train, load=one, first=4, **job)
    losses = [*first[0]["losses"], *second["losses"], *third[0]["losses"]]
    assert losses == whole["losses"]
    assert same_weights(third[0], whole) == [] == same_weights(third[1], whole)


def test_a_checkpoint_of_two_ranks_has_the_bytes_of_one_ranks(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train_alone(dtype="bfloat16", save=str(one))
    run_ranks(2, tmp_path / "ranks", train, dtype="bfloat16", save=str(two))
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir()) and len(names) == 5
    assert all((one / n).read_bytes() == (two / n).read_bytes() for n in names)
