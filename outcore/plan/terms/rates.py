"""Traffic of a step, counted without a rate, and its seconds: a machine's rates as far as an engine reaches them. How
passes overlap is each engine's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from outcore.common.quantities import GB
from outcore.plan import constants as k
from outcore.plan.hardware import Hardware
from outcore.plan.record import StepTime


@dataclass(frozen=True)
class PassSeconds:
    """One pass, each term as if it ran alone."""

    device_s: float
    host_s: float
    h2d_s: float
    d2h_s: float
    drive_s: float
    gpu_s: float
    """The longer of device and host, and what the GPU waits for."""


@dataclass(frozen=True)
class Rates(ABC):
    """One engine on one machine."""

    hardware: Hardware
    states: str
    """Format of the optimizer states."""
    drive_share: float
    """Share of the drive's rate that is reached."""
    attention_share: float = k.ATTENTION_SHARE
    slower: float = 1.0
    """Times that layers take as long as compiled ones."""
    pageable: float = 0.0
    """Share of homes that is not pinned."""

    @abstractmethod
    def seconds(self, traffic: Traffic) -> StepTime:
        """The step, with what overlaps."""

    def of(self, one: Pass) -> PassSeconds:
        """One pass by term."""
        hw = self.hardware
        h2d_rate, d2h_rate = (hw.with_copies(link, self.pageable) * GB for link in (hw.h2d_gb_per_s, hw.d2h_gb_per_s))
        device_s = self.slower * hw.compute_s(one.flops, one.device_bytes, one.attention_flops, self.attention_share)
        host_s, h2d_s = hw.host_s(one.launched_layers), one.h2d_bytes / h2d_rate
        gpu_s = max(device_s, host_s)
        if one.awaited_read_bytes is not None:
            gpu_s += max(h2d_s, hw.drive_s(one.awaited_read_bytes, 0.0))
        drive_s = hw.drive_s(one.read_bytes, one.written_bytes) / self.drive_share
        return PassSeconds(device_s, host_s, h2d_s, one.d2h_bytes / d2h_rate, drive_s, gpu_s)

    def cpu_s(self, *passes: Pass) -> float:
        """Updates and copies that share the RAM while these passes run."""
        ram_bytes = sum(one.ram_bytes for one in passes)
        params, copied = sum(one.updated_params for one in passes), sum(one.copied_bytes for one in passes)
        update_s = self.hardware.update_s(self.states, params, copied) if params or copied else 0.0
        return update_s + ram_bytes / (self.hardware.ram_gb_per_s * GB)


def overlapped_s(*terms_s: float) -> float:
    """Wall clock of terms that run at the same time: the longest, and a residue of the second longest."""
    first, second, *_ = [*sorted(terms_s, reverse=True), 0.0, 0.0]
    return first + k.OVERLAP_RESIDUE * second


@dataclass(frozen=True)
class Pass:
    """One way through the model, forward, backward or the update, on one GPU; bytes by direction."""

    flops: float = 0.0
    """Matrix products."""
    attention_flops: float = 0.0
    device_bytes: float = 0.0
    """Through the device's own memory, beside the operands of matrix products."""
    launched_layers: float = 0.0
    """Eager layers' worth of launches by the host."""
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    read_bytes: float = 0.0
    """From the drive."""
    written_bytes: float = 0.0
    copied_bytes: float = 0.0
    """Copies through RAM beside an update's own."""
    updated_params: float = 0.0
    """Parameters that the CPU updates meanwhile."""
    ram_bytes: float = 0.0
    """An update's at the plain rate of RAM, where no measured one applies."""
    awaited_read_bytes: float | None = None
    """Weights from the drive that layers wait for, and for the link: nothing comes ahead of its use. None: it does."""


@dataclass(frozen=True)
class Traffic:
    """A step, pass by pass."""

    passes: tuple[Pass, ...]
    are_apart: bool = True
    """Whether each pass waits for the one before. Otherwise they overlap as if they were one."""
    between_layers: float = 0.0
    """Eager layers' worth of launches that no work of the GPU hides."""

    def sum(self, of: Callable[[Pass], float]) -> float:
        """Total of one figure."""
        return sum(of(one) for one in self.passes)

    @property
    def read_bytes(self) -> float:
        """All that the drive reads in a step."""
        return self.sum(lambda one: one.read_bytes)

    @property
    def written_bytes(self) -> float:
        """All that the drive writes in a step."""
        return self.sum(lambda one: one.written_bytes)
