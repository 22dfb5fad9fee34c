"""The numbers of a machine that a plan is computed from: capacities in bytes, links in GB/s (10**9), each sourced.

Made from a `Machine` (outcore/machine) and its links: measured by the probe, or nominal from data sheets where the
caller allows that. Overrides win over both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outcore.common.quantities import GB, GIB, format_gb, format_gib
from outcore.common.words import own_command
from outcore.machine import Drive, LinkRates, Machine, pcie_gb_per_s
from outcore.machine.cards import CARDS, card_by_name
from outcore.plan import constants as k
from outcore.sizing.states import STATE_FORMATS
from outcore.sizing.streaming import copies_gb_per_s

LINKS = ("h2d_gb_per_s", "d2h_gb_per_s", "drive_read_gb_per_s", "drive_write_gb_per_s", "ram_gb_per_s")
"""Links that a plan cannot do without; `drive_mixed_gb_per_s` is used where it was measured."""
GPU_LINKS = ("h2d_gb_per_s", "d2h_gb_per_s")
"""Links that are there with a GPU only."""
MEMORY = "device_memory_gb_per_s"
"""Rate that no plan for a GPU can do without: reading weights takes time."""


class ProfileError(ValueError):
    """The machine profile is missing, of another machine, damaged or incomplete; the message says what to do."""


@dataclass(frozen=True)
class Hardware:
    """Capacities and rates of one machine, as a plan uses them."""

    name: str
    vram_bytes: int
    """VRAM of one GPU."""
    ram_bytes: int
    """That the run may take: what is available, not what is built in."""
    pinned_bytes: int
    """Most that can be page-locked."""
    nvme_free_bytes: int
    nvme_total_bytes: int
    h2d_gb_per_s: float
    d2h_gb_per_s: float
    drive_read_gb_per_s: float
    drive_write_gb_per_s: float
    ram_gb_per_s: float
    drive_mixed_gb_per_s: float | None = None
    compute_tflops: float | None = None
    """That compiled layers reach; None: not known, and step times are lower bounds."""
    device_memory_gb_per_s: float | None = None
    """Rate of the GPU's own memory; without a GPU that of copies in RAM, None where nobody measured it."""
    is_rate_of_layers: bool = False
    """Whether `compute_tflops` is of whole layers, so that what passes through the memory is counted in it already."""
    optimizer_gparams_per_s: Mapping[str, float] = field(default_factory=dict)
    """Format of the states -> 10^9 parameters that the CPU optimizer updates per second; {}: not measured."""
    host_layer_s: float = k.HOST_LAYER_S
    """In which one core launches an eager decoder layer, forward, recomputation and backward."""
    is_cpu: bool = False
    """There is no GPU: the run trains on the CPU, and what would be in VRAM is in RAM."""
    is_unified: bool = False
    """GPU and CPU share one memory: `vram_bytes` and `ram_bytes` are parts of it."""
    num_gpus: int = 1
    copies_gb_per_s: float | None = None
    """Rate of a lane from pageable RAM: measured, or by its threads (`copy_threads`). None: as fast as the link."""
    identity: str = ""
    """Name that tells this machine from others (`learned`)."""
    sources: dict[str, str] = field(default_factory=dict)
    """Source of each rate: where it comes from, by its name."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vram_bytes", "ram_bytes", "pinned_bytes", "nvme_free_bytes", "nvme_total_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but an amount of memory cannot be negative.")
        for name in (*LINKS, "drive_mixed_gb_per_s", "compute_tflops", "device_memory_gb_per_s", "host_layer_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(
                    f"{name} is {value}, but a rate must be above 0. Measure it again: {own_command('probe')}"
                )
        for name, value in self.optimizer_gparams_per_s.items():
            if name not in STATE_FORMATS or not value > 0:
                raise ValueError(
                    f"optimizer_gparams_per_s has {name!r}: {value}, but it gives rates above 0 for the formats "
                    f"{', '.join(STATE_FORMATS)}. Measure it again: {own_command('probe')}"
                )

    def drive_s(self, read_bytes: float, written_bytes: float) -> float:
        """Seconds the drive needs for both: by its mixed rate when measured, else one after the other."""
        if self.drive_mixed_gb_per_s and read_bytes and written_bytes:
            # Reads and writes share the drive; the mixed rate was measured with equal parts of both.
            both = 2 * min(read_bytes, written_bytes)
            rest_read, rest_written = read_bytes - both / 2, written_bytes - both / 2
            return both / (self.drive_mixed_gb_per_s * GB) + self._alone_s(rest_read, rest_written)
        return self._alone_s(read_bytes, written_bytes)

    def compute_s(
        self,
        flops: float,
        traffic_bytes: float,
        attention_flops: float = 0.0,
        attention_share: float = k.ATTENTION_SHARE,
    ) -> float:
        """Seconds of matrix products and attention, with what passes through the device's memory, unless the rate is of
        whole layers (`is_rate_of_layers`). `attention_share`: of the rate of matrix products."""
        if self.compute_tflops is None:
            return 0.0
        if self.is_rate_of_layers or self.device_memory_gb_per_s is None:
            return (flops + attention_flops) / (self.compute_tflops * 1e12)
        products_s = (flops + attention_flops / attention_share) / (self.compute_tflops * 1e12)
        return products_s + traffic_bytes / (self.device_memory_gb_per_s * GB)

    def host_s(self, layers: float) -> float:
        """Seconds of the host for the launches of so many eager layers; none where the CPU computes itself."""
        return 0.0 if self.is_cpu else layers * self.host_layer_s

    def for_answers(self) -> Hardware:
        """Give the GPU nearly all of a shared memory: weights that only answer have one copy there and stay."""
        if not self.is_unified:
            return self
        both = self.vram_bytes + self.ram_bytes
        ram_bytes = int(k.UNIFIED_RAM_SHARE_OF_ANSWERS * both)
        return replace(self, vram_bytes=both - ram_bytes, ram_bytes=ram_bytes)

    @property
    def gpu_context_bytes(self) -> int:
        """VRAM that CUDA and its libraries take."""
        return k.GPU_CONTEXT_BYTES + int(k.GPU_CONTEXT_SHARE * self.vram_bytes)

    @property
    def tensor_bytes(self) -> int:
        """VRAM that is left for tensors; at least 1."""
        return max(1, self.vram_bytes - self.gpu_context_bytes - k.GPU_SPARE_BYTES - k.VRAM_RESERVE_BYTES)

    @property
    def dram_gb_per_s(self) -> float:
        """Rate that RAM gives to an update and to copies together: the most that anything was seen to reach."""
        reached = [k.OPTIMIZER_DRAM_BYTES[name] * rate for name, rate in self.optimizer_gparams_per_s.items()]
        return max([k.DRAM_SHARE * self.ram_gb_per_s, *reached])

    def copies_s(self, copied_bytes: float) -> float:
        """Seconds in which RAM takes copies and nothing else."""
        return copied_bytes / (self.dram_gb_per_s * GB)

    def update_s(self, states: str, params: float, copied_bytes: float = 0.0) -> float:
        """Seconds of an update on the CPU while `copied_bytes` pass through the same RAM.

        The cores need their measured time whatever else goes on, the memory the bytes of both: the longer of the two.
        Where no rate was measured, the memory alone; fp24_m8, which older profiles lack, at most split8's rate: its
        arithmetic is that of split8 and a rounding."""
        memory_s = self.copies_s(k.OPTIMIZER_DRAM_BYTES[states] * params + copied_bytes)
        rates = self.optimizer_gparams_per_s
        rate = rates.get(states, rates.get("split8") if states == "fp24_m8" else None)
        return memory_s if rate is None else max(memory_s, params / (rate * 1e9))

    def _alone_s(self, read_bytes: float, written_bytes: float) -> float:
        return read_bytes / (self.drive_read_gb_per_s * GB) + written_bytes / (self.drive_write_gb_per_s * GB)

    @property
    def rated_write_bytes(self) -> int:
        """Bytes that the drive is rated to take in its life, by the usual rating of its size."""
        return self.nvme_total_bytes * k.RATED_WRITES_PER_BYTE

    def with_copies(self, link_gb_per_s: float, pageable: float) -> float:
        """Rate over a link of homes of which this share is pageable and copied by threads, the others pinned."""
        copies = min(link_gb_per_s, self.copies_gb_per_s or link_gb_per_s)
        return 1.0 / ((1.0 - pageable) / link_gb_per_s + pageable / copies)

    @property
    def memory_gb_per_s(self) -> float:
        """Rate of the GPU's memory. ProfileError where it is missing: weights would be read in no time."""
        if self.device_memory_gb_per_s is None:
            raise ProfileError(f"{self.name} has no {MEMORY}: run {own_command('probe')} on that machine.")
        return self.device_memory_gb_per_s

    @property
    def nominal(self) -> dict[str, float]:
        """Rates of links and memory that come from data sheets, in GB/s by name."""
        said = {name: self.sources.get(name, "") for name in (*LINKS, MEMORY)}
        return {name: getattr(self, name) for name, source in said.items() if source.startswith("nominal")}

    def words(self) -> str:
        """The machine in a line."""
        gpus = f"{self.num_gpus} x " if self.num_gpus > 1 else ""
        vram = "no GPU" if self.is_cpu else f"{gpus}{format_gib(self.vram_bytes)} VRAM"
        return (
            f"{self.name}: {vram}, {format_gib(self.ram_bytes)} RAM for the run, "
            f"{format_gb(self.nvme_free_bytes)} free on the drive"
        )


@dataclass(frozen=True)
class Overrides:
    """Values that the user gave for the machine; None: as the profile says."""

    vram_gib: float | None = None
    ram_gib: float | None = None
    pinned_gib: float | None = None
    nvme_free_gb: float | None = None
    tflops: float | None = None
    num_gpus: int = 1
    may_add_gpus: bool = False
    """Plan for more GPUs than the machine has, each like its first and on a link of its own."""


def hardware_of(
    machine: Machine, name: str, overrides: Overrides | None = None, *, allow_nominal: bool = False
) -> Hardware:
    """The numbers of `machine`.

    allow_nominal: links nobody measured get data-sheet rates, noted one by one; otherwise they are an error.

    Raises:
        ProfileError: fewer GPUs than asked for, or links that were never measured."""
    overrides = overrides or Overrides()
    is_cpu = not machine.gpus and overrides.vram_gib is None
    if is_cpu and overrides.num_gpus > 1:
        raise ProfileError(f"{overrides.num_gpus} GPUs were asked for, {name} has none. Leave --num_gpus out.")
    notes: list[str] = list(machine.notes)
    if machine.gpus and overrides.num_gpus > len(machine.gpus):
        words = f"{overrides.num_gpus} GPUs were asked for, the machine {name} has {len(machine.gpus)}"
        if not overrides.may_add_gpus:
            raise ProfileError(f"{words}. Lower --num_gpus, or plan as if it had them with --nominal.")
        notes.append(f"{words}: planned as if it had them, each on a link of its own, with the RAM it has")
    if is_cpu:
        notes.append(
            f"{name} has no GPU: planned for training on the CPU. Another machine: outcore plan --machine "
            "rtx4070-laptop; a GPU added to this one: outcore plan --vram_gib 8"
        )
    drive = planning_drive(machine)
    if drive is None:
        notes.append(f"{name} has no local drive in its profile: nothing can be planned on NVMe")
    rates, sources = _rates(machine, name, allow_nominal, notes)
    tflops, is_of_layers, sources["compute_tflops"] = _compute(machine, overrides.tflops)
    memory, sources[MEMORY] = _memory(machine, name, is_cpu, allow_nominal, notes)
    updates, sources["optimizer_gparams_per_s"] = _updates(machine, notes)
    host_layer_s, sources["host_layer_s"] = _host(machine)
    if tflops is None:
        notes.append(
            f"the compute rate of {machine.gpus[0].name if machine.gpus else 'this machine'} is not known: step times "
            "are lower bounds; give --tflops"
        )
    ram_bytes = _bytes_or(overrides.ram_gib, machine.ram_available_bytes)
    gpu_bytes = machine.gpus[0].vram_bytes if machine.gpus else ram_bytes
    is_unified = any(gpu.is_integrated for gpu in machine.gpus) and overrides.vram_gib is None
    if is_unified:  # one memory: what the GPU takes, the run no longer has as RAM
        gpu_bytes = int(k.UNIFIED_VRAM_SHARE * ram_bytes)
        ram_bytes -= gpu_bytes
        notes.append(
            f"GPU and CPU share one memory: {format_gib(gpu_bytes)} of it are planned for the GPU; copies between them "
            "stay within it"
        )
    pinned_bytes = k.WSL2_PINNED_BYTES if machine.is_wsl2 else machine.ram_available_bytes // 2
    if machine.is_wsl2 and overrides.pinned_gib is None:
        notes.append(
            f"WSL2 lets a process pin little memory: planned with {format_gib(pinned_bytes)}; "
            f"{own_command('probe')} tells how much, give it with --pinned_gib"
        )
    if overrides.pinned_gib is not None:
        pinned_bytes = int(overrides.pinned_gib * GIB)
    free_bytes = (drive.free_bytes or 0) if drive else 0
    return Hardware(
        name=name,
        vram_bytes=_bytes_or(overrides.vram_gib, gpu_bytes),
        ram_bytes=ram_bytes,
        pinned_bytes=pinned_bytes,
        nvme_free_bytes=int(overrides.nvme_free_gb * GB) if overrides.nvme_free_gb is not None else free_bytes,
        nvme_total_bytes=(drive.total_bytes or 0) if drive else 0,
        drive_mixed_gb_per_s=machine.links.drive_mixed_gb_per_s if machine.links else None,
        compute_tflops=tflops,
        device_memory_gb_per_s=memory,
        is_rate_of_layers=is_of_layers,
        optimizer_gparams_per_s=updates,
        host_layer_s=host_layer_s,
        is_cpu=is_cpu,
        is_unified=is_unified,
        num_gpus=overrides.num_gpus,
        copies_gb_per_s=_copies(machine, rates["ram_gb_per_s"]),
        identity=_identity(machine),
        sources=sources,
        notes=tuple(notes),
        **rates,
    )


def _identity(machine: Machine) -> str:
    """GPU, CPU and RAM in words; RAM to the nearest 16 GiB, because firmware takes different amounts of it."""
    names = [gpu.name for gpu in machine.gpus] or ["no GPU"]
    ram_gib = 16 * round(machine.ram_total_bytes / (16 * GIB))
    return f"{', '.join(names)}; {machine.cpu_name}; {ram_gib} GiB{'; WSL2' if machine.is_wsl2 else ''}"


def planning_drive(machine: Machine) -> Drive | None:
    """The drive that states would live on: NVMe before others, then the one with most free space."""
    local = [d for d in machine.drives if d.kind not in ("network", "tmpfs") and not d.is_read_only]
    return max(local, key=lambda d: (d.is_nvme, d.free_bytes or 0), default=None)


def nominal_links(machine: Machine) -> LinkRates:
    """Data-sheet rates of a machine nobody measured; the fractions and their sources are in `constants`."""
    gpu_link = machine.gpus[0].pcie_max_gb_per_s if machine.gpus else None
    drive = planning_drive(machine)
    drive_link = pcie_gb_per_s(drive.pcie_gen, drive.pcie_width) if drive else None
    if drive_link:
        read, write = k.NOMINAL_DRIVE_READ_SHARE * drive_link, k.NOMINAL_DRIVE_WRITE_SHARE * drive_link
    else:
        read, write = k.NOMINAL_DRIVE_GB_PER_S.get(drive.kind if drive else "ssd", k.NOMINAL_DRIVE_GB_PER_S["ssd"])
    copy = k.NOMINAL_PCIE_SHARE * (gpu_link or pcie_gb_per_s(3, 8) or 0.0)
    return LinkRates(
        source="nominal",
        h2d_gb_per_s=round(copy, 2),
        d2h_gb_per_s=round(copy, 2),
        drive_read_gb_per_s=round(read, 2),
        drive_write_gb_per_s=round(write, 2),
        ram_gb_per_s=k.NOMINAL_RAM_GB_PER_S,
    )


def _rates(
    machine: Machine, name: str, allow_nominal: bool, notes: list[str]
) -> tuple[dict[str, float], dict[str, str]]:
    links = machine.links
    rates, sources = {}, {}
    wanted = LINKS if machine.gpus else tuple(link for link in LINKS if link not in GPU_LINKS)
    missing = [link for link in wanted if links is None or getattr(links, link) is None]
    if missing and not allow_nominal:
        what = "no link of it was measured" if len(missing) == len(wanted) else f"not measured: {', '.join(missing)}"
        raise ProfileError(
            f"The profile of {name} is incomplete ({what}). Run {own_command('probe')} on that machine, or add "
            "--nominal to plan with data-sheet rates."
        )
    fallback = nominal_links(machine) if missing else None
    for link in wanted:
        if link in missing:
            assert fallback is not None
            rates[link], sources[link] = getattr(fallback, link), "nominal"
            notes.append(f"{link} was not measured: planned with the nominal {rates[link]:g} GB/s")
        else:
            assert links is not None
            rates[link], sources[link] = getattr(links, link), links.source
    for link in GPU_LINKS if not machine.gpus else ():  # a copy in RAM reads and writes; a triad counts three operands
        rates[link], sources[link] = rates["ram_gb_per_s"] / 3, "a third of the memory's rate, without a GPU"
    return rates, sources


def _updates(machine: Machine, notes: list[str]) -> tuple[dict[str, float], str]:
    """(rates of the CPU optimizer by format, where they come from)."""
    links = machine.links
    if links is not None and links.optimizer_gparams_per_s:
        words = ", ".join(f"{name} {rate:g}" for name, rate in links.optimizer_gparams_per_s.items())
        return links.optimizer_gparams_per_s, f"{links.source}: {words}"
    if links is not None and links.source == "measured":
        notes.append(
            "the CPU optimizer was not measured: its time is planned from the memory's rate, which on one server made "
            f"steps up to 50 % too long; {own_command('probe')} measures it"
        )
    return {}, f"the memory's: bytes of an update at {k.DRAM_SHARE:g} of ram_gb_per_s"


def _copies(machine: Machine, ram_gb_per_s: float) -> float:
    if machine.links is not None and machine.links.pageable_to_gpu_gb_per_s is not None:
        return machine.links.pageable_to_gpu_gb_per_s
    return round(copies_gb_per_s(machine.cpu_cores, ram_gb_per_s), 2)


def _host(machine: Machine) -> tuple[float, str]:
    links = machine.links
    if links is not None and links.host_layer_s is not None:
        return links.host_layer_s, links.source
    return k.HOST_LAYER_S, f"{k.HOST_LAYER_S:g} s, as measured on a server"


def _compute(machine: Machine, given: float | None) -> tuple[float | None, bool, str]:
    """(TFLOPS, whether they are of whole layers, where they come from): given, measured, by name."""
    if given is not None:
        return given, True, "given"
    links = machine.links
    if links is not None and links.matmul_tflops and links.device_memory_gb_per_s:
        share = f"{links.matmul_tflops:g} TFLOPS of matrix products x {k.MATMUL_SHARE:g}, {links.source}"
        return round(links.matmul_tflops * k.MATMUL_SHARE, 3), False, share
    tflops, source = _tflops(machine)
    return tflops, True, source


def _memory(
    machine: Machine, name: str, is_cpu: bool, allow_nominal: bool, notes: list[str]
) -> tuple[float | None, str]:
    """(GB/s of the device's memory, where they come from): the profile's, else by the GPU's name. ProfileError where
    neither knows it, unless nominal rates are allowed or the GPU is one that the user adds."""
    links = machine.links
    if links is not None and links.device_memory_gb_per_s and (machine.gpus or is_cpu):
        return links.device_memory_gb_per_s, links.source
    if is_cpu:
        return None, "not measured"
    gpu = machine.gpus[0].name if machine.gpus else "the GPU that is added"
    if (card := card_by_name(gpu)) is not None:
        return card.memory_gb_per_s, "nominal: the data sheet's, by the GPU's name"
    if machine.gpus and not allow_nominal:
        raise ProfileError(
            f"The profile of {name} has no memory rate of {gpu} ({MEMORY}): weights would be read in no time. "
            f"Run {own_command('probe')} on that machine, or add --nominal to plan with the slowest card's."
        )
    rate = min(card.memory_gb_per_s for card in CARDS.values())
    notes.append(f"the memory rate of {gpu} is not known: planned with the slowest known card's {rate:g} GB/s")
    return rate, "nominal: the slowest known card's"


def _tflops(machine: Machine) -> tuple[float | None, str]:
    if not machine.gpus:
        rate = k.NOMINAL_CPU_TFLOPS_PER_CORE * machine.cpu_cores
        return round(rate, 3), f"{machine.cpu_cores} cores x {k.NOMINAL_CPU_TFLOPS_PER_CORE:g} TFLOPS, nominal"
    if (card := card_by_name(machine.gpus[0].name)) is None:
        return None, "not known"
    words = f"{card.peak_tflops:g} TFLOPS x {card.layers_share:g} ({card.source})"
    return round(card.peak_tflops * card.layers_share, 1), words


def _bytes_or(gib: float | None, otherwise: int) -> int:
    return otherwise if gib is None else int(gib * GIB)
