"""Streams: the order belongs to (seed, epoch) alone, whatever the ranks; resume is exact."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.data import BatchStream, DataError, EvalStream
from outcore.data.layout import MixedRows
from tests.data.layout.test_packing import dataset_of
from tests.refused import refused

QUICK = settings(max_examples=40, deadline=None)


def rows(count: int, kind: str = "padded"):
    return dataset_of([8 + n % 5 for n in range(count)], 16, kind)


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@QUICK
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(0, 12), st.integers(0, 99), st.booleans())
def test_resume_at_any_point_equals_uninterrupted(count, micro_batch_size, world_size, stop, seed, shuffle):
    dataset = rows(count)
    for rank in range(world_size):
        whole = BatchStream(dataset, micro_batch_size, rank, world_size, seed, shuffle)
        expected = [next(whole) for _ in range(stop + 5)]
        first = BatchStream(dataset, micro_batch_size, rank, world_size, seed, shuffle)
        for _ in range(stop):
            next(first)
        state = json.loads(json.dumps(first.state_dict()))
        resumed = BatchStream(dataset, micro_batch_size, rank, world_size, seed, shuffle)
        resumed.load_state_dict(state)
        assert all(equal(next(resumed), batch) for batch in expected[stop:])


@QUICK
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))
def test_ranks_partition_what_one_rank_sees(count, micro_batch_size, world_size, seed):
    dataset = rows(count)
    alone = BatchStream(dataset, micro_batch_size, 0, 1, seed)
    ranks = [BatchStream(dataset, micro_batch_size, rank, world_size, seed) for rank in range(world_size)]
    for _ in range(6):
        together = []
        for stream in ranks:
            together.append(stream.next_rows().tolist())
            next(stream)
        one_by_one = []
        for _ in range(world_size):
            one_by_one.append(alone.next_rows().tolist())
            next(alone)
        assert together == one_by_one
    states = [stream.state_dict() for stream in ranks]
    assert all(state == states[0] == alone.state_dict() for state in states)


@QUICK
@given(st.integers(1, 50), st.integers(1, 7), st.integers(0, 99))
def test_every_epoch_sees_every_row_once(count, micro_batch_size, seed):
    stream = BatchStream(rows(count), micro_batch_size, seed=seed)
    seen: list[int] = []
    while len(seen) < 3 * count:
        seen += stream.next_rows().tolist()
        next(stream)
    for epoch in range(3):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert stream.epoch >= 3


def test_epochs_differ_and_seeds_differ():
    dataset = rows(50)
    orders = [BatchStream(dataset, 50, seed=seed).next_rows().tolist() for seed in (1, 2)]
    stream = BatchStream(dataset, 50, seed=1)
    next(stream)
    assert orders[0] != orders[1] and orders[0] != stream.next_rows().tolist() and stream.epoch == 1
    assert BatchStream(dataset, 50, shuffle=False).next_rows().tolist() == list(range(50))


@pytest.mark.parametrize(("change", "words"), [
    ({"version": 0}, "saved in version 0"),
    ({"fingerprint": "other"}, "the data, the tokenizer, seq_length or packing changed"),
    ({"rows": 9}, "the data changed"), ({"seed": 8}, "the seed changed"), ({"shuffle": False}, "the order changed"),
])  # fmt: skip
def test_a_state_of_other_data_is_refused(change, words):
    stream = BatchStream(rows(10), 2)
    refused(DataError, words, lambda: stream.load_state_dict({**stream.state_dict(), **change}))


def test_wrong_arguments():
    empty = dataset_of([4], 16, "padded", first_loss=[20])
    refused(DataError, "no rows", lambda: BatchStream(empty, 1))
    refused(DataError, "micro-batch size", lambda: BatchStream(rows(3), 0))
    refused(DataError, "rank must be from 0 to world_size - 1 = 1, got 2", lambda: EvalStream(rows(3), 1, 2, 2))


@QUICK
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.sampled_from(["padded", "packed"]))
def test_evaluation_sees_every_row_once_and_ranks_stay_in_step(count, micro_batch_size, world_size, kind):
    dataset = rows(count, kind)
    streams = [EvalStream(dataset, micro_batch_size, rank, world_size) for rank in range(world_size)]
    batches = [list(stream) for stream in streams]
    assert len({len(of_rank) for of_rank in batches}) == 1 == len({len(stream) for stream in streams})
    labels = sorted(
        label for of_rank in batches for batch in of_rank for label in batch["labels"].flatten().tolist() if label >= 0
    )
    expected = dataset.batch(range(len(dataset)))["labels"].flatten().tolist()
    assert labels == sorted(label for label in expected if label >= 0)
    assert [len(of_rank) for of_rank in batches] == [len(list(stream)) for stream in streams], (
        "cannot be iterated again"
    )


def test_resume_is_hindered_only_by_what_changes_the_training_rows(tmp_path):
    from dataclasses import replace

    from outcore.data import DataSettings, prepare_data
    from tests.data.fixtures import text_rows, tiny_tokenizer, write_jsonl

    path = write_jsonl(tmp_path / "x.jsonl", text_rows(60))
    settings = DataSettings(dataset=str(path), seq_length=32, cache_dir=str(tmp_path / "cache"), eval_fraction=0.2)
    stream = BatchStream(prepare_data(settings, tiny_tokenizer()).train, 2)
    next(stream)
    state = stream.state_dict()
    expected = next(stream)
    for harmless in ({"max_eval_samples": 2}, {"on_bad_row": "skip"}, {"cache_dir": str(tmp_path / "elsewhere")}):
        resumed = BatchStream(prepare_data(replace(settings, **harmless), tiny_tokenizer()).train, 2)
        resumed.load_state_dict(state)
        assert equal(next(resumed), expected)
    for other in ({"seq_length": 64}, {"packing": "off"}, {"seed": 1}, {"eval_fraction": 0.1}):
        resumed = BatchStream(prepare_data(replace(settings, **other), tiny_tokenizer()).train, 2)
        with pytest.raises(DataError, match="changed since the checkpoint"):
            resumed.load_state_dict(state)


def test_a_mixture_takes_of_each_source_by_its_weight_and_in_an_order_of_its_own():
    part = rows(7)
    mixed = MixedRows((part, part), (0.55, 1.4))
    found = [[document.tolist() for document in mixed.documents_of(row)] for row in range(len(mixed))]
    assert mixed.taken == (4, 10)
    first, second = found[:4], found[4:]
    assert all(first.count(row) == 1 for row in first) and first != second[:4]
    everything = [[document.tolist() for document in part.documents_of(row)] for row in range(len(part))]
    assert sorted(second.count(row) for row in everything) == [1, 1, 1, 1, 2, 2, 2]
