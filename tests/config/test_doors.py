"""Each setting by each of its doors: the command line, YAML and deepspeed_config.json mean the same."""

import ast
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from outcore.common.classes import same_named
from outcore.common.quantities import GIB
from outcore.config import (
    FIELDS,
    ConfigError,
    DeepSpeedFile,
    Field,
    ProcessFacts,
    RunSettings,
    TrainConfig,
    parse,
    read_deepspeed_file,
    resolve,
    understand,
)
from outcore.engine.stream.settings import StreamSettings, StreamSizes
from tests.config.shipped import shipped, text
from tests.refused import refused

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES: dict[str, Any] = {
    "adam_beta1": 0.8, "adam_beta2": 0.9, "staging_gib": 2.5, "run_name": "a run", "report_to": "none",
    "nvme_offload_path": "/mnt/a drive", "lora_alpha": 8, "offload_optimizer": "none", "offload_params": "none",
    "state_format": "fp32_m8", "aio_block_size": 8192, "lane_slot_bytes": 8192, "storage_block_bytes": 8192,
    "grad_accum_dtype": "fp32", "activations": "ram", "push_to_hub": "a/b", "method": "dpo",
    "reward_function": "math_verify",
}  # fmt: skip
"""Values that are not made up from the field's type and range."""
LORA = {"lora_r": 4, "random_base": True}
GRPO = {"method": "grpo"}
BESIDE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("lora_alpha", "quantize", "use_rslora", "init_lora_weights"), LORA),
    **dict.fromkeys(("use_dora", "lora_modules_to_save"), LORA),
    "lora_r": {"random_base": True},
    "beta": {"method": "dpo"},
    "teacher": {"method": "distill"},
    **dict.fromkeys(("reward_function", "num_generations", "max_completion_length"), GRPO),
    **dict.fromkeys(("on_bad_reward", "reward_timeout_s"), GRPO),
    "pooling": {"method": "embed", "tokenizer_name_or_path": "tokens"},
    "matryoshka": {"method": "embed", "tokenizer_name_or_path": "tokens"},
    "lr_decay_ratio": {"lr_scheduler_type": "wsd"},
    "continue_with_changes": {"resume_from_checkpoint": "auto"},
}
"""Other fields that a field needs."""
IN_FILE: dict[str, Any] = {
    "zero_stage": 2, "staging_gib": int(2.5 * GIB), "activations": True, "lr_scheduler_type": "WarmupCosineLR",
}  # fmt: skip
"""What the file writes for the value, where it is something else."""
VALUES = {"zero_stage": "zero2", "lr_scheduler_type": "cosine"}


def example(row: Field) -> Any:
    """A value that is not the default."""
    if row.name in EXAMPLES:
        return EXAMPLES[row.name]
    if row.name in VALUES:
        return VALUES[row.name]
    if row.choices:
        return next(choice for choice in reversed(row.choices) if choice != row.default)
    if row.is_switch:
        return not row.default
    if row.kind is int:
        return 7
    return {float: 0.25, str: "x:y"}.get(row.kind, ("a", "b"))


def said(argv: list[str]) -> TrainConfig:
    return parse(argv, TrainConfig, "test", "")


def resolved(config: TrainConfig, file: DeepSpeedFile) -> RunSettings:
    return resolve(config, file, ProcessFacts("bf16"))


def file_with(row: Field, key: str) -> DeepSpeedFile:
    value = IN_FILE.get(row.name, example(row))
    block: Any = {}
    inner, parts = block, key.split(".")
    for part in parts[:-1]:
        inner = inner.setdefault(part, {})
    inner[parts[-1]] = value
    if key.startswith("optimizer.params.betas"):
        block = {"optimizer": {"params": {"betas": [0.8, 0.9]}}}
    if row.name == "pin_memory":  # no only where both blocks say so
        block = {"zero_optimization": {name: {"pin_memory": value, "device": "cpu"} for name in OFFLOAD_BLOCKS}}
    if row.name == "initial_scale_power":
        block["fp16"]["enabled"] = False
    return understand(block)


OFFLOAD_BLOCKS = ("offload_optimizer", "offload_param")


@pytest.mark.more(after=40)
@pytest.mark.parametrize("row", FIELDS.values(), ids=list(FIELDS))
def test_a_field_means_the_same_by_each_of_its_doors(row: Field, tmp_path: Path) -> None:
    beside = [f"--{name}={value}" for name, value in BESIDE.get(row.name, {}).items()]
    value = example(row)
    flags = [f"--{row.name}={one}" for one in (value if isinstance(value, tuple) else [value])]
    by_flag = said([*flags, *beside])
    assert getattr(by_flag, row.name) == value != row.default
    lines = {row.name: list(value) if isinstance(value, tuple) else value, **BESIDE.get(row.name, {})}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(lines))
    assert said(["--config", str(tmp_path / "run.yaml")]) == by_flag
    for alias in row.spec.aliases:
        renamed = [flag.replace(f"--{row.name}=", f"--{alias}=") for flag in flags]
        assert said([*renamed, *beside]) == by_flag
    for key in row.spec.file:
        file = file_with(row, key)
        assert file.values[row.name] == value, key
        if "nvme_path" in key or "device" in key or "pin_memory" in key:
            file = dataclasses.replace(file, values={row.name: value})  # without the rest of its block
        if row.name in ("adam_beta1", "adam_beta2"):
            by_flag = said(["--adam_beta1=0.8", "--adam_beta2=0.9"])
        if row.name == "weight_decay":  # a file that gives it means what DeepSpeed means: of norms and biases, too
            by_flag = dataclasses.replace(by_flag, decay_all=True)
        assert resolved(said(beside), file) == resolved(by_flag, DeepSpeedFile()), key


def test_flags_win_over_yaml_and_yaml_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("weight_decay: 0.2\nlearning_rate: 1e-3\n")
    file = understand({"optimizer": {"params": {"weight_decay": 0.3, "lr": 0.5, "eps": 1e-6}}})
    config = said(["--config", str(tmp_path / "run.yaml"), "--learning_rate", "2e-3"])
    found = resolved(config, file)
    assert (found.learning_rate, found.weight_decay, found.adam_epsilon) == (2e-3, 0.2, 1e-6)
    assert (
        found.reasons["learning_rate"] == "--learning_rate" and "optimizer.params.eps" in found.reasons["adam_epsilon"]
    )
    assert any("weight_decay = 0.2: --weight_decay wins" in note for note in found.notes)


@pytest.mark.parametrize("name, stage", [("zero1", "zero1"), ("zero2", "zero2"), ("zero3", "zero3")])
def test_files_of_the_stages_are_made_by_the_command_and_mean_it(name: str, stage: str) -> None:
    path = ROOT / "config" / f"deepspeed_{name}.json"
    assert path.read_text() == text(shipped()[path.name]), "run: python -m tests.config.shipped --write"
    found = resolved(TrainConfig(), read_deepspeed_file(path))
    assert (found.zero_stage, found.engine) == (stage, "deepspeed")
    assert found.offload.params == ("cpu" if stage == "zero3" else "none")


def test_every_value_has_a_reason() -> None:
    for path in ("deepspeed_config.json", "config/deepspeed_zero_infinity.json", "config/deepspeed_zero2.json"):
        found = resolved(TrainConfig(), read_deepspeed_file(ROOT / path))
        assert all(found.reasons.values())
        assert {"learning_rate", "zero_stage", "state_format", "precision", "gradient_accumulation_steps"} <= set(
            found.reasons
        )


def test_each_key_of_the_settings_has_a_reader() -> None:
    """An engine or the planner reads it: a setting that nothing reads cannot be set, only believed."""
    read: set[str] = set()
    for room in ("engine", "plan"):
        for path in (ROOT / "outcore" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] in HOLDERS:
                    read.add(node.attr)
    unread = []
    for cls in (RunSettings, *(type(getattr(SETTINGS, f.name)) for f in dataclasses.fields(RunSettings))):
        if dataclasses.is_dataclass(cls) and cls.__module__.startswith("outcore.config"):
            names = [f.name for f in dataclasses.fields(cls)]
            unread += [f"{cls.__name__}.{name}" for name in names if name not in read]
    settled_before = ["RunSettings.cut_is_open", "DeepSpeedFile.values", "DeepSpeedFile.keys"]
    assert unread == settled_before  # by the run that asks the planner, and by `resolve`


HOLDERS = ("settings", "run", "offload", "wanted", "scaling", "file")
"""What a `RunSettings`, or a part of one, is called where it is read."""


SETTINGS = resolve(TrainConfig(), DeepSpeedFile(), ProcessFacts("bf16"))


@pytest.mark.parametrize(("flags", "file", "words"), [
    ({"state_format": "split8"}, {}, "needs --precision bf16; this run computes in fp32. Use --state_format fp32_m8"),
    ({}, {"outcore": {"state_format": "split"}}, "needs --precision bf16; this run computes in fp32"),
    ({"strict_offload": True, "zero_stage": "infinity"}, {}, "needs --nvme_offload_path"),
    ({"lane_slot_bytes": 1000}, {}, "not a multiple of 4096"),
    ({}, {"outcore": {"staging_bytes": 0}}, "outcore.staging_bytes (staging_gib) must be above 0"),
    ({}, {"aio": {"queue_depth": 8.5}}, "aio.queue_depth (aio_queue_depth) must be a whole number"),
    ({"offload_optimizer": "nvme"}, {"zero_optimization": {"stage": 1}}, "offload_optimizer nvme needs zero_stage"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_read(flags: dict, file: dict, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(TrainConfig(**flags), understand(file), ProcessFacts("fp32"))
    assert words in str(caught.value)


def test_each_setting_of_the_streaming_engine_is_set_by_its_decision() -> None:
    """What no run sets stands in `StreamSizes`, the engine's constructor arguments."""
    set_here: set[str] = set()
    for path in (ROOT / "outcore/engine/stream/decision").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node).startswith(("StreamSettings(", "replace(told,")):
                set_here |= {keyword.arg for keyword in node.keywords if keyword.arg}
    own = {f.name for f in dataclasses.fields(StreamSettings)} - {f.name for f in dataclasses.fields(StreamSizes)}
    assert set_here == own | {"device_bytes"}  # asked once, before the engine takes any


def test_a_field_that_is_renamed_on_one_side_is_not_lost():
    """It was left at its default, in silence."""

    @dataclasses.dataclass
    class Told:
        kept: int = 1
        renamed: int = 2

    assert same_named(Told, SimpleNamespace(kept=3), "renamed") == {"kept": 3}
    refused(AttributeError, "renamed", lambda: same_named(Told, SimpleNamespace(kept=3)))
