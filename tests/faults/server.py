"""A process that has imported everything and forks a child for each run, under the library of `preload.c`.

    LD_PRELOAD=preload.so python -m tests.faults.server

Reads a job a line from stdin: {"argv": [...], "environ": {...}, "fields": {...}} for a whole run, or {"phase": name,
"root": path, "fault": words} for one of `phases`; both with {"log": path, "timeout_s": n}. Answers with the exit code
(negative: the signal's number) a line, `null` when the limit was over and the child was killed.

A run with {"warms": true} leaves the names of the modules that it needed; the server imports them as well and, for the
streaming engine, makes the run's plan once itself, so that every later child finds both done: half of a tiny run's CPU
time. DeepSpeed's plan joins a process group, whose threads a forked child would miss.
"""

import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def child(job: dict[str, Any]) -> None:
    """Run the job and leave with its exit code."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if "phase" in job:
        from tests.faults.phases import run_phase

        if job["count"]:
            os.environ["OUTCORE_FAULT_COUNT"] = job["count"]

        os._exit(run_phase(job["phase"], job["root"], job["fault"]))
    os.environ.update(job["environ"])
    from outcore.engine.deepspeed.staged import gradients
    from tests.engine.stream.runs.job import train

    gradients.MIN_BYTES = 1024  # the model is tiny
    code = 70
    try:
        code = train(job["argv"], **job["fields"])
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.environ.pop("OUTCORE_FAULT", None)
        if job.get("warms"):
            Path(job["log"]).with_suffix(".modules").write_text(json.dumps(sorted(sys.modules)))
        os._exit(code)


def run(job: dict[str, Any]) -> int | None:
    pid = os.fork()
    if pid == 0:
        child(job)
    until_s = time.monotonic() + job["timeout_s"]
    while time.monotonic() < until_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def warm(job: dict[str, Any]) -> None:
    """Import what the run of this job has imported, and fill what the streaming engine's plan keeps."""
    for name in json.loads(Path(job["log"]).with_suffix(".modules").read_text()):
        if name not in sys.modules:
            importlib.import_module(name)
    if "deepspeed" not in job["argv"]:
        _plan(job)
    gc.collect()
    gc.freeze()


def _plan(job: dict[str, Any]) -> None:
    from tests.engine.stream.runs.job import train

    real, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        train([*job["argv"], "--plan"], **job["fields"])
        sys.stdout.flush()
    finally:
        os.dup2(real, 1)
        os.close(real)
        os.close(nowhere)


def main() -> None:
    import torch

    import outcore.train.run  # noqa: F401
    import tests.engine.stream.runs.job
    import tests.faults.phases  # noqa: F401

    torch.set_num_threads(1)
    import torch._dynamo
    import transformers.models.llama.modeling_llama  # noqa: F401

    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        code = run(job)
        if job.get("warms") and code == 0:
            warm(job)
        print(json.dumps(code), flush=True)


if __name__ == "__main__":
    main()
