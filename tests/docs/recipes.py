"""docs/recipes.md: whole commands by goal, each with its forecast: `python -m tests.docs.recipes` writes it from
recipes.yml.

Forecasts are those of `outcore plan` for the shipped profile of the reference laptop, so the page depends on the code
alone. `test_recipes.py` runs each command on a tiny copy."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from outcore.common.quantities import GB, format_gb, format_gib, format_rate, format_s
from outcore.plan.main import main
from tests.forked import ROOT

MACHINE = "rtx4070-laptop"
FEW_DAYS = 3 * 365
"""Days of training until the drive's rating is written, from which a page is silent about it."""
PAGE = ROOT / "docs/recipes.md"
HEAD = f"""# Recipes

Whole commands by what you want. Each forecast is for one laptop (`--machine {MACHINE}`: 8 GB of VRAM, 64 GB of RAM, an
NVMe drive of 4 TB), by the command beside it, with rates of data sheets; nothing was measured there. Ask for your own
machine's. WSL2 has half of the RAM unless [told otherwise](windows.md): plan with `--machine {MACHINE}-wsl2`; 3 B with
all weights then needs the drive. Models are examples: any that [streams](models.md) will do, from the hub or a
folder. Flags: [Settings](settings.md). Which way to go: [when to use what](guide.md#when-to-use-it-and-when-not).

*Made by `python -m tests.docs.recipes`; a test runs each command on a tiny copy of its model.*
"""


@dataclass(frozen=True)
class Recipe:
    """A goal, the command for it, and the arguments of `outcore plan` that forecast it ("": nothing to plan)."""

    goal: str
    command: str
    plan: str = ""
    note: str = ""


SHELVES: dict[str, list[Recipe]] = {
    shelf: [Recipe(**row) for row in rows]
    for shelf, rows in yaml.safe_load((ROOT / "tests/docs/recipes.yml").read_text(encoding="utf-8")).items()
}


def planned(recipe: Recipe) -> dict[str, Any]:
    """What `outcore plan ... --json` says of the recipe."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main([*shlex.split(recipe.plan), "--machine", MACHINE, "--json"])
    found = json.loads(said.getvalue())
    assert code == 0, f"{recipe.goal}: {found.get('constraint') or found.get('words')}"
    return found


def forecast(recipe: Recipe) -> str:
    """One line: bytes in each place, and seconds or tokens."""
    found = planned(recipe)
    if "tokens_per_s" in found:
        return _answers(found)
    if "method" in found:
        tokens, least, more = found["step_tokens"], "", ""
        places, step_s = _places(found["vram_bytes"], found["ram_bytes"], 0), found["step_s"]
    else:
        found = found["plan"]
        drive = dict(found["parts_bytes"]["nvme"])
        saved_bytes = drive.pop("checkpoints", 0)
        places = _places(found["vram_bytes"], found["tiers"]["ram"]["used_bytes"], sum(drive.values()))
        tokens, least = found["tokens_per_step"], "at least " if found["step_is_lower_bound"] else ""
        step_s = tokens / found["tokens_per_s"]
        more = f"; checkpoints take {format_gb(saved_bytes)} of a drive" if saved_bytes > GB else ""
        if (days := found["drive_life_days"]) is not None and days < FEW_DAYS:
            written = format_gb(found["drive_written_bytes_per_step"])
            more += f"; {written} are written a step: the drive's rating in {days:,.0f} days of training"
    return f"{places}; {least}{format_s(step_s)} a step of {tokens:,} tokens{more}"


def _answers(found: dict[str, Any]) -> str:
    rates = next(iter(found["tokens_per_s"].values()))
    at_once = ("1",) if found["preset"] == "latency" else ("1", "8", "64")
    answers = ", ".join(f"{format_rate(rates[many])} ({many})" for many in at_once)
    kv, held = found["kv"], found["bytes"]
    ram_bytes = held["ram"] + (kv["bytes"] if kv["home"] == "ram" else 0)
    places = _places(sum(found["vram_bytes"].values()), ram_bytes, held["nvme"])
    read = found["first_token_s"]
    first = ", ".join(f"{format_s(seconds)} ({int(tokens):,})" for tokens, seconds in read.items())
    return f"{places}; first word after (tokens of prompt): {first}; tokens/s (answers at once): {answers}"


def _places(vram_bytes: float, ram_bytes: float, drive_bytes: float) -> str:
    drive = f", {format_gb(drive_bytes)} on the drive" if drive_bytes else ""
    return f"{format_gib(vram_bytes)} of VRAM, {format_gib(ram_bytes)} of RAM{drive}"


def page() -> str:
    """The whole page as the planner would have it."""
    lines = [HEAD]
    for shelf, recipes in SHELVES.items():
        lines.append(f"## {shelf}\n")
        for recipe in recipes:
            lines += [f"### {recipe.goal}\n", f"```bash\n{recipe.command}\n```\n"]
            if recipe.plan:
                lines.append(f"{forecast(recipe)} (`outcore plan {recipe.plan} --machine {MACHINE}`).")
            lines.append(f"{recipe.note}\n" if recipe.note else "")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
