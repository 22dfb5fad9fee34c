"""The builder: defaults, precedence, repairs and fallbacks, without DeepSpeed."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.common.quantities import GIB
from outcore.engine.deepspeed.config.builder import RunFacts, build_config
from outcore.machine.offload import validate_nvme_path
from outcore.sizing.swapping import WeightCounts, nvme_bytes
from tests.engine.deepspeed.config_cases import INFINITY, TINY, build, settings_of
from tests.refused import refused

ROOT = Path(__file__).parents[3]
LLAMA_8B = WeightCounts(8_030_261_248, 525_336_576, 291, 4096)


def refuse(path: str, required_space_gb: float) -> tuple[bool, str]:
    return False, f"{path} is full."


def has_auto(value: Any) -> bool:
    if isinstance(value, dict):
        return any(has_auto(v) for v in value.values())
    return value == "auto" or (isinstance(value, list) and any(has_auto(v) for v in value))


# --- defaults


def test_an_empty_file_gives_zero3_in_ram() -> None:
    built = build()
    zero = built.config["zero_optimization"]
    assert (built.offload.stage, built.offload.optimizer, built.offload.params) == (3, "cpu", "cpu")
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert built.config["train_batch_size"] == 8 and built.config["gradient_clipping"] == 1.0
    assert built.config["bf16"] == {"enabled": True}
    params = built.config["optimizer"]["params"]
    assert (params["betas"], params["eps"], params["weight_decay"]) == ([0.9, 0.999], 1e-8, 0.01)
    assert "scheduler" not in built.config
    assert "aio" not in built.config and built.warnings == ()
    assert any(note.startswith("max_grad_norm = 1.0: ") for note in built.notes)


def test_the_input_is_never_changed_and_auto_is_resolved() -> None:
    user = {
        "train_batch_size": "auto", "bf16": {"enabled": "auto"}, "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "auto"}},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}, "scheduler": "auto",
        "outcore": {"write_combined": "auto"},
    }  # fmt: skip
    before = copy.deepcopy(user)
    built = build(user)
    assert user == before
    assert not has_auto({key: value for key, value in built.config.items() if key != "outcore"})
    json.dumps(built.config)


@pytest.mark.parametrize(
    "stage, number", [("none", 0), (0, 0), ("1", 1), (2, 2), ("ZeRO3", 3), ("infinity", 3), (None, 3), ("zero4", None)],
)  # fmt: skip
def test_stage_names(stage: Any, number: int | None) -> None:
    if number is None:
        refused(ValueError, "zero_stage", lambda: build(flags={"zero_stage": stage}))
    else:
        assert build(flags={"zero_stage": stage}).config["zero_optimization"]["stage"] == number


def test_stage_none_has_no_offload_and_torchs_adamw() -> None:
    file = json.loads((ROOT / "deepspeed_config.json").read_text())
    built = build(file, {"zero_stage": "none"})
    assert built.config["zero_optimization"] == {"stage": 0}
    assert built.config["optimizer"]["params"]["torch_adam"] is True
    assert built.config["optimizer"]["params"]["fused"] is True
    assert any("offload_optimizer left out" in text for text in built.warnings)


def test_on_the_cpu_adam_is_not_fused_and_cannot_be_the_extension() -> None:
    user = {"optimizer": {"type": "AdamW", "params": {"torch_adam": False}}}
    built = build(user, {"zero_stage": 2}, {"device": "cpu"})
    assert built.config["optimizer"]["params"]["torch_adam"] is True
    assert "fused" not in built.config["optimizer"]["params"]
    assert any("torch_adam changed from False to True" in text for text in built.warnings)


# --- batch


@pytest.mark.parametrize("user, run, expected", [
    ({"train_batch_size": 32}, {}, (32, 2, 16)),
    ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, {"world_size": 4}, (32, 4, 2)),
    ({"train_micro_batch_size_per_gpu": 3}, {"world_size": 2}, (24, 3, 4)),
    ({"train_micro_batch_size_per_gpu": 3}, {"per_device_train_batch_size": 5}, (20, 5, 4)),
    ({"train_batch_size": 7}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}, (3, 1, 3)),
])  # fmt: skip
def test_batch_arithmetic(user: dict, run: dict, expected: tuple[int, int, int]) -> None:
    config = build(user, run=run).config
    assert (
        config["train_batch_size"], config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"],
    ) == expected  # fmt: skip


@given(
    world=st.integers(1, 8), micro=st.none() | st.integers(1, 9), accumulation=st.none() | st.integers(1, 9),
    total=st.none() | st.integers(1, 300),
)  # fmt: skip
def test_the_product_always_holds(world: int, micro: int | None, accumulation: int | None, total: int | None) -> None:
    user = {
        "train_batch_size": total, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation
    }  # fmt: skip
    try:
        config = build({k: v for k, v in user.items() if v is not None}, run={"world_size": world}).config
    except ValueError as error:
        assert "train_batch_size" in str(error)
        return
    product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * world
    assert config["train_batch_size"] == product
    assert total in (None, product)


# --- precision


def test_precision_of_run_wins_over_the_file() -> None:
    built = build({"fp16": {"enabled": True, "loss_scale": 128}}, run={"precision": "fp32"})
    assert built.config["fp16"] == {"enabled": False} and built.config["bf16"] == {"enabled": False}
    assert build({"fp16": {"enabled": True, "loss_scale": 128}}).config["fp16"]["loss_scale"] == 128
    assert build({"bfloat16": {"enabled": True}}).config["bf16"] == {"enabled": True}
    assert build({"bf16": {"enabled": False}}).config["bf16"] == {"enabled": False}


# --- infinity


def test_infinity_puts_both_on_nvme() -> None:
    built = build(flags={**INFINITY, "aio_queue_depth": 32}, model=LLAMA_8B, run={"run_name": "my run"})
    zero = built.config["zero_optimization"]
    assert built.offload.uses_nvme and built.offload.nvme_path == "/mnt/nvme/my run"
    assert zero["offload_param"] == {
        "device": "nvme", "pin_memory": False, "nvme_path": "/mnt/nvme/my run", "max_in_cpu": 500_000_000,
    }  # fmt: skip
    assert zero["offload_optimizer"]["device"] == "nvme"
    assert built.config["aio"]["queue_depth"] == 32
    assert "torch_adam" not in built.config["optimizer"]["params"]
    assert build(flags={**INFINITY, "max_in_cpu_gb": 0}).config["zero_optimization"]["offload_param"]["max_in_cpu"] == 0


def test_user_values_that_a_drive_does_not_take_are_changed_and_said() -> None:
    user = {
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 10**8, "stage3_module_granularity_threshold": 7,
            "offload_param": {"device": "nvme", "nvme_path": "/a", "buffer_count": 1},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
        },
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
    }  # fmt: skip
    built = build(user, run={"world_size": 2})
    zero = built.config["zero_optimization"]
    assert zero["stage3_param_persistence_threshold"] == (524_288 - 1) * 2
    changed = "\n".join(built.warnings)
    for key in ("stage3_param_persistence_threshold changed", "torch_adam changed", "granularity_threshold changed"):
        assert key in changed
    assert any("offload_param.buffer_count: not used" in note for note in built.notes)


@pytest.mark.parametrize(("user", "named"), [
    ({"outcore": {"offload": "stock"}}, "outcore.offload stock"),
    ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights is DeepSpeed's only"),
    ({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}, "offload_optimizer.ratio (part of"),
])  # fmt: skip
def test_deepspeeds_own_offload_stays_in_ram(user: dict, named: str) -> None:
    staged = user.get("outcore", {}).get("offload") != "stock"
    built = build(user, INFINITY, staged=staged)
    assert (built.offload.optimizer, built.offload.params, built.offload.staged) == ("cpu", "cpu", False)
    said = "\n".join(built.warnings)
    assert "DeepSpeed's own NVMe offload is not used" in said and named in said
    assert "aio" not in built.config and "nvme_path" not in json.dumps(built.config["zero_optimization"])
    with pytest.raises(ValueError, match="strict_offload"):
        build(user, {**INFINITY, "strict_offload": True}, staged=staged)
    roomless = build(user, {"nvme_offload_path": "/mnt/nvme"}, {"ram_available_bytes": 1}, LLAMA_8B, staged=staged)
    assert not roomless.offload.uses_nvme and any("is not used" in text for text in roomless.warnings)


def test_flags_choose_what_goes_to_nvme() -> None:
    only_optimizer = build(flags={**INFINITY, "nvme_offload_params": False}).offload
    assert (only_optimizer.optimizer, only_optimizer.params) == ("nvme", "cpu")
    only_params = build(flags={**INFINITY, "nvme_offload_optimizer": False}).offload
    assert (only_params.optimizer, only_params.params) == ("cpu", "nvme")
    on_gpu = build(flags={**INFINITY, "nvme_offload_optimizer": False, "offload_optimizer": "none"})
    assert (on_gpu.offload.optimizer, on_gpu.offload.params) == ("none", "cpu")
    assert any("--offload_optimizer cpu" in text for text in on_gpu.warnings)
    neither = build(flags={**INFINITY, "nvme_offload_optimizer": False, "nvme_offload_params": False})
    assert not neither.offload.uses_nvme and any("neither optimizer nor parameters" in t for t in neither.warnings)


@pytest.mark.parametrize("path", [None, "", "C:\\nvme", "\\\\server\\share"])
def test_an_unusable_path_falls_back_to_ram_loudly(path: str | None) -> None:
    built = build(flags={"zero_stage": "infinity", "nvme_offload_path": path})
    assert (built.offload.optimizer, built.offload.params, built.offload.nvme_path) == ("cpu", "cpu", None)
    assert any("NVMe OFFLOAD IS NOT USED" in text for text in built.warnings)
    with pytest.raises(ValueError, match="strict_offload"):
        build(flags={"zero_stage": "infinity", "nvme_offload_path": path, "strict_offload": True})


def test_a_refused_drive_falls_back_to_ram() -> None:
    built = build(flags=INFINITY, check=refuse)
    assert built.offload.optimizer == "cpu" and "is full" in built.warnings[0]
    assert "aio" not in built.config


def test_the_real_check_is_used_by_default(tmp_path: Path) -> None:
    settings = settings_of(flags={"zero_stage": "infinity", "nvme_offload_path": str(tmp_path / "nvme folder")})
    built = build_config(settings, TINY, RunFacts())
    usable, message = validate_nvme_path(str(tmp_path / "nvme folder"), 0.1)
    assert built.offload.uses_nvme == usable, message


def test_each_rank_takes_a_drive_in_turn() -> None:
    asked: list[tuple[str, float]] = []
    check = lambda path, gb: (asked.append((path, gb)) or path != "/full", "")  # noqa: E731

    def built(drives: str, ranks: int):
        asked.clear()
        settings = settings_of({}, {**INFINITY, "nvme_offload_path": drives})
        return build_config(settings, TINY, RunFacts(world_size=ranks), nvme_check=check, staged=True)

    alone = built("/a", 1)
    whole_gb = asked[0][1]
    both = built("/a,/b", 3)
    assert [path for path, _ in asked] == ["/a", "/b"] and asked[0][1] == pytest.approx(whole_gb * 2 / 3, rel=0.2)
    assert [both.of_rank(rank).offload.nvme_path for rank in range(3)] == ["/a", "/b", "/a"]
    zero = both.of_rank(1).config["zero_optimization"]
    assert {zero[block]["nvme_path"] for block in ("offload_optimizer", "offload_param")} == {"/b"}
    assert alone.of_rank(1) is alone and built("/a,/full", 2).offload.nvme_path is None
    assert any("one drive a rank" in note for note in built("/a,/b", 1).notes)


def test_ram_spills_to_the_drive_when_it_is_too_small() -> None:
    file = {"outcore": {"nvme_path": "/mnt/nvme"}}
    built = build(file, run={"ram_available_bytes": 60 * GIB}, model=LLAMA_8B)
    assert (built.offload.optimizer, built.offload.params) == ("nvme", "cpu")
    assert any("Spilling to NVMe" in text for text in built.warnings)
    smaller = build(file, run={"ram_available_bytes": 20 * GIB}, model=LLAMA_8B)
    assert (smaller.offload.optimizer, smaller.offload.params) == ("nvme", "nvme")
    for kept in (
        build(file, run={"ram_available_bytes": 600 * GIB}, model=LLAMA_8B),
        build({"outcore": {"nvme_path": "/n", "residency": "ram"}}, run={"ram_available_bytes": 1}, model=LLAMA_8B),
        build(file, {"offload_optimizer": "cpu", "offload_params": "cpu"}, {"ram_available_bytes": 1}, LLAMA_8B),
        build(run={"ram_available_bytes": 1}, model=LLAMA_8B),
    ):
        assert kept.offload.optimizer == "cpu"


# --- precedence


def test_flags_win_over_the_file_and_the_file_over_defaults() -> None:
    file = {"aio": {"block_size": 2097152, "queue_depth": 64, "thread_count": 4}, "gradient_clipping": 0.5}
    built = build(file, {**INFINITY, "aio_queue_depth": 16}, {"max_grad_norm": 2.0})
    assert (built.config["aio"]["block_size"], built.config["aio"]["queue_depth"]) == (2097152, 16)
    assert built.config["gradient_clipping"] == 2.0
    assert any("aio.thread_count left out" in text for text in built.warnings)
    explicit = build(file, {**INFINITY, "aio_block_size": 1 << 20})
    assert explicit.config["aio"]["block_size"] == 1 << 20


def test_old_spellings_are_understood() -> None:
    user = {
        "zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True, "prefetch_bucket_size": 5e6}
    }
    built = build(user)
    assert (built.offload.optimizer, built.offload.params) == ("cpu", "cpu")
    assert built.config["zero_optimization"]["stage3_prefetch_bucket_size"] == 5_000_000
    assert build({"zero_optimization": True}).offload.stage == 1
    old = {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}}
    assert build(old).config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


def test_no_scheduler_when_the_loop_sets_the_rate() -> None:
    built = build({"scheduler": {"type": "WarmupLR"}})
    assert "scheduler" not in built.config and built.warnings == ()


def test_shipped_files_build() -> None:
    drive = json.loads((ROOT / "config/deepspeed_zero_infinity.json").read_text())
    assert build(drive, model=LLAMA_8B).offload.uses_nvme
    ram = json.loads((ROOT / "config/deepspeed_zero_infinity_cpu.json").read_text())
    assert not build(ram).offload.uses_nvme
    root = json.loads((ROOT / "deepspeed_config.json").read_text())
    assert root["outcore"] == {
        "staging_bytes": 8589934592, "write_combined": "auto", "engine": "auto", "nvme_path": "",
        "residency": "auto", "state_format": "auto", "ram_budget_gib": None,
    }  # fmt: skip
    built = build(root, {"zero_stage": "zero2"})
    assert built.offload.optimizer == "cpu" and any("offload_param left out" in text for text in built.warnings)


def test_nvme_bytes_counts_states_of_what_is_trained_and_all_parameters() -> None:
    assert nvme_bytes(TINY, "bf16", True, True, 16) == 18 * TINY.total_params
    lora = WeightCounts(1000, 100, trainable_params=10)
    assert nvme_bytes(lora, "bf16", True, False, 16) == 160
