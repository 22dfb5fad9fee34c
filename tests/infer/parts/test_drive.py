"""Keys and values on a drive: the same as in RAM; damage is told; beginnings of prompts outlive the program."""

import errno
import os
import random
import stat
from contextlib import closing

import pytest
import torch

from outcore.flow.weights import Scratch
from outcore.infer.cache import (
    CacheSettings,
    DriveMemory,
    GroupPlan,
    KeptPrefixes,
    KvCache,
    KvMemory,
    KvShape,
    KvStore,
    PrefixesDamaged,
)
from outcore.infer.opening import InferSettings, open_engine
from outcore.storage import PosixEngine, StorageError
from tests.infer.models import greedy, opening
from tests.refused import failing, refused
from tests.storage.faulty import FaultyEngine

CPU = torch.device("cpu")
SHAPE = KvShape(2, 8, 6)


@pytest.mark.parametrize("kv_format", ["same", "int8"])
@pytest.mark.parametrize("open_pages", [2, 50])
def test_a_drive_gives_what_ram_gives(tmp_path, kv_format, open_pages):
    """Random writes (tails, chunks, corrected guesses, pages that change hands) and reads, also begun ahead."""
    draws, size = random.Random(3), 4
    with Scratch([tmp_path], checksums="on") as scratch:
        drive = DriveMemory(scratch, open_pages).store(SHAPE, 30, size, torch.bfloat16, kv_format)
        ram = KvStore(SHAPE, 30, size, torch.bfloat16, KvMemory(CPU), kv_format)
        ends = dict.fromkeys(range(30), 0)
        for _ in range(150):
            page = draws.randrange(30)
            start = 0 if ends[page] == 0 or draws.random() < 0.2 else draws.randrange(ends[page] + (ends[page] < size))
            count = draws.randint(1, size - start)
            ends[page] = start + count if start else max(count, 0)
            slots = torch.arange(page * size + start, page * size + start + count)
            keys, values = torch.randn(count, 2, 8).bfloat16(), torch.randn(count, 2, 6).bfloat16()
            drive.write(keys, values, slots)
            if start == 0:  # a new owner sees nothing of the one before
                ram.write(
                    torch.zeros(size, 2, 8), torch.zeros(size, 2, 6), torch.arange(page * size, page * size + size)
                )
            ram.write(keys, values, slots)
            wanted = torch.tensor(draws.sample(range(30), draws.randint(1, 6)))
            if draws.random() < 0.5:
                drive.read_ahead(wanted)
            if draws.random() < 0.7:
                for mine, theirs in zip(drive.read(wanted, CPU), ram.read(wanted, CPU), strict=True):
                    known = torch.cat([torch.arange(size) < ends[int(p)] for p in wanted])
                    assert torch.equal(mine[known], theirs[known])
        assert drive.ram_bytes < 8 * drive.size_bytes


def test_a_flipped_bit_is_an_error_that_names_the_file(tmp_path):
    with Scratch([tmp_path], checksums="on") as scratch:
        drive = DriveMemory(scratch, 2).store(SHAPE, 4, 4, torch.float32, "same")
        drive.write(torch.ones(4, 2, 8), torch.ones(4, 2, 6), torch.arange(4, 8))
        for page in (0, 2, 3):  # others, so that page 1 is no longer at hand
            drive.write(torch.ones(4, 2, 8), torch.ones(4, 2, 6), torch.arange(page * 4, page * 4 + 4))
        for _, transfer in drive._leaving.values():
            transfer.wait()
        drive._leaving.clear()
        (path,) = tmp_path.rglob("tensors.bin")
        data = bytearray(path.read_bytes())
        data[drive._record_bytes + 5] ^= 1
        path.write_bytes(data)
        refused(StorageError, r"keys and values 1.*came back other", lambda: drive.read(torch.tensor([1]), CPU))


def answers(folder, prompts, **settings):
    """Greedy answers of a model in a folder, how many tokens of prompts came from earlier ones, pages read."""
    with opening(folder, device="cpu", context=256, page_tokens=8, **settings) as opened:
        found = greedy(opened.engine, prompts, 12)
        counts = opened.engine.scheduler.cache.counts
        return found, counts.found_tokens, counts.read_pages


def prompts(lengths=(60, 3, 33), seed=0):
    draws = random.Random(seed)
    return [[draws.randrange(2, 200) for _ in range(length)] for length in lengths]


@pytest.mark.more(after=1)
@pytest.mark.parametrize("kv_format", ["same", "int8"])
def test_a_model_answers_the_same_with_its_cache_on_a_drive(tiny_folder, tmp_path, kv_format):
    folder = tiny_folder[0]
    whole = answers(folder, prompts(), kv_format=kv_format)[0]
    there = answers(folder, prompts(), kv_format=kv_format, kv_home="nvme", nvme_path=(tmp_path,))[0]
    assert there == whole
    assert not list(tmp_path.rglob("tensors.bin"))  # nothing stays


@pytest.mark.more(after=1)
@pytest.mark.parametrize("kv_home", ["ram", "nvme"])
def test_beginnings_outlive_the_program(tiny_folder, tmp_path, kv_home):
    folder, more = tiny_folder[0], {"prefix_path": tmp_path / "kept", "prefix_gib": 0.01}
    if kv_home == "nvme":
        more |= {"kv_home": "nvme", "nvme_path": (tmp_path,)}
    first, found, read = answers(folder, prompts(), **more)
    assert (found, read) == (0, 0)
    second, found, read = answers(folder, prompts(), **more)
    assert second == first and found == 56 + 32 and read == 7 + 4
    if kv_home == "nvme":
        return
    others = [[*prompts()[0][:40], 7, 7, 7]]
    assert answers(folder, others, **more) == (answers(folder, others)[0], 40, 5)
    for other in ({"kv_format": "int8"}, {"quantize": "nf4"}):
        assert answers(folder, prompts(), **other, **more)[1] == 0  # of other bits: not the same pages


def test_a_start_goes_on_without_beginnings_that_are_damaged(tiny_folder, tmp_path):
    more = {"prefix_path": tmp_path / "kept", "prefix_gib": 0.01}
    first, _, _ = answers(tiny_folder[0], prompts(), **more)
    (path,) = tmp_path.rglob("pages.json")
    path.write_text(path.read_text()[:-5])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    said = []
    settings = InferSettings(device="cpu", context=256, ram_gib=1, page_tokens=8, **more)
    with closing(open_engine(str(tiny_folder[0]), settings, said.append)) as opened:
        assert greedy(opened.engine, prompts(), 12) == first
    assert any("warning: prefix_path" in line and "remove that folder" in line for line in said)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def kept_at(folder, budget_bytes=1 << 20, identity="a"):
    return KeptPrefixes(folder, budget_bytes, {"model": identity}, 4, 1000)


def page_of(value: int) -> list[list[torch.Tensor]]:
    return [[torch.full((250,), value, dtype=torch.int32)]]


def chain(kept, tokens):
    """Keep a prompt's pages; their parents' keys."""
    from outcore.infer.cache.prefix import key_of

    parents = [b""]
    for start in range(0, len(tokens), 4):
        kept.put(parents[-1], tokens[start : start + 4], page_of(tokens[start]))
        parents.append(key_of(parents[-1], tokens[start : start + 4]))
    return parents


def test_pages_are_found_by_their_tokens_after_a_restart(tmp_path):
    kept = kept_at(tmp_path)
    parents = chain(kept, list(range(12)))
    kept.close()
    kept = kept_at(tmp_path)
    assert len(kept) == 3 and kept.has(parents[2], [8, 9, 10, 11]) and not kept.has(parents[2], [8, 9, 10, 12])
    found = kept.read(parents[1], [4, 5, 6, 7], page_of(0))
    assert found is not None and torch.equal(found[0][0], page_of(4)[0][0])
    refused(ValueError, "in use by another process", lambda: kept_at(tmp_path))
    kept.close()
    other = kept_at(tmp_path, identity="b")
    assert len(other) == 0
    other.close()


def test_kept_prompts_are_for_this_user_alone(tmp_path):
    (tmp_path / "kept").mkdir(mode=0o755)
    for _ in range(2):
        kept = kept_at(tmp_path / "kept")
        assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700
        kept.close()
        kept.folder.chmod(0o755)  # as one that was made before


def test_the_budget_is_kept_and_the_oldest_ends_go(tmp_path):
    kept = kept_at(tmp_path, 8192 * 4)
    first = chain(kept, [*range(12)])
    chain(kept, [*range(50, 58)])
    assert len(kept) == 4 and kept.size_bytes < 8192 * 4 + 128 * 1024
    assert kept.has(b"", [0, 1, 2, 3]) and not kept.has(first[2], [8, 9, 10, 11])
    chain(kept, [*range(100, 120)])
    kept.close()
    again = kept_at(tmp_path, 8192 * 4)
    assert len(again) == 4
    again.close()
    refused(ValueError, "one page of 4 tokens takes", lambda: kept_at(tmp_path, 4096))


def test_a_page_takes_the_place_of_another_once_that_one_is_written(tmp_path, monkeypatch):
    """Two writes to one place have no order."""
    writes = {}

    def noted(file, offset, record):
        assert offset not in writes or writes[offset].done()
        writes[offset] = submit(file, offset, record)
        return writes[offset]

    with closing(FaultyEngine(PosixEngine(2))) as drive:
        drive.delay(0.05, "write")
        submit = drive.submit_write
        monkeypatch.setattr(drive, "submit_write", noted)
        monkeypatch.setattr("outcore.infer.cache.kept.open_engine", lambda: drive)
        kept = kept_at(tmp_path, 8192 * 2)
        for first in (0, 50, 100):
            chain(kept, [*range(first, first + 8)])
        kept.close()
    assert len(writes) == 2 and not kept.why_not


def test_small_pages_are_kept_up_to_a_number(tmp_path, monkeypatch):
    monkeypatch.setattr("outcore.infer.cache.kept.MAX_PAGES", 3)
    kept = kept_at(tmp_path, 8192 * 100)
    chain(kept, [*range(20)])
    assert len(kept) == 3 and kept.size_bytes < 8192 * 3 + 128 * 1024
    kept.close()


def test_a_damaged_page_is_forgotten_with_what_follows_and_said(tmp_path, caplog):
    kept = kept_at(tmp_path)
    parents = chain(kept, list(range(12)))
    kept.close()
    (path,) = tmp_path.rglob("records.bin")
    data = bytearray(path.read_bytes())
    data[8192 + 4096 + 3] ^= 1  # the second record
    path.write_bytes(data)
    kept = kept_at(tmp_path)
    assert kept.read(parents[1], [4, 5, 6, 7], page_of(0)) is None
    assert "computed again" in caplog.text and len(kept) == 1 and kept.num_damaged == 1
    kept.close()


def test_a_kill_between_two_commits_gives_no_wrong_page(tmp_path):
    """The list is of the last commit, the records are newer: they say themselves whose they are."""
    kept = kept_at(tmp_path, 8192)  # room for one
    chain(kept, [1, 2, 3, 4])
    kept.commit()
    chain(kept, [5, 6, 7, 8])
    kept._settle()
    kept._let_go()  # killed before the list is written
    kept = kept_at(tmp_path, 8192)
    assert kept.has(b"", [1, 2, 3, 4]) and kept.read(b"", [1, 2, 3, 4], page_of(0)) is None
    kept.close()


@pytest.mark.parametrize("name", ["pages.json", "records.bin"])
def test_a_damaged_folder_is_refused_in_words(tmp_path, name):
    kept = kept_at(tmp_path)
    chain(kept, [1, 2, 3, 4])
    kept.close()
    (path,) = tmp_path.rglob(name)
    path.write_bytes(path.read_bytes()[:-5])
    refused(PrefixesDamaged, "remove that folder", lambda: kept_at(tmp_path))


def test_a_drive_without_room_for_another_budget_is_no_damage(tmp_path, monkeypatch):
    kept_at(tmp_path, 8192 * 2).close()
    monkeypatch.setattr(os, "posix_fallocate", failing(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ValueError, match="No space left") as found:
        kept_at(tmp_path, 8192 * 4)
    assert not isinstance(found.value, PrefixesDamaged)
    monkeypatch.undo()
    kept_at(tmp_path, 8192 * 2).close()


def test_memory_forgets_and_the_drive_remembers(tmp_path):
    kept = KeptPrefixes(tmp_path, 1 << 20, {}, 4, 4 * SHAPE.token_bytes(torch.float32, "same"))
    cache = KvCache(CacheSettings((GroupPlan(None, 4),), 4, torch.float32), None, kept)
    cache.make_stores({None: {0: SHAPE}})
    tokens, keys = list(range(16)), torch.randn(16, 2, 8)
    first = cache.open(tokens)
    cache.extend(first, 16)
    slots = torch.tensor([page * 4 + i for page in first.tables[0] for i in range(4)])
    cache.store((0, 0), SHAPE, 0).write(keys, torch.ones(16, 2, 6), slots)
    cache.settle(first, tokens, 16)
    cache.close(first)
    second = cache.open([50] * 16)
    cache.extend(second, 16)
    cache.close(second)
    again = cache.open([*tokens, 99])
    assert again.num_cached == 16 and cache.counts.read_pages == again.num_read == 4
    assert torch.equal(cache.stores[0, 0].read(torch.tensor(again.tables[0]), CPU)[0], keys)
    cache.close_kept()


def test_settings_that_do_nothing_are_errors(tmp_path):
    for wrong, words in (
        ({"kv_home": "nvme"}, "needs a folder"),
        ({"prefix_gib": 1.0}, "does nothing without"),
        ({"prefix_path": tmp_path, "share_prefixes": False}, "does nothing without shared"),
    ):
        with pytest.raises(ValueError, match=words):
            InferSettings(**wrong)
