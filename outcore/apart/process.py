"""Calls of an object's methods in processes of their own, one a thread, with limits of time and memory.

Work that takes longer, or kills its process (a segmentation fault, no memory), is refused in words, and the next call
has a new process. Processes are forked from one that has imported what they need and has no other threads
(multiprocessing's fork server): a new one takes milliseconds, and neither the engine's memory nor its GPU is in it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from outcore.common.os_layer import limit_memory
from outcore.common.quantities import GIB

LIMIT_S = 20.0
"""Seconds that a call may take: 1.5 MB of text became tokens in 2.4 s on two busy cores."""
MEMORY_BYTES = 4 * GIB
"""Memory of a process at most."""
STACK_BYTES = 4 << 20
"""Stack that work has here, half of what it has in the server: what is not too deep here is not there."""
PRELOADED = ["outcore.apart.bench", "transformers.tokenization_utils_tokenizers", "llguidance.hf"]
"""Modules that every process needs; what is not installed is left out."""
START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
READY_S = 120.0
"""Seconds until a process answers for the first time: the fork server imports first."""


def begin() -> None:
    """Have the process from which others are forked import what they need, while this one goes on. Windows forks none:
    there each imports for itself."""
    if START == "forkserver":
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()


class Apart:
    """Calls methods of a copy of `tool`. Each thread that calls has a process until `close`. RuntimeError for a tool
    that cannot be sent to another process."""

    def __init__(self, tool: Any, limit_s: float = LIMIT_S, memory_bytes: int = MEMORY_BYTES) -> None:
        self._limit_s, self._memory_bytes = limit_s, memory_bytes
        try:
            self._tool = pickle.dumps(tool)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise RuntimeError(f"the tokenizer cannot be given to a process of its own: {error}") from error
        self._own = threading.local()
        self._lock, self._processes = threading.Lock(), list[_Process]()

    def call(self, name: str, *args: Any, limit_s: float | None = None) -> Any:
        """Call the method apart and return its result. ValueError in words where it fails or goes beyond a limit."""
        process = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = _Process(self._tool, self._memory_bytes)
            with self._lock:
                self._processes.append(process)
        return process.call(name, args, self._limit_s if limit_s is None else limit_s)

    def close(self) -> None:
        """End all processes; nothing is called any more."""
        with self._lock:
            for process in self._processes:
                process.end()


class _Process:
    """One process, made when it is needed and again when it has died."""

    _starts = threading.Lock()
    """One starts at a time: meanwhile the program's own module is away."""

    def __init__(self, tool: bytes, memory_bytes: int) -> None:
        self._tool, self._memory_bytes = tool, memory_bytes
        self._process: Any = None
        self._pipe: Connection | None = None

    def call(self, name: str, args: tuple[Any, ...], limit_s: float) -> Any:
        pipe = self._pipe or self._begin()
        try:
            pipe.send((name, args))
            if not pipe.poll(limit_s):
                self.end()
                raise ValueError(f"this takes more than the {limit_s:g} s that a request may. Send less, or simpler.")
            is_right, found = pipe.recv()
        except (EOFError, OSError):
            self.end()
            raise ValueError("this takes too much memory, or is nested too deeply. Send less, or simpler.") from None
        if not is_right:
            raise ValueError(found)
        return found

    def _begin(self) -> Connection:
        begin()
        context: Any = multiprocessing.get_context(START)
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._tool, self._memory_bytes), daemon=True)
        with self._starts, _without_main():
            process.start()  # one that has not started cannot be ended, and the server may close meanwhile
        self._process = process
        theirs.close()
        if not ours.poll(READY_S):
            self.end()
            raise RuntimeError(f"a process that reads requests did not begin within {READY_S:g} s")
        ours.recv()
        self._pipe = ours
        return ours

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Have a process that starts meanwhile not run the program's script, which multiprocessing does to find what it is
    to call there: one that serves without asking for its `__name__` would serve once more."""
    own = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = own


def _serve(pipe: Connection, packed: bytes, memory_bytes: int) -> None:
    """Work until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this
    tool = pickle.loads(packed)
    limit_memory(memory_bytes)
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_work, args=(pipe, tool))
    worker.start()
    parent = os.getppid()
    while worker.is_alive() and os.getppid() == parent:  # the fork server ends with a server that was killed
        worker.join(1)
    os._exit(0)  # whatever the work does


def _work(pipe: Connection, tool: Any) -> None:
    pipe.send(True)
    with contextlib.suppress(EOFError, OSError):
        while True:
            name, args = pipe.recv()
            try:
                answer = True, getattr(tool, name)(*args)
            except MemoryError:
                answer = False, "this takes too much memory. Send less."
            except Exception as error:  # templates and tokenizers are programs of their own
                answer = False, str(error) or type(error).__name__
            pipe.send(answer)
