"""Sampler: a background thread that looks at GPU, RAM and drives once a second while the run works.

The thread keeps sums and peaks; `snapshot()` closes the window since the last one and returns the fields of a
metrics.jsonl line. A thread is enough: nearly all of a sample's time is spent in NVML and the kernel with the GIL
released (measured: 0.17 % of one core), and a process could not see this
process's pinned bytes. Drive counters and free space are read in `snapshot()` itself (some 60 us), so that bytes per
step are exact however short the step. What the machine does not tell is null, explained once.

GpuSensor: what one NVIDIA GPU feels, through NVML (package nvidia-ml-py, module pynvml).

Each field is its own sensor: what a GPU, driver or WSL2 does not offer is null, said once. An error that means that
NVML itself is gone (GPU lost, driver reset, library uninitialised) switches all fields off at once.
Cost: about 12 library calls a sample; the two PCIe counters sleep 20 ms each inside the driver with the GIL released,
so they delay only the sampling thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from outcore.monitor.sensors.drive import BlockCounters, DriveSample, DriveSensor
from outcore.monitor.sensors.host import HostSample, HostSensor, SensorBoard, describe

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
    """Facts that do not change during a run."""

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


STALE_INTERVALS = 10
"""A thread that has not sampled for this many intervals (at least 10 s) hangs in a driver: its fields become null."""

FIRST_SAMPLE_WAIT_S = 2.0


class _Mean:
    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1

    def get(self) -> float | None:
        return self.total / self.count if self.count else None


class _Window:
    """Samples since the last snapshot."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.gpu_mem_peak_bytes: int | None = None
        self.gpu_temp_c: float | None = None
        self.ram_rss_bytes: int | None = None
        self.throttle: dict[str, None] | None = None
        self.util_pct, self.power_w, self.clock_mhz, self.rx, self.tx = (_Mean() for _ in range(5))

    def add(self, gpu: GpuSample, host: HostSample) -> None:
        self.num_samples += 1
        self.gpu_mem_peak_bytes = _higher(self.gpu_mem_peak_bytes, gpu.mem_used_bytes)
        self.gpu_temp_c = _higher(self.gpu_temp_c, gpu.temp_c)
        self.ram_rss_bytes = _higher(self.ram_rss_bytes, host.ram_rss_bytes)
        if gpu.throttle is not None:
            self.throttle = {**(self.throttle or {}), **dict.fromkeys(gpu.throttle)}
        self.util_pct.add(gpu.util_pct)
        self.power_w.add(gpu.power_w)
        self.clock_mhz.add(gpu.sm_clock_mhz)
        self.rx.add(gpu.pcie_rx_gb_per_s)
        self.tx.add(gpu.pcie_tx_gb_per_s)


class Sampler:
    """Sampler of the machine's state, once a second.

    Args:
        nvme_path: a path on the drive to watch (the offload folder; it may not exist yet). The nvme_* fields speak of
            the drives under it, of whatever kind they are; the counters are the whole drives', all processes included.
        gpu: NVML index, UUID or PCI bus id (see GpuSensor); None: no GPU is looked at.
        interval_s: time between samples.
        pinned_bytes: called at each snapshot; returns the bytes of pinned memory that the engine holds.
        nvml, psutil_module, root (of sys and proc): fakes for tests."""

    def __init__(
        self,
        nvme_path: Path | str = ".",
        *,
        gpu: int | str | None = 0,
        interval_s: float = 1.0,
        pinned_bytes: Callable[[], int | None] | None = None,
        nvml: Any = None,
        psutil_module: Any = None,
        root: Path | str = "/",
    ) -> None:
        if interval_s <= 0:
            raise ValueError(f"The sampling interval must be above 0 s, got {interval_s}. The default is 1.")
        self.interval_s = interval_s
        self.cpu_s = 0.0
        """CPU seconds that sampling has cost so far (the thread's own)."""
        self._board = SensorBoard()
        self._pinned_bytes = pinned_bytes
        self._gpu = None if gpu is None else GpuSensor(self._board, gpu, nvml)
        self._gpu_opened = False
        self._host = HostSensor(self._board, root, psutil_module=psutil_module)
        self._drive = DriveSensor(self._board, nvme_path, root)
        self._lock = threading.Lock()
        self._window = _Window()
        self._last: tuple[GpuSample, HostSample, DriveSample] | None = None
        self._last_at_s = time.monotonic()
        self._counters: BlockCounters | None = self._drive.read_counters()
        self._counters_at_s = time.monotonic()
        self._stop = threading.Event()
        self._has_sampled = threading.Event()
        self._waited_for_first = False
        self._thread: threading.Thread | None = None

    def start(self) -> Sampler:
        """Begin sampling in the background; returns at once."""
        if self._thread is None:
            self._last_at_s = time.monotonic()
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="outcore-sampler", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Stop the thread. One that hangs in a driver is left behind after 2 s; it ends with the process."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
            alive = self._thread.is_alive()
            self._thread = None
            if alive:
                return
        if self._gpu is not None and self._gpu_opened:
            self._gpu_opened = False
            self._gpu.close()

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def sample_once(self) -> None:
        """Take one sample now on the calling thread (the background thread's body)."""
        started_s = time.thread_time()
        if self._gpu is not None and not self._gpu_opened:
            self._gpu_opened = True
            self._gpu.open()
        gpu = GpuSample() if self._gpu is None else self._gpu.sample()
        host = self._host.sample()
        drive = self._drive.sample()
        with self._lock:
            self._window.add(gpu, host)
            self._last = (gpu, host, drive)
            self._last_at_s = time.monotonic()
            self.cpu_s += time.thread_time() - started_s
        self._has_sampled.set()

    def snapshot(self, gpu_mem_peak_bytes: int | None = None) -> dict[str, Any]:
        """The machine's fields of one metrics.jsonl line, for the time since the last snapshot.

        A step shorter than the interval may hold no sample: it gets the last sample's values. Never blocks on a driver.

        Args:
            gpu_mem_peak_bytes: the allocator's own peak (`torch.cuda.max_memory_allocated()`) when the caller has it;
                otherwise the highest NVML value of the window is given, which includes every process on the GPU."""
        with self._lock:
            window, self._window = self._window, _Window()
            last, age_s = self._last, time.monotonic() - self._last_at_s
        if last is not None and window.num_samples == 0:
            window.add(last[0], last[1])
        if self._thread is not None and age_s > max(10.0, STALE_INTERVALS * self.interval_s):
            self._board.note(
                "stale", f"The sensors have not answered for {age_s:.0f} s (a driver hangs): null until they do."
            )
            window, last = _Window(), None
        gpu, host, drive = last or (GpuSample(), HostSample(), DriveSample())
        return {
            "gpu_mem_bytes": gpu.mem_used_bytes,
            "gpu_mem_peak_bytes": window.gpu_mem_peak_bytes if gpu_mem_peak_bytes is None else gpu_mem_peak_bytes,
            "gpu_util_pct": _round(window.util_pct.get(), 1),
            "gpu_temp_c": window.gpu_temp_c,
            "gpu_power_w": _round(window.power_w.get(), 1),
            "gpu_clock_mhz": _round(window.clock_mhz.get(), 0),
            "throttle": None if window.throttle is None else list(window.throttle),
            "pcie_rx_gb_per_s": _round(window.rx.get(), 3),
            "pcie_tx_gb_per_s": _round(window.tx.get(), 3),
            "pcie_gen": gpu.pcie_gen,
            "pcie_width": gpu.pcie_width,
            "ram_rss_bytes": window.ram_rss_bytes,
            "ram_available_bytes": host.ram_available_bytes,
            "swap_used_bytes": host.swap_used_bytes,
            "own_swap_bytes": host.own_swap_bytes,
            "pinned_bytes": self._read_pinned(),
            **self._drive_fields(),
            "nvme_temp_c": drive.temp_c,
        }

    def describe(self) -> dict[str, Any]:
        """Facts that do not change: sizes and names for the header of metrics.jsonl.

        The GPU's facts come with the first sample: right after `start()` the first call waits for it, 2 s at most."""
        if self._thread is not None and not self._waited_for_first:
            self._waited_for_first = True
            self._has_sampled.wait(FIRST_SAMPLE_WAIT_S)
        facts = None if self._gpu is None else self._gpu.facts
        return {
            "gpu_name": facts and facts.name,
            "gpu_mem_total_bytes": facts and facts.mem_total_bytes,
            "gpu_power_limit_w": facts and facts.power_limit_w,
            "pcie_gen_max": facts and facts.pcie_gen_max,
            "pcie_width_max": facts and facts.pcie_width_max,
            "ram_total_bytes": self._host.ram_total_bytes,
            "nvme_total_bytes": self._drive.total_bytes,
            "nvme_disks": list(self._drive.disks),
            "interval_s": self.interval_s,
        }

    def explanations(self) -> list[str]:
        """One sentence for each sensor that is missing or has failed, so far."""
        return self._board.explanations()

    def take_explanations(self) -> list[str]:
        """The sentences that no earlier call of this has returned: print them and each is said once."""
        return self._board.take_new()

    def _run(self) -> None:
        while True:
            try:
                self.sample_once()
            except Exception as error:  # a bug in sampling must not print tracebacks into a run for days
                self._board.note("sampler", f"The sampler stopped ({type(error).__name__}: {error}); training goes on.")
                with self._lock:
                    self._last = None
                return
            if self._stop.wait(self.interval_s):
                return

    def _read_pinned(self) -> int | None:
        if self._pinned_bytes is None:
            return None
        return self._board.read("pinned_bytes", self._pinned_bytes, what="The pool's pinned bytes")

    def _drive_fields(self) -> dict[str, Any]:
        before, before_s = self._counters, self._counters_at_s
        now, now_s = self._drive.read_counters(), time.monotonic()
        self._counters, self._counters_at_s = now, now_s
        fields: dict[str, Any] = {"nvme_read_bytes": None, "nvme_write_bytes": None, "nvme_queue_depth": None}
        if before is not None and now is not None:
            # A drive that was re-plugged counts from 0 again: what it moved since then is the best lower bound.
            fields["nvme_read_bytes"] = _growth(before.read_bytes, now.read_bytes)
            fields["nvme_write_bytes"] = _growth(before.write_bytes, now.write_bytes)
            elapsed_ms = (now_s - before_s) * 1e3
            if elapsed_ms > 0:
                fields["nvme_queue_depth"] = round(_growth(before.queue_ms, now.queue_ms) / elapsed_ms, 2)
        fields["nvme_free_bytes"] = self._drive.read_free_bytes()
        return fields


def _growth(before: int, now: int) -> int:
    return now - before if now >= before else now


def _higher(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return max(a, b)


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
