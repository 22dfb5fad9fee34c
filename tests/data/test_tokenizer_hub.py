"""Tokenizers (loaded, trained, cached) and hub data sets (through `datasets`, with what is said when it fails)."""

import os
from pathlib import Path

import pytest

from outcore.data import DataError, DataSettings, load_or_train_tokenizer, load_tokenizer, prepare_data, train_byte_bpe
from outcore.data.sources.source import open_source
from outcore.data.tokenizer import tokenizer_hash
from tests.data.fixtures import sentence, text_rows, tiny_tokenizer, write_jsonl
from tests.refused import failing, refused


def test_trained_tokenizer_knows_every_byte_and_its_special_tokens():
    tokenizer = train_byte_bpe((sentence(n) for n in range(200)), vocab_size=512)
    text = "the fox\n\tüñ€ 🦊 \x00\x7f 漢字"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= 512 and tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert tokenizer.pad_token == "<|pad|>" and tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer("a<|im_end|>")["input_ids"][-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.chat_template and tokenizer("fox")["input_ids"][-1] != tokenizer.eos_token_id
    again = train_byte_bpe((sentence(n) for n in range(200)), vocab_size=512)
    assert again.get_vocab() == tokenizer.get_vocab()
    refused(DataError, "vocab_size must be from 512", lambda: train_byte_bpe(["x"], vocab_size=100))


def test_trained_once_then_cached_and_rebuilt_when_damaged(tmp_path: Path):
    path = write_jsonl(tmp_path / "x.jsonl", text_rows(200))
    settings = DataSettings(dataset=str(path), cache_dir=str(tmp_path / "cache"))
    said: list[str] = []
    first = load_or_train_tokenizer(settings, vocab_size=512, say=said.append)
    assert len(said) == 1 and "training a byte-level BPE" in said[0]
    second = load_or_train_tokenizer(settings, vocab_size=512, say=said.append)
    assert len(said) == 1 and first.get_vocab() == second.get_vocab()
    assert tokenizer_hash(first) == tokenizer_hash(second)
    (folder,) = (tmp_path / "cache").glob("tokenizer-*[!k]")
    os.truncate(folder / "tokenizer.json", 100)
    third = load_or_train_tokenizer(settings, vocab_size=512, say=said.append)
    assert len(said) == 3 and "damaged" in said[1] and third.get_vocab() == first.get_vocab()
    load_or_train_tokenizer(settings, vocab_size=600, say=said.append)
    assert len(said) == 4


@pytest.mark.parametrize("row", [
    {"prompt": "the fox", "completion": "a dog"},
    {"messages": [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "a dog"}]},
])  # fmt: skip
def test_trained_on_any_shape(tmp_path: Path, row):
    path = write_jsonl(tmp_path / "x.jsonl", [row] * 20 + [{"odd": 1}])
    tokenizer = load_or_train_tokenizer(DataSettings(dataset=str(path), cache_dir=str(tmp_path)), vocab_size=512)
    assert len(tokenizer("the")["input_ids"]) < 3


def test_hash_follows_what_decides_the_tokens():
    tokenizer = tiny_tokenizer()
    before = tokenizer_hash(tokenizer)
    tokenizer(["a", "bb"], padding=True, truncation=True, max_length=3)  # leaves its mark in the backend
    assert tokenizer_hash(tokenizer) == before
    tokenizer.chat_template = "x"
    assert tokenizer_hash(tokenizer) != before


def test_load_from_a_folder(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "my tokenizer")
    loaded = load_or_train_tokenizer(DataSettings(), str(tmp_path / "my tokenizer"))
    assert loaded.pad_token_id == loaded.eos_token_id and loaded("the fox") == tokenizer("the fox")


def test_folders_that_hold_no_tokenizer(tmp_path: Path):
    refused(DataError, "no such file or folder", lambda: load_tokenizer(str(tmp_path / "nowhere")))
    (tmp_path / "model").mkdir()
    refused(DataError, "has no tokenizer in it", lambda: load_tokenizer(str(tmp_path / "model")))
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    refused(DataError, "cannot be loaded", lambda: load_tokenizer(str(tmp_path / "model")))
    refused(DataError, "Windows path", lambda: load_tokenizer(r"Z:\models\x"))


@pytest.mark.parametrize(("raised", "words"), [
    (OSError("no connection"), "cannot be loaded from the hub.*a folder with the tokenizer's files"),
    (ValueError("... set `trust_remote_code=True` ..."), "runs code of its own.*--trust_remote_code true"),
])  # fmt: skip
def test_hub_tokenizer_errors(monkeypatch, raised, words):
    import transformers

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", failing(raised))
    refused(DataError, words, lambda: load_tokenizer("owner/name"))


# --- hub data sets ----------------------------------------------------------------------------------------------------


class Builder:
    hash = "abc"

    class info:
        splits = ("train", "validation")
        dataset_size = 1000


@pytest.fixture
def hub(monkeypatch):
    """The `datasets` library without its network: what is asked of it is recorded."""
    import datasets

    asked: list[dict] = []

    def load_dataset(name, config, split, streaming):
        asked.append({"name": name, "config": config, "split": split, "streaming": streaming})
        rows = datasets.Dataset.from_list([{"text": f"{split} {sentence(n)}"} for n in range(40)])
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: Builder)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


@pytest.mark.parametrize("streaming", ["on", "off"])
def test_hub_data_set(tmp_path: Path, hub, streaming: str):
    settings = DataSettings(
        dataset="owner/name", dataset_config="en", eval_split="validation", streaming=streaming, seq_length=64,
        cache_dir=str(tmp_path), packing="off",
    )  # fmt: skip
    prepared = prepare_data(settings, tiny_tokenizer())
    assert prepared.eval is not None and len(prepared.train) == len(prepared.eval) == 40
    assert tiny_tokenizer().decode(prepared.eval.batch([0])["input_ids"][0]).startswith("validation")
    assert [(call["split"], call["streaming"]) for call in hub] == [
        ("train", streaming == "on"),
        ("validation", streaming == "on"),
    ]
    assert prepare_data(settings, tiny_tokenizer()).summary.cache_hit


def test_hub_data_set_larger_than_ram_share_is_streamed(hub, monkeypatch):
    monkeypatch.setattr(Builder.info, "dataset_size", 10**15)
    source = open_source(DataSettings(dataset="owner/name"))
    assert hub[0]["streaming"] and "read as a stream" in source.notes()[0]
    assert [record.row["text"][:5] for record in source.records()] == ["train"] * 40


def test_hub_split_that_is_not_there(hub):
    with pytest.raises(DataError, match=r"no split 'trian'.*nearest: 'train'.*it has: train, validation"):
        open_source(DataSettings(dataset="owner/name", dataset_split="trian"))


def _error(name: str, base: type[Exception] = Exception) -> Exception:
    return type(name, (base,), {})("what the library said")


@pytest.mark.parametrize(("raised", "words"), [
    (ConnectionError("no route"), "the hub cannot be reached.*no route"),
    (_error("OfflineModeIsEnabled"), "the hub cannot be reached"),
    (_error("DatasetNotFoundError", OSError), "neither a local file or folder nor a data set"),
    (ValueError("Config name is missing"), "dataset_config"),
    (_error("SomethingElse"), "cannot be loaded: SomethingElse: what the library said"),
])  # fmt: skip
def test_hub_errors_name_what_works_without_it(monkeypatch, raised, words):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset_builder", failing(raised))
    with pytest.raises(DataError, match=words) as error:
        open_source(DataSettings(dataset="owner/name"))
    if "dataset_config" not in words:
        for local in (".jsonl", "a folder of text files", "embedded"):
            assert local in str(error.value)


def test_hub_that_breaks_off_while_streaming(hub, monkeypatch):
    source = open_source(DataSettings(dataset="owner/name", streaming="on"))

    def rows():
        yield {"text": "one"}
        raise ConnectionError("gone")

    source._dataset = rows()  # type: ignore[attr-defined]
    refused(DataError, r"cannot be reached.*gone", lambda: list(source.records()))


def test_saved_data_set(tmp_path: Path):
    import datasets

    rows = datasets.Dataset.from_list(text_rows(10))
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "many"))
    for name in ("one", "many"):
        settings = DataSettings(dataset=str(tmp_path / name), cache_dir=str(tmp_path / "c"), seq_length=32)
        assert prepare_data(settings, tiny_tokenizer()).summary.documents == 10
    with pytest.raises(DataError, match=r"no split 'test'.*it has: train"):
        open_source(DataSettings(dataset=str(tmp_path / "many"), dataset_split="test"))
    next((tmp_path / "one").glob("*.arrow")).unlink()
    refused(DataError, "cannot be opened", lambda: open_source(DataSettings(dataset=str(tmp_path / "one"))))
