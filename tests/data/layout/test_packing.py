"""Packing, windows, permutation: nothing lost, nothing twice, every document by itself."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.data.cache.encode import NO_LOSS
from outcore.data.layout.dataset import RowDataset
from outcore.data.layout.permutation import Permutation
from outcore.data.layout.segments import (
    pack,
    rows_of,
    seq2seq_segments,
    split_documents,
    supervised_segments,
    text_windows,
)
from tests.data.layout.isolation import document_ids

QUICK = settings(max_examples=60, deadline=None)


def corpus(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens 0, 1, 2, ... so that each is recognised, document offsets)."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return np.arange(offsets[-1], dtype=np.uint32), offsets


class Cache(NamedTuple):
    """As much of a token cache as the layout reads."""

    tokens: np.ndarray
    offsets: np.ndarray
    first_loss: np.ndarray


def dataset_of(lengths: list[int], seq_length: int, kind: str, first_loss: list[int] | None = None) -> RowDataset:
    tokens, offsets = corpus(lengths)
    documents = np.arange(len(lengths))
    is_text = first_loss is None
    if is_text:
        segments = text_windows(offsets, documents, seq_length * (2 if kind == "seq2seq" else 1))
    else:
        for number, first in enumerate(first_loss):
            tokens[offsets[number] : offsets[number] + first] |= NO_LOSS
        first = np.asarray(first_loss)
        if kind == "seq2seq":
            segments = seq2seq_segments(offsets, first, documents, seq_length)
        else:
            cache = Cache(tokens=tokens, offsets=offsets, first_loss=first)
            segments = supervised_segments(cache, documents, seq_length)
    segments, row_ends = rows_of(segments, seq_length, kind == "packed")
    return RowDataset(tokens, segments.starts, segments.lengths, row_ends, seq_length, kind, 999_999, "f", is_text)


@QUICK
@given(st.lists(st.integers(1, 40), max_size=120), st.integers(40, 64), st.integers(1, 50))
def test_pack_places_every_segment_once(lengths, capacity, buffer_segments):
    order, row_ends = pack(np.asarray(lengths, dtype=np.int64), capacity, buffer_segments)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    sums = [sum(lengths[s] for s in order[a:b]) for a, b in pairwise(row_ends)]
    assert all(0 < total <= capacity for total in sums) and row_ends[-1] == len(lengths)


def test_pack_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="segments must have 1 to 8 tokens"):
        pack(np.asarray([9]), 8)


@QUICK
@given(st.lists(st.integers(2, 70), min_size=1, max_size=30), st.integers(8, 24))
def test_windows_lose_and_repeat_no_token(lengths, window):
    tokens, offsets = corpus(lengths)
    segments = text_windows(offsets, np.arange(len(lengths)), window)
    assert segments.lengths.min() >= 2 and segments.lengths.max() <= window
    joined = np.concatenate([tokens[s : s + n] for s, n in zip(segments.starts, segments.lengths)])
    assert joined.tolist() == tokens.tolist()
    borders = set(offsets.tolist())
    for start, length in zip(segments.starts.tolist(), segments.lengths.tolist()):
        assert not borders & set(range(start + 1, start + length)), "a window reaches over a document's border"


@QUICK
@given(st.lists(st.integers(2, 70), min_size=1, max_size=30), st.integers(8, 24))
def test_packed_rows_hold_every_token_once_and_isolated(lengths, seq_length):
    dataset = dataset_of(lengths, seq_length, "packed")
    batch = dataset.batch(range(len(dataset)))
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert all(tensor.shape == (len(dataset), seq_length) for tensor in batch.values())
    real = batch["input_ids"] != 999_999
    assert sorted(batch["input_ids"][real].tolist()) == list(range(sum(lengths)))
    assert (batch["labels"][~real] == -100).all()

    _, offsets = corpus(lengths)
    source = torch.from_numpy(np.searchsorted(offsets, batch["input_ids"].numpy(), side="right"))
    documents = document_ids(batch["position_ids"])
    for b in range(len(dataset)):
        for document in documents[b].unique():
            inside = (documents[b] == document) & real[b]
            assert len(source[b][inside].unique()) <= 1, "two documents under one number"
            assert len(real[b][documents[b] == document].unique()) == 1, "padding belongs to a document"
    first = batch["position_ids"] == 0
    assert (batch["labels"][first] == -100).all()
    assert (batch["labels"][real & ~first] == batch["input_ids"][real & ~first]).all()
    steps = batch["position_ids"].diff(dim=1)
    assert ((steps == 1) | (batch["position_ids"][:, 1:] == 0)).all()


@QUICK
@given(st.lists(st.integers(2, 70), min_size=1, max_size=12), st.integers(8, 24), st.data())
def test_padded_rows(lengths, seq_length, data):
    dataset = dataset_of(lengths, seq_length, "padded")
    rows = data.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=4))
    batch = dataset.batch(rows)
    assert "position_ids" not in batch
    width = batch["input_ids"].shape[1]
    assert width == seq_length or width % 8 == 0
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    assert (batch["attention_mask"] == 0).any() if "attention_mask" in batch else True
    for b, row in enumerate(rows):
        (tokens,) = dataset.documents_of(row)
        assert batch["input_ids"][b, : len(tokens)].tolist() == tokens.tolist()
        assert mask[b].tolist() == [1] * len(tokens) + [0] * (width - len(tokens))
        assert batch["labels"][b].tolist() == [-100, *tokens[1:].tolist()] + [-100] * (width - len(tokens))


def test_conversations_are_cut_off_and_dropped_when_no_loss_is_left():
    dataset = dataset_of([10, 30, 30, 9], 16, "padded", first_loss=[4, 10, 20, 1])
    assert dataset.lengths.tolist() == [10, 16, 9] and dataset.starts.tolist() == [0, 10, 70]
    tokens, offsets = corpus([10, 30, 30, 9])
    cache = Cache(tokens=tokens, offsets=offsets, first_loss=np.asarray([4, 10, 20, 1]))
    segments = supervised_segments(cache, np.arange(4), 16)
    assert (segments.truncated, segments.dropped) == (1, 1)
    labels = dataset.batch([0])["labels"][0]
    assert (labels[:4] == -100).all() and labels[4:10].tolist() == tokens[4:10].tolist()


def test_long_conversations_as_long_rows_says():
    tokens, offsets = corpus([10, 30, 30])
    tokens[:40] |= NO_LOSS
    tokens[5] &= ~NO_LOSS
    tokens[12] &= ~NO_LOSS  # the second document learns its third token only, the last one all
    cache = Cache(tokens=tokens, offsets=offsets, first_loss=np.asarray([5, 2, 1]))
    everyone = np.arange(3)

    def cut(how: str):
        found = supervised_segments(cache, everyone, 16, how)
        left_out = (found.truncated, found.dropped, found.split)
        return list(zip(found.starts.tolist(), found.lengths.tolist())), left_out

    assert cut("keep_start") == ([(0, 10), (10, 16), (40, 16)], (2, 0, 0))
    assert cut("keep_end") == ([(0, 10), (54, 16)], (1, 1, 0))
    assert cut("drop") == ([(0, 10)], (0, 2, 0))
    assert cut("split") == ([(0, 10), (10, 16), (40, 16), (56, 14)], (0, 1, 2))


def test_seq2seq_batches():
    dataset = dataset_of([10, 6], 8, "seq2seq", first_loss=[4, 3])
    batch = dataset.batch([0, 1])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3] + [999_999] * 4, [10, 11, 12] + [999_999] * 5]
    assert batch["attention_mask"].tolist() == [[1] * 4 + [0] * 4, [1] * 3 + [0] * 5]
    assert batch["labels"].tolist() == [[4, 5, 6, 7, 8, 9, -100, -100], [13, 14, 15] + [-100] * 5]
    text = dataset_of([21], 8, "seq2seq")
    batch = text.batch([0, 1])
    assert batch["input_ids"].tolist() == [list(range(8)), [16, 17, 18] + [999_999] * 5]
    assert batch["labels"].tolist() == [list(range(8, 16)), [19, 20] + [-100] * 6]
    cut = dataset_of([30], 8, "seq2seq", first_loss=[12]).batch([0])
    assert cut["input_ids"].tolist() == [list(range(8))] and cut["labels"].tolist() == [list(range(12, 20))]


def test_padding_share_and_bad_row_number():
    dataset = dataset_of([16, 8], 16, "packed")
    assert dataset.padding_share == pytest.approx(0.25) and dataset.total_tokens == 24
    with pytest.raises(IndexError):
        dataset.documents_of(2)


@QUICK
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 50))
def test_permutation_is_one(n, seed, epoch):
    values = Permutation(n, seed, epoch)(np.arange(n))
    assert np.array_equal(np.sort(values), np.arange(n))
    some = np.arange(0, n, 7)
    assert np.array_equal(Permutation(n, seed, epoch)(some), values[some])


def test_permutation_mixes():
    n = 10_000
    first, second = (Permutation(n, 42, epoch)(np.arange(n)) for epoch in (0, 1))
    for values in (first, second):
        assert abs(np.corrcoef(values, np.arange(n))[0, 1]) < 0.05
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05
        halves = np.histogram(values[: n // 2], bins=10, range=(0, n))[0]
        assert halves.min() > 400 and halves.max() < 600
    assert (first == second).mean() < 0.01


def test_permutation_stays_the_same_for_ever():
    # Written down on purpose: a resumed run relies on it.
    assert Permutation(10, 42, 0)(np.arange(10)).tolist() == PINNED
    with pytest.raises(IndexError):
        Permutation(10, 42)(np.asarray([10]))
    with pytest.raises(ValueError):
        Permutation(0, 42)


PINNED = [6, 2, 8, 3, 7, 4, 9, 5, 0, 1]


@QUICK
@given(st.integers(1, 400), st.floats(0, 0.5), st.integers(0, 1000))
def test_split_by_documents(documents, fraction, seed):
    train, evaluation = split_documents(documents, fraction, seed)
    assert sorted([*train, *evaluation]) == list(range(documents))
    assert len(evaluation) == int(documents * fraction)
