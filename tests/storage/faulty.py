"""`FaultyEngine`: any engine that fails, comes up short or is slow on command, to prove that callers notice.

It is what tests of every layer above use instead of a broken drive: the failure arrives exactly as a real one, on the
thread that waits, and the bytes of a failed request are not moved (or only in part, for short ones).
"""

import errno as errno_module
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from outcore.storage.block_file import BlockFile
from outcore.storage.engine import StorageEngine
from outcore.storage.engines.worker import STALL_S, Kind
from outcore.storage.errors import StorageError, Transfer

Matcher = Callable[[BlockFile, int, int], bool]


@dataclass
class Fault:
    """One planned misbehaviour."""

    action: Literal["fail", "short", "delay"]
    kind: Kind | None
    after: int = 0
    times: int | None = 1
    errno: int | None = None
    got: int = 0
    delay_s: float = 0.0
    matches: Matcher | None = None
    seen: int = field(default=0, init=False)
    fired: int = field(default=0, init=False)

    def fires(self, kind: Kind, file: BlockFile, offset: int, n_bytes: int) -> bool:
        if self.kind not in (None, kind) or (self.matches is not None and not self.matches(file, offset, n_bytes)):
            return False
        self.seen += 1
        if self.seen <= self.after or (self.times is not None and self.fired >= self.times):
            return False
        self.fired += 1
        return True


class FaultyEngine:
    """Wraps `inner`; plans are tried in the order they were made, the first that fires decides.

    For each plan: `kind` "read", "write" or None for both; the first `after` matching requests pass, the next `times`
    (None: all) misbehave; `matches(file, offset, n_bytes)` narrows it down.
    """

    def __init__(self, inner: StorageEngine) -> None:
        self.inner = inner
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._held: list[Callable[[], None]] | None = []

    @property
    def on_finished(self) -> Any:
        """The inner engine's listener."""
        return getattr(self.inner, "on_finished", None)

    @on_finished.setter
    def on_finished(self, listener: Any) -> None:
        self.inner.on_finished = listener

    @property
    def name(self) -> str:
        return f"faulty {self.inner.name}"

    def fail(self, kind: Kind | None = None, *, errno: int = errno_module.EIO, **when: Any) -> Fault:
        """Requests end with this errno and move nothing. `when`, here and below: `after`, `times` (1), `matches`."""
        return self._plan(Fault("fail", kind, errno=errno, **when))

    def short(self, kind: Kind | None = None, *, got: int = 0, **when: Any) -> Fault:
        """Requests end as short after `got` bytes."""
        return self._plan(Fault("short", kind, got=got, **when))

    def delay(self, delay_s: float, kind: Kind | None = None, **when: Any) -> Fault:
        """Requests (all of them) succeed, but end `delay_s` later; with math.inf when `let_go` is called."""
        return self._plan(Fault("delay", kind, delay_s=delay_s, **{"times": None, **when}))

    def let_go(self) -> None:
        """End what was delayed without end, now and later."""
        with self._lock:
            held, self._held = self._held or [], None
        for finish in held:
            finish()

    def clear(self) -> None:
        """Behave again."""
        with self._lock:
            self._faults.clear()

    def _plan(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def submit_read(self, file: BlockFile, offset: int, buffer: Any, *, priority: int = 0) -> Transfer:
        return self._submit("read", file, offset, buffer, priority)

    def submit_write(self, file: BlockFile, offset: int, buffer: Any, *, priority: int = 0) -> Transfer:
        return self._submit("write", file, offset, buffer, priority)

    def _submit(self, kind: Kind, file: BlockFile, offset: int, buffer: Any, priority: int) -> Transfer:
        n_bytes = memoryview(buffer).nbytes if not hasattr(buffer, "nbytes") else buffer.nbytes
        with self._lock:
            fault = next((plan for plan in self._faults if plan.fires(kind, file, offset, n_bytes)), None)
        submit = self.inner.submit_read if kind == "read" else self.inner.submit_write
        if fault is None:
            return submit(file, offset, buffer, priority=priority)
        outer = Transfer(n_bytes, f"{kind} of {n_bytes} bytes at {offset} of {file.path} (faulty)")
        if fault.action == "delay":
            inner = submit(file, offset, buffer, priority=priority)
            inner.add_done_callback(lambda done: self._finish_later(outer, done.error, fault.delay_s))
            return outer
        got = min(fault.got, n_bytes) if fault.action == "short" else 0
        reason = "injected fault"
        error = StorageError(
            kind, path=file.path, offset=offset, wanted=n_bytes, got=got, errno=fault.errno, reason=reason
        )
        if got:
            partial = submit(file, offset, _flat(buffer)[:got], priority=priority)
            partial.add_done_callback(lambda done: outer.finish(done.error or error))
        else:
            outer.finish(error)
        return outer

    def _finish_later(self, transfer: Transfer, error: BaseException | None, delay_s: float) -> None:
        if delay_s < math.inf:
            timer = threading.Timer(delay_s, transfer.finish, args=(error,))
            timer.daemon = True
            timer.start()
            return
        with self._lock:
            if self._held is not None:
                return self._held.append(lambda: transfer.finish(error))
        transfer.finish(error)

    def close(self, *, cancel: bool = False, stall_s: float = STALL_S) -> None:
        """Close the inner engine."""
        self.inner.close(cancel=cancel, stall_s=stall_s)


def _flat(buffer: Any) -> Any:
    if hasattr(buffer, "untyped_storage"):  # a tensor: its bytes
        import torch

        return buffer.detach().reshape(-1).view(torch.uint8)
    return memoryview(buffer).cast("B")
