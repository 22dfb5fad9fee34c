"""The mixed rate of a drive: bytes per second while reads and writes are under way at the same time, half of each.

    python benchmarks/race/drive_rate.py FOLDER [SECONDS]

Through outcore's storage engine, O_DIRECT, blocks of 48 MiB, 16 of them under way. Drives behind a server's virtual
disk change by a third within minutes, so benchmarks that compare drive bytes with this rate take it right before and
right after each variant. Prints a line `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TENSOR_BYTES = 48 << 20
TENSORS = 64
SECONDS = 4.0


def mixed_rate(folder: Path, seconds: float) -> dict[str, Any]:
    """{"bytes_per_s": read and written, "moved_bytes": in all}; leaves nothing in `folder`."""
    sys.path.insert(0, str(HERE.parents[1]))
    import torch

    from outcore.storage import TensorSpec, TensorStore, aligned_bytes, open_engine

    scratch = Path(tempfile.mkdtemp(prefix="mixed-rate-", dir=folder))
    engine = open_engine("auto", num_threads=16)
    specs = [TensorSpec(str(n), torch.uint8, (TENSOR_BYTES,)) for n in range(TENSORS)]
    store = TensorStore.create([scratch / "store"], specs, engine=engine)
    try:
        buffers = [torch.from_numpy(aligned_bytes(TENSOR_BYTES)) for _ in range(16)]
        for n in range(TENSORS):  # reads of blocks that were never written do not reach the drive
            store.submit_write(str(n), buffers[0]).wait()
        moved, n = 0, 0
        under_way: list[Any] = [None] * len(buffers)
        start_s = time.perf_counter()
        while time.perf_counter() - start_s < seconds:
            slot = n % len(buffers)
            if under_way[slot] is not None:
                moved += under_way[slot].wait()
            submit = store.submit_read if n % 2 else store.submit_write
            place = n if n % 2 else n + TENSORS // 2  # a tensor is never read and written at the same time
            under_way[slot] = submit(str(place % TENSORS), buffers[slot])
            n += 1
        elapsed_s = time.perf_counter() - start_s
        for transfer in under_way:
            if transfer is not None:
                transfer.wait()
        return {"bytes_per_s": moved / elapsed_s, "moved_bytes": moved}
    finally:
        store.delete()
        engine.close()
        shutil.rmtree(scratch, ignore_errors=True)


def measure(folder: Path, seconds: float = SECONDS) -> float:
    """Bytes per second, taken by a child of its own. RuntimeError when it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), str(folder), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"the drive's rate could not be measured in {folder}: {(done.stdout + done.stderr)[-2000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))["bytes_per_s"]


class RatesAround:
    """The drive's rate right before and right after each variant; one between two variants serves both."""

    def __init__(self, folder: Path, seconds: float = SECONDS) -> None:
        self._folder, self._seconds = folder, seconds
        self._last: float | None = None

    def before(self) -> None:
        """The variant begins now."""
        if self._last is None:
            self._last = measure(self._folder, self._seconds)

    def after(self) -> list[float]:
        """[before, after] in bytes per second, of the variant that has just ended."""
        assert self._last is not None
        first, self._last = self._last, measure(self._folder, self._seconds)
        return [first, self._last]

    def forget(self) -> None:
        """Something else runs now."""
        self._last = None


def drive_seconds(moved: dict[str, float], rates: list[float]) -> float:
    """Seconds that the drive needs for so many bytes (by kind) at the mean of the rates around."""
    return sum(moved.values()) / (sum(rates) / len(rates))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float, nargs="?", default=SECONDS)
    wanted = parser.parse_args()
    print("RESULT " + json.dumps(mixed_rate(wanted.folder, wanted.seconds)), flush=True)
