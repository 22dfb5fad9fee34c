"""Whole runs of train_model.py as two ranks: a killed rank ends the run, one rank goes on from its checkpoint."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from outcore.train.run import main
from tests.forked import start_script
from tests.train.jobs import REPOSITORY, corpus, engine_of, flags, fresh_env, metrics

(corpus,) = (corpus,)
pytestmark = pytest.mark.slow


def start_ranks(argv: list[str], logs: list[Path]) -> list:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank, log in enumerate(logs):
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
        mine |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        started.append(start_script(REPOSITORY / "train_model.py", argv, fresh_env(**mine), log))
    return started


def test_a_killed_rank_ends_the_run_and_one_rank_resumes_it(tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    shared = ["--run_name", "r", "--save_steps", "2", "--eval_strategy", "no", "--fit_check", "warn"]
    one = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    two = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1"]
    assert main([*flags(straight, corpus, *shared, *one), "--max_steps", "40"]) == 0

    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = start_ranks([*flags(broken, corpus, *shared, *two), "--max_steps", "40"], logs)
    try:
        saved = broken / "checkpoint" / "r" / "step-00000004"
        deadline_s = time.monotonic() + 600
        while not saved.exists():
            assert time.monotonic() < deadline_s and ranks[0].poll() is None, logs[0].read_text()[-2000:]
            time.sleep(0.02)
        os.kill(ranks[1].pid, signal.SIGKILL)
        assert ranks[0].wait(600) == 1
    finally:
        for process in ranks:
            process.kill()
    assert f"rank 1 (process {ranks[1].pid}) has ended without a word" in logs[0].read_text()
    assert engine_of(broken) == {"name": "stream", "reason": "auto: 2 ranks of one host and a decoder-only model"}

    argv = [*flags(broken, corpus, *shared, *one), "--max_steps", "40", "--resume_from_checkpoint", "auto"]
    assert main(argv) == 0
    losses = [[line["loss"] for line in metrics(root) if "loss" in line] for root in (straight, broken)]
    assert len(losses[0]) == len(losses[1]) == 40
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
