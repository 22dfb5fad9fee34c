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

from outcore.common.quantities import format_gb, format_gib, format_rate, format_s
from outcore.plan.main import main
from tests.forked import ROOT

MACHINE = "rtx4070-laptop"
PAGE = ROOT / "docs/recipes.md"
HEAD = f"""# Recipes

Whole commands by what you want. Each forecast is for one laptop (`--machine {MACHINE}`: 8 GB of VRAM, 64 GB of RAM, an
NVMe drive), by the command beside it; nothing was measured there. Ask for your own machine's. Models are examples: any
that [streams](models.md) will do, from the hub or a folder. Flags: [Settings](settings.md). Which way to go:
[when to use what](guide.md#when-to-use-it-and-when-not).

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
        rates = next(iter(found["tokens_per_s"].values()))
        places = [f"{format_gib(sum(found['vram_bytes'].values()))} of VRAM", *_places(found["bytes"])]
        at_once = ("1",) if found["preset"] == "latency" else ("1", "8", "64")
        answers = ", ".join(f"{format_rate(rates[many])} ({many})" for many in at_once)
        first_s = next(iter(found["first_token_s"].values()))
        return f"{', '.join(places)}; first word after {format_s(first_s)}; tokens/s (answers at once): {answers}"
    if "method" in found:
        tokens, step_s = found["step_tokens"], found["step_s"]
        bytes_of = {"ram": found["ram_bytes"], "nvme": 0}
    else:
        found = found["plan"]
        tokens, step_s = found["tokens_per_step"], found["tokens_per_step"] / found["tokens_per_s"]
        drive = {part: size for part, size in found["parts_bytes"]["nvme"].items() if part != "checkpoints"}
        bytes_of = {"ram": found["tiers"]["ram"]["used_bytes"], "nvme": sum(drive.values())}
    places = [f"{format_gib(found['vram_bytes'])} of VRAM", *_places(bytes_of)]
    return f"{', '.join(places)}; {format_s(step_s)} a step of {tokens:,} tokens"


def _places(bytes_of: dict[str, int]) -> list[str]:
    drive = [f"{format_gb(bytes_of['nvme'])} on the drive"] if bytes_of["nvme"] else []
    return [f"{format_gib(bytes_of['ram'])} of RAM", *drive]


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
