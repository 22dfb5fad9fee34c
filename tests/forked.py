"""Scripts in child processes that are forked from a server which has imported torch, transformers and DeepSpeed.

A fresh interpreter spends more than five seconds of CPU time on these imports, mostly more than on the test itself.
Where there is a GPU every child is a fresh interpreter all the same: a forked one may be unable to use CUDA.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = (
    "tests.known_cpu", "pytest", "peft", "outcore.train.run", "torch._dynamo", "torch.utils.cpp_extension",
    "matplotlib.figure", "transformers.models.llama.modeling_llama", "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.original_muon",
)  # fmt: skip
"""What training imports only when it needs it, besides the program itself."""


def fork_server() -> ForkServerContext:
    """One server for all children of this process; it starts with the first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


class ForkedProcess:
    """As much of `subprocess.Popen` as tests use."""

    def __init__(self, script: Path, argv: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        arguments = (str(script), [*argv], dict(environ), str(log))
        self._process = fork_server().Process(target=_run, args=arguments)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def start_script(
    script: Path, argv: Sequence[str], environ: Mapping[str, str], log: Path
) -> ForkedProcess | subprocess.Popen[bytes]:
    """`python SCRIPT ARGV...` in the repository with this environment; its output is added to `log`."""
    if torch.cuda.is_available() or os.name == "nt":
        with open(log, "ab") as output:
            return subprocess.Popen(
                [sys.executable, str(script), *argv], cwd=ROOT, env=dict(environ),
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
    return ForkedProcess(script, argv, environ, log)


def run_script(
    script: Path, argv: Sequence[str], environ: Mapping[str, str], log: Path, *, timeout_s: float = 300.0
) -> int:
    """To the script's end; its exit code."""
    child = start_script(script, argv, environ, log)
    try:
        return child.wait(timeout_s)
    finally:
        child.kill()


def _run(script: str, argv: list[str], environ: dict[str, str], log: str) -> None:
    """In the child."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(ROOT)
    gc.freeze()  # what the server imported stays: looking through all of it at each collection takes long
    sys.argv = [script, *argv]
    sys.path[:0] = [str(Path(script).parent), str(ROOT)]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:  # multiprocessing ends a child without them
        atexit._run_exitfuncs()
