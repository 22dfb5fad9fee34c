"""The main job end to end on the CPU accelerator: train, stop, resume bit for bit, export, and what goes wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import start_script
from safetensors.torch import load_file

from outcore.engine.base import StepResult
from outcore.optim.reference import cast_param
from outcore.train.run import main

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the {} {} bears\n"
FAST = ["--seq_length", "32", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
FAST += ["--sample_steps", "0", "--sample_tokens", "4", "--report_to", "none", "--logging_steps", "100"]
REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def fresh_env(**more: str) -> dict[str, str]:
    """The environment without this process's own ranks and port, for child processes."""
    ours = ("MASTER_PORT", "MASTER_ADDR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    return {**{k: v for k, v in os.environ.items() if k not in ours}, **more}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("my data") / "a text.txt"
    path.write_text("\n\n".join(TEXT.format(i, i * i) * 12 for i in range(60)))
    return path


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def flags(root: Path, corpus: Path, *extra: str) -> list[str]:
    folders = [f"--{name}_dir={root / name}" for name in ("checkpoint", "log", "export")]
    return [*FAST, "--dataset", str(corpus), *folders, f"--data_cache_dir={corpus.parent / 'cache'}", *extra]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("model*.safetensors"))
    assert files, folder
    return {k: v for file in files for k, v in load_file(file).items()}


def states(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for family in ("model", "master", "exp_avg", "exp_avg_sq"):
        for file in sorted(folder.glob(f"{family}-*.safetensors")):
            found.update({f"{family}:{k}": v for k, v in load_file(file).items()})
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def metrics(root: Path, run: str = "r") -> list[dict]:
    return [json.loads(line) for line in (root / "log" / run / "metrics.jsonl").read_text().splitlines()]


ENGINES = {"stream": [], "deepspeed": ["--engine", "deepspeed"]}
"""Flags by the engine that trains with them: nothing said on one process is the streaming engine."""


def engine_of(root: Path, run: str = "r") -> dict[str, str]:
    return json.loads((root / "log" / run / "plan.json").read_text())["engine"]


@pytest.fixture(scope="session")
def straight_by(shared: Path, corpus: Path) -> Callable[[str], Path]:
    """Six steps without interruption, bf16 with fp32 masters in RAM, by an engine; each is trained once."""

    def run(engine: str) -> Path:
        root = shared / engine
        if not root.exists():
            os.chdir(REPOSITORY)
            argv = flags(root, corpus, "--run_name", "r", "--max_steps", "6", "--save_steps", "2", *ENGINES[engine])
            assert main([*argv, "--precision", "bf16", "--save_total_limit", "9", "--eval_steps", "3"]) == 0
        return root

    return run


@pytest.fixture
def straight(straight_by: Callable[[str], Path]) -> Path:
    """By the default engine."""
    return straight_by("stream")


@pytest.mark.parametrize("engine", list(ENGINES))
def test_a_run_leaves_what_it_promises(straight_by: Callable[[str], Path], engine: str) -> None:
    straight = straight_by(engine)
    lines = metrics(straight)
    assert lines[0]["event"] == "header" and lines[0]["versions"]["deepspeed"] and lines[0]["model"]["total_params"]
    assert lines[0]["plan"]["engine"] == engine == engine_of(straight)["name"]
    steps = [line for line in lines if "event" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    wanted = (
        "loss lr grad_norm tokens step_s tokens_per_s phase_s gpu_mem_bytes gpu_util_pct ram_rss_bytes pinned_bytes"
    )
    wanted += (
        " nvme_read_bytes nvme_write_bytes nvme_free_bytes nvme_temp_c throttle pcie_rx_gb_per_s gpu_mem_peak_bytes"
    )
    assert set(wanted.split()) <= set(steps[0])
    assert steps[0]["pinned_bytes"] == 0, "the engine knows, and nothing is pinned without a GPU"
    assert steps[-1]["loss"] < steps[0]["loss"] and steps[0]["grad_norm"] > 0
    assert {line["step"] for line in lines if line.get("event") == "eval"} == {3, 6}
    assert (straight / "log/r/loss.png").stat().st_size > 10_000
    plan = json.loads((straight / "log/r/plan.json").read_text())
    assert plan["notes"] and plan["said"]
    if engine == "deepspeed":
        assert plan["deepspeed"]["zero_optimization"]["stage"] == 3 and plan["engine"]["reason"] == "as asked"
    else:
        assert plan["stream"]["states"] == "split" and "auto: one process" in plan["engine"]["reason"]
        assert "zero_optimization.overlap_comm" in plan["unused"] and "aio" in plan["unused"]
    assert sorted(p.name for p in (straight / "checkpoint/r").iterdir()) == [f"step-0000000{i}" for i in (2, 4, 6)]
    state = states(straight / "checkpoint/r/step-00000006")
    assert {k.split(":")[0] for k in state} == {"model", "master", "exp_avg", "exp_avg_sq"}


def test_the_export_loads_and_says_the_same(straight: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = straight / "export/r"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    state = states(straight / "checkpoint/r/step-00000006")
    for name, value in model.named_parameters():
        assert torch.equal(value.detach().to(torch.bfloat16), state[f"model:{name}"]), name
    model = model.float()
    ids = tokenizer("the quick brown fox", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits
        reference = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        reference.load_state_dict(
            {k.split(":")[1]: v.float() for k, v in state.items() if k.startswith("model:")}, strict=False
        )
        reference.tie_weights()
        assert torch.equal(reference.eval()(ids).logits, logits)


@pytest.mark.parametrize("engine", list(ENGINES))
def test_masters_round_to_the_weights(straight_by: Callable[[str], Path], engine: str) -> None:
    """By both engines, as the split does: to the nearest bf16 number, away from zero between two."""
    state = states(straight_by(engine) / "checkpoint/r/step-00000006")
    for key, value in state.items():
        if key.startswith("master:"):
            assert torch.equal(cast_param(value, torch.bfloat16), state["model:" + key[7:]])


@pytest.mark.no_cover
def test_exact_states_in_two_formats_train_the_same_numbers(tmp_path: Path, corpus: Path, straight: Path) -> None:
    """What `state_format auto` takes with bf16 equals fp32 states bit for bit, and 8-bit moments are told as other."""
    common = ["--run_name", "r", "--max_steps", "6", "--precision", "bf16", "--save_steps", "0", "--no_export"]
    assert main(flags(tmp_path, corpus, *common, "--eval_steps", "0", "--state_format", "fp32")) == 0
    at_end = "checkpoint/r/step-00000006"
    assert same(states(tmp_path / at_end), states(straight / at_end))
    compact = flags(tmp_path / "m8", corpus, *common, "--eval_steps", "0", "--state_format", "split8")
    assert main(compact) == 0
    plan = json.loads((tmp_path / "m8/log/r/plan.json").read_text())
    assert any("8 bits" in note and "differ" in note for note in plan["notes"])
    assert not same(states(tmp_path / "m8" / at_end), states(straight / at_end))


@pytest.mark.parametrize("budget_gib", ["0", "0.02"])
def test_states_on_nvme_train_the_same_numbers_and_leave_nothing_there(
    tmp_path: Path, corpus: Path, straight: Path, budget_gib: str
) -> None:
    """RAM first up to a budget, the rest on the drive: the same bits, the scratch gone, checkpoints whole."""
    drive = tmp_path / "drive"
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "6", "--precision", "bf16", "--eval_steps", "0")
    argv += ["--nvme_offload_path", str(drive), "--ram_budget_gib", budget_gib, "--save_steps", "4", "--no_export"]
    assert main(argv) == 0
    plan = json.loads((tmp_path / "log/r/plan.json").read_text())
    assert plan["stream"]["nvme_path"] == str(drive) and plan["stream"]["state_ram_bytes"] is not None
    assert any("on NVMe" in note for note in plan["notes"])
    for step in ("step-00000004", "step-00000006"):
        assert same(states(tmp_path / "checkpoint/r" / step), states(straight / "checkpoint/r" / step))
    assert not any(drive.rglob("*")), "scratch is removed with the engine"


def test_staged_offload_leaves_nothing_on_the_drive_but_what_was_there(tmp_path: Path, corpus: Path) -> None:
    drive = tmp_path / "drive"
    (drive / "kept").mkdir(parents=True)
    (drive / "kept" / "mine.txt").write_text("mine")
    argv = ["--engine", "deepspeed", "--zero_stage", "infinity", "--nvme_offload_path", str(drive), "--no_export"]
    argv += ["--strict_offload", "--max_steps", "1", "--eval_steps", "0", "--save_strategy", "no"]
    for run, more in (("planned", ["--plan"]), ("r", []), ("kept", [])):
        assert main(flags(tmp_path, corpus, "--run_name", run, *argv, *more)) == 0
    assert [path.name for path in drive.rglob("*")] == ["kept", "mine.txt"]


@pytest.mark.no_cover
@pytest.mark.parametrize("how", ["stream", "deepspeed", "zero1", "zero2", "none"])
def test_resume_is_bit_identical(tmp_path: Path, corpus: Path, straight_by: Callable[[str], Path], how: str) -> None:
    """Stopped after step 2 and resumed to 6 equals six steps at once; for each engine and ZeRO stage."""
    extra = ["--run_name", "r", "--max_steps", "6", "--precision", "bf16", "--no_export"]
    if how in ENGINES:
        reference = straight_by(how)
        extra += ENGINES[how]
    else:
        reference = tmp_path / "whole"
        extra += ["--zero_stage", how]
        assert main(flags(reference, corpus, *extra, "--save_steps", "0", "--eval_steps", "0")) == 0
    argv = flags(tmp_path, corpus, *extra, "--save_steps", "2", "--eval_steps", "3")

    class Killed(Exception):
        pass

    from outcore.train.loop import Trainer

    original = Trainer.train_one

    def dies(self: Trainer, batches: object):
        if self.step == 3:
            raise Killed
        return original(self, batches)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_one", dies)
        with pytest.raises(Killed):
            main(argv)
    torch.manual_seed(999)
    assert main([*argv, "--resume_from_checkpoint", "auto"]) == 0
    got = states(tmp_path / "checkpoint/r/step-00000006")
    assert same(got, states(reference / "checkpoint/r/step-00000006"))
    assert [line["step"] for line in metrics(tmp_path) if "event" not in line] == [1, 2, 3, 4, 5, 6]
    whole = {line["step"]: line["loss"] for line in metrics(reference) if "event" not in line}
    parts = {line["step"]: line["loss"] for line in metrics(tmp_path) if "event" not in line}
    assert parts == whole
    assert engine_of(tmp_path)["name"] == ("stream" if how == "stream" else "deepspeed")
    if how not in ENGINES:
        assert f"zero_stage {how} was asked for" in engine_of(tmp_path)["reason"]


def test_a_refused_resume_leaves_the_log_whole(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = flags(tmp_path, corpus, "--max_steps", "2", "--save_steps", "1", "--run_name", "r", "--no_export")
    assert main(argv) == 0
    before = (tmp_path / "log" / "r" / "metrics.jsonl").read_bytes()
    start = str(tmp_path / "checkpoint" / "r" / "step-00000001")
    assert main([*argv, "--seq_length", "16", "--resume_from_checkpoint", start]) == 2
    assert "the data position cannot be restored" in capsys.readouterr().err
    assert (tmp_path / "log" / "r" / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_resumes_in_another_stage(tmp_path: Path, corpus: Path, straight: Path) -> None:
    """Checkpoints know nothing of engine and ZeRO stage: the restored states are the same numbers."""
    start = straight / "checkpoint/r/step-00000004"
    for stage in ("none", "zero2"):
        root = tmp_path / stage
        argv = flags(root, corpus, "--run_name", "r", "--max_steps", "6", "--precision", "bf16", "--no_export")
        argv += [
            "--zero_stage",
            stage,
            "--resume_from_checkpoint",
            str(start),
            "--save_steps",
            "1",
            "--eval_steps",
            "0",
        ]
        assert main([*argv, "--save_total_limit", "9"]) == 0
        got, want = states(root / "checkpoint/r/step-00000006"), states(straight / "checkpoint/r/step-00000006")
        for key in want:
            torch.testing.assert_close(got[key].float(), want[key].float(), rtol=0.1, atol=3e-3, msg=key)


def test_signal_saves_and_says_how_to_resume(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from outcore.train.loop import Trainer

    original = Trainer.train_one

    def signalled(self: Trainer, batches: object):
        result = original(self, batches)  # type: ignore[arg-type]
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_one", signalled)
        argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "5", "--eval_steps", "0", "--save_steps", "0")
        assert main(argv) == 130
    out = capsys.readouterr()
    assert "--resume_from_checkpoint auto" in out.out and "SIGINT: finishing this step" in out.err
    assert [p.name for p in (tmp_path / "checkpoint/r").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("engine", list(ENGINES))
def test_what_a_resumed_run_changes_is_said(
    tmp_path: Path, corpus: Path, straight_by: Callable[[str], Path], capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    start = str(straight_by(engine) / "checkpoint/r/step-00000004")
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "6", "--precision", "bf16", *ENGINES[engine])
    argv += ["--no_export", "--save_steps", "1", "--save_total_limit", "9", "--resume_from_checkpoint"]

    def changed(*argv: str) -> list[str]:
        capsys.readouterr()
        assert main(list(argv)) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("resume: ")]

    other = ["--weight_decay", "0.3", "--adam_beta1", "0.8", "--adam_beta2", "0.95", "--adam_epsilon", "1e-7"]
    said = changed(*argv, start, *other, "--max_grad_norm", "0.5", "--state_format", "fp32")
    assert said == [
        "resume: weight_decay 0.01 -> 0.3: training goes on with 0.3",
        "resume: adam_beta1 0.9 -> 0.8: training goes on with 0.8",
        "resume: adam_beta2 0.999 -> 0.95: training goes on with 0.95",
        "resume: adam_epsilon 1e-08 -> 1e-07: training goes on with 1e-07",
        "resume: max_grad_norm 1.0 -> 0.5: training goes on with 0.5",
        "resume: state_format split -> fp32: training goes on with fp32; the states are converted exactly",
    ]
    assert (
        changed(
            *argv,
            str(tmp_path / "checkpoint/r/step-00000005"),
            *other,
            "--max_grad_norm",
            "0.5",
            "--state_format",
            "fp32",
        )
        == []
    )


@pytest.mark.no_cover
@pytest.mark.parametrize("engine", list(ENGINES))
def test_states_in_another_format_go_on_bit_by_bit(
    tmp_path: Path, corpus: Path, straight_by: Callable[[str], Path], engine: str
) -> None:
    whole = straight_by(engine) / "checkpoint/r"
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "6", "--precision", "bf16", *ENGINES[engine])
    argv += ["--no_export", "--state_format", "fp32", "--resume_from_checkpoint", str(whole / "step-00000004")]
    assert main(argv) == 0
    assert same(states(tmp_path / "checkpoint/r/step-00000006"), states(whole / "step-00000006"))


def test_another_format_of_states_and_dropout_of_adapters_is_said(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "2", "--precision", "bf16", "--no_export")
    argv += ["--lora_r", "4", "--save_steps", "1"]
    assert main(argv) == 0
    start = str(tmp_path / "checkpoint/r/step-00000001")
    argv += ["--resume_from_checkpoint", start, "--lora_dropout", "0.5", "--state_format", "split8"]
    assert main(argv) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("resume: ")] == [
        "resume: lora_dropout 0.0 -> 0.5: training goes on with 0.5",
        "resume: state_format split -> split8: training goes on with split8; the moments are rounded to 8 bits once",
    ]


@pytest.mark.parametrize("engine", list(ENGINES))
def test_a_model_without_a_finite_validation_loss_is_never_saved(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "4", "--save_total_limit", "1", *ENGINES[engine])
    argv += ["--precision", "bf16", "--learning_rate", "1e6", "--save_steps", "1", "--eval_steps", "2"]
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert "the validation loss of step 2 is nan" in error and "the last checkpoint is that of step 1" in error
    assert [p.name for p in (tmp_path / "checkpoint/r").iterdir()] == ["step-00000001"]
    assert not (tmp_path / "export" / "r").exists()


@pytest.mark.parametrize(
    ("bad_step", "more", "code", "kept", "words"),
    [
        (2, [], 0, "134", "the loss of step 2 is inf: this model is not saved; the last checkpoint is that of step 1"),
        (4, [], 0, "1234", "step 4: validation loss "),  # it is finite: the model is good
        (4, ["--eval_fraction", "0"], 1, "123", "the loss of step 4 is inf, the run's last: this model is not saved"),
    ],
)
def test_no_checkpoint_is_made_while_the_training_loss_is_not_finite(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    bad_step: int, more: list[str], code: int, kept: str, words: str,
) -> None:  # fmt: skip
    """As in fp16, where such a step is skipped and the run goes on."""
    from outcore.engine.stream.engine import StreamEngine

    original = StreamEngine.train_step

    def overflows(self: StreamEngine, micro_batches: list, lr: float) -> StepResult:
        result = original(self, micro_batches, lr)
        return dataclasses.replace(result, loss=math.inf, skipped=True) if self.updates == bad_step else result

    monkeypatch.setattr(StreamEngine, "train_step", overflows)
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "4", "--save_total_limit", "9", "--no_export")
    assert main([*argv, "--save_steps", "1", "--eval_steps", "0", *more]) == code
    said = capsys.readouterr()
    assert words in said.err + said.out
    assert sorted(p.name for p in (tmp_path / "checkpoint/r").iterdir()) == [f"step-0000000{n}" for n in kept]


def test_auto_goes_on_from_where_a_run_went_back_to(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from outcore.train.loop import Trainer

    run = tmp_path / "checkpoint" / "r"
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "4", "--eval_steps", "0", "--save_steps", "1")
    argv += ["--save_total_limit", "9", "--no_export", "--resume_from_checkpoint"]
    assert main([*argv, "auto"]) == 0
    original = Trainer.train_one

    def dies(self: Trainer, batches: object):
        if self.step == dies_at:
            raise RuntimeError("killed")
        return original(self, batches)  # type: ignore[arg-type]

    for start, dies_at, went_on_from in ((str(run / "step-00000001"), 1, 1), ("auto", 2, 1), ("auto", 9, 2)):
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "train_one", dies)
            assert main([*argv, start]) == (0 if dies_at == 9 else 1)
        said = capsys.readouterr()
        assert f"step-0000000{went_on_from} at step {went_on_from}\n" in said.out
        left = "step-00000002, step-00000003, step-00000004 of this run: left behind"
        assert (left in said.out + said.err) == (start != "auto")
    assert [line["step"] for line in metrics(tmp_path) if "event" not in line] == [1, 2, 3, 4]


@pytest.mark.no_cover
@pytest.mark.parametrize("engine", list(ENGINES))
def test_kill_at_random_moments_then_resume(
    tmp_path: Path, corpus: Path, straight_by: Callable[[str], Path], engine: str
) -> None:
    """SIGKILL in a step, in a save, and between; each time the command is repeated; the end is the same."""
    straight = straight_by(engine)
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "6", "--precision", "bf16", "--save_steps", "2")
    argv += ["--save_total_limit", "9", "--eval_steps", "3", "--resume_from_checkpoint", "auto", *ENGINES[engine]]
    log = tmp_path / "log/r/metrics.jsonl"
    saves = tmp_path / "checkpoint/r"
    moments = [
        lambda: log.exists() and sum('"loss"' in line for line in log.read_text().splitlines()) >= 1,
        lambda: any(saves.glob(".step-*.part")),
        lambda: (saves / "step-00000004").exists(),
    ]
    output = tmp_path / "log.txt"
    for number, moment in enumerate(moments):
        if number == 0:
            with open(output, "wb") as file:
                command = [sys.executable, "train_model.py", *argv]
                child = subprocess.Popen(command, env=fresh_env(), stdout=file, stderr=subprocess.STDOUT)
        else:  # the same script in a process that need not import everything again
            child = start_script(REPOSITORY / "train_model.py", argv, fresh_env(), output)
        until_s = time.monotonic() + 120
        while not moment() and child.poll() is None and time.monotonic() < until_s:
            time.sleep(0.002)
        child.kill()
        assert child.wait(60) == -signal.SIGKILL, output.read_text()
    assert main(argv) == 0
    assert same(states(saves / "step-00000006"), states(straight / "checkpoint/r/step-00000006"))
    assert same(weights(tmp_path / "export/r"), weights(straight / "export/r"))


@pytest.mark.parametrize("engine", list(ENGINES))
def test_lora_trains_resumes_and_merges(tmp_path: Path, corpus: Path, straight: Path, engine: str) -> None:
    base = straight / "export/r"
    common = ["--model_name_or_path", str(base), "--lora_r", "4", "--precision", "fp32", "--eval_steps", "2"]
    common += ["--sample_steps", "2", *ENGINES[engine]]
    argv = flags(tmp_path, corpus, *common, "--run_name", "r", "--max_steps", "4", "--save_steps", "2", "--lr", "5e-3")
    assert main(argv) == 0
    state = states(tmp_path / "checkpoint/r/step-00000004")
    assert all("lora_" in key for key in state), "a LoRA checkpoint holds the adapters only"
    assert engine_of(tmp_path)["name"] == engine
    assert {line["step"] for line in metrics(tmp_path) if line.get("event") == "eval"} == {2, 4}
    assert (tmp_path / "log/r/samples.txt").read_text().count("--- step") == 2
    merged, before = weights(tmp_path / "export/r"), weights(base)
    assert merged.keys() == before.keys()
    changed = [k for k in merged if not torch.equal(merged[k].float(), before[k].float())]
    assert changed and all("proj" in k for k in changed)
    resumed = flags(tmp_path / "again", corpus, *common, "--run_name", "r", "--max_steps", "4", "--lr", "5e-3")
    start = str(tmp_path / "checkpoint/r/step-00000002")
    assert main([*resumed, "--resume_from_checkpoint", start, "--lora_export", "adapter"]) == 0
    assert same(states(tmp_path / "again/checkpoint/r/step-00000004"), state)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with_adapter = PeftModel.from_pretrained(plain, str(tmp_path / "again/export/r")).merge_and_unload()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "export/r", dtype=torch.float32)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(with_adapter(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preset", ["tiny-moe", "tiny-t5"])
def test_other_shapes_train_and_export(tmp_path: Path, corpus: Path, preset: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    argv = flags(tmp_path, corpus, "--preset", preset, "--run_name", "r", "--max_steps", "3", "--eval_steps", "0")
    assert main(argv) == 0
    losses = [line["loss"] for line in metrics(tmp_path) if "event" not in line]
    assert losses[-1] < losses[0]
    engine = engine_of(tmp_path)
    assert engine["name"] == ("deepspeed" if "t5" in preset else "stream")
    assert "t5" not in preset or "encoder-decoder" in engine["reason"]
    auto = AutoModelForSeq2SeqLM if "t5" in preset else AutoModelForCausalLM
    model, report = auto.from_pretrained(tmp_path / "export/r", output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    state = states(tmp_path / "checkpoint/r/step-00000003")
    for name, value in model.named_parameters():
        assert torch.equal(value.detach(), state[f"model:{name}"]), name


@pytest.mark.no_cover
@pytest.mark.parametrize(("first", "second"), [("deepspeed", "stream"), ("stream", "deepspeed")])
def test_engines_agree_and_resume_each_others_checkpoints(
    tmp_path: Path, corpus: Path, straight_by: Callable[[str], Path], first: str, second: str
) -> None:
    """The same losses from the start, and from the other engine's checkpoint of step 4."""
    whole = {line["step"]: line["loss"] for line in metrics(straight_by(first)) if "event" not in line}
    for line in metrics(straight_by(second)):
        if "event" not in line:
            assert line["loss"] == pytest.approx(whole[line["step"]], rel=0.005)
    start = str(straight_by(first) / "checkpoint/r/step-00000004")
    common = ["--run_name", "r", "--max_steps", "6", "--precision", "bf16", "--eval_steps", "3", *ENGINES[second]]
    assert main(flags(tmp_path, corpus, *common, "--resume_from_checkpoint", start)) == 0
    again = [line for line in metrics(tmp_path) if "event" not in line]
    assert [line["step"] for line in again] == [5, 6]
    for line in again:
        assert line["loss"] == pytest.approx(whole[line["step"]], rel=0.005)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--preset", "tiny-t5"], "two stacks of layers"),
        (["--model_module", "examples/my_model.py:build"], "own"),
        (["--deepspeed_config", "{ds}"], "adam_w_mode is false"),
        (["--zero_stage", "zero1"], "contradict each other"),
        (["--state_format", "split", "--precision", "fp32"], "needs --precision bf16"),
        (["--activations", "nvme"], "give --nvme_offload_path"),
    ],
)
def test_streaming_engine_refuses_what_it_cannot(
    tmp_path: Path, corpus: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}))
    argv = [text.replace("{ds}", str(file)) for text in argv]
    assert main(flags(tmp_path, corpus, "--engine", "stream", "--max_steps", "1", *argv)) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_own_model_and_loss(tmp_path: Path, corpus: Path) -> None:
    argv = flags(
        tmp_path, corpus, "--model_module", "examples/my_model.py:build", "--run_name", "r", "--max_steps", "3"
    )
    assert main([*argv, "--eval_steps", "0", "--packing", "off"]) == 0
    losses = [line["loss"] for line in metrics(tmp_path) if "event" not in line]
    assert losses[-1] < losses[0]
    assert weights(tmp_path / "export/r")
    assert engine_of(tmp_path)["name"] == "deepspeed" and "own" in engine_of(tmp_path)["reason"]


def test_accumulation_does_not_change_the_loss(tmp_path: Path, corpus: Path) -> None:
    """1 x 4 and 4 x 1 micro-batches of a padded batch with unequal lengths: the same loss and gradient norm."""
    results = []
    for micro, accumulation in (("1", "4"), ("4", "1")):
        root = tmp_path / micro
        argv = flags(root, corpus, "--run_name", "r", "--max_steps", "2", "--eval_steps", "0", "--packing", "off")
        argv += ["--per_device_train_batch_size", micro, "--gradient_accumulation_steps", accumulation, "--no_export"]
        assert main([*argv, "--precision", "fp32"]) == 0
        results.append([(line["loss"], line["grad_norm"]) for line in metrics(root) if "event" not in line])
    for (loss_a, norm_a), (loss_b, norm_b) in zip(*results, strict=True):
        assert loss_a == pytest.approx(loss_b, rel=1e-5) and norm_a == pytest.approx(norm_b, rel=1e-3)


def test_two_ranks_equal_one(tmp_path: Path, corpus: Path) -> None:
    """The deepspeed launcher with two processes and half the accumulation sees the same losses as one process."""
    env = fresh_env(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    common = ["--run_name", "r", "--max_steps", "3", "--eval_steps", "3", "--precision", "fp32", "--no_export"]
    two = flags(tmp_path / "two", corpus, *common, "--gradient_accumulation_steps", "1", "--save_steps", "0")
    launcher = str(Path(sys.executable).parent / "deepspeed")
    done = subprocess.run(
        [launcher, "--num_accelerators=2", "--master_port=29617", "train_model.py", *two],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    one = flags(tmp_path / "one", corpus, *common, "--save_steps", "0", "--engine", "deepspeed")
    assert main(one) == 0
    assert "2 were asked for" in engine_of(tmp_path / "two")["reason"]
    for a, b in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        for key in ("loss", "grad_norm", "eval_loss"):
            if key in b:
                assert a[key] == pytest.approx(b[key], rel=1e-4), (key, b.get("step"))
    two_states = states(tmp_path / "two/checkpoint/r/step-00000003")
    for key, value in states(tmp_path / "one/checkpoint/r/step-00000003").items():
        torch.testing.assert_close(two_states[key], value, rtol=2e-3, atol=1e-5, msg=key)
