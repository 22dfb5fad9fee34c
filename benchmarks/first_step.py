"""Seconds from a fresh clone to the first step of training, and of a second start.

    python benchmarks/first_step.py --runs 3 --result first_step.json

Clones this repository's HEAD, runs `python setup.py --run` with an empty cache of packages, then starts it again until
its first step. Every line is kept with its second in FOLDER/run-N.log; phases are read from those lines. Clones are
removed; nothing else of the machine is touched but the report of the set-up. Run it with nothing else at work."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PHASES = {
    "packages_s": re.compile(r"^\[(\d+)/\1\] .*: done|packages:\s+all pinned"),
    "first_step_s": re.compile(r"step 1/\d+ \| loss"),
    "trained_s": re.compile(r"done: \d+ steps"),
    "verified_s": re.compile(r"verifying every part: done"),
}
"""Name -> the first line that ends this phase."""


def seconds_of(clone: Path, log: Path, *, stop_at_first_step: bool) -> dict[str, float]:
    """Start `setup.py --run`; seconds from then to each phase's end, and to its own as `all_s`."""
    environ = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environ |= {"UV_CACHE_DIR": str(clone.parent / "cache"), "PYTHONUNBUFFERED": "1"}
    found: dict[str, float] = {}
    began_s = time.monotonic()
    command = [sys.executable, "setup.py", "--run"]
    with (
        log.open("a", encoding="utf-8", buffering=1) as kept,
        subprocess.Popen(
            command, cwd=clone, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            at_s = time.monotonic() - began_s
            kept.write(f"{at_s:8.2f} {line}")
            for name, pattern in PHASES.items():
                if name not in found and pattern.search(line):
                    found[name] = round(at_s, 2)
            if stop_at_first_step and "first_step_s" in found:
                os.killpg(process.pid, signal.SIGINT)
                stop_at_first_step = False
        process.wait()
        kept.write(f"exit code {process.returncode}\n")
    if "first_step_s" not in found:
        raise SystemExit(f"no first step: exit code {process.returncode}; see {log}")
    return found | {"all_s": round(time.monotonic() - began_s, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "first_step")
    parser.add_argument("--result", type=Path, help="JSON with every run")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for number in range(1, options.runs + 1):
        place, log = options.folder / f"run-{number}", options.folder / f"run-{number}.log"
        shutil.rmtree(place, ignore_errors=True)
        log.unlink(missing_ok=True)
        subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(place / "clone")], check=True)
        first = seconds_of(place / "clone", log, stop_at_first_step=False)
        second = seconds_of(place / "clone", log, stop_at_first_step=True)
        first["step_after_packages_s"] = round(first["first_step_s"] - first["packages_s"], 2)
        runs.append({"first": first, "second_first_step_s": second["first_step_s"], "load": os.getloadavg()[0]})
        print(json.dumps(runs[-1]), flush=True)
        shutil.rmtree(place)
    for name in ("packages_s", "first_step_s", "step_after_packages_s", "all_s"):
        print(f"{name}: median {statistics.median(run['first'][name] for run in runs):.1f}")
    print(f"second start to its first step: median {statistics.median(r['second_first_step_s'] for r in runs):.1f} s")
    if options.result:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
        about = {"commit": head.stdout.strip(), "cores": os.cpu_count(), "python": sys.version.split()[0]}
        options.result.write_text(json.dumps(about | {"runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
