"""Graphics cards by their data sheets, and a usual computer around each, to plan for a machine that is not here.

`profiles/cards.csv` is the one place of a card's size and rates. A profile's name is the card's ('rtx4090',
'rtx4070-ti-super', 'gb10'), '2x-rtx3090' has two of them. Rates of the computer around are rules of thumb."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from outcore.common.quantities import GIB
from outcore.machine.records import PROFILES_DIR, Drive, Gpu, LinkRates, Machine, pcie_gb_per_s

COPIES_SHARE = 0.79
"""Share of a PCIe link's line rate that copies reach: 12.5 GB/s of 15.8 on the reference laptop."""
UNIFIED_COPY_SHARE = 0.4
"""Copies within one memory read and write it."""


@dataclass(frozen=True)
class Card:
    """One row of the table."""

    key: str
    """Part of the driver's name of it, in lower case."""
    kind: str
    """laptop, desktop, server or unified: of one memory with the CPU."""
    vram_bytes: int
    capability: tuple[int, int] | None
    pcie_gen: int | None
    pcie_width: int | None
    peak_tflops: float
    layers_share: float
    """Share of the peak that compiled layers reach."""
    memory_gb_per_s: float
    source: str
    """Source of the peak."""


@dataclass(frozen=True)
class Around:
    """A usual computer around a card of one kind."""

    cores: int
    threads: int
    ram_gib: int
    ram_gb_per_s: float
    """Three quarters of the data sheet's, as a triad reaches."""
    words: str


AROUND: Mapping[str, Around] = MappingProxyType(
    {
        "laptop": Around(10, 16, 64, 65.0, "laptop with 64 GiB of DDR5-5200 in two channels"),
        "desktop": Around(8, 16, 64, 70.0, "desktop with 64 GiB of DDR5-5600 in two channels"),
        "server": Around(16, 32, 256, 230.0, "server with 256 GiB of DDR5-4800 in eight channels"),
        "unified": Around(16, 32, 119, 200.0, "128 GB of LPDDR5X that CPU and GPU share"),
    }
)


def _read() -> dict[str, Card]:
    lines = (PROFILES_DIR / "cards.csv").read_text(encoding="utf-8").splitlines()
    found = {}
    for key, kind, gib, capability, gen, width, peak, share, memory, source in csv.reader(
        line for line in lines if not line.startswith("#")
    ):
        major, _, minor = capability.partition(".")
        able = (int(major), int(minor)) if capability else None
        link = (int(gen), int(width)) if gen else (None, None)
        found[key] = Card(key, kind, int(gib) * GIB, able, *link, float(peak), float(share), float(memory), source)
    return found


CARDS: Mapping[str, Card] = MappingProxyType(_read())
"""Every card, by its key."""


def card_by_name(gpu_name: str) -> Card | None:
    """The card whose driver calls it so; None where it is not in the table. A name with "laptop", "ti" or "super" in it
    is another chip and matches only its own row."""
    name = gpu_name.lower()
    for key, card in sorted(CARDS.items(), key=lambda item: -len(item[0])):
        if re.search(rf"\b{re.escape(key)}(?! ?(super|ti\b|laptop))", name):
            return card
    return None


def profile_name(card: Card) -> str:
    """'rtx 4070 ti super' -> 'rtx4070-ti-super'."""
    return re.sub(r"^(rtx|gtx) (?=\d)", r"\1", card.key).replace(" ", "-")


def machine_of(name: str) -> Machine | None:
    """The computer around a card, or around several ('2x-rtx3090'); None for a name that the table does not have."""
    count, _, rest = name.rpartition("x-")
    wanted, number = (rest, int(count)) if count.isdigit() else (name, 1)
    card = next((card for card in CARDS.values() if profile_name(card) == wanted.lower()), None)
    if card is None or not 1 <= number <= 16:
        return None
    around, is_unified = AROUND[card.kind], card.kind == "unified"
    ram_bytes = around.ram_gib * GIB
    gpus = tuple(
        Gpu(
            index, card.key.upper(), card.vram_bytes, card.capability, pcie_gen_max=card.pcie_gen,
            pcie_width_max=card.pcie_width, is_integrated=is_unified,
        )
        for index in range(number)
    )  # fmt: skip
    line = pcie_gb_per_s(card.pcie_gen, card.pcie_width)
    link = UNIFIED_COPY_SHARE * around.ram_gb_per_s if line is None else COPIES_SHARE * line
    drive = Drive(
        "/", "nvme", "nominal: 2 TB NVMe drive, PCIe 4.0 x4", "/", "ext4", pcie_gen=4, pcie_width=4,
        total_bytes=2 * 10**12, free_bytes=16 * 10**11,
    )  # fmt: skip
    return Machine(
        os_family="linux", os_name="Linux", kernel="", architecture="x86_64", is_wsl2=False, python_version="3.12",
        cpu_name=f"a CPU of {around.cores} cores", cpu_cores=around.cores, cpu_threads=around.threads,
        ram_total_bytes=ram_bytes, ram_available_bytes=ram_bytes * 9 // 10, gpus=gpus, drives=(drive,),
        links=LinkRates(
            "nominal", h2d_gb_per_s=link, d2h_gb_per_s=link, drive_read_gb_per_s=6.5, drive_write_gb_per_s=5.5,
            ram_gb_per_s=around.ram_gb_per_s, device_memory_gb_per_s=card.memory_gb_per_s,
        ),
        notes=(
            f"nominal: the card by its data sheet ({card.source}) in a {around.words}, with a 2 TB drive of PCIe 4.0; "
            "give what differs (--ram_gib, --nvme_free_gb); nothing of it was measured",
        ),
    )  # fmt: skip


def load_machine(name: str) -> Machine:
    """A machine by its profile's file or name. ValueError naming all profiles where there is none."""
    if Path(name).is_file() or (PROFILES_DIR / f"{name}.json").is_file():
        return Machine.load(name)
    if (usual := machine_of(name)) is None:
        raise ValueError(f"no machine profile {name!r}: give a JSON file or one of: {', '.join(shipped_profiles())}")
    return usual


def shipped_profiles() -> list[str]:
    """Names that `--machine` takes."""
    return sorted({path.stem for path in Path(PROFILES_DIR).glob("*.json")} | {*map(profile_name, CARDS.values())})
