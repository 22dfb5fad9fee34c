"""`outcore plan` and `outcore`: tables, JSON, exit codes, the guide in the docs, and what is not imported."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from outcore import cli
from outcore.machine import LinkRates, Machine
from outcore.plan.main import main
from tests.docs.planning import PAGE, page

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = ["--machine", "rtx4070-laptop"]


@pytest.mark.more
def test_the_guide_in_the_docs_is_what_the_planner_says():
    assert page() == PAGE.read_text(encoding="utf-8"), "run: python -m tests.docs.planning"


def test_tables(capsys):
    assert main(["--model", "llama-8b", *LAPTOP]) == 0
    out = capsys.readouterr().out
    for words in ("8.03 B parameters", "Where every byte lives", "infinity", "tokens/s", "forecast", "rating lasts"):
        assert words in out
    assert "compared with runs on servers" in " ".join(out.split())
    assert main(["--model", "llama-70b", *LAPTOP]) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out and "Smallest change that fits" in out and "NVMe" in out
    assert main(["--model", "llama-8b", "--vram_gib", "1", *LAPTOP]) == 1
    assert "No single change" in capsys.readouterr().out
    assert main(["--model", "tiny", *LAPTOP]) == 0
    assert "a lower bound" in " ".join(capsys.readouterr().out.split())


def test_a_slow_drive_is_said_where_the_run_uses_it(tmp_path, capsys):
    laptop = Machine.load("rtx4070-laptop")
    rates = {"drive_read_gb_per_s": 1.5, "drive_write_gb_per_s": 3.0, "ram_gb_per_s": 60.0}
    links = LinkRates("measured", h2d_gb_per_s=12.0, d2h_gb_per_s=12.0, **rates)
    profile = str(dataclasses.replace(laptop, links=links).save(tmp_path / "slow.json"))
    said = "reads 1.5 GB/s, below 2 GB/s"
    for model, uses in (("llama-8b", True), ("tiny", False)):
        main(["--model", model, "--machine", profile])
        assert (said in " ".join(capsys.readouterr().out.split())) == uses


def test_json_counts_by_name(capsys):
    assert main(["--model", "8b", "--json", "--lora_r", "16", *LAPTOP]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["params"] == answer["plan"]["params"] > 8_030_261_248
    assert set(answer["stages"]) == {"none", "zero1", "zero2", "zero3", "infinity"}
    for plan in (*answer["stages"].values(), answer["stream"]):
        assert plan["params"] == answer["params"] and plan["forecast"] is True
        for tier in ("vram", "pinned", "ram", "nvme"):
            assert plan[f"{tier}_bytes"] == sum(plan["parts_bytes"][tier].values())
    assert answer["plan"]["time_s"]["step_s"] > 0 and answer["rates"]["h2d_gb_per_s"] == "nominal"


def test_adapters_on_named_modules(capsys):
    flags = ["--model", "llama-1b", "--json", "--lora_r", "16", *LAPTOP]
    assert main([*flags, "--lora_target_modules", "q_proj,v_proj"]) == 0
    answer = json.loads(capsys.readouterr().out)
    plan = answer["plan"]
    named = 16 * 16 * (2048 + 2048 + 2048 + 512)  # rank, layers, (in + out) of q and of v
    assert plan["trainable_params"] == named and plan["params"] == 1_235_814_400 + named
    assert plan["parts_bytes"]["ram"]["moments"] == 8 * named
    assert "--lora_r 16 --lora_target_modules q_proj,v_proj" in answer["flags"]
    assert main([*flags, "--lora_target_modules", "all-linear"]) == 0
    by_default = json.loads(capsys.readouterr().out)["plan"]
    assert by_default["lora_targets"] == [] and by_default["trainable_params"] > 5 * named


@pytest.mark.parametrize(("argv", "words"), [
    ([], "Name a model"), (["--model", "lama-8b", *LAPTOP], "Did you mean"),
    (["--model", "tiny", "--machine", "nowhere"], "no machine profile"),
    (["--model", "tiny", "--seq_length", "0", *LAPTOP], "seq_length: must be above 0"),
    (["--model", "tiny", "--engine", "stream", "--zero_stage", "2", *LAPTOP], "contradict"),
    (["--model", "tiny", "--num_gpus", "3", *LAPTOP], "Lower --num_gpus"),
    (["--model", "tiny", "--lora_r", "-2", *LAPTOP], "lora_r: must be at least 0"),
    (["--model", "tiny", "--lora_target_modules", "q_proj", *LAPTOP], "lora_r is 0"),
    (["--model", "tiny", "--lora_r", "4", "--lora_target_modules", "q_prj", *LAPTOP], "Did you mean 'q_proj'"),
])  # fmt: skip
def test_wrong_usage(argv, words, capsys):
    assert main(argv) == 2
    assert words in capsys.readouterr().err


def test_a_preset_is_planned_without_torch():
    code = (
        "import sys; from outcore.cli import main; code = main(sys.argv[1:]); "
        "bad = {'torch', 'transformers', 'deepspeed', 'matplotlib'} & set(sys.modules); "
        "sys.exit(f'imported {bad}' if bad else code)"
    )
    argv = [sys.executable, "-c", code, "plan", "--model", "llama-8b", "--json", *LAPTOP]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "llama-8b"


def test_the_console_command(capsys, tmp_path):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "plan" in out and "watch" in out
    assert cli.main([]) == 2
    assert cli.main(["plam"]) == 2 and "Did you mean 'plan'" in capsys.readouterr().err
    assert cli.main(["xyzzy"]) == 2 and "Did you mean" not in capsys.readouterr().err
    assert cli.main(["--version"]) == 0
    assert cli.main(["watch", "nothing", "--logs", str(tmp_path)]) == 2
    assert cli.main(["plan", "--model", "tiny", *LAPTOP]) == 0


def test_stages_and_tiers_name_the_same_bytes_and_small_rates_are_no_zero(capsys):
    assert main(["--model", "llama-70b", "--machine", "rtx4070-laptop", "--ram_gib", "16", "--seq_length", "64"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "NVMe in GB, checkpoints too" in said
    assert " 0 tokens/s" not in said
    main(["--model", "llama-8b", "--machine", "rtx4070-laptop", "--ram_gib", "16"])
    tiers, _, stages = capsys.readouterr().out.partition("Every ZeRO stage")
    total = re.search(r"total, states x 1.5\W+([\d.]+) GB", tiers)
    assert total and f" {float(total[1]):,.0f} " in stages


def test_help_of_plans_is_about_plans(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    for idle in (
        "resume_from_checkpoint",
        "report_to",
        "run_name",
        "early_stopping_patience",
        "learning_rate",
        "plan",
    ):
        assert f"  --{idle} " not in said
    for needed in ("lora_r", "nvme_offload_path", "machine", "infer", "gradient_accumulation_steps"):
        assert f"--{needed}" in said
    assert main(["--model", "tiny", *LAPTOP, "--run_name", "x", "--learning_rate", "1e-4"]) == 0, "taken all the same"


def bought(capsys, *flags: str) -> list[dict]:
    code = main([*flags, "--upgrade", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == (0 if told["fits"] else 1)
    return told["upgrades"]


def test_the_cheapest_purchase_that_halves_the_step_is_named(capsys):
    found = bought(capsys, "--model", "llama-8b", "--machine", "rtx3090")
    enough = [one["words"] for one in found if one["is_enough"]]
    assert found[0]["words"].startswith("a second drive") and enough[0] == "64.00 GiB more RAM"
    assert main(["--model", "llama-8b", "--machine", "rtx3090", "--upgrade"]) == 0
    assert "The cheapest purchase that halves the step: 64.00 GiB more RAM." in capsys.readouterr().out


def test_it_asks_the_planner_not_a_rule(capsys):
    """What is promised is what the plan of the machine with it says."""
    (first, *_) = [
        one for one in bought(capsys, "--model", "llama-8b", "--machine", "rtx3090") if "RAM" in one["words"]
    ]
    assert first["words"] == "32.00 GiB more RAM"
    more = 64 * 0.9 + 32
    main(["--model", "llama-8b", "--machine", "rtx3090", "--ram_gib", str(more), "--pinned_gib", "44.8", "--json"])
    assert json.loads(capsys.readouterr().out)["plan"]["time_s"]["step_s"] == first["step_s"]


def test_a_run_that_does_not_fit_hears_what_makes_it_fit(capsys):
    assert main(["--model", "qwen3-14b", "--machine", "rtx4060", "--nvme_free_gb", "10", "--upgrade"]) == 1
    assert "The cheapest purchase that makes the run fit: a second drive" in capsys.readouterr().out


def test_soldered_memory_and_laptop_cards_are_not_offered(capsys):
    laptop = bought(capsys, "--model", "llama-8b", "--machine", "rtx4070-laptop")
    assert laptop and not any("instead of the card" in one["words"] for one in laptop)
    assert all("drive" in one["words"] for one in bought(capsys, "--model", "llama-8b", "--machine", "gb10"))
