"""Trial: the real run up to its loop, then a few measured steps, one checkpoint saved and loaded, and no more.

Runs as a process of its own (`python -m outcore.performance.trial RESULT STEPS SECONDS SAVE_BYTES -- FLAGS`), so that
a run which runs out of memory or is killed leaves the test standing. Everything comes from the main job; only what
follows its assembly is another goal."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from outcore.checkpoint import Checkpoint, open_checkpoint, step_folder
from outcore.engine.base import WARM_UP_STEPS
from outcore.train.run import Ready, TrainingLoop, main

INTERVAL_S = 0.02
EVAL_MICRO_BATCHES = 4


class RssWatch:
    """Looks at this process's resident memory while it is open: `peak_bytes`, None where /proc does not tell it."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outcore-rss", daemon=True)

    def __enter__(self) -> RssWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._over.wait(INTERVAL_S):
            try:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
            except OSError:  # not Linux
                return
            self.peak_bytes = max(self.peak_bytes or 0, pages * os.sysconf("SC_PAGE_SIZE"))


class TrialRun:
    """`result`: where the figures go as JSON. At least `warm_steps` + 1 steps, then as many of `steps` as `limit_s`
    allows. A checkpoint larger than `most_save_bytes` is not written."""

    warm_steps = WARM_UP_STEPS

    def __init__(self, result: Path, steps: int, limit_s: float, most_save_bytes: int) -> None:
        self.result, self.steps, self.limit_s, self.most_save_bytes = result, steps, limit_s, most_save_bytes

    def __call__(self, ready: Ready) -> int:
        """Try a run that is ready; the exit code."""
        job, trainer, context = ready.job, ready.trainer, ready.context
        parts, forecast, loaded = trainer.parts, context.forecast, trainer.parts.engine.loaded
        found: dict[str, Any] = {
            "startup_s": {**job.clock.parts_s, "all": time.perf_counter() - job.started_s},
            "engine": {"name": context.decided.name, "reason": context.decided.reason},
            "model": {"words": loaded.words, "params": loaded.facts.total_params},
            "length": {
                "total_steps": parts.length.total_steps,
                "eval_steps": parts.length.eval_steps,
                "save_steps": parts.length.save_steps,
                "accumulation": parts.length.accumulation,
            },
            "forecast": forecast.to_dict() if forecast else None,
            "forecast_problem": forecast.problem if forecast else "",
            "state_bytes": parts.engine.facts().state_bytes,
        }
        found |= self._steps(trainer)
        facts = parts.engine.facts()
        found |= {"staying_bytes": facts.staying_bytes, "ahead_bytes": facts.ahead_bytes}
        found["eval"] = self._evaluation(trainer)
        found |= self._checkpoint(trainer, found["state_bytes"])
        found["machine"] = parts.sampler.describe()
        found["sensors"] = parts.sampler.explanations()
        found["said"] = job.said
        parts.progress.close()
        self.result.write_text(json.dumps(found, default=str), encoding="utf-8")
        return 0

    def _steps(self, trainer: TrainingLoop) -> dict[str, Any]:
        """Warm-up first (compilation, first touches), then steps that are watched."""
        batches, began_s = iter(trainer.parts.stream), time.perf_counter()
        for _ in range(self.warm_steps):
            trainer.train_one(batches)
        with RssWatch() as rss:
            for _ in range(self.steps):
                trainer.train_one(batches)
                if time.perf_counter() - began_s > self.limit_s:
                    break
        lines = trainer.parts.folder.metrics.read_text(encoding="utf-8").splitlines()
        records = [record for line in lines if "event" not in (record := json.loads(line))]
        return {"steps": records, "warm_steps": self.warm_steps, "rss_peak_bytes": rss.peak_bytes}

    def _evaluation(self, trainer: TrainingLoop) -> dict[str, Any] | None:
        """Seconds of a whole evaluation, by a few of its micro-batches."""
        batches = trainer.parts.eval_batches
        if batches is None:
            return None
        count = sum(1 for _ in batches())
        few = min(EVAL_MICRO_BATCHES, count)
        began_s = time.perf_counter()
        trainer.parts.engine.evaluate(itertools.islice(batches(), few))
        seconds = time.perf_counter() - began_s
        return {"micro_batches": count, "measured": few, "seconds": seconds * count / few}

    def _checkpoint(self, trainer: TrainingLoop, size_bytes: int) -> dict[str, Any]:
        """A save and a load through the loop itself."""
        if size_bytes > self.most_save_bytes:
            return {"save_s": None, "load_s": None, "save_note": f"not written: {size_bytes} bytes"}
        began_s = time.perf_counter()
        trainer.save()
        save_s = time.perf_counter() - began_s
        path = trainer.parts.folder.checkpoints / step_folder(trainer.step)
        written = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        began_s = time.perf_counter()
        checkpoint: Checkpoint = open_checkpoint(path)
        trainer.resume(checkpoint)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {"save_s": save_s, "load_s": time.perf_counter() - began_s, "saved_bytes": written}


if __name__ == "__main__":
    _result, _steps, _limit_s, _most = sys.argv[1:5]
    sys.exit(main(sys.argv[6:], TrialRun(Path(_result), int(_steps), float(_limit_s), int(_most))))
