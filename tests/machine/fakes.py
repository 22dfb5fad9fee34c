"""Fake /proc and /sys trees, and nvidia-smi answers, for machines that are not here."""

from collections.abc import Mapping, Sequence
from pathlib import Path

RTX4070_CSV = "0, NVIDIA GeForce RTX 4070 Laptop GPU, 8188, 8.9, 580.65.06, 1, 4, 8, 8, 00000000:01:00.0, GPU-1234\n"
BANNER_13 = "| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: 13.0 |"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def add_disk(
    root: Path,
    name: str,
    device: str,
    files: Mapping[str, str] | None = None,
    partitions: Mapping[str, str] | None = None,
) -> Path:
    """A whole disk below sys/devices/<device>/block/<name>; `partitions` is name -> 'major:minor'."""
    directory = root / "sys/devices" / device / "block" / name
    directory.mkdir(parents=True, exist_ok=True)
    for entry, text in (files or {}).items():
        write(directory / entry, text)
    link(root / "sys/class/block" / name, directory)
    for partition, number in (partitions or {}).items():
        write(directory / partition / "partition", "1")
        link(root / "sys/class/block" / partition, directory / partition)
        link(root / "sys/dev/block" / number, directory / partition)
    return directory


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def add_mounts(root: Path, *lines: str) -> None:
    """Lines as 'major:minor root mount_point options fstype source super_options'."""
    text = ""
    for i, line in enumerate(lines):
        number, mount_root, point, options, filesystem, source, super_options = line.split(" ")
        text += f"{30 + i} 1 {number} {mount_root} {point} {options} shared:1 - {filesystem} {source} {super_options}\n"
    write(root / "proc/self/mountinfo", text)


def smi(listing: str = RTX4070_CSV, banner: str = BANNER_13, code: int = 0):
    """A command runner that knows nvidia-smi only."""

    def run(command: Sequence[str]) -> tuple[int, str]:
        if Path(command[0]).name != "nvidia-smi":
            raise FileNotFoundError(2, "No such file", command[0])
        return (code, listing) if len(command) > 1 else (0, banner)

    return run


def no_tools(command: Sequence[str]) -> tuple[int, str]:
    raise FileNotFoundError(2, "No such file", command[0])


def linux_root(root: Path, *, wsl: str = "", ram_kib: int = 64 * 1024 * 1024) -> Path:
    """/proc of a small Ubuntu; `wsl` is what the kernel name carries there."""
    kernel = f"5.15.167.4-{wsl}" if wsl else "6.8.0-45-generic"
    write(root / "proc/version", f"Linux version {kernel} (builder) #1 SMP")
    write(root / "proc/sys/kernel/osrelease", kernel + "\n")
    write(root / "etc/os-release", 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\n')
    cpu = "processor\t: {}\nmodel name\t: Core i7\nphysical id\t: 0\ncore id\t\t: {}\nflags\t\t: fpu avx avx2 fma\n"
    write(root / "proc/cpuinfo", "\n".join(cpu.format(i, i // 2) for i in range(4)) + "\n")
    memory = f"MemTotal: {ram_kib} kB\nMemFree: 100 kB\nMemAvailable: {ram_kib // 2} kB\nSwapTotal: 2048 kB\n"
    write(root / "proc/meminfo", memory)
    return root
