"""What the monitor costs a run: CPU per sample, time per step's line, and step time with and without it.

    python benchmarks/monitor_cost.py [--seconds 20] [--interval_s 1] [--device cpu|cuda]

Steps are matrix products of about 200 ms; blocks with and without the monitor alternate, so that drifts of the machine
hit both alike. The firm figure is the CPU share (CPU time of the sampling thread and of each step's calls on the
training thread); the step-time difference is given with its spread, which on a busy machine is larger than itself.
Exit code 1 if the share is 1 % or more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from outcore.common.quantities import format_s
from outcore.monitor import MemoryWatch, MetricsLog, RunProgress, RunWarnings, Sampler, SpaceWatch, make_loggers

BLOCK_S = 4.0
STEP_S = 0.2
LIMIT = 0.01


class Step:
    """A compute step of about STEP_S."""

    def __init__(self, device: str) -> None:
        side = 1024 if device == "cpu" else 8192
        self._matrix_SS = torch.rand(side, side, device=device)  # [side, side]
        self._sync = torch.cuda.synchronize if device == "cuda" else lambda: None
        self.run(1)
        best_s = min(self._time_one() for _ in range(20))
        self.num_products = max(1, round(STEP_S / best_s))

    def _time_one(self) -> float:
        started_s = time.perf_counter()
        self.run(1)
        return time.perf_counter() - started_s

    def run(self, num_products: int | None = None) -> None:
        for _ in range(num_products or self.num_products):
            self._matrix_SS @ self._matrix_SS
        self._sync()


class Monitor:
    """Everything a run calls at a step, and the time it takes on the training thread."""

    def __init__(self, folder: Path, interval_s: float) -> None:
        self.sampler = Sampler(folder, interval_s=interval_s)
        self.log = MetricsLog(folder / "metrics.jsonl")
        self.log.write_header({"run": "cost"})
        self.loggers = make_loggers("tensorboard", folder)
        self.progress = RunProgress(None, file=open(folder / "progress.txt", "w"), plain_every_s=10)  # noqa: SIM115
        self.space, self.memory = SpaceWatch({folder: 0}), MemoryWatch(0)
        self.warnings = RunWarnings(self.sampler.describe)
        self.call_s: list[float] = []
        self.cpu_s = 0.0
        self.step = 0

    def after_step(self, step_s: float) -> None:
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        self.step += 1
        record = {"step": self.step, "loss": 1.0, "lr": 1e-4, "step_s": step_s, **self.sampler.snapshot()}
        self.log.write_step(record)
        self.loggers.log_step(record)
        self.progress.update(record)
        self.warnings.check(record, [self.space.check(), self.memory.check()])
        self.call_s.append(time.perf_counter() - started_s)
        self.cpu_s += time.thread_time() - started_cpu_s

    def close(self) -> None:
        for each in (self.sampler, self.progress, self.loggers, self.log):
            each.close()


def run_block(step: Step, monitor: Monitor | None) -> list[float]:
    """Step times over BLOCK_S, monitor's calls included."""
    times_s = []
    end_s = time.perf_counter() + BLOCK_S
    while time.perf_counter() < end_s:
        started_s = time.perf_counter()
        step.run()
        if monitor is not None:
            monitor.after_step(time.perf_counter() - started_s)
        times_s.append(time.perf_counter() - started_s)
    return times_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--interval_s", type=float, default=1.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    step = Step(args.device)
    pairs: list[tuple[float, float]] = []
    monitored_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        monitor = Monitor(Path(folder), args.interval_s)
        for _ in range(max(2, round(args.seconds / (2 * BLOCK_S)))):
            without_s = statistics.median(run_block(step, None))
            monitor.sampler.start()
            started_s = time.perf_counter()
            with_s = statistics.median(run_block(step, monitor))
            monitored_s += time.perf_counter() - started_s
            monitor.sampler.close()
            pairs.append((without_s, with_s))
        monitor.close()
        explanations = monitor.sampler.explanations()
    sampling = monitor.sampler.cpu_s / monitored_s
    calls = monitor.cpu_s / monitored_s
    changes = [with_s / without_s - 1 for without_s, with_s in pairs]
    print(f"device {args.device}, a sample each {args.interval_s} s, steps of {format_s(pairs[0][0])}")
    print(f"sampling thread: {sampling * 100:.3f} % of one core")
    print(
        f"calls at a step: {format_s(monitor.cpu_s / monitor.step)} of CPU (median wall time "
        f"{format_s(statistics.median(monitor.call_s))}), {calls * 100:.3f} % of steps of this length"
    )
    print(f"calls cost less than 1 % of steps longer than {format_s(monitor.cpu_s / monitor.step / LIMIT)}")
    print(
        f"step time with the monitor: {statistics.median(changes) * 100:+.2f} % (median of {len(changes)} pairs, "
        f"{min(changes) * 100:+.1f} to {max(changes) * 100:+.1f} %)"
    )
    for text in explanations:
        print(f"note: {text}")
    if sampling + calls >= LIMIT:
        print(f"TOO DEAR: {(sampling + calls) * 100:.2f} % is not below {LIMIT * 100:.0f} %")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
