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
ODD = {"vocab": 1100, "width": 516, "inner": 1028, "tied": False}
"""No weight is a whole number of sectors: multi-weight tiles would corrupt its gradients."""


def facts(model: dict[str, Any]) -> WeightCounts:
    block = 2 * model["width"] * model["inner"] + 3 * model["width"] + model["inner"]
    embed = model["vocab"] * model["width"]
    return WeightCounts(2 * block + embed * (1 if model["tied"] else 2), embed, hidden_size=model["width"])


def training_jobs(nvme: Path) -> dict[str, dict[str, Any]]:
    infinity = {"zero_stage": "infinity", "max_in_cpu_gb": 0.0}
    file = json.loads((ROOT / "deepspeed_config.json").read_text())
    spill = json.loads((ROOT / "config/deepspeed_zero_infinity.json").read_text())
    serial = {"zero_optimization": {"offload_optimizer": {"pipeline_read": False, "pipeline_write": False}}}
    jobs = {
        "none": (file, {"zero_stage": "none"}, EVEN, {}), "zero2": (file, {"zero_stage": "zero2"}, EVEN, {}),
        "ram": (file, {}, EVEN, {}), "infinity": (file, infinity, EVEN, {}),
        "infinity_half": (spill, {"zero_stage": "infinity", "max_in_cpu_gb": 0.003}, EVEN, {}),
        "infinity_serial": (serial, infinity, EVEN, {}), "ram_odd": (file, {}, ODD, {}),
        "infinity_odd": (file, infinity, ODD, {}), "ram_tied_fp32": (file, {}, TIED, {"precision": "fp32"}),
        "infinity_tied_fp32": (file, infinity, TIED, {"precision": "fp32"}),
    }  # fmt: skip
    made: dict[str, dict[str, Any]] = {}
    for name, (user, settings, model, run) in jobs.items():
        said = {"nvme_offload_path": str(nvme), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        said |= {"learning_rate": 5e-4, **settings}
        chosen = settings_of(user, said, **run)
        built = build_config(chosen, facts(model), RunFacts(device="cpu", run_name=name), nvme_check=accept)
        made[name] = {
            "config": built.config, "model": model, "steps": 2, "needs_async_io": built.offload.uses_nvme,
        }  # fmt: skip
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
        run = RunFacts(memlock_limit_bytes=1 << 60)
        made[f"{stage}-{precision}-{file}"] = build_config(settings, model, run, nvme_check=accept).config
    return made


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("dsconfig")
    nvme = work / "nvme drive"
    nvme.mkdir()
    jobs = {"parse": parse_jobs(), "train": training_jobs(nvme), "has_libaio": Path("/usr/include/libaio.h").exists()}
    for job in jobs["train"].values():
        for block in job["config"]["zero_optimization"].values():
            if isinstance(block, dict) and block.get("nvme_path"):
                Path(block["nvme_path"]).mkdir(parents=True, exist_ok=True)
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
    if "skipped" in outcome:
        pytest.skip(outcome["skipped"])
    assert "error" not in outcome, outcome
    return outcome


@pytest.mark.more
@pytest.mark.parametrize("name", ["none", "zero2", "ram"])
def test_trains_without_a_drive(results: dict[str, Any], name: str) -> None:
    outcome = trained(results, name)
    assert outcome["global_steps"] == 2
    assert all(0 < loss < 20 for loss in outcome["losses"])
    assert outcome["swap_file_bytes"] == 0


@pytest.mark.more
def test_stages_none_and_two_agree(results: dict[str, Any]) -> None:
    assert trained(results, "none")["losses"] == pytest.approx(trained(results, "zero2")["losses"], rel=5e-3)


@pytest.mark.more
@pytest.mark.parametrize("drive, ram", [
    ("infinity", "ram"), ("infinity_half", "ram"), ("infinity_odd", "ram_odd"), ("infinity_tied_fp32", "ram_tied_fp32"),
])  # fmt: skip
def test_nvme_gives_exactly_the_losses_of_ram(results: dict[str, Any], drive: str, ram: str) -> None:
    on_drive = trained(results, drive)
    assert on_drive["losses"] == trained(results, ram)["losses"]
    assert on_drive["swap_file_bytes"] > 12 * facts(EVEN if "odd" not in drive else ODD).total_params / 2


@pytest.mark.more
def test_unpipelined_swapping_trains(results: dict[str, Any]) -> None:
    outcome = trained(results, "infinity_serial")
    assert outcome["global_steps"] == 2 and outcome["swap_file_bytes"] > 0
