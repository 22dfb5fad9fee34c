"""Schedules, run folders, stop requests, random state, and words for a full tier."""

import errno
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from outcore.checkpoint.folders import SPACE_MARGIN_BYTES, Checkpoint, save_checkpoint
from outcore.checkpoint.shards import CheckpointError, TensorPlan, write_shard
from outcore.common.ports import free_port
from outcore.config import ConfigError, TrainConfig, understand
from outcore.engine.deepspeed.environment import GROUP_OF_ONE, prepare_environment
from outcore.machine.host import CpuInfo
from outcore.runs import RunFolder, take_run
from outcore.train.changes import explain, ram_advice
from outcore.train.configure.rooms import choose_device, schedule_of
from outcore.train.configure.schedule import LrSchedule
from outcore.train.process.random_state import explain_order, load_random_state, save_random_state, seed_everything
from outcore.train.process.stop_request import StopRequest
from outcore.train.run.planned import SPACE_RESERVE_BYTES, export_bytes, space_reserves
from tests.refused import refused


def _schedule(params: object, **flags: object) -> LrSchedule:
    block = {"scheduler": {"type": "WarmupLR", "params": params}}
    return schedule_of(TrainConfig(**flags), understand(block), 0.5, 100)  # type: ignore[arg-type]


def test_the_files_scheduler_is_followed_or_refused() -> None:
    made = LrSchedule("constant", 0.5, 7, 100, first=1)  # whose first step has a seventh of the peak
    same = {"warmup_max_lr": 0.5, "warmup_min_lr": 0, "total_num_steps": 100, "warmup_type": "linear"}
    assert _schedule({"warmup_num_steps": 7, "warmup_max_lr": "auto"}) == _schedule({"warmup_num_steps": 7, **same})
    assert _schedule({"warmup_num_steps": 7}) == made and _schedule("auto").warmup_steps == 3
    assert _schedule({"warmup_num_steps": 7}, warmup_steps=0).warmup_steps == 0
    assert _schedule({"warmup_max_lr": 9, "warmup_num_steps": 7}, lr_scheduler_type="cosine").warmup_steps == 3
    assert schedule_of(TrainConfig(), understand({"scheduler": "auto"}), 0.5, 100) == LrSchedule(
        "warmup_decay", 0.5, 3, 100
    )
    for params, words in (
        ({"warmup_max_lr": 0.1}, "warmup_max_lr is 0.1, but this run's is 0.5, which --learning_rate"),
        ({"total_num_steps": 9}, "total_num_steps is 9, but this run's is 100"),
        ({"warmup_num_steps": "10"}, "must be a whole number, got '10'"),
        ({"warmup_type": "log"}, "warmup_type is 'log'"),
        ({"warmup_steps": 3}, "Did you mean 'warmup_num_steps'"),
        ({"warmup_num_steps": 101}, r"warmup_num_steps \(101\) is more than the run's 100 steps"),
    ):
        with pytest.raises(ConfigError, match=words):
            _schedule(params)
    with pytest.raises(ConfigError, match=r"warmup_steps \(101\) is more than the run's 100 steps"):
        _schedule("auto", warmup_steps=101)


def test_bf16_on_a_cpu_without_its_units_is_said_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for simd, is_slow in ((("avx", "avx2"), True), (("avx2", "avx512_bf16"), False)):
        cpu = CpuInfo("c", 1, 1, simd, 1)
        monkeypatch.setattr("outcore.train.configure.rooms.detect_cpu", lambda _root, cpu=cpu: cpu)
        assert ("than with --precision fp32" in choose_device(TrainConfig(precision="bf16")).reason) is is_slow
        assert choose_device(TrainConfig()).precision == "fp32"


def _config(tmp_path: Path, **settings: object) -> TrainConfig:
    folders = {k: str(tmp_path / k) for k in ("checkpoint_dir", "log_dir", "export_dir")}
    return TrainConfig(**{**folders, **settings})  # type: ignore[arg-type]


def _checkpoint(tmp_path: Path, run: str, step: int) -> Path:
    def write(folder: Path, on_file: object) -> dict:
        write_shard(
            folder / "m-00001-of-00001.safetensors",
            [TensorPlan("a", torch.uint8, (1,))],
            lambda n: torch.ones(1, dtype=torch.uint8),
        )
        return {}

    return save_checkpoint(tmp_path / "checkpoint_dir" / run, step, write, needed_bytes=1, keep=3)


def _take(config: TrainConfig, say: Callable[[str], None] = print) -> tuple[RunFolder, Checkpoint | None]:
    """What `take_run` settles, with the run free again."""
    taken = take_run(config, say)
    assert taken.lock is not None
    taken.lock.release()
    return taken.folder, taken.checkpoint


def test_new_runs_never_write_into_older_ones(tmp_path: Path) -> None:
    config = _config(tmp_path)
    folder, checkpoint = _take(config, print)
    assert folder.name == "tiny-embedded" and checkpoint is None
    folder.make()
    _checkpoint(tmp_path, "tiny-embedded", 3)
    assert _take(config, print)[0].name == "tiny-embedded-2"
    refused(ConfigError, "is in use", lambda: _take(_config(tmp_path, run_name="tiny-embedded"), print))
    other = _checkpoint(tmp_path, "other", 1)
    resume = {"resume_from_checkpoint": str(other)}
    assert _take(_config(tmp_path, **resume), print)[0].name == "other"
    assert _take(_config(tmp_path, run_name="other", **resume), print)[0].name == "other"
    assert _take(_config(tmp_path, run_name="third", **resume), print)[0].name == "third"
    with pytest.raises(ConfigError, match="would overwrite that run"):
        _take(_config(tmp_path, run_name="tiny-embedded", **resume), print)


def test_auto_resumes_the_newest_run(tmp_path: Path) -> None:
    config = _config(tmp_path, resume_from_checkpoint="auto")
    said: list[str] = []
    assert _take(config, said.append)[1] is None and "no checkpoint yet" in said[0]
    _checkpoint(tmp_path, "tiny-embedded", 3)
    path = _checkpoint(tmp_path, "tiny-embedded-2", 5)
    folder, checkpoint = _take(config, said.append)
    assert folder.name == "tiny-embedded-2" and checkpoint is not None and checkpoint.step == 5
    (path / "m-00001-of-00001.safetensors").write_bytes(b"")
    folder, checkpoint = _take(config, said.append)
    assert folder.name == "tiny-embedded" and checkpoint is not None and "damaged" in said[-1]
    explicit, checkpoint = _take(
        _config(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint_dir/tiny-embedded/step-00000003")), print
    )
    assert explicit.name == "tiny-embedded" and checkpoint is not None and checkpoint.step == 3


def test_all_checkpoints_damaged_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, "tiny-embedded", 3)
    (path / "m-00001-of-00001.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of them is whole"):
        _take(_config(tmp_path, resume_from_checkpoint="auto"), print)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "log_dir").write_text("a file")
    refused(ConfigError, "cannot be written", lambda: _take(_config(tmp_path), print)[0].make())


def test_stop_request_catches_and_restores() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.wanted() and stop.exit_code == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wanted() and stop.exit_code == 143
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 0)
    assert signal.getsignal(signal.SIGTERM) is before


def test_torchruns_copy_of_a_ctrl_c_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wanted() and stop.exit_code == 130
        monkeypatch.setattr("outcore.train.process.stop_request.PASSED_ON_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_closed_terminal_asks_to_stop_and_takes_the_screen_with_it(tmp_path: Path) -> None:
    ends = multiprocessing.get_context("fork").Pipe(duplex=False)

    def child() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started by nohup
        master, slave = os.openpty()
        os.dup2(slave, 1)
        os.dup2(slave, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        with StopRequest() as stop:
            os.close(master)  # the terminal hangs up; a session's leader gets the signal with it
            os.kill(os.getpid(), signal.SIGHUP)
            print("goes nowhere", flush=True)
            ends[1].send((stop.wanted(), stop.exit_code))
        ends[1].close()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    ends[1].close()
    assert ends[0].poll(60) and ends[0].recv() == (True, 128 + signal.SIGHUP)
    process.join(600)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:  # nohup
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.wanted()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_random_state_round_trip(tmp_path: Path) -> None:
    seed_everything(5)
    torch.rand(3), np.random.rand(2), random.random()
    random.gauss(0, 1)
    numbers, _path, _crc = save_random_state(tmp_path, 0)
    drawn = torch.rand(4), np.random.rand(4), random.random(), random.gauss(0, 1)
    seed_everything(6)
    assert load_random_state(tmp_path, 0, numbers)
    again = torch.rand(4), np.random.rand(4), random.random(), random.gauss(0, 1)
    assert torch.equal(drawn[0], again[0]) and (drawn[1] == again[1]).all() and drawn[2:] == again[2:]
    assert not load_random_state(tmp_path, 1, numbers)


def test_a_fixed_order_is_strict_and_its_complaint_is_in_words(fixed_order: None) -> None:
    assert torch.get_deterministic_debug_mode() == 2  # an error, no warning
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with pytest.raises(RuntimeError) as caught:
        torch.ones(4).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
    words = str(explain_order(caught.value))
    assert (
        words.startswith("--deterministic: this run needs put_, of which torch")
        and "Leave --deterministic out" in words
    )
    wrapped = RuntimeError(f"backend='inductor' raised:\nRuntimeError: {caught.value}")
    assert str(explain_order(wrapped)) == words
    assert explain_order(RuntimeError("something else")) is None


def test_words_for_a_full_tier() -> None:
    config = TrainConfig(zero_stage="zero2", activation_checkpointing=True)
    oom = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 ... of which 1.50 GiB is free.")
    words = str(explain(oom, config, 4))
    assert "2.00 GiB more was needed" in words and "--per_device_train_batch_size 2" in words
    assert "--zero_stage zero3" in str(explain(oom, config, 1))
    assert "--seq_length 128" in str(explain(oom, TrainConfig(seq_length=256), 1))
    assert "activation_checkpointing true" in str(explain(oom, TrainConfig(activation_checkpointing=False), 1))
    full = OSError(errno.ENOSPC, "No space left on device", "/x/y")
    assert "/x/y" in str(explain(full, config, 1))
    assert "RAM is full" in str(explain(MemoryError(), config, 1))
    assert "lora" in ram_advice(TrainConfig(zero_stage="infinity"))
    assert explain(ValueError("x"), config, 1) is None


def test_words_for_a_full_tier_name_the_streaming_engines_settings() -> None:
    oom = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 ... of which 1.50 GiB is free.")

    def vram(micro_batch: int = 1, **settings: object) -> str:
        return str(explain(oom, TrainConfig(**settings), micro_batch, "stream"))  # pyright: ignore[reportArgumentType]

    assert "--per_device_train_batch_size 2" in vram(4)
    assert "--activations ram" in vram(activations="device")
    assert "--tiling auto" in vram(tiling="off")
    assert "--tiling on" in vram(seq_length=256) and "--seq_length 128" in vram(seq_length=256)
    assert "tiling" not in vram(tiling="on") and "--seq_length" in vram(tiling="on")
    assert "activation_checkpointing" not in vram(activation_checkpointing=False), "it recomputes layers anyway"

    def ram(**settings: object) -> str:
        config = TrainConfig(**settings)  # pyright: ignore[reportArgumentType]
        return str(explain(MemoryError("no room"), config, 1, "stream"))

    assert "RAM is full (no room). Use --nvme_offload_path DIR" in ram() and "--state_format split8" in ram()
    assert "--state_format fp32_m8" in ram(precision="fp32")
    assert "--ram_budget_gib 4 " in ram(nvme_offload_path="/n", ram_budget_gib=8.0)
    assert "a lower --ram_budget_gib (" in ram(nvme_offload_path="/n")
    nothing_left = {"nvme_offload_path": "/n", "ram_budget_gib": 0.0}
    assert "--activations nvme" in ram(**nothing_left)
    assert "--max_grad_norm 0" in ram(**nothing_left, activations="nvme")
    assert "--lora_r 16" in ram(state_format="split8") and "8-bit" not in ram(state_format="split8")


def test_environment_keeps_what_a_launcher_set() -> None:
    env = {"RANK": "3", "MASTER_PORT": "1", "TORCH_CUDA_ARCH_LIST": "8.0 9.0a", "PATH": "/bin"}
    added = prepare_environment(False, 2, env)
    assert env["RANK"] == "3" and env["MASTER_PORT"] == "1" and env["LOCAL_RANK"] == "2"
    assert env["DS_ACCELERATOR"] == "cpu" and env["TORCH_CUDA_ARCH_LIST"] == "8.0 9.0" and "RANK" not in added
    assert 1024 <= free_port() < 65536
    fresh: dict[str, str] = {}
    prepare_environment(True, -1, fresh)
    assert fresh["WORLD_SIZE"] == "1" and "DS_ACCELERATOR" not in fresh and int(fresh["MASTER_PORT"]) > 0


def test_a_child_of_a_group_of_one_is_a_group_of_its_own() -> None:
    parent: dict[str, str] = {}
    prepare_environment(True, -1, parent)
    prepare_environment(True, -1, again := dict(parent))
    assert again == parent  # the same process
    child = {**parent, GROUP_OF_ONE: f"{os.getpid() + 1} {parent['MASTER_PORT']}"}
    prepare_environment(True, -1, child)
    assert child["MASTER_PORT"] != parent["MASTER_PORT"] and child["RANK"] == "0"
    assert child[GROUP_OF_ONE] == f"{os.getpid()} {child['MASTER_PORT']}"
    launched = {**parent, GROUP_OF_ONE: f"{os.getpid() + 1} 1", "RANK": "3", "WORLD_SIZE": "4"}
    prepare_environment(True, 1, launched)
    assert (launched["RANK"], launched["WORLD_SIZE"], launched["MASTER_PORT"]) == ("3", "4", parent["MASTER_PORT"])


@pytest.mark.parametrize(("flags", "checkpoint_bytes", "exported_bytes"), [
    ({}, 42 * 10**9, 6 * 10**9), ({"save_strategy": "no", "export": False}, 0, 0),
    ({"save_strategy": "no"}, 0, 6 * 10**9), ({"save_strategy": "no", "lora_r": 8}, 0, 6 * 10**9),
    ({"save_strategy": "no", "lora_r": 8, "lora_export": "adapter"}, 0, 4 * 10**9),
])  # fmt: skip
def test_a_drive_keeps_free_what_the_run_will_write_there(tmp_path, flags, checkpoint_bytes, exported_bytes):
    config = TrainConfig(**flags)
    exported = export_bytes(config, 3 * 10**9, 2 * 10**9, "bf16")
    assert exported == exported_bytes
    folder = RunFolder("r", tmp_path / "c/r", tmp_path / "l/r", tmp_path / "e/r")
    found = space_reserves(config, folder, str(tmp_path / "nvme"), 42 * 10**9, exported)
    written = {folder.checkpoints: checkpoint_bytes, tmp_path / "e": exported}
    assert found == {
        **{path: n_bytes + SPACE_MARGIN_BYTES for path, n_bytes in written.items() if n_bytes},
        folder.logs: SPACE_RESERVE_BYTES,
        tmp_path / "nvme": SPACE_RESERVE_BYTES,
    }
    together = RunFolder("r", tmp_path / "c/r", tmp_path / "c/r", tmp_path / "e/r")
    assert space_reserves(config, together, None, 42 * 10**9, exported)[together.logs] == max(
        SPACE_RESERVE_BYTES, found.get(folder.checkpoints, 0)
    )
