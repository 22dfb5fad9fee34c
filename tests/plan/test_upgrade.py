"""`outcore plan --upgrade`: what to buy."""

import json

from outcore.plan.main import main


def asked(capsys, *flags: str) -> list[dict]:
    code = main([*flags, "--upgrade", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == (0 if told["fits"] else 1)
    return told["upgrades"]


def test_the_cheapest_purchase_that_halves_the_step_is_named(capsys):
    found = asked(capsys, "--model", "llama-8b", "--machine", "rtx3090")
    enough = [one["words"] for one in found if one["is_enough"]]
    assert found[0]["words"].startswith("a second drive") and enough[0] == "64.00 GiB more RAM"
    assert main(["--model", "llama-8b", "--machine", "rtx3090", "--upgrade"]) == 0
    assert "The cheapest purchase that halves the step: 64.00 GiB more RAM." in capsys.readouterr().out


def test_it_asks_the_planner_not_a_rule(capsys):
    """What is promised is what the plan of the machine with it says."""
    (first, *_) = [one for one in asked(capsys, "--model", "llama-8b", "--machine", "rtx3090") if "RAM" in one["words"]]
    assert first["words"] == "32.00 GiB more RAM"
    more = 64 * 0.9 + 32
    main(["--model", "llama-8b", "--machine", "rtx3090", "--ram_gib", str(more), "--pinned_gib", "44.8", "--json"])
    assert json.loads(capsys.readouterr().out)["plan"]["time_s"]["step_s"] == first["step_s"]


def test_a_run_that_does_not_fit_hears_what_makes_it_fit(capsys):
    assert main(["--model", "qwen3-14b", "--machine", "rtx4060", "--nvme_free_gb", "10", "--upgrade"]) == 1
    assert "The cheapest purchase that makes the run fit: a second drive" in capsys.readouterr().out


def test_soldered_memory_and_laptop_cards_are_not_offered(capsys):
    laptop = asked(capsys, "--model", "llama-8b", "--machine", "rtx4070-laptop")
    assert laptop and not any("instead of the card" in one["words"] for one in laptop)
    assert all("drive" in one["words"] for one in asked(capsys, "--model", "llama-8b", "--machine", "gb10"))
