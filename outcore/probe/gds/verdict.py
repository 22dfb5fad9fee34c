"""Judging the facts: which path data takes here, why not a better one, and what would change that. Pure functions.

The paths, best first:

    gds-nvfs       DMA from drive to GPU through the nvidia-fs kernel module
    gds-p2pdma     DMA from drive to GPU through the kernel's own PCI P2PDMA
    cufile-compat  kvikio calls libcufile, which bounces through host memory inside
    kvikio-posix   kvikio itself reads with POSIX calls and copies
    staged         outcore's own pinned ring: drive, pinned slot, copy engine

A direct verdict rests on the decisive read alone (compat off everywhere, bytes compared); attribute 116 and product
names only explain a refusal, they never decide."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from outcore.common.words import own_command
from outcore.probe.gds.facts import GdsFacts, ReadTest

PATHS = ("gds-nvfs", "gds-p2pdma", "cufile-compat", "kvikio-posix", "staged")

# NVIDIA GDS troubleshooting guide, "P2PDMA Supported GPUs" (2026): nothing else is on the list, GeForce in particular.
P2PDMA_GPUS = ("A100", "A40", "L4", "L40S", "H100", "H200", "B100", "B200", "B300")
P2PDMA_MIN_KERNEL = (6, 2)
P2PDMA_MIN_CUDA = (12, 8)


@dataclass(frozen=True)
class LadderRow:
    """One step of the ladder: what was asked, what was found. `state` is 'yes', 'no', 'unknown' or 'info'."""

    step: str
    state: str
    found: str


@dataclass(frozen=True)
class PathVerdict:
    """The path, in words and with reasons."""

    path: str
    headline: str
    reasons: tuple[str, ...]
    """Why this path."""
    why_not: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Reasons against each better path on this machine."""
    would_change: tuple[str, ...] = ()
    """Changes that the owner could make; empty when nothing can be done."""

    @property
    def is_direct(self) -> bool:
        """Whether drive and GPU exchange data without host memory."""
        return self.path in ("gds-nvfs", "gds-p2pdma")


def gpu_class(name: str) -> str:
    """'consumer' (GeForce, Titan), 'workstation' (RTX A/Ada/PRO, Quadro) or 'data-centre', from the product name."""
    if re.search(r"geforce|titan", name, re.IGNORECASE):
        return "consumer"
    if re.search(r"quadro|\brtx\b", name, re.IGNORECASE):
        return "workstation"
    return "data-centre"


def on_p2pdma_list(name: str) -> bool:
    """Whether NVIDIA lists this GPU for the P2PDMA path ('NVIDIA H200' yes, 'NVIDIA A4000' no)."""
    words = re.split(r"[\s\-_/]+", name.upper())
    return gpu_class(name) == "data-centre" and any(gpu in words for gpu in P2PDMA_GPUS)


def judge(facts: GdsFacts) -> PathVerdict:
    """The verdict for these facts."""
    path, headline, reasons = _path(facts)
    better = PATHS[: PATHS.index(path)]
    explain = {
        "gds-nvfs": _why_not_nvidia_fs,
        "gds-p2pdma": _why_not_p2pdma,
        "cufile-compat": _why_not_cufile,
        "kvikio-posix": _why_not_kvikio,
    }
    why_not = {name: tuple(explain[name](facts)) for name in better}
    return PathVerdict(path, headline, tuple(reasons), why_not, tuple(_would_change(facts, path)))


def _path(facts: GdsFacts) -> tuple[str, str, list[str]]:
    if facts.platform == "win32":
        return (
            "staged",
            "Native Windows: no GPUDirect Storage; data goes through outcore's pinned ring.",
            ["cuFile exists for Linux only, and kvikio has no Windows wheels"],
        )
    if not facts.gpus:
        reason = facts.gpu_error or "no GPU was found"
        return "staged", "No GPU: files are read into plain host memory; there is nothing to send them on to.", [reason]
    if facts.direct.status == "ok":
        return _direct_path(facts)
    if facts.auto.status == "ok" and facts.auto.backend == "POSIX":
        reasons = ["one read with kvikio's own choice was counted on its POSIX backend"]
        return "kvikio-posix", "No GPUDirect Storage: kvikio reads with POSIX calls and copies to the GPU.", reasons
    if facts.auto.status == "ok":
        reasons = [
            "the decisive read without any fallback failed, the same read with fallbacks succeeded"
            + (" and kvikio counted it on cuFile" if facts.auto.backend == "GDS" else ""),
            "so libcufile bounces the data through host memory while kvikio still calls it GDS",
        ]
        return "cufile-compat", "No GPUDirect Storage: libcufile runs in its own compatibility mode.", reasons
    return "staged", "No GPUDirect Storage: data goes through outcore's pinned ring.", _why_not_kvikio(facts)


def _direct_path(facts: GdsFacts) -> tuple[str, str, list[str]]:
    proof = "a read into GPU memory with every fallback switched off succeeded and its bytes are right"
    if facts.direct.nvidia_fs_moved:
        return (
            "gds-nvfs",
            "GPUDirect Storage works, through nvidia-fs.",
            [proof, "the nvidia-fs counters moved with it"],
        )
    witness = (
        "the nvidia-fs counters did not move with it" if facts.nvidia_fs is not None else "nvidia-fs is not loaded"
    ) + ", so the kernel's P2PDMA carried it"
    return "gds-p2pdma", "GPUDirect Storage works, through the kernel's P2PDMA.", [proof, witness]


def _common_obstacles(facts: GdsFacts) -> list[str]:
    """Obstacles to both direct paths."""
    if facts.platform == "win32":
        return ["cuFile exists for Linux only"]
    if not facts.platform.startswith("linux"):
        return [f"cuFile exists for Linux only, this is {facts.platform}"]
    if not facts.gpus:
        return [f"no GPU: {facts.gpu_error or 'none was found'}"]
    reasons = []
    if facts.is_wsl2:
        reasons.append(
            "WSL2: the GPU is para-virtualised and the drive is a virtual disk, so neither can DMA to the other"
        )
    name = facts.gpus[0].name
    if facts.gpus[0].gpu_direct_rdma_supported is False:
        reasons.append(f"CUDA attribute 116 is 0: {name} does not let other devices reach its memory")
    if facts.drive_filesystem and facts.drive_filesystem not in ("ext4", "xfs") and facts.drive_kind != "network":
        reasons.append(f"the test directory is on {facts.drive_filesystem}; local GPUDirect Storage needs ext4 or xfs")
    if facts.drive_kind == "virtual" and not facts.is_wsl2:
        reasons.append(f"{facts.drive_device or 'the drive'} is a virtual disk, not an NVMe on the GPU's PCIe tree")
    elif facts.drive_kind in ("ssd", "hdd", "tmpfs"):
        reasons.append(f"the drive is of kind {facts.drive_kind}; local GPUDirect Storage needs NVMe")
    return reasons


def _decisive(test: ReadTest) -> list[str]:
    if test.status == "not-run":
        return []
    words = {
        "refused": "the decisive read was refused",
        "wrong-bytes": "the decisive read returned wrong bytes",
        "signal": "libcufile aborted in the decisive read",
        "timeout": "the decisive read hung",
    }.get(test.status)
    return [f"{words}: {test.detail}"] if words else []


def _why_not_nvidia_fs(facts: GdsFacts) -> list[str]:
    reasons = _common_obstacles(facts)
    if facts.gpus and facts.platform.startswith("linux"):
        name = facts.gpus[0].name
        if gpu_class(name) == "consumer":
            reasons.append(
                f"{name} is a consumer GPU; NVIDIA enables nvidia-fs on data-centre and workstation GPUs only"
            )
        if facts.nvidia_fs is None:
            reasons.append("the nvidia-fs kernel module is not loaded")
        elif facts.direct.status == "ok":
            reasons.append("nvidia-fs is loaded, but libcufile preferred P2PDMA: its counters did not move")
        if not facts.kvikio_version or facts.kvikio_error:
            reasons += _why_not_cufile(facts)
        if facts.gpus[0].gpu_direct_rdma_supported and facts.direct.status != "ok":
            reasons.append("CUDA attribute 116 is 1, which is necessary but proves nothing")
        reasons += _decisive(facts.direct)
    return reasons


def _why_not_p2pdma(facts: GdsFacts) -> list[str]:
    reasons = _common_obstacles(facts)
    if not facts.gpus or not facts.platform.startswith("linux"):
        return reasons
    name = facts.gpus[0].name
    if not on_p2pdma_list(name):
        reasons.append(f"{name} is not on NVIDIA's list for P2PDMA ({', '.join(P2PDMA_GPUS)})")
    if not facts.is_wsl2:
        if facts.open_kernel_module is False:
            reasons.append("the driver is the closed kernel module; P2PDMA needs the open one")
        if facts.kernel_version < P2PDMA_MIN_KERNEL:
            reasons.append(f"kernel {facts.kernel_release} is older than 6.2")
        if facts.kernel_has_p2pdma is False:
            reasons.append("this kernel was built without PCI_P2PDMA")
        if _version(facts.cuda_version) < P2PDMA_MIN_CUDA:
            reasons.append(f"the driver speaks CUDA {facts.cuda_version or 'of unknown version'}; P2PDMA needs 12.8")
        if not (facts.cufile_json.get("properties") or {}).get("use_pci_p2pdma"):
            where = facts.cufile_json_path or "/etc/cufile.json, which is missing here,"
            reasons.append(f"{where} does not set use_pci_p2pdma")
    if not facts.kvikio_version or facts.kvikio_error:
        reasons += _why_not_cufile(facts)
    reasons += _decisive(facts.p2pdma_trial if facts.p2pdma_trial.status != "not-run" else facts.direct)
    return reasons


def _why_not_cufile(facts: GdsFacts) -> list[str]:
    if facts.platform == "win32" or not facts.gpus:
        return _common_obstacles(facts)
    if not facts.kvikio_version:
        return ["kvikio is not installed"]
    if facts.kvikio_error:
        return [f"kvikio {facts.kvikio_version} cannot be used: {facts.kvikio_error}"]
    if facts.is_wsl2:
        return ["kvikio never calls libcufile under WSL2 (the kernel's name contains 'microsoft')"]
    if facts.auto.status == "ok" and facts.auto.backend == "POSIX":
        return ["kvikio did not choose libcufile (not found, or /run/udev is not readable, as in a container)"]
    return [f"kvikio's read failed ({facts.auto.status}): {facts.auto.detail}"] if facts.auto.status != "ok" else []


def _why_not_kvikio(facts: GdsFacts) -> list[str]:
    if facts.platform == "win32":
        return ["kvikio has no Windows wheels"]
    if facts.auto.status == "not-run" and facts.gpus and facts.kvikio_version and not facts.kvikio_error:
        return ["kvikio's read was not tried (no test file could be written)"]
    if facts.gpus and facts.kvikio_version and not facts.kvikio_error:
        return [f"kvikio's read failed ({facts.auto.status}): {facts.auto.detail}"]
    return _why_not_cufile(facts)


def _would_change(facts: GdsFacts, path: str) -> list[str]:
    if path in ("gds-nvfs", "gds-p2pdma"):
        return []
    if facts.platform == "win32":
        return [
            "WSL2 gives kvikio's POSIX path and everything else of outcore, still without GPUDirect Storage: "
            "run `wsl --install` in an administrator's PowerShell, then install outcore inside Ubuntu"
        ]
    if not facts.gpus:
        return ["an NVIDIA GPU and its driver (check with nvidia-smi)"]
    changes = []
    name = facts.gpus[0].name
    if not facts.kvikio_version or facts.kvikio_error:
        changes.append(f"install kvikio for your CUDA (`{own_command('setup')}` says how), then run this again")
    if gpu_class(name) == "consumer":
        changes.append(
            f"nothing gives {name} GPUDirect Storage"
            + (": a native Linux boot would not either" if facts.is_wsl2 else "")
            + ". The pinned ring runs at the drive's speed, so little is lost"
        )
        return changes
    if facts.is_wsl2:
        return [*changes, f"boot Linux natively: {name} can use GPUDirect Storage there"]
    if facts.drive_kind == "virtual":
        changes.append("pass a real NVMe drive through to this machine, or use a bare-metal one")
    if facts.p2pdma_trial.status == "ok":
        changes.append(
            'set "properties": {"use_pci_p2pdma": true} in /etc/cufile.json: tested here just now, and it works'
        )
    else:
        if facts.nvidia_fs is None:
            changes.append("nvidia-fs: `sudo apt install nvidia-gds && sudo modprobe nvidia-fs`, then run this again")
        if on_p2pdma_list(name):
            changes.append(
                "or P2PDMA: open kernel module, kernel 6.2 or newer, use_pci_p2pdma true in /etc/cufile.json, and in "
                '/etc/modprobe.d `options nvidia NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;"`'
            )
    return changes


def _version(text: str | None) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)
