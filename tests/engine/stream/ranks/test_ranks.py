"""Several ranks of one host train what one rank trains, to the bit where the order of sums is the same."""

from __future__ import annotations

import pytest

from tests.engine.stream.ranks.world import run_ranks, same_weights, train, train_alone


@pytest.mark.parametrize(("model", "world_size", "dtype"), [("llama", 2, "bfloat16")])
def test_ranks_with_a_micro_batch_each_equal_one_rank_to_the_bit(tmp_path, model, world_size, dtype):
    job = {"model": model, "micro": world_size, "dtype": dtype}
    alone = train_alone(**job)
    found = run_ranks(world_size, tmp_path, train, **job)
    for rank in found:
        assert rank["losses"] == alone["losses"] and rank["norms"] == alone["norms"]
        assert same_weights(rank, alone) == []
        assert rank["evaluated"][1] == alone["evaluated"][1]
        assert rank["evaluated"][0] == pytest.approx(alone["evaluated"][0], rel=1e-6)
