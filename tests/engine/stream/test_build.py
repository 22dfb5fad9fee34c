"""Building the streaming engine: whatever step of it fails, all that was opened before is closed again."""

import threading
from dataclasses import replace

import pytest
import torch

from outcore.engine.stream import build as build_module
from outcore.engine.stream.build import build_stream_engine
from tests.flow.models import TINY_SETTINGS, plain_batch, tiny_loaded
from tests.refused import refused
from tests.waiting import until

TINY = replace(TINY_SETTINGS, slot_bytes=8192, chunk_numel=4096, weight_read_ahead_bytes=64 * 1024)
EVERYTHING = {"max_grad_norm": 0.0, "state_ram_bytes": 0, "weight_ram_bytes": 0, "activations": "nvme"}
"""On a drive."""
pytestmark = pytest.mark.usefixtures("one_thread")


class Broken(Exception):
    """Made by the test."""


STEPS = [
    *("PinnedPool", "Scratch", "UploadLane", "DownloadLane", "HostMemory", "WeightHomes"),
    *("UploadLane from NVMe", "Homes", "open_store", "GradientArena", "OptimizerPool", "StateRing", "PartUpdates"),
    *("WeightPrefetcher", "GradientDownload", "open_tiles", "PartRunner", "Flow", "open_activations"),
    *("VerticalSchedule", "EngineParts", "StreamEngine"),
]
"""Of an engine with everything on NVMe that can be there."""


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_leaves_nothing_open(tmp_path, monkeypatch, step):
    tiling = "on" if step == "open_tiles" else "off"
    settings = replace(TINY, **EVERYTHING, tiling=tiling, tile_bytes=2500, nvme_path=str(tmp_path))
    staging, optimizers = _watched(monkeypatch)
    name, _, from_drive = step.partition(" ")
    original = getattr(build_module, name)

    def fails(*args, **kwargs):
        if from_drive and not kwargs.get("owner", "").endswith(from_drive):
            return original(*args, **kwargs)
        raise Broken(step)

    threads = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(build_module, name, fails)
        with pytest.raises(Broken):
            build(settings)
    until(lambda: not set(threading.enumerate()) - threads)  # closing tells a thread to end, which it does soon
    assert not list(tmp_path.iterdir())
    assert [pool.capacity_bytes for pool in staging] == [0] * (step != "PinnedPool")
    assert [pool._closed for pool in optimizers] == [True] * (STEPS.index(step) > STEPS.index("OptimizerPool"))


def test_after_a_step_that_failed_the_same_drive_and_settings_train(tmp_path, monkeypatch):
    settings = replace(TINY, **EVERYTHING, nvme_path=str(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setattr(build_module, "StreamEngine", _broken)
        build(settings)
    engine = build(settings)
    assert engine.train_step([plain_batch()], 1e-3).loss > 0
    engine.close()
    assert not list(tmp_path.iterdir())


def _broken(*_args, **_kwargs):
    raise Broken


def test_settings_that_cannot_be_release_the_staging_memory(monkeypatch):
    staging, _ = _watched(monkeypatch)
    refused(ValueError, "gradient_bytes", lambda: build(replace(TINY, max_grad_norm=0.0, gradient_bytes=4096)))
    assert [pool.capacity_bytes for pool in staging] == [0]


def test_with_a_drive_under_the_run_two_cores_are_left_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(7)))
    _, optimizers = _watched(monkeypatch)
    in_ram = replace(TINY, optimizer_threads=None)
    for settings in (in_ram, replace(in_ram, nvme_path=str(tmp_path), state_ram_bytes=0), replace(TINY)):
        build(settings).close()
    assert [pool.num_threads for pool in optimizers] == [7, 5, 1]


def build(settings):
    loaded = tiny_loaded("llama", dtype=torch.bfloat16)
    return build_stream_engine(loaded, settings, device="cpu", pinned_grant=False, trial=False)


def _watched(monkeypatch) -> tuple[list, list]:
    """The staging and optimizer pools that are opened from here on."""
    staging, optimizers = [], []

    class Staging(build_module.PinnedPool):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            staging.append(self)

        @property
        def is_pinned(self) -> bool:
            """As beside a GPU: homes are leased from it, and it cannot close before they are released."""
            return True

    class Optimizer(build_module.OptimizerPool):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            optimizers.append(self)

    monkeypatch.setattr(build_module, "PinnedPool", Staging)
    monkeypatch.setattr(build_module, "OptimizerPool", Optimizer)
    return staging, optimizers
