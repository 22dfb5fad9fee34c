"""The main job end to end on the CPU accelerator: train, export, every engine and shape, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outcore.common.ports import free_port
from outcore.optim.formats.chunk_state import cast_param
from outcore.train.run import main
from tests.forked import start_script
from tests.train.jobs import (
    ENGINES,
    REPOSITORY,
    engine_of,
    fixtures,
    flags,
    fresh_env,
    metrics,
    same,
    states,
    weights,
)

corpus, shared, straight, straight_by, in_the_repository = fixtures


@pytest.mark.parametrize("engine", list(ENGINES))
def test_a_run_leaves_what_it_promises(straight_by: Callable[[str], Path], engine: str) -> None:
    straight = straight_by(engine)
    lines = metrics(straight)
    assert lines[0]["event"] == "header" and lines[0]["versions"]["transformers"] and lines[0]["model"]["total_params"]
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


def test_the_export_loads_with_the_weights_of_the_last_step(straight: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = straight / "export/r"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    state = states(straight / "checkpoint/r/step-00000006")
    for name, value in model.named_parameters():
        assert torch.equal(value.detach().to(torch.bfloat16), state[f"model:{name}"]), name
    assert tokenizer("the quick brown fox")["input_ids"]


@pytest.mark.parametrize("engine", list(ENGINES))
def test_masters_round_to_the_weights(straight_by: Callable[[str], Path], engine: str) -> None:
    """By both engines, as the split does: to the nearest bf16 number, away from zero between two."""
    state = states(straight_by(engine) / "checkpoint/r/step-00000006")
    for key, value in state.items():
        if key.startswith("master:"):
            assert torch.equal(cast_param(value, torch.bfloat16), state["model:" + key[7:]])


def test_states_on_nvme_train_the_same_numbers_and_leave_nothing_there(tmp_path, corpus, straight):
    """The bits of RAM, the scratch gone, checkpoints whole."""
    drive = tmp_path / "drive"
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "6", "--precision", "bf16", "--eval_steps", "0")
    argv += ["--nvme_offload_path", str(drive), "--ram_budget_gib", "0", "--save_steps", "4", "--no_export"]
    assert main(argv) == 0
    plan = json.loads((tmp_path / "log/r/plan.json").read_text())
    assert plan["stream"]["nvme_path"] == str(drive) and plan["stream"]["state_ram_bytes"] is not None
    assert any("on NVMe" in note for note in plan["notes"])
    for step in ("step-00000004", "step-00000006"):
        assert same(states(tmp_path / "checkpoint/r" / step), states(straight / "checkpoint/r" / step))
    assert not any(drive.rglob("*")), "scratch is removed with the engine"


def test_staged_offload_trains_as_ram_does_and_leaves_nothing_on_the_drive(tmp_path: Path, corpus: Path) -> None:
    drive = tmp_path / "drive"
    (drive / "kept").mkdir(parents=True)
    (drive / "kept" / "mine.txt").write_text("mine")
    argv = ["--engine", "deepspeed", "--no_export", "--max_steps", "3", "--eval_steps", "0", "--save_strategy", "no"]
    on_nvme = ["--zero_stage", "infinity", "--nvme_offload_path", str(drive), "--strict_offload"]
    for run, more in (("planned", [*on_nvme, "--plan"]), ("kept", on_nvme), ("ram", ["--zero_stage", "zero3"])):
        assert main(flags(tmp_path, corpus, "--run_name", run, *argv, *more)) == 0
    assert [path.name for path in drive.rglob("*")] == ["kept", "mine.txt"]
    losses = [[line["loss"] for line in metrics(tmp_path, run) if "loss" in line] for run in ("kept", "ram")]
    assert losses[0] == losses[1] and len(set(losses[0])) == 3


@pytest.mark.parametrize("engine", ["stream", pytest.param("deepspeed", marks=pytest.mark.slow)])
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
        merged_logits = whole(ids).logits  # rounded to the base's bf16
        torch.testing.assert_close(with_adapter(ids).logits, merged_logits, rtol=0, atol=2e-3)


@pytest.mark.more(after=1)
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


@pytest.mark.parametrize(("first", "second"), [("deepspeed", "stream"), ("stream", "deepspeed")])
def test_engines_agree_and_resume_each_others_checkpoints(tmp_path, corpus, straight_by, first, second):
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


@pytest.mark.parametrize(("argv", "words"), [
    (["--preset", "tiny-t5"], "two stacks of layers"), (["--model_module", "examples/my_model.py:build"], "own"),
    (["--deepspeed_config", "{ds}"], "adam_w_mode is false"), (["--zero_stage", "zero1"], "contradict each other"),
    (["--state_format", "split", "--precision", "fp32"], "needs --precision bf16"),
    (["--activations", "nvme"], "give --nvme_offload_path"),
])  # fmt: skip
def test_streaming_engine_refuses_what_it_cannot(tmp_path, corpus, argv, words, capsys):
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


@pytest.mark.more
def test_a_run_imports_no_compiler_before_it_compiles() -> None:
    """It takes more than a second, which eager runs and refused ones need not wait for."""
    code = (
        "import sys, outcore.train.run; print([m for m in ('torch._dynamo', 'deepspeed', 'peft') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=fresh_env(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forked", "launched"])
def test_two_ranks_equal_one(tmp_path: Path, corpus: Path, launched: bool) -> None:
    """Two processes, as the deepspeed launcher starts them or by it, and half the accumulation see the same losses."""
    common = ["--run_name", "r", "--max_steps", "3", "--eval_steps", "3", "--precision", "fp32", "--no_export"]
    common += ["--engine", "deepspeed"]
    two = flags(tmp_path / "two", corpus, *common, "--gradient_accumulation_steps", "1", "--save_steps", "0")
    place = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    logs = [tmp_path / "0.txt", tmp_path / "1.txt"]
    if launched:
        launcher = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators=2", "--master_port=29617"]
        with open(logs[0], "wb") as log:
            command = [*launcher, "train_model.py", *two]
            done = subprocess.run(command, env=fresh_env(**place), stdout=log, stderr=subprocess.STDOUT, timeout=900)
        assert done.returncode == 0, logs[0].read_text()[-6000:]
    else:
        place |= {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [
            start_script(
                REPOSITORY / "train_model.py",
                [f"--local_rank={rank}", *two],
                fresh_env(**place, RANK=str(rank), LOCAL_RANK=str(rank)),
                log,
            )
            for rank, log in enumerate(logs)
        ]
        assert [rank.wait(900) for rank in ranks] == [0, 0], [log.read_text()[-3000:] for log in logs]
    one = flags(tmp_path / "one", corpus, *common, "--save_steps", "0")
    assert main(one) == 0
    assert engine_of(tmp_path / "two")["name"] == "deepspeed"
    for a, b in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        for key in ("loss", "grad_norm", "eval_loss"):
            if key in b:
                assert a[key] == pytest.approx(b[key], rel=1e-4), (key, b.get("step"))
    two_states = states(tmp_path / "two/checkpoint/r/step-00000003")
    for key, value in states(tmp_path / "one/checkpoint/r/step-00000003").items():
        torch.testing.assert_close(two_states[key], value, rtol=2e-3, atol=1e-5, msg=key)
