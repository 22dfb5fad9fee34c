"""Flags and YAML become one checked configuration; wrong input names the nearest right word."""

from collections.abc import Callable
from pathlib import Path

import pytest

from outcore import cli
from outcore.config import FIELDS, ConfigError, TrainConfig
from outcore.plan.fields import parse_plan
from outcore.train.configure import parse_config
from tests.refused import refused


def test_every_field_is_a_documented_flag(capsys: pytest.CaptureFixture[str]) -> None:
    everything = help_text(["--help", "all"], capsys)
    for row in FIELDS.values():
        assert row.help and row.group, row.name
        assert f"--{row.name} " in everything, row.name
        assert all(f"--{alias}" in everything for alias in row.spec.aliases)


def test_help_is_short_and_says_how_to_see_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text(["--help"], capsys)
    shown = [name for name in FIELDS if f"--{name} " in text]
    assert shown == [name for name, row in FIELDS.items() if row.spec.common] and 20 <= len(shown) <= 33
    assert "--help all" in text and "Engine and offload" in text and "--per_device_train_batch_size" in text
    assert max(len(line) for line in text.splitlines()) <= 110


def test_help_calls_the_command_as_it_was_called(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    assert capsys.readouterr().out.startswith("usage: outcore train [MODEL] [--config FILE]")
    assert help_text(["--help"], capsys).startswith("usage: train_model.py [MODEL] [--config FILE]")


def help_text(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse_config(argv)
    assert exit_info.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("argv", "name", "value"), [
    (["--learning-rate", "1e-4"], "learning_rate", 1e-4), (["--save-steps=7"], "save_steps", 7),
    (["--gradient_checkpointing", "false"], "activation_checkpointing", False),
    (["--no_activation_checkpointing"], "activation_checkpointing", False),
    (["--deterministic"], "deterministic", True), (["--zero_stage", "3"], "zero_stage", "zero3"),
    (["--zero_stage", "none"], "zero_stage", "none"),
    (["--lr_scheduler_type", "linear"], "lr_scheduler_type", "warmup_decay"), (["--local_rank=1"], "local_rank", 1),
    (["--max_steps", "1e3"], "max_steps", 1000),
    (["--nvme_offload_path", "/a path/with spaces"], "nvme_offload_path", "/a path/with spaces"),
])  # fmt: skip
def test_spellings(argv: list[str], name: str, value: object) -> None:
    assert getattr(parse_config(argv), name) == value


@pytest.mark.parametrize("parsed", [parse_config, parse_plan])
@pytest.mark.parametrize(("model", "field", "value"), [
    ("llama-8b", "preset", "llama-8b"), ("8B", "preset", "llama-8b"), ("Qwen/Qwen3-4B", "model_name_or_path", "same"),
    ("a folder", "model_name_or_path", "same"), ("m.gguf", "model_name_or_path", "same"),
    ("config.json", "config_file", "same"), ("gpt2", "model_name_or_path", "same"), ("gpt-oss-120b", "preset", "same"),
    ("tiny", "preset", "same"), ("my-run", "model_name_or_path", "final_model/my-run"),
])  # fmt: skip
def test_a_model_is_named_by_one_rule_in_training_and_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: Callable[[list[str]], TrainConfig],
    model: str, field: str, value: str,
) -> None:  # fmt: skip
    """By its place, before or after flags, by a flag or in YAML."""
    monkeypatch.chdir(tmp_path)
    for folder in ("a folder", "final_model/my-run", "final_model/tiny"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("m.gguf", "config.json", "run.yaml"):
        (tmp_path / name).write_text(f"model: {model}\n")
    argvs = [[model], [model, "--seed", "3"], ["--plan", model, "--seed", "3"], ["--seed", "3", model]]
    argvs += [[f"--{flag}", model] for flag in ("model", "base_model", "model_name_or_path")]
    argvs.append(["--config", "run.yaml"])
    if model in ("gpt2", "my-run"):
        argvs.pop(2)  # neither a file nor with an owner: a switch takes it for its value, and says so
    for argv in argvs:
        config = parsed(argv)
        named = {name: getattr(config, name) for name in ("model_name_or_path", "preset", "config_file")}
        assert {name for name in named if named[name]} == {field}, argv
        assert named[field] == (model if value == "same" else value)


@pytest.mark.parametrize(
    "name", ["checkpoint_dir", "log_dir", "export_dir", "data_cache_dir", "nvme_offload_path", "tokenizer"]
)
def test_a_folder_to_write_into_whose_name_is_no_utf8_is_refused_with_the_reason(name: str) -> None:
    odd = b"out\xff".decode(errors="surrogateescape")
    reason = "is no UTF-8, and libraries that write tokenizers and weights open no such path. Rename the folder."
    refused(ConfigError, reason, lambda: parse_config([f"--{name}", odd]))


def test_a_folder_here_comes_before_a_preset_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert parse_config(["tiny"]).model_name_or_path == "tiny"


@pytest.mark.parametrize(("argv", "words"), [
    (["--save_step", "3"], "Did you mean --save_steps"),
    (["--seed", "9" * 20], "seed: must be from 0 to 9223372036854775807"),
    (["--learning_rate", "fast"], "learning_rate: expected a number, got 'fast'"),
    (["--max_steps", "1.5"], "max_steps: expected a whole number"),
    (["--max_steps", "0"], "max_steps: must be above 0"), (["--deterministic", "maybe"], "expected true or false"),
    (["--zero_stage", "4"], "is not one of none, zero1"), (["--packing", "yes"], "is not one of auto, on, off"),
    (["--per_device_train_batch_size", "0"], "must be above 0"), (["--weight_decay", "-1"], "must be at least 0"),
    (["--adam_beta2", "1.0"], "at least 0 and below 1"),
    (["--preset", "tiny", "--config_file", "x.json"], "preset and config_file contradict"),
    (["--engine", "stream", "--zero_stage", "2"], "contradict each other"),
    (["--eval_dataset", "e.jsonl", "--eval_fraction", "0.1"], "nothing is held out"),
    (["--zero_stage", "none", "--offload_optimizer", "nvme"], "contradict each other"),
    (["--zero_stage", "1", "--offload_params", "cpu"], "needs --zero_stage zero3"),
    (["--zero_stage", "none", "--offload_optimizer", "cpu"], "needs zero1, 2 or 3"),
    (["--warmup_steps", "9", "--max_steps", "5"], "is more than max_steps"), (["--lora_alpha", "8"], "lora_r is 0"),
    (["--run_name", "a/b"], "plain folder name"), (["x/y", "tiny"], "every setting is a flag"),
    (["x/y", "--model", "tiny"], "'x/y' and --model tiny name two models"),
    (["tiny", "--preset", "gpt2"], "contradict each other: a run has one model"),
    (["--lora_r", "4"], "lora_r: the default model is a shape, with random weights"),
    (["llama-1b", "--lora_r", "4"], "or add --random_base"),
    (["--config", "/nowhere/x.yaml"], "no such file"), (["--learning_rate"], "--learning_rate needs a value"),
    (["--max_in_cpu_gb", "-1"], "must be at least 0"), (["--metrics_port", "70000"], "from 0 to 65535"),
])  # fmt: skip
def test_wrong_input_is_refused_with_the_right_word(argv: list[str], words: str) -> None:
    refused(ConfigError, words.replace("(", r"\("), lambda: parse_config(argv))


def test_yaml_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "my run.yaml"
    file.write_text("learning_rate: 1e-3\ngradient_checkpointing: false\nmax_steps: 5\nzero_stage: 3\n")
    config = parse_config(["--config", str(file), "--max_steps", "9"])
    assert config.learning_rate == 1e-3 and not config.activation_checkpointing
    assert config.max_steps == 9 and config.zero_stage == "zero3"


@pytest.mark.parametrize(("text", "words"), [
    ("engine: no", "engine: 'no' is not one of auto, stream"),
    ("learning_rat: 1", "unknown setting 'learning_rat'. Did you mean learning_rate"),
    ("- a\n- b", "expected `name: value` lines"), ("a: [", "not readable as YAML"),
    ("gradient_checkpointing: true\nactivation_checkpointing: true", "given twice"),
    ("dataset: {a: 1}", "expected text"), ("max_steps: [1]", "expected a whole number"),
    ("run_name: [a]", "expected text, got list"), ("resume_from_checkpoint: yes", "expected text, got bool"),
    ("report_to: {a: 1}", "expected text, got dict"),
])  # fmt: skip
def test_wrong_yaml(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    refused(ConfigError, words, lambda: parse_config(["--config", str(file)]))


YAML_FORMS = [
    *((f"save_strategy: {word}", "save_strategy", "no") for word in ("no", "false", "off")),
    ("eval_strategy: no", "eval_strategy", "no"),
    ("quantize: no", "quantize", "none"), ("packing: no", "packing", "off"), ("packing: yes", "packing", "on"),
    ("report_to: no", "report_to", "none"), ("report_to: []", "report_to", "none"),
    *((f"{name}: {word}", name, None) for name, row in FIELDS.items() if row.is_optional and row.kind is str
      for word in ("no", "false", "off", "null")),
    ("report_to:\n- tensorboard", "report_to", "tensorboard"),
    ("lora_r: 8\nmodel: x/y\nlora_target_modules: [q_proj, v_proj]", "lora_target_modules", "q_proj,v_proj"),
    ("lora_r: 8\nmodel: x/y\nlora_modules_to_save: [lm_head]", "lora_modules_to_save", "lm_head"),
    ("text_extensions: [.txt, .md]", "text_extensions", ".txt,.md"),
    ("nvme_offload_path: [/a, /b]", "nvme_offload_path", "/a,/b"),
    ("config_overrides: {num_hidden_layers: 4}", "config_overrides", '{"num_hidden_layers": 4}'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name", "value"), YAML_FORMS, ids=[form[0] for form in YAML_FORMS])
def test_yaml_gives_a_setting_as_yaml_writes_such_things(tmp_path: Path, text: str, name: str, value: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert getattr(parse_config(["--config", str(file)]), name) == value


def test_empty_yaml_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("")
    assert parse_config(["--config", str(file)]) == TrainConfig()
