"""Caches on the drive: atomic, verified, rebuilt when damaged, built by one process; errors that say what to do."""

import errno
import multiprocessing
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import outcore.data.cache.arrays as arrays_module
from outcore.data import CacheError, DataError, DataSettings, prepare_data
from outcore.data.cache.arrays import ArraysWriter, DamagedArrays, open_arrays
from outcore.data.cache.checked import DamagedCache
from outcore.data.cache.lock import build_lock
from tests.data.fixtures import sentence, text_rows, tiny_tokenizer, write_jsonl
from tests.refused import refused


def write(path: Path, **values) -> None:
    with ArraysWriter(path) as writer:
        for name, array in values.items():
            writer.array(name, array.dtype).append(array)
        writer.commit({"a": 1})


def test_leavings_of_a_killed_process_are_cleared(tmp_path: Path):
    (tmp_path / "x.partial-1").mkdir()
    (tmp_path / "x.partial-1" / "a.bin").write_bytes(b"half")
    write(tmp_path / "x", a=np.arange(3))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGES = {
    "cut short": lambda folder: os.truncate(folder / "a.bin", 100),
    "one bit": lambda folder: flip(folder / "a.bin"),
    "array gone": lambda folder: (folder / "a.bin").unlink(),
    "manifest gone": lambda folder: (folder / "manifest.json").unlink(),
    "manifest cut": lambda folder: os.truncate(folder / "manifest.json", 20),
    "manifest of nothing": lambda folder: (folder / "manifest.json").write_text("[]"),
    "checksums missing": lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().split('"crc32"')[0] + '"crc32": []}}, "block_bytes": 64, "meta": {}}'
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(tmp_path: Path, damage: str):
    write(tmp_path / "x", a=np.arange(1000))
    DAMAGES[damage](tmp_path / "x")
    with pytest.raises(DamagedArrays):
        open_arrays(tmp_path / "x")


DAMAGED_UNDER_A_RUN = {
    "zeroed": lambda file: patch(file, 70_000, bytes(64)),
    "one bit": lambda file: patch(file, 70_000, bytes([file.read_bytes()[70_000] ^ 1])),
    "cut short": lambda file: os.truncate(file, 70_000),
}


def patch(file: Path, at: int, data: bytes) -> None:
    with open(file, "r+b") as opened:
        opened.seek(at)
        opened.write(data)


@pytest.mark.parametrize("damage", DAMAGED_UNDER_A_RUN)
def test_damage_under_a_run_is_an_error_where_it_is_read_and_nowhere_else(tmp_path: Path, damage: str):
    """Never other values, and no signal that ends the process."""
    values = np.arange(1, 40_001, dtype=np.uint32)  # 160,000 bytes: ten pieces; damage in the fifth
    write(tmp_path / "x", a=values)
    checked = open_arrays(tmp_path / "x").checked("a")
    assert checked[17_500] == 17_501 and checked[9:9].tolist() == []
    assert np.array_equal(checked[4090:4110], values[4090:4110]) and np.array_equal(np.asarray(checked), values)
    DAMAGED_UNDER_A_RUN[damage](tmp_path / "x/a.bin")
    assert np.array_equal(checked[10:16_000], values[10:16_000])
    words = r"a\.bin: bytes 65,536 and on have changed.*--resume_from_checkpoint"
    refused(DamagedCache, words, lambda: checked[17_490:17_510])
    refused(DamagedCache, words, lambda: checked[16_000:20_481])
    if damage != "cut short":
        assert np.array_equal(checked[20_480:], values[20_480:])


def test_a_cache_that_is_removed_is_read_to_the_end(tmp_path: Path):
    write(tmp_path / "x", a=np.arange(40_000))
    checked = open_arrays(tmp_path / "x").checked("a")
    shutil.rmtree(tmp_path / "x")
    assert checked[39_999] == 39_999


def test_checksums_of_pieces_that_are_damaged_are_found_on_opening(tmp_path: Path):
    write(tmp_path / "x", a=np.arange(1000))
    flip(tmp_path / "x/a.crc")
    refused(DamagedArrays, r"a\.crc: has changed", lambda: open_arrays(tmp_path / "x"))


def test_large_arrays_are_verified_by_sample(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(arrays_module, "BLOCK_BYTES", 8)
    monkeypatch.setattr(arrays_module, "VERIFY_WHOLE_UP_TO_BYTES", 64)
    write(tmp_path / "x", a=np.arange(1000))
    assert open_arrays(tmp_path / "x")["a"][-1] == 999
    data = bytearray((tmp_path / "x" / "a.bin").read_bytes())
    data[-1] ^= 1
    (tmp_path / "x" / "a.bin").write_bytes(bytes(data))
    with pytest.raises(DamagedArrays, match="block 999 has changed"):
        open_arrays(tmp_path / "x")


@pytest.fixture
def data(tmp_path: Path) -> DataSettings:
    path = write_jsonl(tmp_path / "x.jsonl", text_rows(60))
    return DataSettings(dataset=str(path), seq_length=32, cache_dir=str(tmp_path / "cache"))


def tokens_folder(settings: DataSettings) -> Path:
    (folder,) = Path(settings.cache_dir).glob("tokens-*[!k]")
    return folder


def test_hit_rebuild_and_what_belongs_to_the_key(data: DataSettings):
    tokenizer = tiny_tokenizer()
    first = prepare_data(data, tokenizer)
    again = prepare_data(data, tokenizer)
    assert not first.summary.cache_hit and again.summary.cache_hit
    tokens = np.array(first.train.tokens)  # copied: the map shows the damage done below
    assert np.array_equal(tokens, again.train.tokens)
    assert first.train.fingerprint == again.train.fingerprint

    said: list[str] = []
    flip(tokens_folder(data) / "tokens.bin")
    rebuilt = prepare_data(data, tokenizer, say=said.append)
    assert not rebuilt.summary.cache_hit and any("damaged and will be rebuilt" in line for line in said)
    assert np.array_equal(tokens, rebuilt.train.tokens)

    from dataclasses import replace

    longer = prepare_data(replace(data, seq_length=64), tokenizer)
    assert longer.summary.cache_hit and longer.train.fingerprint != first.train.fingerprint
    other = tiny_tokenizer()
    other.add_tokens(["wizards"])
    assert not prepare_data(data, other).summary.cache_hit
    with open(data.dataset, "a") as file:
        file.write('{"text": "one more"}\n')
    assert not prepare_data(data, tokenizer).summary.cache_hit


def test_cache_folder_that_cannot_be_written(tmp_path: Path, data: DataSettings):
    from dataclasses import replace

    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CacheError, match=r"cannot be written in .*file.*Set --data_cache_dir to a writable folder"):
        prepare_data(replace(data, cache_dir=str(tmp_path / "file" / "cache")), tiny_tokenizer())


def test_read_only_cache_folder(monkeypatch, data: DataSettings):
    Path(data.cache_dir).mkdir()
    Path(data.cache_dir).chmod(0o555)
    if os.geteuid() == 0:  # root writes anywhere; ask what another user would be told
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(CacheError, match=r"Permission denied. Set --data_cache_dir to a writable folder"):
        prepare_data(data, tiny_tokenizer())
    Path(data.cache_dir).chmod(0o755)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_drive(data: DataSettings, monkeypatch):
    real_open = open

    def open_on_full_drive(path, mode="r", *args, **kwargs):
        full = str(path).endswith("tokens.bin") and mode == "wb"
        return real_open("/dev/full" if full else path, mode, *args, **kwargs)

    monkeypatch.setattr(arrays_module, "open", open_on_full_drive, raising=False)
    with pytest.raises(CacheError, match=r"no space left for the token cache in .* free.*cache_dir"):
        prepare_data(data, tiny_tokenizer())
    monkeypatch.undo()
    assert not list(Path(data.cache_dir).glob("tokens-*partial*")), "half-written files stay behind"
    assert len(prepare_data(data, tiny_tokenizer()).train) > 0


def test_other_write_errors_keep_their_reason(tmp_path: Path):
    with pytest.raises(CacheError, match="failed: EIO, Input/output error"), arrays_module.explained(tmp_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _hold(path: str, held) -> None:
    with build_lock(Path(path), 5, print, "it"):
        held.set()
        time.sleep(120)


def test_lock_waits_says_so_and_gives_up(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("outcore.data.cache.lock.SAY_AFTER_S", 0.05)
    context = multiprocessing.get_context("fork")
    held = context.Event()
    process = context.Process(target=_hold, args=(str(tmp_path / "x.lock"), held))
    process.start()
    assert held.wait(30)
    said: list[str] = []
    try:
        with (
            pytest.raises(CacheError, match=r"another process has been preparing the rows.*lock_timeout_s"),
            build_lock(tmp_path / "x.lock", 0.3, said.append, "the rows"),
        ):
            pytest.fail("the lock was given twice")
        assert said == ["waiting for another process that is preparing the rows"]
        process.kill()  # its lock goes with it
        process.join()
        with build_lock(tmp_path / "x.lock", 10, said.append, "the rows"):
            pass
    finally:
        process.kill()
        process.join()


def test_several_builders_at_once_build_once(data: DataSettings):
    """Threads stand in for processes: the lock belongs to the open file, so it parts them just the same."""
    tokenizers = [tiny_tokenizer() for _ in range(3)]
    start = threading.Barrier(3)

    def build(tokenizer):
        start.wait(timeout=60)
        return prepare_data(data, tokenizer)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(build, tokenizers))
    assert sorted(prepared.summary.cache_hit for prepared in found) == [False, True, True]
    assert len({(prepared.train.fingerprint, prepared.train.total_tokens) for prepared in found}) == 1


def test_a_document_whose_file_breaks_half_way_is_taken_back(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("outcore.data.sources.textfile.BLOCK_BYTES", 4096)
    monkeypatch.setattr("outcore.data.sources.textfile.iterate_text.__defaults__", (4096,))
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(sentence(1))
    (folder / "b.txt").write_bytes((sentence(2, 9000)).encode() + b"\xff")
    (folder / "c.txt").write_text(sentence(3))
    settings = DataSettings(dataset=str(folder), seq_length=64, cache_dir=str(tmp_path / "c"), eval_fraction=0)
    with pytest.raises(DataError, match=r"b\.txt: byte offset \d+ \(0xff\) is not UTF-8"):
        prepare_data(settings, tiny_tokenizer())
    from dataclasses import replace

    prepared = prepare_data(replace(settings, on_bad_row="skip"), tiny_tokenizer())
    text = tiny_tokenizer().decode(np.asarray(prepared.train.tokens))
    assert text == f"{sentence(1)}<|endoftext|>{sentence(3)}<|endoftext|>"
    assert prepared.summary.bad_rows == 1 and prepared.summary.documents == 2


def test_progress_is_told(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("outcore.data.cache.tokens.TELL_EVERY_S", 0.0)
    monkeypatch.setattr("outcore.data.cache.batches.BATCH_ITEMS", 10)
    path = write_jsonl(tmp_path / "x.jsonl", text_rows(30))
    said: list[str] = []
    prepare_data(
        DataSettings(dataset=str(path), seq_length=32, cache_dir=str(tmp_path)), tiny_tokenizer(), say=said.append
    )
    assert any("documents" in line and "so far" in line for line in said)
