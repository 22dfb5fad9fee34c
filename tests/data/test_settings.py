"""Settings and paths: wrong input is refused at once, in words that name the way out."""

from pathlib import Path

import pytest

from outcore.data import DataError, DataSettings, load_or_train_tokenizer
from outcore.data.sources.paths import translate
from outcore.data.sources.source import open_source
from tests.refused import refused


@pytest.mark.parametrize(("values", "words"), [
    ({"dataset": ""}, "dataset must be a non-empty text"), ({"format": "mesages"}, "nearest: 'messages'"),
    ({"packing": "yes"}, "packing must be one of auto, on, off"),
    ({"on_bad_row": "ignore"}, "on_bad_row must be one of error, skip"),
    ({"streaming": True}, "streaming must be one of"), ({"seq_length": 4}, "seq_length must be a whole number from 8"),
    ({"seq_length": 512.0}, "seq_length must be a whole number"),
    ({"seq_length": True}, "seq_length must be a whole number"), ({"eval_fraction": 0.9}, "from 0 .none. to 0.5"),
    ({"eval_fraction": "5%"}, "eval_fraction is the share"),
    ({"max_train_samples": 0}, "max_train_samples must be a whole number from 1"),
    ({"num_proc": 0}, "num_proc must be a whole number from 1"),
    ({"lock_timeout_s": 0}, "lock_timeout_s must be positive"),
    ({"prompt_column": "q"}, "prompt_column and completion_column go together"),
    ({"text_column": "t", "messages_column": "m"}, "columns of two shapes"),
    ({"text_column": "t", "format": "messages"}, "those of 'text'"),
    ({"text_extensions": ","}, "at least one extension"),
])  # fmt: skip
def test_wrong_settings_are_refused(values, words):
    refused(DataError, words, lambda: DataSettings(**values))


def test_windows_path_on_plain_linux_is_explained():
    refused(DataError, r"Windows path.*/mnt/c/data/x\.jsonl", lambda: translate(r"C:\data\x.jsonl", on_wsl=False))


def test_windows_path_on_wsl_is_translated(tmp_path: Path):
    (tmp_path / "c").mkdir()
    assert translate(r"C:\my data\x.jsonl", on_wsl=True, mount_root=tmp_path) == tmp_path / "c" / "my data" / "x.jsonl"
    assert translate("c:/data/x.txt", on_wsl=True, mount_root=tmp_path) == tmp_path / "c" / "data" / "x.txt"
    with pytest.raises(DataError, match=r"drive D: is not mounted.*drvfs"):
        translate(r"D:\x.jsonl", on_wsl=True, mount_root=tmp_path)


def test_unc_paths_are_explained_or_translated():
    with pytest.raises(DataError, match=r"network share.*drvfs.*/mnt/share/a/b\.txt"):
        translate(r"\\server\share\a\b.txt", on_wsl=True)
    refused(DataError, "cifs //server/share", lambda: translate(r"\\server\share", on_wsl=False))
    assert translate(r"\\wsl$\Ubuntu\home\me\x.txt", on_wsl=True) == Path("/home/me/x.txt")
    refused(DataError, "here it would be /home/me", lambda: translate(r"\\wsl.localhost\Ubuntu\home\me", on_wsl=False))


@pytest.mark.parametrize(("name", "words"), [("x.pdf", "named .pdf are not read"), ("x", "without extension")])
def test_unknown_kind_of_file(tmp_path: Path, name: str, words: str):
    (tmp_path / name).write_text("x")
    refused(DataError, words, lambda: open_source(DataSettings(dataset=str(tmp_path / name))))


def test_empty_file_and_folder(tmp_path: Path):
    (tmp_path / "x.jsonl").touch()
    with pytest.raises(DataError, match="is empty: there is nothing to read"):
        open_source(DataSettings(dataset=str(tmp_path / "x.jsonl")))
    refused(DataError, "has no non-empty", lambda: open_source(DataSettings(dataset=str(tmp_path))))
    (tmp_path / "a.bin").write_bytes(b"x")
    refused(DataError, r"found: 1 x \.bin", lambda: open_source(DataSettings(dataset=str(tmp_path))))


def test_a_column_that_is_not_there_is_told_before_a_tokenizer_is_trained(tmp_path: Path) -> None:
    (tmp_path / "qa.csv").write_text("question,answer\nWhat?,That.\n")
    said: list[str] = []
    columns = {"prompt_column": "qestion", "completion_column": "answer"}
    settings = DataSettings(dataset=str(tmp_path / "qa.csv"), cache_dir=str(tmp_path / "cache"), **columns)
    with pytest.raises(DataError, match="no column 'qestion'"):
        load_or_train_tokenizer(settings, say=said.append)
    assert said == []
