"""The frozen records that say what a computer is, and their JSON form (no schema library:
this runs before any install).

A `Machine` is detected, saved beside a run, and loaded again as a profile, so that a plan can be made for a computer
that is not here. Unknown keys and missing fields are refused when loading: a profile that half fits plans nonsense."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path

PROFILES_DIR = Path(__file__).resolve().parent.parent / "profiles"
FORMAT_VERSION = 1

# Usable bytes/s per lane and direction after line coding (8b/10b for gen 1-2, 128b/130b after), PCI-SIG base
# specifications; packet overhead takes another 10-15 %.
PCIE_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}

DRIVE_KINDS = ("nvme", "ssd", "hdd", "network", "tmpfs", "virtual", "unknown")


def pcie_gb_per_s(gen: int | None, width: int | None) -> float | None:
    """Raw rate of a PCIe link in one direction, or None when its generation or width is not known."""
    lane_gb_per_s = PCIE_LANE_GB_PER_S.get(gen or 0)
    return round(lane_gb_per_s * width, 3) if lane_gb_per_s and width else None


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver describes it."""

    index: int
    name: str
    vram_bytes: int
    compute_capability: tuple[int, int] | None = None
    """(8, 9) for Ada; None where the driver is too old to say."""
    driver_version: str | None = None
    pcie_gen_current: int | None = None
    """At idle this is lower than under load: a laptop link sleeps at generation 1."""
    pcie_gen_max: int | None = None
    """Best PCIe generation of GPU and slot together."""
    pcie_width_current: int | None = None
    pcie_width_max: int | None = None
    pci_bus_id: str | None = None
    uuid: str | None = None
    is_integrated: bool = False
    """True for a GPU that has no memory of its own and shares the RAM: what is kept there is not kept twice."""

    @property
    def pcie_max_gb_per_s(self) -> float | None:
        """Line rate of the link in one direction at its best; about 85-90 % of it is reached by copies."""
        return pcie_gb_per_s(self.pcie_gen_max, self.pcie_width_max)


@dataclass(frozen=True)
class Drive:
    """Drive under a path."""

    path: str
    """The path that was asked about."""
    kind: str
    """One of DRIVE_KINDS. With several disks underneath (LVM, RAID, btrfs) the slowest kind."""
    reason: str
    """Why `kind` is what it is, in words."""
    mount_point: str
    filesystem: str
    device: str | None = None
    """Source of the mount as the kernel names it: '/dev/nvme0n1p2', 'server:/export', 'C:\\'."""
    disks: tuple[str, ...] = ()
    """Whole disks underneath: ('nvme0n1',)."""
    model: str | None = None
    rotational: bool | None = None
    rotational_trusted: bool = False
    """False on virtual disks: WSL2 and virtio call every disk rotational."""
    is_removable: bool = False
    is_usb: bool = False
    is_read_only: bool = False
    logical_block_bytes: int | None = None
    """Alignment that O_DIRECT asks for on the disk (the largest of several)."""
    pcie_gen: int | None = None
    pcie_width: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    """Bytes that an ordinary user may still write (the filesystem's reserve is not counted)."""
    read_gb_per_s: float | None = None
    """Sequential reads as the probe measured them; None: never measured, as for the two below."""
    write_gb_per_s: float | None = None
    iops_4k: float | None = None
    """Random reads of 4 KiB per second."""

    @property
    def is_nvme(self) -> bool:
        return self.kind == "nvme"


@dataclass(frozen=True)
class LinkRates:
    """Rates at which bytes move here, in GB/s (10**9), and are worked on; None where nobody has measured."""

    source: str
    """'measured' by the probe or 'nominal' from data sheets."""
    h2d_gb_per_s: float | None = None
    d2h_gb_per_s: float | None = None
    both_ways_gb_per_s: float | None = None
    """Sum of the two directions at the same time."""
    drive_read_gb_per_s: float | None = None
    drive_write_gb_per_s: float | None = None
    drive_mixed_gb_per_s: float | None = None
    """Sum of reads and writes at the same time."""
    ram_gb_per_s: float | None = None
    matmul_tflops: float | None = None
    """Matrix products of the first GPU in bf16; without a GPU those of the CPU in fp32."""
    device_memory_gb_per_s: float | None = None
    """Copies within that device's memory, reads and writes counted."""
    optimizer_gparams_per_s: dict[str, float] | None = None
    """Format of the states -> 10^9 parameters per second that the CPU optimizer updates, all cores but two at work."""
    host_layer_s: float | None = None
    """Seconds in which one core launches an eager decoder layer on the first GPU: forward, recomputation, backward."""
    pageable_to_gpu_gb_per_s: float | None = None
    """RAM that is not pinned, copied into a lane's slots by its threads."""
    write_combined_share: float | None = None
    """Rate from write-combined pinned memory to the GPU over the rate from default pinned memory."""


@dataclass(frozen=True)
class Machine:
    """This computer, or one that a profile describes."""

    os_family: str
    """'linux' | 'windows' | 'macos'."""
    os_name: str
    """'Ubuntu 24.04.1 LTS'."""
    kernel: str
    architecture: str
    """'x86_64' | 'aarch64'."""
    is_wsl2: bool
    python_version: str
    cpu_name: str
    cpu_cores: int
    cpu_threads: int
    ram_total_bytes: int
    """Bytes of RAM that this process can ever have: physical memory, or the container's limit when that is lower."""
    ram_available_bytes: int
    cpu_simd: tuple[str, ...] = ()
    """Flags of SIMD_FLAGS that the CPU has: ('avx2', 'avx512f', ...)."""
    numa_nodes: int = 1
    swap_total_bytes: int = 0
    memlock_limit_bytes: int | None = None
    """RLIMIT_MEMLOCK; None = unlimited or not known. It binds mlock (DeepSpeed), not cudaHostAlloc."""
    gpus: tuple[Gpu, ...] = ()
    nvlink_domains: tuple[tuple[int, ...], ...] = ()
    """Numbers of GPUs whose every pair NVLink joins, group by group."""
    other_gpus: tuple[str, ...] = ()
    """Display adapters beside NVIDIA's ('Intel at 0000:00:02.0, integrated'), which nothing here computes on."""
    driver_version: str | None = None
    cuda_driver_version: str | None = None
    """The newest CUDA that the driver can run: '12.8'."""
    drives: tuple[Drive, ...] = ()
    links: LinkRates | None = None
    notes: tuple[str, ...] = ()
    """Text for people: what could not be read, and why."""

    @property
    def cuda_driver_major(self) -> int | None:
        return int(self.cuda_driver_version.split(".")[0]) if self.cuda_driver_version else None

    @property
    def has_gpu(self) -> bool:
        return bool(self.gpus)

    def to_dict(self) -> dict[str, typing.Any]:
        """Plain lists, dicts, numbers and strings; `from_dict` is its inverse."""
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, record: dict[str, typing.Any]) -> Machine:
        """Raises ValueError naming the field that is unknown, missing or of the wrong type."""
        if not isinstance(record, dict):
            raise ValueError(f"a machine profile is a JSON object, got {type(record).__name__}")
        fields = dict(record)
        version = fields.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(
                f"machine profile has format_version {version!r}, this outcore reads {FORMAT_VERSION}: detect it again"
            )
        return _build(cls, fields, "machine")

    @classmethod
    def from_json(cls, text: str) -> Machine:
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"machine profile is not JSON ({error}): detect the machine again") from error
        return cls.from_dict(record)

    def save(self, path: str | Path) -> Path:
        """Write the profile as JSON (the folder is made); OSError when it cannot be written."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.to_json() + "\n", encoding="utf-8")
        return target

    @classmethod
    def load(cls, path_or_name: str | Path) -> Machine:
        """A profile by file, or by the name of a file that is shipped. ValueError when there is none."""
        candidate = Path(path_or_name)
        if not candidate.is_file():
            candidate = PROFILES_DIR / f"{path_or_name}.json"
        if not candidate.is_file():
            raise ValueError(f"no machine profile {str(path_or_name)!r}: there is no such JSON file")
        try:
            return cls.from_json(candidate.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{candidate}: {error}") from error


def _build(cls: type, record: typing.Any, where: str) -> typing.Any:
    """A dataclass from a dict, with types checked by its annotations."""
    if not isinstance(record, dict):
        raise ValueError(f"{where} must be an object, got {type(record).__name__}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(record) - set(fields))
    if unknown:
        raise ValueError(f"{where} has unknown field(s) {', '.join(unknown)}")
    missing = [
        name
        for name, f in fields.items()
        if name not in record and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where} lacks field(s) {', '.join(missing)}")
    return cls(**{name: _convert(hints[name], value, f"{where}.{name}") for name, value in record.items()})


def _convert(hint: typing.Any, value: typing.Any, where: str) -> typing.Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [a for a in args if a is not type(None)]
        return None if value is None and len(inner) < len(args) else _convert(inner[0], value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where} must be a list, got {type(value).__name__}")
        if args[-1] is Ellipsis:
            return tuple(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
        if len(value) != len(args):
            raise ValueError(f"{where} must have {len(args)} entries, got {len(value)}")
        return tuple(_convert(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(args, value)))
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{where} must be an object, got {type(value).__name__}")
        return {name: _convert(args[1], item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _build(hint, value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    kind: type = hint
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} must be {kind.__name__}, got {value!r}")
    return value
