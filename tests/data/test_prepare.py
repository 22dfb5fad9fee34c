"""The whole way: from a data set and a tokenizer to rows, with the summary, the sample and the limits."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outcore.data import BatchStream, DataError, DataSettings, EvalStream, prepare_data, render_sample
from outcore.data.sources.embedded import EmbeddedSource
from tests.data.fixtures import sentence, text_rows, tiny_tokenizer, write_jsonl
from tests.refused import refused

CONVERSATION = {
    "conversations": [
        {"from": "human", "value": "the quick fox?"},
        {"from": "gpt", "value": "a lazy dog"},
    ]
}


def settings_for(tmp_path: Path, dataset: Path, **values) -> DataSettings:
    return DataSettings(dataset=str(dataset), cache_dir=str(tmp_path / "cache"), **{"seq_length": 32, **values})


def decoded(prepared) -> list[str]:
    """Text of every training document or window."""
    tokenizer = tiny_tokenizer()
    return [
        tokenizer.decode((document & 0x7FFFFFFF).tolist())
        for row in range(len(prepared.train))
        for document in prepared.train.documents_of(row)
    ]


def test_text_end_to_end(tmp_path: Path):
    rows = text_rows(100)
    settings = settings_for(tmp_path, write_jsonl(tmp_path / "my data.jsonl", rows), seq_length=128)
    prepared = prepare_data(settings, tiny_tokenizer())
    summary = prepared.summary
    assert prepared.eval is not None
    assert (summary.documents, summary.kind, summary.bad_rows) == (100, "packed", 0)
    assert summary.train_rows == len(prepared.train) and summary.eval_rows == len(prepared.eval)
    assert summary.tokens == prepared.train.total_tokens + prepared.eval.total_tokens
    assert summary.loss_tokens == summary.tokens - 100
    assert 0 <= summary.padding_share < 0.15 and 0 < summary.max_token_id < 600
    assert "100 documents" in summary.lines()[0] and "packed" in summary.lines()[1]
    assert prepared.sample_text.count("⟦") == 1
    batch = next(BatchStream(prepared.train, 4))
    assert batch["input_ids"].shape == (4, 128) and batch["position_ids"].max() < 128
    assert sum(len(batch["labels"]) for batch in EvalStream(prepared.eval, 2)) == len(prepared.eval)


def test_token_ids_of_the_evaluation_count_too(tmp_path: Path):
    """What the model's table is compared with: an id beyond it would fail at the first evaluation, hours later."""
    rows = write_jsonl(tmp_path / "x.jsonl", text_rows(4))
    other = write_jsonl(tmp_path / "y.jsonl", [{"input_ids": [1, 298_832, 3]}])
    settings = replace(settings_for(tmp_path, rows, seq_length=128), eval_dataset=str(other))
    assert prepare_data(settings, tiny_tokenizer()).summary.max_token_id == 298_832


def test_split_is_by_document(tmp_path: Path):
    settings = settings_for(tmp_path, write_jsonl(tmp_path / "x.jsonl", text_rows(100)), packing="off", seq_length=512)
    prepared = prepare_data(replace(settings, eval_fraction=0.1), tiny_tokenizer())
    assert prepared.eval is not None and (len(prepared.train), len(prepared.eval)) == (90, 10)
    mean = prepared.train.total_tokens / 90
    assert f"of {mean:.0f} tokens on average (at most 512), padded to a" in prepared.summary.lines()[1]
    assert not set(prepared.train.starts.tolist()) & set(prepared.eval.starts.tolist())
    other_seed = prepare_data(replace(settings, eval_fraction=0.1, seed=7), tiny_tokenizer())
    assert other_seed.eval is not None and set(other_seed.eval.starts) != set(prepared.eval.starts)
    assert prepare_data(replace(settings, eval_fraction=0), tiny_tokenizer()).eval is None


def test_a_single_text_file_is_evaluated_on_its_tail(tmp_path: Path):
    (tmp_path / "book.txt").write_text("\n".join(sentence(n) for n in range(200)))
    prepared = prepare_data(settings_for(tmp_path, tmp_path / "book.txt"), tiny_tokenizer())
    assert prepared.eval is not None and prepared.summary.documents == 1
    assert prepared.eval.starts.min() >= prepared.train.starts.max()
    assert len(prepared.eval) == int(0.05 * (len(prepared.eval) + len(prepared.train)))
    (tmp_path / "note.txt").write_text("a lazy dog")
    alone = prepare_data(settings_for(tmp_path, tmp_path / "note.txt"), tiny_tokenizer())
    assert alone.eval is None and any("no evaluation" in note for note in alone.summary.notes)


def test_large_documents_are_tokenised_in_pieces_without_loss(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("outcore.data.cache.encode.cut_text.__defaults__", (500,))
    monkeypatch.setattr("outcore.data.sources.textfile.iterate_text.__defaults__", (3000,))
    text = "\n".join(sentence(n) for n in range(300))
    (tmp_path / "book.txt").write_text(text)
    prepared = prepare_data(settings_for(tmp_path, tmp_path / "book.txt", eval_fraction=0), tiny_tokenizer())
    assert tiny_tokenizer().decode(np.asarray(prepared.train.tokens)) == text + "<|endoftext|>"


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, suffix: str):
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    rows = [{"prompt": sentence(n), "completion": " " + sentence(n + 1)} for n in range(30)]
    path = tmp_path / f"x.{suffix}"
    table = pyarrow.Table.from_pylist(rows)
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif suffix == "csv":
        pyarrow.csv.write_csv(table, path)
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    else:
        write_jsonl(path, rows)
    prepared = prepare_data(
        settings_for(tmp_path, path, packing="off", seq_length=64, eval_fraction=0), tiny_tokenizer()
    )
    assert decoded(prepared) == [f"{row['prompt']}{row['completion']}<|endoftext|>" for row in rows]
    batch = prepared.train.batch([0])
    tokenizer = tiny_tokenizer()
    learned = batch["labels"][0][batch["labels"][0] >= 0]
    assert tokenizer.decode(learned) == f"{rows[0]['completion']}<|endoftext|>"


def test_conversations_with_and_without_a_template(tmp_path: Path):
    path = write_jsonl(tmp_path / "x.jsonl", [CONVERSATION] * 20)
    prepared = prepare_data(settings_for(tmp_path, path), tiny_tokenizer())
    assert prepared.sample_text == (
        "<|im_start|>user\nthe quick fox?<|im_end|>\n<|im_start|>assistant\n⟦a lazy dog<|im_end|>⟧\n"
    )
    bare = tiny_tokenizer(None)
    prepared = prepare_data(settings_for(tmp_path, path), bare)
    assert bare.chat_template and any("no chat template" in note for note in prepared.summary.notes)
    everything = prepare_data(settings_for(tmp_path, path, train_on_prompt=True), tiny_tokenizer())
    assert everything.summary.loss_tokens == everything.summary.tokens - 20


def test_text_leaves_a_tokenizer_without_template_as_it_was(tmp_path: Path):
    bare = tiny_tokenizer(None)
    prepared = prepare_data(settings_for(tmp_path, write_jsonl(tmp_path / "x.jsonl", text_rows(30))), bare)
    assert bare.chat_template is None and not any("template" in note for note in prepared.summary.notes)


def test_long_conversations_are_cut_off_and_counted(tmp_path: Path):
    long_answer = {"prompt": "the fox", "completion": sentence(1, 60)}
    long_question = {"prompt": sentence(1, 60), "completion": "a dog"}
    path = write_jsonl(tmp_path / "x.jsonl", [long_answer] * 3 + [long_question] * 2)
    prepared = prepare_data(settings_for(tmp_path, path, eval_fraction=0), tiny_tokenizer())
    assert (prepared.summary.truncated_documents, prepared.summary.dropped_documents) == (3, 2)
    assert "cut off at seq_length: 3" in "\n".join(prepared.summary.lines())
    only_questions = write_jsonl(tmp_path / "y.jsonl", [long_question])
    with pytest.raises(DataError, match="Raise seq_length"):
        prepare_data(settings_for(tmp_path, only_questions, eval_fraction=0), tiny_tokenizer())


def test_bad_rows_stop_or_are_counted(tmp_path: Path):
    path = write_jsonl(tmp_path / "x.jsonl", [*text_rows(5), "{broken", {"text": None}, {"txt": "a"}, {"text": ""}])
    with pytest.raises(DataError, match=r"x\.jsonl, line 6: not valid JSON.*--on_bad_row skip"):
        prepare_data(settings_for(tmp_path, path), tiny_tokenizer())
    prepared = prepare_data(settings_for(tmp_path, path, on_bad_row="skip"), tiny_tokenizer())
    assert (prepared.summary.documents, prepared.summary.bad_rows, prepared.summary.empty_documents) == (5, 3, 1)
    assert "line 8: no column 'text'" in " ".join(prepared.summary.bad_row_examples)
    said = "\n".join(prepared.summary.lines())
    assert "left out: 3 malformed rows" in said and "left out: 1 document " in said
    again = prepare_data(settings_for(tmp_path, path, on_bad_row="skip"), tiny_tokenizer())
    assert again.summary.cache_hit and again.summary.bad_rows == 3, "the report is part of the cache"


@pytest.mark.parametrize(("lines", "policy", "words"), [
    (["{broken"] * 3, "skip", "has no usable row"), (["{broken"] * 40, "error", "line 1: not valid JSON"),
    ([{"text": ""}] * 3, "error", "nothing that bears loss: 3 empty documents and 0 malformed"),
    ([""], "error", "is empty: it has no row"),
])  # fmt: skip
def test_nothing_to_train_on(tmp_path: Path, lines, policy, words):
    path = write_jsonl(tmp_path / "x.jsonl", lines)
    refused(DataError, words, lambda: prepare_data(settings_for(tmp_path, path, on_bad_row=policy), tiny_tokenizer()))


@pytest.mark.parametrize(("rows", "words"), [
    ([], "eval.jsonl is empty: there is nothing to read"), ([{"text": ""}], "eval.jsonl has nothing that bears loss"),
    ([{"prompt": sentence(1, 60), "completion": "a dog"}], "--eval_dataset: .*eval.jsonl leaves no row to evaluate on"),
])  # fmt: skip
def test_nothing_to_evaluate_on(tmp_path: Path, rows, words):
    path = write_jsonl(tmp_path / "x.jsonl", text_rows(5))
    settings = settings_for(tmp_path, path, eval_dataset=str(write_jsonl(tmp_path / "eval.jsonl", rows)))
    with pytest.raises(DataError, match=words) as caught:
        prepare_data(settings, tiny_tokenizer())
    assert "train on" not in str(caught.value)


def test_first_usable_row_may_come_late(tmp_path: Path):
    path = write_jsonl(tmp_path / "x.jsonl", ["{broken"] * 20 + text_rows(3))
    assert prepare_data(settings_for(tmp_path, path, on_bad_row="skip"), tiny_tokenizer()).summary.bad_rows == 20


def test_plain_text_has_no_columns(tmp_path: Path):
    (tmp_path / "x.txt").write_text("a dog")
    with pytest.raises(DataError, match="plain text, which has no columns"):
        prepare_data(settings_for(tmp_path, tmp_path / "x.txt", text_column="text"), tiny_tokenizer())
    with pytest.raises(DataError, match="is plain text, but the format is 'alpaca'"):
        prepare_data(settings_for(tmp_path, tmp_path / "x.txt", format="alpaca"), tiny_tokenizer())


def test_packing_switch(tmp_path: Path):
    path = write_jsonl(tmp_path / "x.jsonl", text_rows(30))
    assert prepare_data(settings_for(tmp_path, path), tiny_tokenizer(), packing_allowed=False).train.kind == "padded"
    assert prepare_data(settings_for(tmp_path, path, packing="off"), tiny_tokenizer()).train.kind == "padded"
    with pytest.raises(DataError, match="cannot keep packed documents apart"):
        prepare_data(settings_for(tmp_path, path, packing="on"), tiny_tokenizer(), packing_allowed=False)
    with pytest.raises(DataError, match="encoder-decoder"):
        prepare_data(settings_for(tmp_path, path, packing="on"), tiny_tokenizer(), encoder_decoder=True)


def test_separate_evaluation_set(tmp_path: Path):
    train = write_jsonl(tmp_path / "train.jsonl", text_rows(30))
    evaluation = write_jsonl(tmp_path / "eval.jsonl", [{"text": sentence(900 + n)} for n in range(8)])
    settings = settings_for(tmp_path, train, eval_dataset=str(evaluation), packing="off", seq_length=256)
    prepared = prepare_data(settings, tiny_tokenizer())
    assert prepared.eval is not None and (len(prepared.train), len(prepared.eval)) == (30, 8)
    assert " 900." in tiny_tokenizer().decode(prepared.eval.batch([0])["input_ids"][0])
    few = prepare_data(replace(settings, max_eval_samples=3), tiny_tokenizer())
    assert few.eval is not None and len(few.eval) == 3


@pytest.mark.parametrize("packing", ["on", "off"])
def test_max_samples_limit_rows_and_reading(tmp_path: Path, packing: str):
    path = write_jsonl(tmp_path / "x.jsonl", [*text_rows(2000), "{never reached"])
    settings = settings_for(tmp_path, path, max_train_samples=5, max_eval_samples=2, packing=packing, eval_fraction=0.2)
    prepared = prepare_data(settings, tiny_tokenizer())
    assert prepared.eval is not None and len(prepared.train) == 5 and 1 <= len(prepared.eval) <= 2
    assert prepared.summary.documents < 60


@pytest.mark.parametrize("rows", [text_rows(40), [CONVERSATION] * 40, [{"prompt": "a", "completion": "dog"}] * 40])
def test_encoder_decoder(tmp_path: Path, rows):
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    prepared = prepare_data(settings_for(tmp_path, path), tiny_tokenizer(), encoder_decoder=True)
    batch = next(BatchStream(prepared.train, 4))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert (batch["labels"] >= 0).any(dim=1).all() and batch["attention_mask"].any(dim=1).all()
    assert max(batch["labels"].shape[1], batch["input_ids"].shape[1]) <= 32
    assert "⟦" in prepared.sample_text and prepared.summary.kind == "seq2seq"


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_tokenise_the_same(tmp_path: Path, monkeypatch, real: bool):
    """Threads in place of processes: order and bounds are what is tested, starting processes takes many seconds."""
    from concurrent.futures import ThreadPoolExecutor

    if not real:
        monkeypatch.setattr("outcore.data.cache.batches.BATCH_ITEMS", 7)
        pool = "outcore.data.cache.batches.ProcessPoolExecutor"
        monkeypatch.setattr(pool, lambda workers, mp_context: ThreadPoolExecutor(workers))
    path = write_jsonl(tmp_path / "x.jsonl", text_rows(2000 if real else 50))
    one = prepare_data(settings_for(tmp_path, path), tiny_tokenizer())
    two = replace(settings_for(tmp_path, path, num_proc=2), cache_dir=str(tmp_path / "2"))
    assert np.array_equal(one.train.tokens, prepare_data(two, tiny_tokenizer()).train.tokens)


def test_render_sample():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("the quick fox a lazy dog")["input_ids"]
    labels = [-100] * (len(ids) - 3) + ids[-3:]
    text = render_sample(tokenizer, ids, labels)
    assert text.endswith("⟧") and text.replace("⟦", "").replace("⟧", "") == "the quick fox a lazy dog"
    assert render_sample(tokenizer, [], []) == ""
    assert "characters ...]" in render_sample(tokenizer, ids * 100, ids * 100, max_run_chars=40)
    refused(ValueError, "of one length", lambda: render_sample(tokenizer, ids, labels[:-1]))


# --- the embedded default ---------------------------------------------------------------------------------------------


def test_embedded_text_is_the_interpreters_own_library(monkeypatch, tmp_path: Path):
    source = EmbeddedSource()
    names = [path.relative_to(source.root).as_posix() for path in source.files]
    assert names == sorted(names) and "argparse.py" in names and len(names) > 150
    assert 1_000_000 < source.total_bytes <= 12_000_000
    assert not any(part in ("test", "tests", "site-packages", "lib2to3") for name in names for part in name.split("/"))
    assert source.identity() == EmbeddedSource().identity()
    assert EmbeddedSource(total_bytes=2_000_000).total_bytes <= 2_000_000

    monkeypatch.setattr("outcore.data.prepare.open_source", lambda *_, **__: EmbeddedSource(total_bytes=400_000))
    settings = DataSettings(seq_length=64, cache_dir=str(tmp_path))
    prepared = prepare_data(settings, tiny_tokenizer())
    assert prepared.eval is not None and 1 <= len(prepared.eval) <= 64
    assert len(prepared.train) > 100 and prepared.summary.source.startswith("embedded")


def test_embedded_text_needs_source_files(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\n")
    refused(DataError, r"stripped or zipped interpreter.*Give another data set", lambda: EmbeddedSource(root=tmp_path))


def test_embedded_passes_over_files_that_are_no_text(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\n" * 50)
    (tmp_path / "bad.py").write_bytes(b"# coding: nonsense\n")
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\n# é\n".encode("latin-1"))
    texts = [record.row["text"] for record in EmbeddedSource(root=tmp_path, total_bytes=500).records()]
    assert len(texts) == 2 and "é" in texts[1]
