"""DeepSpeed itself takes what the builder makes: its parser reads a grid of configurations, and small models train
with some.

One child process for all of it (DeepSpeed is imported once); the accelerator is the CPU.
"""

import itertools
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from outcore.config import deepspeed_keys as keys
from outcore.engine.deepspeed.config.builder import RunFacts, build_config
from outcore.install.extensions import extension_environment
from outcore.sizing.swapping import WeightCounts
from tests.engine.deepspeed.config_cases import accept, settings_of
from tests.forked import run_script

ROOT = Path(__file__).parents[3]
CHILD = Path(__file__).with_name("config_child.py")
SHIPPED = ("deepspeed_config.json", *(f"config/{path.name}" for path in sorted((ROOT / "config").glob("*.json"))))
EVEN = {"vocab": 2048, "width": 512, "inner": 1024, "tied": False}
TIED = {**EVEN, "tied": True}


def facts(model: dict[str, Any]) -> WeightCounts:
    block = 2 * model["width"] * model["inner"] + 3 * model["width"] + model["inner"]
    embed = model["vocab"] * model["width"]
    return WeightCounts(2 * block + embed * (1 if model["tied"] else 2), embed, hidden_size=model["width"])


def training_jobs() -> dict[str, dict[str, Any]]:
    file = json.loads((ROOT / "deepspeed_config.json").read_text())
    jobs = {
        "none": ({"zero_stage": "none"}, EVEN, {}), "zero2": ({"zero_stage": "zero2"}, EVEN, {}),
        "ram": ({}, EVEN, {}), "ram_tied_fp32": ({}, TIED, {"precision": "fp32"}),
    }  # fmt: skip
    made: dict[str, dict[str, Any]] = {}
    for name, (settings, model, run) in jobs.items():
        said = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 5e-4, **settings}
        chosen = settings_of(file, said, **run)
        built = build_config(chosen, facts(model), RunFacts(device="cpu", run_name=name), staged=False)
        made[name] = {"config": built.config, "model": model, "steps": 2}
    return made


def parse_jobs() -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {name: json.loads((ROOT / name).read_text()) for name in SHIPPED}
    model = WeightCounts(8_000_000_000, 525_336_576, hidden_size=4096)
    grid = itertools.product(("none", "zero1", "zero2", "zero3", "infinity"), ("bf16", "fp16", "fp32"), (
        "deepspeed_config.json", "config/deepspeed_zero_infinity_cpu.json", None,
    ))  # fmt: skip
    for stage, precision, file in grid:
        user = json.loads((ROOT / file).read_text()) if file else {}
        settings = settings_of(user, {"zero_stage": stage, "nvme_offload_path": "/mnt/a drive"}, precision)
        made[f"{stage}-{precision}-{file}"] = build_config(settings, model, RunFacts(), nvme_check=accept).config
    return made


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("dsconfig")
    jobs = {"parse": parse_jobs(), "train": training_jobs()}
    (work / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environ = {
        **os.environ, **extension_environment("cpu"), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    log = work / "log.txt"
    assert run_script(CHILD, [str(work)], environ, log, timeout_s=1500) == 0, log.read_text()[-6000:]
    return json.loads((work / "results.json").read_text())


pytestmark = pytest.mark.timeout(1600)  # the first run on a machine compiles DeepSpeed's extensions


@pytest.mark.more
def test_every_configuration_passes_deepspeeds_parser(results: dict[str, Any]) -> None:
    failed = {name: parsed["error"] for name, parsed in results["parsed"].items() if "error" in parsed}
    assert failed == {}
    assert len(results["parsed"]) > 40
    for name in SHIPPED:
        stage = next((number for number in (1, 2) if f"zero{number}" in name), 3)
        assert results["parsed"][name] == {"train_batch_size": 8, "stage": stage}


@pytest.mark.more
def test_our_key_tables_are_deepspeeds(results: dict[str, Any]) -> None:
    ours = {
        "zero_optimization": keys.ZERO, "offload_param": keys.OFFLOAD_PARAM, "bf16": keys.BF16, "fp16": keys.FP16,
        "offload_optimizer": keys.OFFLOAD_OPTIMIZER,
    }  # fmt: skip
    assert {name: sorted(table) for name, table in ours.items()} == results["keys"]
    assert sorted(keys.REMOVED) == results["removed"]
    assert sorted(keys.REMOVED_ZERO) == results["removed_zero"]


def trained(results: dict[str, Any], name: str) -> dict[str, Any]:
    outcome = results["trained"][name]
    assert "error" not in outcome, outcome
    return outcome


@pytest.mark.more
@pytest.mark.parametrize("name", ["none", "zero2", "ram", "ram_tied_fp32"])
def test_trains(results: dict[str, Any], name: str) -> None:
    outcome = trained(results, name)
    assert outcome["global_steps"] == 2
    assert all(0 < loss < float("inf") for loss in outcome["losses"]), "of tied random weights they are large"


@pytest.mark.more
def test_stages_none_and_two_agree(results: dict[str, Any]) -> None:
    assert trained(results, "none")["losses"] == pytest.approx(trained(results, "zero2")["losses"], rel=5e-3)
