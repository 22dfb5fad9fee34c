"""What starts of models measured of this machine's CPU beside its link, kept where ratios of forecasts are: the
probe has no such trial, and a plan made before a model opens counts layers on the CPU by the last start's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from outcore.plan.hardware import Hardware
from outcore.plan.learned.ratios import LEARNED, keep, known_of
from outcore.sizing.inference import InPlaceRates


def remember_rates(name: str, rates: InPlaceRates, hardware: Hardware, path: Path = LEARNED) -> None:
    """Keep what was measured with the packed format, or in the precision, of this name."""
    known = known_of(hardware, path)
    known.setdefault("rates", {})[name] = asdict(rates)
    keep(known, path)


def known_rates(hardware: Hardware, path: Path = LEARNED) -> Mapping[str, InPlaceRates]:
    """Rates by the name of the packed format or precision; {} where no start on this machine measured any."""
    found = known_of(hardware, path).get("rates", {})
    return {
        name: InPlaceRates(
            {int(tokens): rate for tokens, rate in one["cpu_gb_per_s"].items()}, one["link_gb_per_s"], one["part_s"]
        )
        for name, one in found.items()
    }
