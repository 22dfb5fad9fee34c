"""`plan_race.py`: runs of the race within the planner's aims; `laptop.py`: what it says of the laptop."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
SERVER = RESULTS / "plan_vs_measured-h100-second.json"
FILES = (
    "rivals-h100-1.2b-16k-second", "rivals-h100-1.2b-16k-third", "rivals-h100-1.2b-4k-second",
    "rivals-h100-1.2b-4k-third", "rivals-h100-1.75b-13k-second", "rivals-h100-1.75b-4k-beside",
    "rivals-h100-2.8b-16k-ours", "lora-70b-nf4-h100", "lora-8b-nf4-h100", "lora-trainstream-h100-beside",
    "rivals-h100-1.2b-16k-three", "muon-h100-third", "long-rows-8b-32k-h100-second", "long-rows-8b-128k-h100",
    "rivals-h100-2.8b-4k",
)  # fmt: skip
FAR = {"rivals-h100-2.8b-4k-ours": (0.20, 0.14), "long-rows-1.2b-256k-h100": (0.20, 0.14)}
"""What misses an aim, with how far it may: a backward at the limit beyond which none is captured leaves room for one
layer more; the allocator keeps memory between blocks of many sizes."""
CASES = [(name, (0.20, 0.10)) for name in FILES] + list(FAR.items())


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in ("plan", "race"):
        monkeypatch.syspath_prepend(str(RESULTS.parent / folder))
    import plan_race  # pyright: ignore[reportMissingImports]

    return plan_race


@pytest.mark.parametrize(("name", "limits"), CASES, ids=[name for name, _ in CASES])
def test_runs_of_the_race_are_foreseen(race: Any, name: str, limits: tuple[float, float]) -> None:
    server, runs = race.server_of(SERVER), list(race.runs_of(RESULTS / f"{name}.json"))
    assert runs
    for run in runs:
        plan, (step_s, ram_gib, vram_gib) = race.forecast(run, server), run.took
        assert plan.time.step_s == pytest.approx(step_s, rel=limits[0])
        assert plan.expected_bytes("ram", "pinned") / 2**30 == pytest.approx(ram_gib, rel=limits[1])
        assert plan.expected_bytes("vram") / 2**30 == pytest.approx(vram_gib, rel=limits[1])


def test_less_ram_makes_updates_longer(race: Any) -> None:
    server = race.server_of(SERVER)
    run = next(race.runs_of(RESULTS / "rivals-h100-1.2b-16k-third.json"))
    slow = dataclasses.replace(server, ram_gb_per_s=80.0, optimizer_gparams_per_s={})
    assert race.forecast(run, slow).time.step_s > 1.2 * race.forecast(run, server).time.step_s
    assert "| 1 x 16,384 |" in race.row(run, race.forecast(run, server))


@pytest.mark.more
def test_the_laptop_table_in_the_docs_is_what_the_planner_says(race: Any, tmp_path: Path) -> None:
    import laptop  # pyright: ignore[reportMissingImports]

    found = laptop.state()
    assert found.is_current, "run: python benchmarks/plan/laptop.py"
    page = tmp_path / "race.md"
    page.write_text(found.text.replace("arithmetic", "link"))
    assert not laptop.document_state(page, laptop.table(), laptop.BEGIN, laptop.END).is_current
