"""SensorBoard: reads sensors that may be missing, fail or vanish, and says so once for each.

A sensor that fails is switched off for the rest of the run (its value is None from then on) and leaves one sentence
for people. Nothing a sensor does can raise into the run. Cost: one dict look-up per read beside the sensor itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class SensorBoard:
    """Which sensors work, and one sentence for each that does not. Safe to use from several threads."""

    def __init__(self) -> None:
        self._off: set[str] = set()
        self._sentences: dict[str, str] = {}
        self._num_taken = 0
        self._lock = threading.Lock()

    def read(self, name: str, read: Callable[[], T | None], *, what: str) -> T | None:
        """The value of `read()`, or None where the sensor is off or fails now (then it is off from now on).

        Args:
            name: key of the sensor, e.g. "gpu_temp_c".
            what: the sensor in words for the sentence, e.g. "GPU temperature"."""
        if name in self._off:
            return None
        try:
            return read()
        except Exception as error:  # a sensor must never stop a training run, whatever its driver raises
            self.switch_off(name, f"{what}: not available ({describe(error)}); {name} is null from now on.")
            return None

    def switch_off(self, name: str, sentence: str) -> None:
        """Turn the sensor off for good; `sentence` is kept unless one was given for it before."""
        self._off.add(name)
        self.note(name, sentence)

    def note(self, name: str, sentence: str) -> None:
        """Keep a sentence under `name` once, without turning anything off."""
        with self._lock:
            self._sentences.setdefault(name, sentence)

    def is_off(self, name: str) -> bool:
        return name in self._off

    def explanations(self) -> list[str]:
        """Every sentence so far, in the order in which the sensors fell away."""
        with self._lock:
            return list(self._sentences.values())

    def take_new(self) -> list[str]:
        """The sentences that an earlier call has not returned."""
        with self._lock:
            sentences = list(self._sentences.values())[self._num_taken :]
            self._num_taken += len(sentences)
            return sentences


def describe(error: BaseException) -> str:
    """An exception in words: its message, or its type where it has none."""
    return str(error).strip().rstrip(".") or type(error).__name__
