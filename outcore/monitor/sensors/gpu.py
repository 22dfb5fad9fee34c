"""GpuSensor: what one NVIDIA GPU feels, through NVML (package nvidia-ml-py, module pynvml).

Each field is its own sensor: what a GPU, driver or WSL2 does not offer is null, said once. An error that means that
NVML itself is gone (GPU lost, driver reset, library uninitialised) switches all fields off at once.
Cost: about 12 library calls a sample; the two PCIe counters sleep 20 ms each inside the driver with the GIL released,
so they delay only the sampling thread."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from outcore.monitor.sensors.sensor import SensorBoard, describe

# Bits of nvmlClocksEventReasons (nvml.h); bit 1, GPU idle, is no throttling.
THROTTLE_WORDS = {
    0x002: "clock limit set by user",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal (software)",
    0x040: "thermal (hardware)",
    0x080: "power brake",
    0x100: "display clock limit",
}
_KNOWN_NOT_THROTTLE = 0x001
# Errors after which no other NVML call can work either.
_FATAL_ERRORS = (
    "NVML_ERROR_UNINITIALIZED",
    "NVML_ERROR_GPU_IS_LOST",
    "NVML_ERROR_RESET_REQUIRED",
    "NVML_ERROR_DRIVER_NOT_LOADED",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
)
# NVML reports PCIe throughput in KB/s, counted over 20 ms, seen from the GPU: RX is host to device.
_PCIE_UNIT_BYTES = 1000


def throttle_words(reasons_mask: int) -> list[str]:
    """NVML's bit mask of clock event reasons in words; idle is left out, unknown bits keep their number."""
    words = [word for bit, word in THROTTLE_WORDS.items() if reasons_mask & bit]
    unknown = reasons_mask & ~(sum(THROTTLE_WORDS) | _KNOWN_NOT_THROTTLE)
    return [*words, f"reason {unknown:#x}"] if unknown else words


@dataclass
class GpuSample:
    """One look at the GPU; None where it does not tell."""

    mem_used_bytes: int | None = None
    util_pct: float | None = None
    temp_c: float | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    throttle: list[str] | None = None
    pcie_rx_gb_per_s: float | None = None
    pcie_tx_gb_per_s: float | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None


@dataclass
class GpuFacts:
    """What does not change during a run."""

    name: str | None = None
    mem_total_bytes: int | None = None
    pcie_gen_max: int | None = None
    pcie_width_max: int | None = None
    power_limit_w: float | None = None


class GpuSensor:
    """One GPU of this machine.

    Args:
        board: where missing sensors are noted.
        gpu: NVML index (the order of nvidia-smi, which CUDA_VISIBLE_DEVICES does not change), or a UUID with or
            without its "GPU-" prefix (`str(torch.cuda.get_device_properties(i).uuid)`), or a PCI bus id.
        nvml: a module with pynvml's functions; None imports pynvml."""

    def __init__(self, board: SensorBoard, gpu: int | str = 0, nvml: Any = None) -> None:
        self._board = board
        self._gpu = gpu
        self._nvml = nvml
        self._handle: Any = None
        self._dead = False
        self._initialised = False
        self.facts = GpuFacts()

    def open(self) -> bool:
        """Connect to NVML; False (with a sentence on the board) where that cannot be."""
        try:
            if self._nvml is None:
                self._nvml = import_module("pynvml")
            self._nvml.nvmlInit()
            self._initialised = True
            self._handle = self._find(self._gpu)
        except Exception as error:  # import errors, NVML errors, broken drivers: all mean "no GPU sensors"
            self._die(f"GPU sensors are not available ({describe(error)}): all gpu_* and pcie_* fields are null.")
            return False
        call = self._call
        self.facts.name = call("gpu_name", "GPU name", "nvmlDeviceGetName")
        memory = call("gpu_mem_bytes", "GPU memory use", "nvmlDeviceGetMemoryInfo")
        self.facts.mem_total_bytes = None if memory is None else int(memory.total)
        link = "The PCIe link's maximum"
        self.facts.pcie_gen_max = call("pcie_gen_max", link, "nvmlDeviceGetMaxPcieLinkGeneration")
        self.facts.pcie_width_max = call("pcie_width_max", link, "nvmlDeviceGetMaxPcieLinkWidth")
        limit_mw = call("gpu_power_limit_w", "The GPU's power limit", "nvmlDeviceGetEnforcedPowerLimit")
        self.facts.power_limit_w = None if limit_mw is None else limit_mw / 1e3
        return not self._dead

    def sample(self) -> GpuSample:
        """Read all that works now. Blocks about 40 ms where the GPU counts PCIe bytes."""
        sample = GpuSample()
        if self._handle is None or self._dead:
            return sample
        nvml, call = self._nvml, self._call
        memory = call("gpu_mem_bytes", "GPU memory use", "nvmlDeviceGetMemoryInfo")
        sample.mem_used_bytes = None if memory is None else int(memory.used)
        rates = call("gpu_util_pct", "GPU utilisation", "nvmlDeviceGetUtilizationRates")
        sample.util_pct = None if rates is None else float(rates.gpu)
        sample.temp_c = call("gpu_temp_c", "GPU temperature", "nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU")
        power_mw = call("gpu_power_w", "GPU power", "nvmlDeviceGetPowerUsage")
        sample.power_w = None if power_mw is None else power_mw / 1e3
        sample.sm_clock_mhz = call("gpu_clock_mhz", "The GPU's clock", "nvmlDeviceGetClockInfo", "NVML_CLOCK_SM")
        # The function was renamed in R535; older drivers and bindings have only the second name.
        reasons = "nvmlDeviceGetCurrentClocksEventReasons"
        if not hasattr(nvml, reasons):
            reasons = "nvmlDeviceGetCurrentClocksThrottleReasons"
        mask = call("throttle", "The reason for GPU clock limits", reasons)
        sample.throttle = None if mask is None else throttle_words(int(mask))
        what, function = "The GPU's PCIe byte counter", "nvmlDeviceGetPcieThroughput"
        rx = call("pcie_rx_gb_per_s", what, function, "NVML_PCIE_UTIL_RX_BYTES")
        tx = call("pcie_tx_gb_per_s", what, function, "NVML_PCIE_UTIL_TX_BYTES")
        sample.pcie_rx_gb_per_s = None if rx is None else rx * _PCIE_UNIT_BYTES / 1e9
        sample.pcie_tx_gb_per_s = None if tx is None else tx * _PCIE_UNIT_BYTES / 1e9
        sample.pcie_gen = call("pcie_gen", "The PCIe link's state", "nvmlDeviceGetCurrPcieLinkGeneration")
        sample.pcie_width = call("pcie_width", "The PCIe link's state", "nvmlDeviceGetCurrPcieLinkWidth")
        return GpuSample() if self._dead else sample

    def close(self) -> None:
        """Let go of NVML (its use is counted, so other users in the process keep theirs)."""
        if self._initialised:
            self._initialised = False
            try:
                self._nvml.nvmlShutdown()
            except Exception as error:
                self._board.switch_off("nvml_shutdown", f"NVML did not shut down cleanly ({describe(error)}).")
        self._handle = None

    def _find(self, gpu: int | str) -> Any:
        if isinstance(gpu, int):
            return self._nvml.nvmlDeviceGetHandleByIndex(gpu)
        if gpu.startswith(("GPU-", "MIG-")):
            return self._nvml.nvmlDeviceGetHandleByUUID(gpu)
        if gpu.count("-") == 4:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu}")
        return self._nvml.nvmlDeviceGetHandleByPciBusId(gpu)

    def _call(self, name: str, what: str, function: str, constant: str | None = None) -> Any:
        """One NVML call as a sensor; `constant` names the module's constant to pass as the second argument."""
        if self._dead:
            return None

        def read() -> Any:
            try:
                args = (self._handle,) if constant is None else (self._handle, getattr(self._nvml, constant))
                return getattr(self._nvml, function)(*args)
            except Exception as error:
                if self._is_fatal(error):
                    self._die(
                        f"The GPU's sensors stopped answering ({describe(error)}): all gpu_* and pcie_* fields are "
                        "null from now on. Training goes on; if CUDA fails too, look at `dmesg` for Xid errors."
                    )
                    return None
                raise

        return self._board.read(name, read, what=what)

    def _is_fatal(self, error: Exception) -> bool:
        code = getattr(error, "value", None)
        return code is not None and code in {getattr(self._nvml, name, object()) for name in _FATAL_ERRORS}

    def _die(self, sentence: str) -> None:
        self._dead = True
        self._board.switch_off("nvml", sentence)
