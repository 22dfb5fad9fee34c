"""Parameters on NVMe that kvikio reads into the device's memory, without slots: the same bits as through the lanes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outcore.engine.base import EngineError
from outcore.engine.stream.build import build_stream_engine
from outcore.storage import DriveAccess
from tests.engine.inside import parts_of
from tests.engine.stream.training import same
from tests.flow.models import tiny_loaded
from tests.flow.weights.test_weights_trained import NOTHING_IN_RAM, TINY, run
from tests.refused import refused
from tests.storage import test_kvikio

kvikio_double = test_kvikio.kvikio
pytestmark = [pytest.mark.usefixtures("one_thread")]
KVIKIO_BLOCK_BYTES = 64 * 1024


@pytest.fixture
def train(tmp_path: Path, engines: list):
    def train(path: str, device: str = "cpu", **changes):
        access = DriveAccess("posix", 2, KVIKIO_BLOCK_BYTES, path)  # type: ignore[arg-type]
        settings = replace(TINY, nvme_path=str(tmp_path / path), storage=access, **NOTHING_IN_RAM, **changes)
        loaded = tiny_loaded("llama", dtype=torch.bfloat16)
        engines.append(build_stream_engine(loaded, settings, device=device, pinned_grant=False, trial=False))
        result = run(engines[-1], range(2))
        return result, sum(lane.moved_bytes for lane in parts_of(engines[-1]).drive_lanes)

    return train


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("path", "compat"), [("kvikio", "ON"), ("gds", "OFF")])
def test_kvikio_into_the_device_trains_to_the_same_bits(train, kvikio_double, path: str, compat: str) -> None:
    staged, moved_bytes = train("staged")
    assert moved_bytes > 0 and kvikio_double.settings == []
    direct, moved_bytes = train(path)
    assert same(staged, direct)
    assert kvikio_double.settings[0]["compat_mode"] == compat
    assert moved_bytes > 0
    assert any(call[0] == "read" for file in kvikio_double.CuFile.opened for call in file.calls)


def test_a_machine_without_kvikio_refuses_with_the_way_out(train) -> None:
    refused(EngineError, r"transfer_path gds: the kvikio engine needs.*--transfer_path staged", lambda: train("gds"))


@pytest.mark.gpu
@pytest.mark.parametrize("checksums", ["auto", "on"])
def test_on_a_gpu_kvikios_compatibility_path_trains_to_the_same_bits(train, checksums: str) -> None:
    pytest.importorskip("kvikio")
    staged, _ = train("staged", "cuda", compile="off")
    direct, _ = train("kvikio", "cuda", compile="off", nvme_checksums=checksums)
    assert same(staged, direct)
