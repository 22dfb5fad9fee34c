"""Two hosts, rehearsed: two network namespaces of this machine, joined by one cable, with a rank of DeepSpeed's engine
in each."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from outcore.train.run import main
from tests.train.jobs import REPOSITORY, corpus, engine_of, flags, fresh_env, metrics

(corpus,) = (corpus,)
pytestmark = pytest.mark.slow
NAMES, ADDRESSES = ("outcore-a", "outcore-b"), ("10.213.7.1", "10.213.7.2")


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[None]:
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need root and the command ip (package iproute2)")
    made = []
    try:
        for name in NAMES:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "oc-a", "netns", NAMES[0], "type", "veth", "peer", "name", "oc-b", "netns", NAMES[1])
        for name, link, address in zip(NAMES, ("oc-a", "oc-b"), ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except OSError as error:
        for name in made:
            ip("netns", "del", name)
        pytest.skip(f"this system makes no network namespaces: {error}")
    yield
    for name in NAMES:
        ip("netns", "del", name)


def start(rank: int, argv: list[str], log: Path) -> subprocess.Popen:
    mine = {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_SIZE": "1",
        "CROSS_RANK": str(rank), "CROSS_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": ("oc-a", "oc-b")[rank], "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    python = shutil.which("python3", path=str(REPOSITORY / ".venv/bin")) or "python3"
    with open(log, "wb") as output:
        command = ["ip", "netns", "exec", NAMES[rank], python, str(REPOSITORY / "train_model.py"), *argv]
        return subprocess.Popen(command, env=fresh_env(**mine), stdout=output, stderr=subprocess.STDOUT, cwd=REPOSITORY)


def test_two_hosts_train_and_one_resumes(hosts, tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    shared = ["--run_name", "r", "--eval_strategy", "no", "--fit_check", "warn", "--engine", "deepspeed"]
    two = [*flags(tmp_path, corpus, *shared, "--gradient_accumulation_steps", "1"), "--max_steps", "4"]
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = [start(rank, two, log) for rank, log in enumerate(logs)]
    try:
        codes = [rank.wait(900) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    assert engine_of(tmp_path)["name"] == "deepspeed"
    assert [line["step"] for line in metrics(tmp_path) if "loss" in line] == [1, 2, 3, 4]

    one = [
        *flags(tmp_path, corpus, *shared), "--max_steps", "6", "--resume_from_checkpoint", "auto",
        "--continue_with_changes",
    ]  # fmt: skip
    assert main(one) == 0
    assert [line["step"] for line in metrics(tmp_path) if "loss" in line] == [1, 2, 3, 4, 5, 6]
