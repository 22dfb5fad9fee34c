"""State of the PCIe link and the GPU's clocks *while* data moves: generation, width, throttling, temperature.

A laptop's link sleeps at generation 1 when idle, so only samples under load count: the best generation and width that
were seen. Reads NVML every 50 ms on its own thread; where NVML is missing or refuses (WSL2 refuses some questions) the
fields stay None and `error` says why."""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass, field
from typing import Any

SAMPLE_EVERY_S = 0.05

# nvml.h, nvmlClocksEventReason*: bits of the reasons for which a GPU runs below its clocks.
THROTTLE_REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "thermal limit (software)",
    0x40: "thermal limit (hardware)",
    0x80: "power brake",
}
THERMAL_BITS = 0x08 | 0x20 | 0x40


@dataclass
class LinkUnderLoad:
    """The best the link did and the worst the clocks suffered while it was watched."""

    pcie_gen: int | None = None
    pcie_width: int | None = None
    pcie_gen_max: int | None = None
    pcie_width_max: int | None = None
    throttle_bits: int = 0
    temperature_c: int | None = None
    samples: int = 0
    error: str = ""
    missing: set[str] = field(default_factory=set)

    @property
    def throttle_reasons(self) -> list[str]:
        """Reasons in words; empty when nothing was seen (or nothing could be asked)."""
        return [words for bit, words in THROTTLE_REASONS.items() if self.throttle_bits & bit]

    @property
    def thermal(self) -> bool:
        """Whether heat slowed the GPU down while it was watched."""
        return bool(self.throttle_bits & THERMAL_BITS)


class LoadSampler:
    """Watches one GPU between `__enter__` and `__exit__`; `seen` is complete afterwards.

    gpu: its index, or its UUID ('GPU-...') which CUDA_VISIBLE_DEVICES does not shift.
    nvml: stands in for the module `pynvml` in tests."""

    def __init__(self, gpu: int | str, nvml: Any | None = None, every_s: float = SAMPLE_EVERY_S) -> None:
        self.seen = LinkUnderLoad()
        self._gpu, self._nvml, self._every_s = gpu, nvml, every_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._handle: Any = None

    def __enter__(self) -> LoadSampler:
        try:
            if self._nvml is None:
                self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            by_uuid = isinstance(self._gpu, str)
            find = self._nvml.nvmlDeviceGetHandleByUUID if by_uuid else self._nvml.nvmlDeviceGetHandleByIndex
            self._handle = find(self._gpu)
        except Exception as error:  # pynvml has its own exception tree, and a missing library is an OSError
            self.seen.error = f"link and clocks could not be watched: {type(error).__name__}: {error}"
            return self
        self.seen.pcie_gen_max = self._ask("nvmlDeviceGetMaxPcieLinkGeneration")
        self.seen.pcie_width_max = self._ask("nvmlDeviceGetMaxPcieLinkWidth")
        self._thread = threading.Thread(target=self._watch, name="outcore-load-sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            assert self._nvml is not None
            self._nvml.nvmlShutdown()

    def _watch(self) -> None:
        while True:
            self._sample()
            if self._stop.wait(self._every_s):
                return

    def _sample(self) -> None:
        seen = self.seen
        seen.pcie_gen = _larger(seen.pcie_gen, self._ask("nvmlDeviceGetCurrPcieLinkGeneration"))
        seen.pcie_width = _larger(seen.pcie_width, self._ask("nvmlDeviceGetCurrPcieLinkWidth"))
        seen.temperature_c = _larger(seen.temperature_c, self._ask("nvmlDeviceGetTemperature", 0))
        seen.throttle_bits |= self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        seen.samples += 1

    def _ask(self, function: str, *arguments: Any) -> int | None:
        if function in self.seen.missing:
            return None
        try:
            return int(getattr(self._nvml, function)(self._handle, *arguments))
        except Exception:  # not supported on this GPU or under WSL2: asked once, remembered, reported as None
            self.seen.missing.add(function)
            return None


def _larger(known: int | None, new: int | None) -> int | None:
    return new if known is None else known if new is None else max(known, new)
