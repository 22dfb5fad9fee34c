"""The public ZeRO-Infinity functions: space estimate, configuration, saving."""

import copy
import errno
import json
import math
import os
from pathlib import Path

import pytest

from outcore.config import ProcessFacts, TrainConfig, resolve, understand
from outcore.engine.deepspeed.infinity import (
    build_infinity_config,
    estimate_nvme_space_required,
    nvme_space_parts_gb,
    save_infinity_config,
)
from outcore.sizing.swapping import WeightCounts
from tests.refused import failing, refused

BILLION = 10**9


def test_estimates_of_the_product_brief() -> None:
    assert 20 <= estimate_nvme_space_required(BILLION, True, True, True, 1.5) <= 30
    assert 7 <= estimate_nvme_space_required(BILLION, False, True, False, 1.0) <= 9
    assert estimate_nvme_space_required(BILLION, True, True, True) == pytest.approx(27)
    assert estimate_nvme_space_required(BILLION, False, False, False) == 0


def test_parts_sum_to_the_whole() -> None:
    parts = nvme_space_parts_gb(8 * BILLION, True, True, False)
    assert parts == {"parameters": 48.0, "optimizer": 64.0, "gradients": 0.0}
    assert estimate_nvme_space_required(8 * BILLION, True, True, False, 2.0) == pytest.approx(2 * sum(parts.values()))


@pytest.mark.parametrize(
    "total, factor", [(-1, 1.5), (1.5, 1.5), (True, 1.5), (1, 0.9), (1, math.nan), (1, math.inf), (1, "2")]
)
def test_estimates_refuse_nonsense(total: int, factor: float) -> None:
    with pytest.raises(ValueError, match=r"total_params|safety_factor"):
        estimate_nvme_space_required(total, True, True, True, factor)


def test_build_never_changes_its_input() -> None:
    base = json.loads((Path(__file__).parents[3] / "deepspeed_config.json").read_text())
    before = copy.deepcopy(base)
    config = build_infinity_config(
        base, nvme_path="/mnt/a b", aio_block_size=1 << 21, aio_queue_depth=16, pin_memory=False, max_in_cpu_gb=2,
        model=WeightCounts(BILLION, 10**8), world_size=2,
    )  # fmt: skip
    assert base == before
    zero = config["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == "/mnt/a b"
    assert zero["offload_param"]["max_in_cpu"] == 10**9 and zero["offload_param"]["pin_memory"] is False
    assert (config["aio"]["block_size"], config["aio"]["queue_depth"]) == (1 << 21, 16)
    assert config["gradient_clipping"] == 1.0 and config["outcore"] == base["outcore"]
    assert config["optimizer"] == base["optimizer"]
    config["zero_optimization"]["stage"] = 0
    assert base == before


def test_build_parts_on_and_off() -> None:
    only_optimizer = build_infinity_config({}, nvme_path="/mnt/n", offload_params=False)
    assert only_optimizer["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert only_optimizer["zero_optimization"]["offload_optimizer"]["device"] == "nvme"
    on_gpu = {"optimizer": {"type": "AdamW", "params": {"lr": 1.0, "torch_adam": True, "fused": True}}}
    assert build_infinity_config(on_gpu, nvme_path="/mnt/n")["optimizer"]["params"] == {"lr": 1.0}
    nothing = build_infinity_config({}, nvme_path="/mnt/n", offload_params=False, offload_optimizer=False)
    assert "aio" not in nothing and "optimizer" not in nothing
    refused(ValueError, "Windows spelling", lambda: build_infinity_config({}, nvme_path="C:\\nvme"))
    refused(ValueError, "gradient_clipping", lambda: build_infinity_config({"gradient_cliping": 1}, nvme_path="/mnt/n"))


def test_save_is_atomic_and_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new folder" / "config.json"
    assert save_infinity_config({"a": 1}, target) == target
    assert json.loads(target.read_text()) == {"a": 1}
    target.chmod(0o600)
    save_infinity_config({"a": 2}, target)
    assert json.loads(target.read_text()) == {"a": 2} and target.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "replace", failing(OSError(errno.EIO, "power lost")))
    refused(OSError, "power lost", lambda: save_infinity_config({"a": 3}, target))
    assert json.loads(target.read_text()) == {"a": 2}
    assert list(target.parent.iterdir()) == [target]


def test_save_refuses_what_is_no_json(tmp_path: Path) -> None:
    for wrong in ({"a": math.nan}, {"a": object()}):
        with pytest.raises(ValueError, match="cannot be saved as JSON"):
            save_infinity_config(wrong, tmp_path / "c.json")
    assert list(tmp_path.iterdir()) == []


def test_gradients_are_a_key_that_our_offload_reads_or_refused() -> None:
    base = {"outcore": {"streams": 4}}
    config = build_infinity_config(base, nvme_path="/mnt/n", offload_gradients=True)
    assert config["outcore"] == {"streams": 4, "nvme_offload_gradients": True} and base == {"outcore": {"streams": 4}}
    assert resolve(TrainConfig(), understand(config), ProcessFacts()).offload.gradients_on_nvme
    for wrong, more in (({"outcore": {"offload": "stock"}}, {}), ({}, {"offload_optimizer": False})):
        with pytest.raises(ValueError, match="offload_gradients needs"):
            build_infinity_config(wrong, nvme_path="/mnt/n", offload_gradients=True, **more)
