"""A rank that dies, fails or is slow: the others end with the reason, within seconds, and say which one it was."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.engine.stream.ranks.host import PublishedUpdates
from outcore.engine.stream.ranks.reduce import SHARE, STEPS, SlowRank
from outcore.flow.weights import Scratch
from outcore.staging.shared import RankEnded, RankGroup
from outcore.storage.store import STORE_NAMES, lock_directories
from tests.engine.stream.ranks.world import run_ranks, slow_then_named, train_with_fault
from tests.refused import refused


@pytest.mark.more(after=1)
@pytest.mark.parametrize("fault", ["killed in forward", "killed in the optimizer", "killed in save"])
def test_a_killed_rank_ends_the_others(tmp_path, fault):
    words, died = run_ranks(2, tmp_path / "ranks", train_with_fault, fault=fault, drive=str(tmp_path))
    assert died == -signal.SIGKILL
    at = "saving" if fault.endswith("save") else "step 2"
    assert words.startswith("RankEnded: rank 1 (process ") and "has ended without a word, at: " + at in words


def test_what_one_rank_raises_the_others_hear(tmp_path):
    words, own = run_ranks(2, tmp_path / "ranks", train_with_fault, fault="raises", drive=str(tmp_path))
    assert own == "RuntimeError: out of luck"
    assert words == "RankEnded: rank 1 failed: RuntimeError: out of luck"


def test_a_rank_without_memory_ends_where_others_have_its_gradients(tmp_path):
    """Made again, its pass would ship them twice, and the ranks wait for each other for ever."""
    words, own = run_ranks(2, tmp_path / "ranks", train_with_fault, 60.0, fault="short of memory", drive=str(tmp_path))
    assert own == "OutOfMemoryError: CUDA out of memory"
    assert words == "RankEnded: rank 1 failed: OutOfMemoryError: CUDA out of memory"


def test_a_rank_hears_what_its_own_thread_that_publishes_died_of():
    """It waited for itself until the group's timeout, and said nothing of why."""

    class Pool:
        @property
        def num_finished(self) -> int:
            raise OSError("the drive is gone")

    group = RankGroup(0, 1, lambda mine: [mine], 1, timeout_s=60.0)
    host: Any = SimpleNamespace(group=group, counter=lambda kind, part: 0)
    part: Any = SimpleNamespace(index=0, name="layer 0")
    published = PublishedUpdates(host, Pool())  # pyright: ignore[reportArgumentType]
    published.watch(part, lambda: True)
    refused(RankEnded, "rank 0 failed: OSError: the drive is gone", lambda: published.wait(part))
    published.close()
    group.close()


def test_a_full_drive_in_save(tmp_path):
    own, words = run_ranks(2, tmp_path / "ranks", train_with_fault, fault="full drive", drive=str(tmp_path))
    assert own.startswith("FileError") and "the drive is full" in own
    assert words.startswith("RankEnded: rank 0 failed: FileError") and "the drive is full" in words


def test_no_room_on_one_ranks_drive(tmp_path):
    words, own = run_ranks(2, tmp_path / "ranks", train_with_fault, fault="no room", drive=str(tmp_path))
    assert own.startswith("EngineError: there is no room for the optimizer states on NVMe: 12 GB are missing")
    assert words.startswith("RankEnded: rank 1 failed: EngineError: there is no room")


def test_scratch_of_killed_ranks_is_removed_by_a_run_with_fewer(tmp_path):
    left = [tmp_path / f"outcore-scratch-{rank}" for rank in (1, 2, 3)]
    for folder in left:
        store = folder / "optimizer states"
        store.mkdir(parents=True)
        (store / STORE_NAMES[0]).write_bytes(b"x")
    other = tmp_path / "outcore-scratch-mine"
    other.mkdir()
    (beside,) = lock_directories([left[2]], exclusive=True)
    with Scratch([tmp_path], num_ranks=2):
        assert [folder.exists() for folder in left] == [True, False, True]  # rank 1's own; a run beside this one
    beside.release()
    assert other.exists()


def test_a_slow_rank_is_named_and_waited_for(tmp_path):
    (words, said), (slow, _) = run_ranks(2, tmp_path / "ranks", slow_then_named, drive=str(tmp_path))
    assert words == slow == "no error"
    assert any("waiting for rank 1 (process " in line and "at: step 2" in line for line in said)


def test_a_rank_that_holds_up_every_step_is_named_once(caplog):
    class Ranks:
        rank, waited_s, collective_s = 0, [0.0, 0.0, 0.0], {"update": 0.0, "tokens": 0.0}

    slow = SlowRank(Ranks())  # pyright: ignore[reportArgumentType]
    for step in range(3 * STEPS):
        Ranks.waited_s[2 if step else 1] += 1.1 * SHARE
        Ranks.waited_s[1] += 0.01
        Ranks.collective_s["update"] += 0.2
        Ranks.collective_s["tokens"] += 0.03
        assert slow.step(1.0) == pytest.approx(1.1 * SHARE + 0.01)
        assert slow.collective_s == pytest.approx({"collective_update": 0.2, "collective_tokens": 0.03})
        assert slow.waited_s["waited_rank_1"] == pytest.approx(0.01 if step else 1.1 * SHARE + 0.01)
        assert len(caplog.records) == (step >= STEPS)
    assert caplog.records[0].message.startswith("rank 2 is slow: rank 0 waited for it 22 %")
    assert "mostly in: update" in caplog.records[0].message
