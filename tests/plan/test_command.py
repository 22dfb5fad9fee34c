"""The command that the planner prints, pasted into train_model.py, plans to the same values."""

import json
import shlex
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from outcore.common.quantities import GIB
from outcore.config import ConfigError
from outcore.formats.gguf_files import write_gguf
from outcore.model import PRESETS
from outcore.plan import Plan
from outcore.plan import main as plan_main
from outcore.plan.main import main
from outcore.plan.run import forecast as forecast_module
from outcore.train.configure import parse_config
from outcore.train.run import main as train
from outcore.train.run import planned
from tests.formats.test_gguf import folder_of
from tests.refused import refused

ROOT = Path(__file__).resolve().parents[2]
SAME = ("engine", "zero_stage", "state_format", "precision", "seq_length", "micro_batch", "accumulation", "num_gpus")
SAME += ("lora_r", "tiling", "params", "homes")
HUB = {preset.published: preset.name for preset in PRESETS.values() if preset.published}
FLAGS = {
    "preset": st.sampled_from(["gpt2", "llama-1b"]),  # a tiny preset takes its vocabulary from the data
    "seq_length": st.sampled_from([None, 64, 256, 1000]),
    "per_device_train_batch_size": st.sampled_from([None, 1, 3, 8]),
    "gradient_accumulation_steps": st.sampled_from([None, 1, 5]),
    "engine": st.sampled_from(["auto", "stream", "deepspeed"]),
    "zero_stage": st.sampled_from([None, "none", "zero1", "2", "zero3"]),
    "state_format": st.sampled_from([None, "fp32", "split", "fp32_m8", "split8"]),
    "precision": st.sampled_from(["bf16", "fp32"]),
    "activation_checkpointing": st.sampled_from([None, "true", "false"]),
    "max_grad_norm": st.sampled_from([None, "0", "1.0", "0.25"]),
    "lora_r": st.sampled_from([None, 8]),
    "save_total_limit": st.sampled_from([None, 1, 5]),
}


def _argv(flags: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]


class Pasted:
    """One machine for both programs, and the plans that each made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hardware = replace(forecast_module.run_hardware(False), ram_bytes=400 * GIB, nvme_free_bytes=10**13)
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(plan_main, "load_hardware", lambda *a, **kw: hardware)
        monkeypatch.setattr(forecast_module, "run_hardware", lambda *a, **kw: hardware)
        monkeypatch.setattr(planned, "available_ram_bytes", lambda: 400 * GIB)
        self.plans: list[Plan] = []
        monkeypatch.setattr(
            forecast_module.Forecaster, "show", lambda _self, forecast, config: self.plans.append(forecast.plan)
        )
        real = plan_main.choose_or_change

        def remember(*args: Any) -> Any:
            answer = real(*args)
            self.plans.append(answer.plan)
            return answer

        monkeypatch.setattr(plan_main, "choose_or_change", remember)

    def check(self, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        """Plan, paste, compare."""
        self.plans.clear()
        capsys.readouterr()
        code = main(argv)
        out = capsys.readouterr().out
        if code == 2:
            assume(False)
        line = next(line for line in out.splitlines() if line.startswith("Run it: "))
        words = shlex.split(line.removeprefix("Run it: "))
        assert words[:2] == ["python", "train_model.py"]
        if HUB.keys() & set(words):  # adapters name the trained model, which is not here
            at = words.index("--model_name_or_path")
            words[at : at + 2] = ["--preset", HUB[words[at + 1]], "--random_base"]
        assert train([*words[2:], "--plan"]) == 0, capsys.readouterr().err
        planned, pasted = self.plans
        for name in SAME:
            assert getattr(pasted, name) == getattr(planned, name), (name, line)
        assert pasted.homes == planned.homes, line
        assert pasted.expected_bytes("ram", "pinned") == pytest.approx(
            planned.expected_bytes("ram", "pinned"), rel=0.02
        )
        assert pasted.time.step_s == pytest.approx(planned.time.step_s, rel=0.02), line


@pytest.mark.more(after=1)
@pytest.mark.parametrize("examples", [2, 8, pytest.param(150, marks=pytest.mark.slow)])
def test_a_pasted_command_plans_to_the_same(monkeypatch, capsys, examples):
    pasted = Pasted(monkeypatch)

    @settings(max_examples=examples, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.fixed_dictionaries(FLAGS))
    def check(flags: dict[str, Any]) -> None:
        pasted.check(_argv(flags), capsys)

    check()


def test_what_no_plan_depends_on_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Pasted(monkeypatch)
    assert main(["--model", "1b", "--dataset", "my notes/", "--nvme_offload_path", "/mnt/x", "--lora_r", "4"]) == 0
    out = capsys.readouterr().out
    assert "--model_name_or_path meta-llama/Llama-3.2-1B --dataset 'my notes/' " in out and "--lora_r 4" in out
    said = ["--lr", "1e-5", "--deterministic", "--run_name", "my run", "--lr_scheduler_type", "cosine"]
    assert main(["--model", "1b", *said, "--staging_gib", "4", "--fit_check", "warn", "--packing", "off"]) == 0
    run_it = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Run it: "))
    for flag in ("--learning_rate 1e-05", "--deterministic true", "--run_name 'my run'", "--lr_scheduler_type cosine"):
        assert flag in run_it
    assert "--staging_gib 4" in run_it and "--fit_check warn" in run_it and "--packing off" in run_it
    argv = ["--model", "1b", "--zero_stage", "infinity", "--engine", "deepspeed", "--nvme_offload_path", "/mnt/x"]
    assert main(argv) == 0
    assert "--nvme_offload_path /mnt/x " in capsys.readouterr().out


def test_adapters_are_planned_over_a_trained_model(capsys: pytest.CaptureFixture[str]) -> None:
    """A preset is a shape with random weights, over which adapters learn little."""
    asked = ["--machine", "rtx4070-laptop", "--model"]
    for name in ("llama-70b", "qwen3-14b", "moe-small"):
        published = PRESETS[name].published
        main([*asked, name, "--lora_r", "16", "--json"])
        flags = f"--model_name_or_path {published} " if published else f"--preset {name} --random_base "
        assert flags in json.loads(capsys.readouterr().out)["command"]
    assert main([*asked, "tiny", "--lora_r", "16"]) == 0
    said = capsys.readouterr().out
    assert "random weights, over which adapters learn little" in " ".join(said.split())
    run_it = next(line for line in said.splitlines() if line.startswith("Run it: "))
    words = shlex.split(run_it.removeprefix("Run it: "))[2:]
    assert parse_config(words).lora_r == 16 and "--random_base" in words
    words.remove("--random_base")
    refused(ConfigError, "lora_r: tiny is a shape, with random weights", lambda: parse_config(words))
    assert main([*asked, "llama-1b"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "random weights; name a trained model to begin with that: --model_name_or_path meta-llama/" in said
    assert "--preset llama-1b" in said


def test_a_plan_tells_how_long_the_whole_run_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "llama-1b", "--machine", "rtx4070-laptop"]
    assert main([*asked, "--max_steps", "1000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"]["steps"] == 1000
    assert found["run"]["seconds"] == pytest.approx(1000 * found["plan"]["time_s"]["step_s"])
    late = datetime.fromisoformat(found["run"]["ends"]) - datetime.now().astimezone()
    assert late.total_seconds() == pytest.approx(found["run"]["seconds"], abs=90)
    (tmp_path / "notes.txt").write_bytes(b"word " * 8192)  # 40,960 bytes: 10,240 tokens
    told = []
    for flags in ("--max_steps 1000", f"--num_train_epochs 4 --dataset {tmp_path}", "--num_train_epochs 4", ""):
        assert main([*asked, *flags.split()]) == 0
        told.append(" ".join(capsys.readouterr().out.split()))
    assert "The whole run: 1,000 steps, " in told[0] and "begun now it ends on " in told[0]
    assert "The whole run: 5 steps (about: 4 epochs of 40.96 kB, 4 bytes a token)" in told[1]
    assert "how many steps 4 epochs take is known when the data is read" in told[2]
    assert "The whole run" not in told[3]


def test_adapters_over_a_gguf_file_are_planned_as_the_run_holds_them(tmp_path, monkeypatch, capsys) -> None:
    """Layers packed as published, embedding and head not; no flag asks for what the file has."""
    pytest.importorskip("gguf")
    folder = folder_of(tmp_path, vocab_size=2000)
    file = write_gguf(folder, tmp_path / "model.gguf", "q4_k")
    argv = ["--model", str(file), "--tokenizer", str(folder), "--lora_r", "4", "--seq_length", "64"]
    Pasted(monkeypatch).check(argv, capsys)
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["plan"]["quantize"] == "q4_k" and answer["plan"]["precision"] == "fp32"
    assert f"--model_name_or_path {file}" in answer["command"] and "--quantize" not in answer["command"]


@pytest.mark.parametrize("flag", ["--offload_params cpu", "--nvme_offload_params false"])
def test_a_setting_that_the_plan_does_not_follow_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "llama-8b", "--machine", "rtx4070-laptop", *flag.split()]) == 2
    said = capsys.readouterr().err
    assert f"outcore plan: {flag.split()[0].removeprefix('--')}: outcore plan chooses this itself" in said
    assert "train_model.py --plan" in said


@pytest.mark.parametrize(("residency", "model"), [("ram", "llama-3b"), ("nvme", "llama-1b")])
def test_the_plan_follows_the_residency(residency: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", model, "--machine", "rtx4070-laptop", "--ram_gib", "30", "--json"]
    uses_drive = []
    for flags in (["--residency", residency], []):
        main([*argv, *flags])
        plan = json.loads(capsys.readouterr().out)
        uses_drive.append("NVMe" in plan["plan"]["homes"]["optimizer states"])
        assert ("--residency" in plan["command"]) is bool(flags)
    assert uses_drive == ([False, True] if residency == "ram" else [True, False])
    assert main([*argv, "--residency", "ram", "--zero_stage", "infinity", "--engine", "deepspeed"]) == 2
    assert "contradict" in capsys.readouterr().err


def test_a_budget_of_ram_is_a_limit_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for flags in (["--ram_gib", "20"], ["--ram_budget_gib", "20"], ["--ram_gib", "40", "--ram_budget_gib", "20"]):
        assert main(["--model", "llama-1b", "--machine", "rtx4070-laptop", *flags]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] == answers[2]


def test_the_answer_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All but the command, which is one line to copy."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--model", "70b", "--nominal"]) in (0, 1)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if not line.startswith("Run it: ")]
    assert max(len(line) for line in lines) <= 80
    assert any(line.endswith("RAM, NVMe") for line in lines), "no cell is cut off"


def test_several_gpus_are_started_by_what_is_there(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Who installed by pip has no script, and perhaps no DeepSpeed."""
    for words, folder in (
        ("deepspeed --num_gpus=2 train_model.py", ROOT),
        ("torchrun --nproc_per_node=2 -m outcore train", tmp_path),
    ):
        monkeypatch.setattr("outcore.common.words._CLONE", folder)
        assert main(["llama-1b", "--machine", "2x-rtx3090", "--num_gpus", "2"]) == 0
        assert f"Run it: {words} --preset llama-1b" in " ".join(capsys.readouterr().out.split())
