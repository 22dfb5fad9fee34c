"""Threads on which requests are understood, beside the event loop, each with a process for templates and tokenizers.

What may take seconds (long bodies, forms to compile) has threads of its own, so that it waits for its like only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from outcore.apart import Apart, Bench

READERS = 2
"""Threads for requests that take a moment, and as many for others."""
QUICK_BYTES = 1 << 16
"""Bodies up to this long take milliseconds."""
STACK_BYTES = 8 << 20
"""Stack of a thread on which forms are compiled: more than they were tried with."""

Found = TypeVar("Found")


class Reading:
    """Threads of one server, from `start` to `close`."""

    def __init__(self, bench: Bench) -> None:
        self._apart = Apart(bench)
        self.ask = self._apart.call
        self._quick, self._slow = (ThreadPoolExecutor(READERS, f"reading-{name}") for name in ("quick", "slow"))

    def start(self) -> None:
        """Begin the threads, and the process that the first request needs."""
        before = threading.stack_size(STACK_BYTES)
        try:
            for threads in (self._quick, self._slow):
                all_began = threading.Barrier(READERS + 1)
                for _ in range(READERS):
                    threads.submit(all_began.wait)
                all_began.wait()
        finally:
            threading.stack_size(before)
        self._quick.submit(self.ask, "texts", [], True)

    async def of(self, body: Mapping[str, Any], size_bytes: int, work: Callable[..., Found], *args: Any) -> Found:
        """Run `work`, which understands a body that came as so many bytes, and return its result."""
        return await self.run(work, *args, is_slow=size_bytes > QUICK_BYTES or _has_form(body))

    async def run(self, work: Callable[..., Found], *args: Any, is_slow: bool = True) -> Found:
        """Run `work` on a thread and return its result."""
        threads = self._slow if is_slow else self._quick
        return await asyncio.get_running_loop().run_in_executor(threads, work, *args)

    def close(self) -> None:
        """End the processes, and what runs in them."""
        for threads in (self._quick, self._slow):
            threads.shutdown(wait=False, cancel_futures=True)
        self._apart.close()


def _has_form(body: Mapping[str, Any]) -> bool:
    """Whether an answer must have a form, which is tried and compiled."""
    return bool(body.get("tools")) or any(isinstance(body.get(name), Mapping) for name in ("response_format", "text"))
