"""Damage in a cache is named once and the cache rebuilt; a full drive is told in words, whichever library met it."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outcore.data import DataSettings, load_or_train_tokenizer
from outcore.data.basis import CacheError
from outcore.data.cache.arrays import ArraysWriter, DamagedArrays, open_arrays


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_single_bits_of_a_manifest_are_damage_and_nothing_else(tmp_path: Path) -> None:
    with ArraysWriter(tmp_path / "cache") as writer:
        writer.array("tokens", np.uint16).append(np.arange(500, dtype=np.uint16))
        writer.array("starts", np.int64).append(np.arange(9))
        writer.commit({"rows": 9, "words": ["a", "b"]})
    manifest = tmp_path / "cache" / "manifest.json"
    draw = random.Random(1)
    for bit in draw.sample(range(8 * manifest.stat().st_size), 200):
        flip(manifest, bit)
        try:
            found = open_arrays(tmp_path / "cache")
            assert found.meta == {"rows": 9, "words": ["a", "b"]} and found["tokens"][7] == 7  # white space
        except DamagedArrays as error:
            assert str(tmp_path / "cache") in str(error)
        flip(manifest, bit)


@pytest.fixture
def cached(tmp_path: Path) -> tuple[DataSettings, Path, list[str]]:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    settings = DataSettings(dataset=str(text), cache_dir=str(tmp_path / "cache"), seq_length=32)
    said: list[str] = []
    load_or_train_tokenizer(settings, vocab_size=512, say=said.append)
    (folder,) = [path for path in (tmp_path / "cache").rglob("tokenizer-*") if path.is_dir()]
    said.clear()
    return settings, folder, said


@pytest.mark.parametrize("how", ["cut", "flip", "gone"])
def test_a_damaged_tokenizer_is_named_once_and_trained_again(cached: tuple[Any, Path, list[str]], how: str) -> None:
    settings, folder, said = cached
    names = sorted(path.name for path in folder.iterdir())
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(names)
    for name in names:
        before = (folder / name).read_bytes()
        if how == "cut":
            (folder / name).write_bytes(b"")
        elif how == "flip":
            flip(folder / name, 8 * (len(before) // 2))
        else:
            (folder / name).unlink()
        tokenizer = load_or_train_tokenizer(settings, vocab_size=512, say=said.append)
        assert sum("is damaged and will be trained again" in words for words in said) == 1 and name in said[0], said
        assert (folder / name).read_bytes() == before and tokenizer.chat_template
        said.clear()
    load_or_train_tokenizer(settings, vocab_size=512, say=said.append)
    assert not said


def test_an_error_that_a_library_in_rust_only_quotes_names_the_folder(tmp_path, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    def full(self: Any, *args: Any, **kwargs: Any) -> None:
        raise Exception("No space left on device (os error 28)")  # as the tokenizers library does

    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox\n" * 100)
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    settings = DataSettings(dataset=str(text), cache_dir=str(tmp_path / "cache"), seq_length=32)
    with pytest.raises(CacheError, match=r"no space left.*cache.*--data_cache_dir"):
        load_or_train_tokenizer(settings, vocab_size=512, say=lambda words: None)
