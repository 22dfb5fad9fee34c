"""From flags and deepspeed_config.json to the streaming engine: which engine, which homes, which settings, said why."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from outcore.common.quantities import GIB, MIB
from outcore.config import ConfigError, ProcessFacts, TrainConfig, resolve, understand
from outcore.engine.base import grouped
from outcore.engine.decide import choose_engine
from outcore.engine.stream import StreamDecision
from outcore.engine.stream.decision.decide import unused_keys
from outcore.flow.weights import Scratch
from outcore.optim import state_format
from outcore.probe.report.config_file import read_config
from outcore.sizing.streaming import LANE_BYTES, PROCESS_BYTES, RAM_RESERVE_BYTES
from outcore.storage import DriveAccess, PosixEngine
from tests.engine.deepspeed.config_cases import INFINITY, build
from tests.engine.even_model import EvenModel
from tests.refused import refused

SHIPPED = json.loads((Path(__file__).resolve().parents[2] / "deepspeed_config.json").read_text())
SIZES = EvenModel(
    total_params=10**9, trainable_params=10**9, num_layers=10, hidden_size=100, step_tokens=(64, 64), row_tokens=32,
    ram_available_bytes=40 * GIB, has_cuda=True,
)  # fmt: skip
"""2 GB of weights, 2 of gradients and 10 of split states."""


def usable(path: str, required_gb: float) -> tuple[bool, str]:
    return True, f"{path} is writable."


ADAM = {
    "optimizer": {"params": {"betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.5}}, "gradient_clipping": 0.25,
}  # fmt: skip


def plan_of(
    config: TrainConfig | None = None, file: dict | None = None, check=usable, sizes=SIZES, precision="bf16"
) -> StreamDecision:
    settings = resolve(config or TrainConfig(), understand({**ADAM, **(file or {})}), ProcessFacts(precision))
    return sizes.decide(settings, nvme_check=check)


def engine_of(config: TrainConfig | None = None, file: dict | None = None, processes: int = 1, precision="bf16"):
    return choose_engine(
        resolve(config or TrainConfig(), understand(file or {}), ProcessFacts(precision, processes, 1))
    )


@pytest.mark.parametrize(("config", "file", "processes", "words"), [
    ({"zero_stage": "zero2"}, {}, 1, "zero_stage zero2"),
    ({}, {"zero_optimization": {"stage": 1}}, 1, "zero_stage zero1"),
    ({}, {"zero_optimization": False}, 1, "zero_stage none"), ({}, {}, 2, "2 ranks on several hosts"),
    ({}, {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, 1, "L2 regularisation"),
    ({}, {"optimizer": {"params": {"bias_correction": False}}}, 1, "bias_correction"),
    ({}, {"bf16": {"enabled": True, "bf16_optimizer_states": True}}, 1, "bf16_optimizer_states"),
])  # fmt: skip
def test_auto_gives_way_with_the_reason_and_stream_refuses_with_it(config, file, processes, words):
    choice = engine_of(TrainConfig(**config), file, processes)
    assert choice.name == "deepspeed" and words in choice.reason and "auto" in choice.reason
    refused(ConfigError, words, lambda: engine_of(TrainConfig(**config, engine="stream"), file, processes))


@pytest.mark.parametrize("stage", [None, "zero3", "infinity"])
def test_auto_streams_and_an_asked_engine_is_kept(stage):
    assert engine_of(TrainConfig(zero_stage=stage)).name == "stream"
    assert engine_of(TrainConfig(zero_stage=stage), SHIPPED).name == "stream"
    assert engine_of(TrainConfig(zero_stage=stage, engine="deepspeed")).reason == "as asked"
    assert engine_of(TrainConfig(zero_stage=stage), {"outcore": {"engine": "deepspeed"}}).name == "deepspeed"
    assert engine_of(file={"fp16": {"loss_scale": 128}}, precision="fp16").name == "deepspeed"


def test_a_momentum_alone_is_counted_where_muon_updates():
    """10.8 GB of 14: 800 M parameters have no second moment."""
    muon, sizes = TrainConfig(optimizer="muon"), replace(SIZES, ram_available_bytes=12 * 10**9)
    assert "this run needs 13.04 GiB of RAM" in plan_of(sizes=sizes).shortage
    assert not plan_of(muon, sizes=replace(sizes, muon_params=800 * 10**6)).shortage
    notes = [plan_of(muon, sizes=replace(SIZES, muon_params=n)).notes for n in (10**8, 10**9)]  # 6 B of each cross
    assert [any("9.31 GiB of homes cross" in note for note in found) for found in notes] == [False, True]


def test_ram_first_then_the_drive():
    """Gradients (2 GB) first, then weights (2), then what is left of the 10 of states."""
    here = {"nvme_offload_path": "/drive"}
    s = plan_of(TrainConfig(**here, ram_budget_gib=14)).told
    assert s.nvme_paths == ("/drive",) and s.weight_ram_bytes is None and 4e9 < s.state_ram_bytes < 10e9
    s = plan_of(TrainConfig(**here, ram_budget_gib=7)).told
    assert 0 < s.weight_ram_bytes < 2e9 and s.state_ram_bytes == 0
    measured = plan_of(TrainConfig(**here), sizes=replace(SIZES, ram_available_bytes=10 * GIB)).told
    kept = 10 * GIB - PROCESS_BYTES - RAM_RESERVE_BYTES - LANE_BYTES - 4 * 10**9 - measured.state_ram_bytes
    assert 0.9 * GIB < kept <= GIB  # the ring's whole slots
    assert plan_of(TrainConfig(**here)).told.nvme_paths == ()
    everything = plan_of(file={"outcore": {"residency": "nvme", "nvme_path": "/drive"}}).told
    assert everything.state_ram_bytes == 0 and everything.weight_ram_bytes == 0


@pytest.mark.parametrize("budget_gib", [7, 9, 12, 16])
@pytest.mark.parametrize("trained", [10**9, 4 * 10**6])
@pytest.mark.parametrize("staging_gib", [None, 2.0])
def test_a_budget_is_what_the_process_takes(budget_gib, trained, staging_gib):
    """It did not count Python, CUDA, slots, the ring and weights read ahead: LoRA took 54.9 of 52 GiB, full training
    0.6 more than its ring. It counted 4 slots of each lane where pageable homes get 16."""
    sizes = replace(SIZES, total_params=4 * 10**9 if trained < 10**9 else 10**9, trainable_params=trained)
    settings = TrainConfig(nvme_offload_path="/drive", ram_budget_gib=budget_gib, staging_gib=staging_gib)
    plan = plan_of(settings, sizes=sizes)
    s, states = plan.told, int(10 * trained)
    weights = 2 * sizes.total_params if s.weight_ram_bytes is None else s.weight_ram_bytes
    kept = states if s.state_ram_bytes is None else s.state_ram_bytes
    homes = weights + kept + 2 * trained
    if s.nvme_paths:
        slot_bytes = state_format("split").on_drive.chunk_bytes(s.chunk_numel) + 2 * s.chunk_numel
        chunks = -(-(states - kept) // (10 * s.chunk_numel))
        homes += min(s.state_ring_bytes, s.state_ring_slots * slot_bytes, chunks * slot_bytes) if kept < states else 0
        homes += s.weight_read_ahead_bytes if s.weight_ram_bytes is not None else 0
    taken = PROCESS_BYTES + s.lane_bytes + homes
    assert taken <= 1.02 * budget_gib * GIB and not any("the process takes" in line for line in plan.warnings)
    assert not s.nvme_paths or taken > 0.95 * budget_gib * GIB  # and no less than it may


def test_a_budget_below_what_cannot_leave_ram_is_said():
    warnings = plan_of(TrainConfig(nvme_offload_path="/drive", ram_budget_gib=4)).warnings
    assert any("the process takes" in line and "1.86 GiB of gradients" in line for line in warnings)


LORA_8B = replace(SIZES, total_params=8 * 10**9, trainable_params=4 * 10**7, ram_available_bytes=100 * GIB)


def test_more_is_pinned_where_homes_need_it_and_the_machine_has_it():
    """Half of LoRA's base of 8 B was pageable under the default's 8 GiB: 2.56 s a step where all pinned takes 1.5."""
    plan = plan_of(sizes=LORA_8B, file=SHIPPED)
    assert 16e9 < plan.told.staging_bytes < 17e9 and plan.told.num_slots == 4
    assert any(note.startswith("pinned memory: 15.") and "--staging_gib sets it" in note for note in plan.notes)
    ranks = plan_of(sizes=replace(LORA_8B, num_ranks=2), file=SHIPPED).told
    assert plan.told.staging_bytes + plan.told.lane_bytes <= ranks.staging_bytes < 1.03 * plan.told.staging_bytes
    half = plan_of(sizes=replace(LORA_8B, ram_available_bytes=24 * GIB)).told
    assert half.staging_bytes == 12 * GIB and half.num_slots == 16
    for config, sizes in ((TrainConfig(staging_gib=8.0), LORA_8B), (None, replace(LORA_8B, is_wsl2=True))):
        told = plan_of(config, sizes=sizes)
        assert told.told.staging_bytes == 8 * GIB and not any("pinned memory" in note for note in told.notes)
    assert plan_of().told.staging_bytes == 8 * GIB  # 4 GB cross: nothing is missing


@pytest.mark.parametrize(("staging_gib", "slots"), [(0.5, 8), (1.0, 16), (4.0, 16)])
def test_pageable_homes_get_lanes_with_more_slots(staging_gib, slots):
    told = plan_of(TrainConfig(staging_gib=staging_gib), sizes=LORA_8B).told
    assert told.num_slots == slots and told.lane_bytes <= told.staging_bytes == staging_gib * GIB
    assert plan_of(TrainConfig(staging_gib=staging_gib, lane_slots=2), sizes=LORA_8B).told.num_slots == 2


def test_two_drives_take_halves_of_one_process_and_a_rank_each_of_several():
    needed: list[tuple[str, float]] = []
    check = lambda path, gb: (needed.append((path, gb)) or True, "")  # noqa: E731
    asked = TrainConfig(zero_stage="infinity", nvme_offload_path="/a,/b", ram_budget_gib=0.0)
    assert plan_of(asked, check=check).told.nvme_path == ("/a", "/b")
    assert [path for path, _ in needed] == ["/a", "/b"] and needed[0][1] == needed[1][1]
    halves = needed[0][1]
    needed.clear()
    assert plan_of(replace(asked, nvme_offload_path="/a"), check=check).told.nvme_path == "/a"
    assert needed[0][1] == pytest.approx(2 * halves, rel=1e-6)


def test_storage_as_the_probe_found_it_is_what_scratch_opens(tmp_path):
    """`--apply` wrote outcore.storage and nobody read it."""
    found = {"outcore": {"storage": {"engine": "posix", "threads": 3, "block_bytes": 65536}}}
    plan = plan_of(file=found)
    assert plan.told.storage == DriveAccess("posix", 3, 65536) and not plan.unused
    assert any("storage_engine posix, storage_threads 3, storage_block_bytes 65536" in note for note in plan.notes)
    assert not any("--apply" in note for note in plan_of().notes)
    scratch = Scratch([tmp_path], storage=plan.told.storage)
    assert isinstance(scratch.engine, PosixEngine) and scratch.engine.block_bytes == 65536
    scratch.close()
    assert plan_of(TrainConfig(storage_threads=5), found).told.storage.num_threads == 5
    with pytest.raises(ConfigError, match="storage_block_bytes 1000 is not a multiple of 4096"):
        plan_of(TrainConfig(storage_block_bytes=1000))


OTHER = {
    "outcore.write_combined": "on", "outcore.engine": "deepspeed", "outcore.nvme_path": "/d",
    "outcore.residency": "ram", "outcore.state_format": "split8", "outcore.ram_budget_gib": 5.0,
    "zero_optimization.stage": 2,
    "zero_optimization.offload_optimizer.device": "nvme", "zero_optimization.offload_param.device": "nvme",
    "optimizer.type": "SGD", "optimizer.params.betas": [0.5, 0.6], "bf16.enabled": False,
}  # fmt: skip


def _leaves(block, path=""):
    for key, value in block.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        elif not key.startswith("_"):
            yield f"{path}{key}", value


@pytest.mark.parametrize("key", [key for key, _ in _leaves(SHIPPED)])
def test_every_key_of_the_shipped_file_has_an_effect(key, tmp_path):
    """Another value changes the run's settings or the probe's; of what the streaming engine tells to be without effect
    there, the configuration that DeepSpeed runs, in RAM or with a drive."""
    old = dict(_leaves(SHIPPED))[key]
    new = OTHER[key] if key in OTHER else (not old if isinstance(old, bool) else 2 * old)
    changed = json.loads(json.dumps(SHIPPED))
    for name in (key, key.replace("optimizer.pin", "param.pin"), key.replace("param.pin", "optimizer.pin")):
        *path, last = name.split(".")
        block = changed
        for part in path:
            block = block[part]
        block[last] = new

    def effect(file):
        (tmp_path / "ds.json").write_text(json.dumps(file))
        settings = resolve(TrainConfig(), understand(file), ProcessFacts(None))
        return replace(settings, file=None, reasons={}), read_config(tmp_path / "ds.json")

    only_deepspeeds = any(f"{key}.".startswith(f"{name}.") for name in unused_keys(SHIPPED))
    if only_deepspeeds:
        used = [
            build(changed, flags).config != build(SHIPPED, flags).config
            for flags in ({"engine": "deepspeed"}, {**INFINITY, "engine": "deepspeed"})
        ]
        assert any(used), f"{key} has no effect in either engine"
        return
    if key == "optimizer.type":  # Adam is AdamW here, another optimizer is refused
        refused(ConfigError, "SGD", lambda: resolve(TrainConfig(), understand(changed), ProcessFacts(None)))
        return
    assert effect(changed) != effect(SHIPPED), f"{key} has no effect"


def test_what_must_stay_in_ram_stays_there():
    here = {"nvme_offload_path": "/drive", "ram_budget_gib": 0.0}
    s = plan_of(TrainConfig(**here, offload_params="cpu")).told
    assert s.weight_ram_bytes is None and s.state_ram_bytes == 0
    s = plan_of(TrainConfig(**here, zero_stage="infinity", nvme_offload_optimizer=False)).told
    assert s.weight_ram_bytes == 0 and s.state_ram_bytes is None
    kept = plan_of(TrainConfig(**here), {"outcore": {"residency": "ram"}})
    assert kept.told.nvme_paths == () and any("no drive takes the rest" in line for line in kept.warnings)
    with pytest.raises(ConfigError, match="residency ram contradicts"):
        plan_of(file={"outcore": {"residency": "ram"}, "zero_optimization": {"offload_param": {"device": "nvme"}}})
    with pytest.raises(ValueError, match="contradict each other"):
        plan_of(TrainConfig(**here, zero_stage="infinity", offload_params="cpu"))


def test_a_drive_that_cannot_be_used_means_ram_said_loudly_or_an_error():
    def broken(path, required_gb):
        return False, f"{path} is full."

    asked = TrainConfig(zero_stage="infinity", nvme_offload_path="/drive", ram_budget_gib=0.0)
    plan = plan_of(asked, check=broken)
    assert plan.told.nvme_paths == () and "NVMe OFFLOAD IS NOT USED: /drive is full." in plan.warnings[0]
    with pytest.raises(ConfigError, match=r"strict_offload: .*is full"):
        plan_of(replace(asked, strict_offload=True), check=broken)
    short = plan_of(asked, check=broken, sizes=replace(SIZES, ram_available_bytes=10 * GIB)).shortage
    assert re.search(r"needs 13\.\d+ GiB.*10\.00 GiB are available\. The drive was not taken: /drive is full", short)
    assert "--nvme_offload_path" not in short, "that drive was named already"
    no_path = plan_of(TrainConfig(zero_stage="infinity"))
    assert "No NVMe path is given" in no_path.warnings[0]
    needed = []
    plan_of(asked, check=lambda path, gb: (needed.append(gb), usable(path, gb))[1])
    assert needed[0] == pytest.approx(1.5 * 12.03, rel=1e-3)  # compressed, and room


def test_keys_of_the_file_that_are_honoured():
    file = {
        "fp16": {"initial_scale_power": 8, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 4},
        "data_types": {"grad_accum_dtype": "fp16"}, "activation_checkpointing": {"cpu_checkpointing": True},
        "outcore": {"staging_bytes": GIB, "write_combined": "on", "lanes": {"slot_bytes": MIB, "num_slots": 5}},
    }  # fmt: skip
    s = plan_of(file=file, precision="fp16").told
    assert (s.initial_loss_scale, s.loss_scale_window, s.loss_scale_hysteresis, s.min_loss_scale) == (256.0, 7, 3, 4.0)
    assert s.accumulate == "weights" and s.activations == "ram" and s.write_combined and s.states == "fp32"
    assert (s.staging_bytes, s.slot_bytes, s.num_slots) == (GIB, MIB, 5)
    assert plan_of(TrainConfig(pin_memory=False)).told.staging_bytes == 128 * MIB
    flags = plan_of(TrainConfig(activations="device", compile="off", tiling="on", tile_bytes=4096)).told
    assert (flags.activations, flags.compile, flags.tiling, flags.tile_bytes) == ("device", "off", "on", 4096)


def test_state_formats():
    compact = plan_of(TrainConfig(state_format="split8"))
    assert compact.told.states == "split8" and any("8 bits" in note for note in compact.notes)
    assert plan_of(file={"outcore": {"state_format": "fp32_m8"}}).told.states == "fp32_m8"
    with pytest.raises(ConfigError, match=r"needs --precision bf16.*fp32_m8"):
        plan_of(TrainConfig(state_format="split8"), precision="fp16")
    shortest = plan_of(TrainConfig(state_format="fp24_m8"))
    assert shortest.told.states == "fp24_m8" and any("masters in 24" in note for note in shortest.notes)
    with pytest.raises(ConfigError, match=r"fp24_m8.*needs --precision bf16.*fp32_m8"):
        plan_of(TrainConfig(state_format="fp24_m8"), precision="fp32")


def test_keys_without_effect_are_listed_once():
    found = unused_keys(SHIPPED)
    assert "zero_optimization.overlap_comm" in found and "aio" in found
    assert not understand({"outcore": {"streams": 4}}).blocks["outcore"]  # earlier files had it
    assert not any(key.endswith(("stage", "device", "nvme_path", "state_format", "residency")) for key in found)
    assert grouped(found).count("zero_optimization") == 1 and "aio" in grouped(found)
    assert grouped(["a.b", "a.c", "a.d", "e", "f.g"], most=2) == "a (3 keys), e, f (g)"


def test_write_combined_auto_is_as_this_machine_measured_it():
    for measured, wanted in ((True, True), (False, False), (None, False)):
        plan = plan_of(sizes=replace(SIZES, write_combined=measured))
        assert plan.told.write_combined is wanted
        assert any("write_combined auto" in note for note in plan.notes) is (measured is not None)
    fast = replace(SIZES, write_combined=True)
    assert not plan_of(TrainConfig(write_combined="off"), sizes=fast).told.write_combined
    assert not plan_of(sizes=replace(fast, has_cuda=False)).told.write_combined
    drive = plan_of(sizes=fast, file={"outcore": {"residency": "nvme", "nvme_path": "/drive"}}).told
    assert drive.nvme_paths and not drive.write_combined, "the CPU reads slots of a store with checksums"
