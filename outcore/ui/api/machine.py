"""This machine: what it is, what was measured of it, how it feels now, and thresholds that turn into alerts."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from outcore.common import read_object
from outcore.common.files import newest, user_folder
from outcore.common.words import own_command
from outcore.machine import Machine, detect_machine
from outcore.monitor import Sampler
from outcore.serve.additions import bad
from outcore.ui.api.place import Place, write_json

SAMPLE_EVERY_S = 2.0
KEPT_SAMPLES = 450
"""A quarter of an hour."""
DEFAULT_THRESHOLDS: dict[str, float] = {
    "gpu_temp_c": 87.0,
    "nvme_temp_c": 75.0,
    "ram_used_share": 0.95,
    "vram_used_share": 0.98,
    "drive_used_share": 0.95,
    "swap_used_gib": 1.0,
}
"""Above them there is an alert."""
WORDS = {
    "gpu_temp_c": "The GPU has {value:.0f} °C (limit {limit:.0f}) and will slow down: give it air.",
    "nvme_temp_c": "The drive has {value:.0f} °C (limit {limit:.0f}): it will slow down. A heat sink or a pause helps.",
    "ram_used_share": "RAM is {value:.0%} full (limit {limit:.0%}): close programs, or give runs a smaller RAM budget.",
    "vram_used_share": "VRAM is {value:.0%} full (limit {limit:.0%}): another program may be using the GPU.",
    "drive_used_share": "The drive is {value:.0%} full (limit {limit:.0%}): delete old runs or checkpoints.",
    "swap_used_gib": "{value:.1f} GiB are swapped out (limit {limit:.1f}): everything that is swapped crawls.",
}
SHOWN = (
    "gpu_util_pct", "gpu_mem_bytes", "gpu_temp_c", "gpu_power_w", "pcie_rx_gb_per_s", "pcie_tx_gb_per_s",
    "ram_available_bytes", "swap_used_bytes", "nvme_queue_depth", "nvme_temp_c", "nvme_free_bytes", "throttle",
)  # fmt: skip


class MachineWatch:
    """Watch over the machine for the panel. `begin` and `end` with the server. `beside`: called with every sample."""

    def __init__(self, place: Place, sampler: Sampler | None = None, beside: Callable[[], None] = lambda: None) -> None:
        self.place, self._beside = place, beside
        self._sampler = sampler or Sampler(place.logs, interval_s=SAMPLE_EVERY_S)
        self._samples: deque[dict[str, Any]] = deque(maxlen=KEPT_SAMPLES)
        self._stop, self._setting = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="machine watch", daemon=True)

    def begin(self) -> None:
        """Start to look."""
        self._sampler.start()
        self._thread.start()

    def end(self) -> None:
        """Look no more."""
        self._stop.set()
        self._sampler.close()

    def facts(self) -> dict[str, Any]:
        """Describe the machine, the links as measured, the reports of set-up and probe."""
        profile, why = None, f"This machine was never measured: {own_command('probe')} does, in a few minutes."
        path = newest(user_folder() / "machine_profile.json")
        if path.is_file():
            try:
                profile, why = asdict(Machine.load(path)), ""
            except (ValueError, OSError) as error:
                why = f"{path} is damaged ({error}): run {own_command('probe')} again."
        setup = newest(user_folder() / "setup_report.json")
        return {
            "machine": asdict(detect_machine()),
            "profile": profile,
            "why_no_profile": why,
            "setup": read_object(setup) or None,
            "probe": read_object(newest(user_folder() / "gds_report.json")) or None,
            "setup_at": setup.stat().st_mtime if setup.is_file() else None,
        }

    def live(self) -> dict[str, Any]:
        """Samples of the last quarter of an hour, sizes, alerts, and which sensors are missing and why."""
        samples = list(self._samples)
        limits = self._sampler.describe()
        return {
            "samples": samples,
            "limits": limits,
            "alerts": self._alerts(samples[-1] if samples else {}, limits),
            "missing": self._sampler.explanations(),
        }

    def thresholds(self) -> dict[str, float]:
        """Thresholds by name; those that the user set over the usual ones."""
        return DEFAULT_THRESHOLDS | {k: v for k, v in read_object(self._file).items() if k in DEFAULT_THRESHOLDS}

    def set_thresholds(self, body: Mapping[str, Any]) -> dict[str, float]:
        """Keep other thresholds. ApiError for a name or a number that cannot be."""
        for name, value in body.items():
            if name not in DEFAULT_THRESHOLDS:
                raise bad(f"{name} is no threshold; there are {', '.join(DEFAULT_THRESHOLDS)}.", name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value <= 0:
                raise bad(f"{name} must be a number above 0, got {value!r}.", name)
        with self._setting:
            found = self.thresholds() | dict(body)
            write_json(self._file, found)
        return found

    @property
    def _file(self):
        return self.place.own / "thresholds.json"

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            snapshot = self._sampler.snapshot()
            sample = {name: snapshot.get(name) for name in SHOWN}
            for name in ("nvme_read_bytes", "nvme_write_bytes"):
                moved = snapshot.get(name)
                sample[name.replace("bytes", "gb_per_s")] = None if moved is None else moved / SAMPLE_EVERY_S / 1e9
            self._samples.append({"time": time.time(), **sample})
            self._beside()

    def _alerts(self, sample: Mapping[str, Any], limits: Mapping[str, Any]) -> list[dict[str, Any]]:
        found = []
        measured = _measured(sample, limits)
        for name, limit in self.thresholds().items():
            value = measured.get(name)
            if value is not None and value > limit:
                words = WORDS[name].format(value=value, limit=limit)
                found.append({"name": name, "value": value, "limit": limit, "words": words})
        if sample.get("throttle"):
            words = f"The GPU holds back: {', '.join(sample['throttle'])}."
            found.append({"name": "throttle", "value": None, "limit": None, "words": words})
        return found


def _measured(sample: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, float]:
    """The figures that thresholds are about."""
    found: dict[str, float] = {}
    for name in ("gpu_temp_c", "nvme_temp_c"):
        if sample.get(name) is not None:
            found[name] = sample[name]
    for name, used, total in (
        ("ram_used_share", _less(limits.get("ram_total_bytes"), sample.get("ram_available_bytes")),
         limits.get("ram_total_bytes")),
        ("vram_used_share", sample.get("gpu_mem_bytes"), limits.get("gpu_mem_total_bytes")),
        ("drive_used_share", _less(limits.get("nvme_total_bytes"), sample.get("nvme_free_bytes")),
         limits.get("nvme_total_bytes")),
    ):  # fmt: skip
        if used is not None and total:
            found[name] = used / total
    if sample.get("swap_used_bytes") is not None:
        found["swap_used_gib"] = sample["swap_used_bytes"] / 2**30
    return found


def _less(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
