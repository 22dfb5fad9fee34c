"""What a failing drive, a full one, full GPU memory or a stuck thread do to a run of the streaming engine.

Each ends with exit code 1 and a paragraph that says what happened and what to do; no thread stays, the checkpoint is
whole, and the run resumed from it ends with the bits of one that nothing happened to.
"""

import errno
import math
import shutil
import subprocess
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outcore.checkpoint.folders import open_checkpoint
from outcore.engine.stream import state
from outcore.engine.stream.backward.layer import BackwardRunner
from outcore.engine.stream.engine import StreamEngine
from outcore.engine.stream.parts import EngineParts
from outcore.flow.layers import PartRunner
from outcore.flow.weights import scratch
from outcore.optim import OptimizerPool
from outcore.optim import reference as torch_backend
from outcore.staging import PinnedPool
from outcore.staging.lanes.copy_streams import HostStreams
from outcore.storage import open_engine
from outcore.train.loop import TrainingLoop
from tests.engine.inside import parts_of
from tests.engine.stream.runs.job import flags, losses, same, states, train, write_corpus
from tests.storage.faulty import FaultyEngine

RUN = ["--max_steps", "4", "--save_steps", "2", "--save_total_limit", "9", "--no_export"]
FAILS_AFTER = 2


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("my data"))


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    root = tmp_path_factory.mktemp("straight")
    assert train(flags(root, corpus, *RUN)) == 0
    return root


def limit_waits(parts: EngineParts, limit_s: float) -> None:
    for lane in (parts.upload, *parts.drive_lanes, parts.download_lane):
        lane.timeout_s = limit_s
    parts.updates._timeout_s = limit_s
    if parts.ring is not None:
        parts.ring._timeout_s = parts.ring._updates._timeout_s = limit_s


class Job:
    """A run in which something breaks once step 2 is saved."""

    def __init__(self, root: Path, corpus: Path, straight: Path, capsys: Any, patch: pytest.MonkeyPatch) -> None:
        self.root, self.straight, self.capsys, self.patch = root, straight, capsys, patch
        self.argv = flags(root, corpus, *RUN)
        self.is_broken = False
        self.limit_s: float | None = None
        """Of every wait once something is broken; before, a busy machine has the time that it needs."""
        original = TrainingLoop.save

        def save(trainer: TrainingLoop) -> None:
            original(trainer)
            self.is_broken = trainer.step == FAILS_AFTER
            if self.is_broken and self.limit_s is not None:
                assert isinstance(trainer.parts.engine, StreamEngine)
                limit_waits(parts_of(trainer.parts.engine), self.limit_s)

        patch.setattr(TrainingLoop, "save", save)

    def on_nvme(self) -> dict[str, Any]:
        return {"nvme_path": str(self.root / "drive"), "activations": "nvme"}

    def faulty_drive(self, plan: Callable[[FaultyEngine], Any]) -> None:
        """The drive of the scratch files is faulty from the save on, as planned."""
        engine = FaultyEngine(open_engine("auto"))
        plan(engine)
        for fault in engine._faults:
            fault.matches = lambda *_: self.is_broken
        self.patch.setattr(scratch, "_opened", lambda *_, **__: engine)

    def fails(self, *words: str, stuck: str | None = None, **fields: Any) -> str:
        """The message of the run that fails; it has these words. `stuck`: whose threads cannot end."""
        before = set(threading.enumerate())
        assert train(self.argv, **fields) == 1
        left = [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
        assert all(stuck is not None and thread.name.startswith(stuck) and thread.daemon for thread in left), left
        message = self.capsys.readouterr().err
        assert "error: " in message and "Traceback" not in message, message
        paragraph = message[message.index("error: ") :]
        for word in words:
            assert word in paragraph, (word, message)
        assert open_checkpoint(self.root / "checkpoint/r/step-00000002").step == 2
        assert not list((self.root / "checkpoint/r").glob(".step*")), "nothing half-written is left"
        assert not (self.root / "drive/outcore-scratch").exists()
        return paragraph

    def resumes(self, **fields: Any) -> None:
        self.patch.undo()
        assert train([*self.argv, "--resume_from_checkpoint", "auto"], **fields) == 0
        end = "checkpoint/r/step-00000004"
        assert same(states(self.root / end), states(self.straight / end))
        assert losses(self.root) == losses(self.straight)


@pytest.fixture
def job(tmp_path, corpus, straight, capsys, monkeypatch) -> Job:
    return Job(tmp_path, corpus, straight, capsys, monkeypatch)


DRIVE_FAULTS = {
    "write error": (lambda drive: drive.fail("write", after=3), ["write", "tensors.bin", "Input/output error"]),
    "read error": (lambda drive: drive.fail("read", after=2), ["read", "tensors.bin", "Input/output error"]),
    "short read": (lambda drive: drive.short("read", got=4096), ["read", "tensors.bin", "4096"]),
    "full": (lambda drive: drive.fail("write", errno=errno.ENOSPC), ["write", "No space left on device"]),
}


@pytest.mark.parametrize("name", [
    "write error", *(pytest.param(name, marks=pytest.mark.slow) for name in ("read error", "full", "short read")),
])  # fmt: skip
def test_a_drive_that_fails_in_mid_step(job: Job, name: str) -> None:
    plan, words = DRIVE_FAULTS[name]
    job.faulty_drive(plan)
    job.fails(*words, "resume from the last checkpoint", **job.on_nvme())
    if name == "write error":
        job.resumes(**job.on_nvme())


STATE_FAULTS = {
    "short write": (lambda drive: drive.short("write", got=512, after=3), "512"),
    "write error": (lambda drive: drive.fail("write", after=3), "Input/output error"),
    "short read": (lambda drive: drive.short("read", got=4096), "4096"),
    "full": (lambda drive: drive.fail("write", errno=errno.ENOSPC), "No space left on device"),
}


@pytest.mark.more
@pytest.mark.parametrize("name", [
    "short write", *(pytest.param(name, marks=pytest.mark.slow) for name in ("write error", "short read", "full")),
])  # fmt: skip
def test_a_drive_that_fails_under_the_optimizer(job: Job, name: str) -> None:
    plan, word = STATE_FAULTS[name]
    job.faulty_drive(plan)
    fields = {"nvme_path": str(job.root / "drive"), "state_ram_bytes": 0}
    if name == "short write":  # new parameters wait in RAM, too
        fields["weight_ram_bytes"] = 0
    job.fails("optimizer states", "tensors.bin", word, "the last checkpoint is intact", **fields)
    if "write" in name:
        job.resumes(**fields)


@pytest.mark.more(after=1)
@pytest.mark.parametrize("where", [PartRunner, BackwardRunner])
def test_gpu_memory_that_runs_out_in_mid_step(job: Job, where: type) -> None:
    original = where.layer

    def full(runner: Any, index: int, *args: Any) -> Any:
        if job.is_broken and index == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 8 GiB")
        return original(runner, index, *args)

    job.patch.setattr(where, "layer", full)
    job.fails("GPU memory", "2.00 GiB more was needed", "--per_device_train_batch_size 1")
    if where is BackwardRunner:
        job.resumes()


def test_a_gradient_that_is_not_finite_without_clipping(job: Job) -> None:
    """bf16, updates during the backward: the run stops, and nothing is saved of a step that was made by halves."""
    original = BackwardRunner.layer

    def infinite(runner: BackwardRunner, index: int, *args: Any) -> Any:
        grad = original(runner, index, *args)
        if job.is_broken and index == 0:
            args[-1].flat[3] = float("inf")
        return grad

    job.patch.setattr(BackwardRunner, "layer", infinite)
    job.argv += ["--max_grad_norm", "0"]
    job.fails("norm became inf", "resume from the last checkpoint with gradient clipping")
    assert [path.name for path in (job.root / "checkpoint/r").glob("step-*")] == ["step-00000002"]


def test_an_update_that_fails(job: Job) -> None:
    original = torch_backend.update_chunk

    def fails(*args: Any) -> None:
        if job.is_broken:
            raise MemoryError("no memory for the update")
        original(*args)

    job.patch.setattr(torch_backend, "update_chunk", fails)
    job.fails("update of unit", "no memory for the update", "resume from the last checkpoint")
    job.resumes()


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("lane", "words"), [
    ("upload", ["upload of ", "is not issued after 500 ms", "upload lane 'upload'", "transfers under way"]),
    ("download", ["500 ms"]),
])  # fmt: skip
def test_a_lane_that_is_stuck(job: Job, lane: str, words: list[str]) -> None:
    """Every wait ends: after its limit it says which transfer of which lane it was waiting for."""
    go_on = threading.Event()
    original = HostStreams.copy_pieces

    def stuck(*args: Any) -> Any:
        if job.is_broken and threading.current_thread().name == f"{lane}-lane":
            go_on.wait(60)
        return original(*args)

    job.patch.setattr(HostStreams, "copy_pieces", stuck)
    job.limit_s = 0.5
    paragraph = job.fails(*words, stuck=lane)
    go_on.set()  # closing has not waited for it: it goes on with what was submitted, in here and not in another test
    if lane == "upload":
        job.resumes()
    else:
        assert "gradient of" in paragraph or "download of" in paragraph


def test_an_optimizer_that_is_stuck(job: Job) -> None:
    """Neither the step nor closing waits for it: its memory stays, and the reason is on the screen."""
    go_on = threading.Event()
    original, close = torch_backend.update_chunk, OptimizerPool.close

    def stuck(*args: Any) -> None:
        if job.is_broken:
            go_on.wait(60)
        original(*args)

    def close_soon(pool: OptimizerPool, timeout_s: float, *, cancel: bool) -> None:
        close(pool, min(timeout_s, 0.2), cancel=cancel)

    job.patch.setattr(torch_backend, "update_chunk", stuck)
    job.patch.setattr(OptimizerPool, "close", close_soon)
    job.limit_s = 0.5
    job.fails("the optimizer did not finish", "embedding", "within 500 ms", "2 threads (torch)", stuck="optimizer")
    left = [thread for thread in threading.enumerate() if thread.name.startswith("optimizer")]
    assert left
    go_on.set()
    for thread in left:
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def small_drive(tmp_path: Path):
    """A drive of 100 MiB (tmpfs), room for two checkpoints. Only root can mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "none", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("a small drive can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_scratch_that_does_not_fit_is_told_before_training(job: Job, small_drive: Path) -> None:
    fields = {"nvme_path": str(small_drive), "activations": "nvme", "step_tokens": (1 << 20,) * 2}
    assert train(job.argv, **fields) == 1
    message = job.capsys.readouterr()
    assert "no room for the activations on NVMe" in message.err and str(small_drive) in message.err
    assert "step 1/" not in message.out and not list((job.root / "checkpoint").glob("*/*"))
    assert not list(small_drive.iterdir())


def test_a_drive_that_fills_up_during_a_save(job: Job, small_drive: Path) -> None:
    """The space is looked at before a save; here another program takes it in the middle of one."""
    Usage = namedtuple("Usage", "total used free")
    real = shutil.disk_usage

    def roomy(path: Any) -> Any:
        return Usage(1 << 50, 0, 1 << 50) if str(path).startswith(str(small_drive)) else real(path)

    job.patch.setattr(shutil, "disk_usage", roomy)
    original = state.write_shard

    def crowded(path: Path, *args: Any) -> Any:
        if job.is_broken and path.name.startswith("exp_avg-"):
            with open(small_drive / "of another program", "wb", buffering=0) as file, pytest.raises(OSError):
                while True:
                    file.write(bytes(1 << 16))
        return original(path, *args)

    job.patch.setattr(state, "write_shard", crowded)
    job.argv = [arg.replace(str(job.root / "checkpoint"), str(small_drive / "c")) for arg in job.argv]
    assert train(job.argv) == 1
    message = job.capsys.readouterr().err
    assert "is full" in message and "No space left" in message and "Traceback" not in message
    assert [path.name for path in (small_drive / "c/r").iterdir()] == ["step-00000002"]
    (small_drive / "of another program").unlink()
    job.patch.setattr(state, "write_shard", original)
    assert train([*job.argv, "--resume_from_checkpoint", "auto", "--save_total_limit", "1"]) == 0
    assert same(states(small_drive / "c/r/step-00000004"), states(job.straight / "checkpoint/r/step-00000004"))


# --- a drive that hangs: requests that do not end

HANGS = {
    "activations": ({"activations": "nvme"}, [], "the activation checkpoint of layer"),
    "parameters": ({"weight_ram_bytes": 0}, ["--lora_r", "4", "--random_base"], "could not be read from NVMe"),
    "states": ({"state_ram_bytes": 0}, [], "on NVMe were not up to date within 500 ms"),
}


@pytest.mark.more(after=1)
@pytest.mark.parametrize("name", HANGS)
def test_a_drive_that_hangs(job: Job, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """The reason is on the screen before anything is closed; closing then ends although the drive does not."""
    fields, more, word = HANGS[name]
    job.argv += more
    engine = FaultyEngine(open_engine("auto"))
    engine.delay(math.inf, "read", matches=lambda *_: job.is_broken)
    job.patch.setattr(scratch, "_opened", lambda *_, **__: engine)
    job.limit_s = 0.5
    said = []
    original, leave = EngineParts.close, PinnedPool.leave
    left: list[PinnedPool] = []

    def close(parts: EngineParts) -> None:
        said.append(job.capsys.readouterr().err)
        original(parts)
        assert parts.scratch is not None
        stores = parts.scratch._stores.values()
        assert any(store._traffic._under_way for store in stores), "the drive still hangs"
        assert not any(file.closed for store in stores for file in store._files)

    def leaves(pool: PinnedPool) -> None:
        left.append(pool)
        leave(pool)

    job.patch.setattr(EngineParts, "close", close)
    job.patch.setattr(PinnedPool, "leave", leaves)
    assert train(job.argv, nvme_path=str(job.root / "drive"), **fields) == 1
    assert "error: " in said[0] and word in said[0] and "Traceback" not in said[0], said
    assert "error: " not in job.capsys.readouterr().err, "it is said once"
    assert len(left) == 1 and left[0]._slabs, "memory that a transfer may still write to is not freed"
    stays = [record.getMessage() for record in caplog.records if "scratch files stay" in record.getMessage()]
    engine.let_go()  # nothing is left when the next test begins
    assert len(stays) == 1 and str(job.root / "drive") in stays[0] and "tensors.bin" in stays[0]
    assert open_checkpoint(job.root / "checkpoint/r/step-00000002").step == 2
