"""Threads that run one at a time, in an order that a seed draws, on a clock that only waiting moves.

Each simulated thread is a real one that holds the baton or waits for it. The baton may change hands wherever the code
takes a lock, waits, reads a queue, or (`lines`) at any line of the product's. When nobody can go on, the clock jumps to
the first limit of a wait; when there is none either, everybody waits for ever, which is a failure (`Stuck`).

`installed` puts `threading`, `time` and `queue` of the simulation into the product's modules, by their names there."""

from __future__ import annotations

import _thread
import contextlib
import gc
import math
import random
import sys
import time as real_time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType, SimpleNamespace
from typing import Any

MOST_STEPS = 400_000
"""Steps of one seed; more are a wait without end in small pieces."""
LINE_SHARE = 0.04
"""Chance that the baton changes hands at a line."""
ROOMS = ("storage", "staging", "states", "optim", "flow", "engine.stream", "infer", "checkpoint", "runs", "common")
PREFIXES = tuple(f"outcore.{room}" for room in ROOMS)


class Stuck(AssertionError):
    """Somebody waits for what never comes."""


class Killed(BaseException):
    """The simulated process is dead: nothing that its code does from now on happens."""


class Task:
    """One simulated thread."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation, self.name = simulation, name
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.is_over = False
        self.is_killed = False
        self.ready: Callable[[], bool] | None = None
        """What it waits for; None: it can go on."""
        self.until_s = math.inf
        self.process: Any = None
        """What dies together (see `drive.Process`)."""


class Simulation:
    """The order of things under one seed."""

    def __init__(self, seed: int | str, *, lines: bool = False, seen: set[tuple[str, int]] | None = None) -> None:
        self.random = random.Random(seed)
        self.now_s, self.wall_s = 1000.0, 1.7e9
        self.steps, self.trace = 0, 0
        self.is_over = False
        self.failures: list[BaseException] = []
        """What simulated threads died of."""
        self._lines, self._seen = lines, seen
        self._turns = self.random.choice([0.02, 0.1, 0.5])
        """Chance that it does: much of what goes wrong needs one turn at the one place, some needs many."""
        self._tasks: list[Task] = []
        self._is_switching = False
        self.current = Task(self, "main")
        self._tasks.append(self.current)

    # --- for the code under test

    def start(self, run: Callable[[], Any], name: str) -> Task:
        """Begin a thread; it belongs to the process of the one that starts it."""
        task = Task(self, name)
        task.process = self.current.process
        self._tasks.append(task)
        _thread.start_new_thread(self._main, (task, run))
        self.step()
        return task

    def _main(self, task: Task, run: Callable[[], Any]) -> None:
        task.gate.acquire()
        try:
            if not task.is_killed:
                if self._lines or self._seen is not None:
                    sys.settrace(self._on_call)
                run()
        except Killed:
            pass
        except BaseException as error:
            if not self.is_over:
                self.failures.append(error)
        finally:
            sys.settrace(None)
            task.is_over = True
            self._next(task)

    def step(self) -> None:
        """The baton may change hands here."""
        if self.is_over:
            return
        self.steps += 1
        if self.random.random() < self._turns or self.current.is_killed:
            self._go(self.current)

    def block(self, ready: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait until `ready()`; False when the limit came first."""
        if self.is_over and ready():
            return True
        if self.is_over:
            raise Killed
        task = self.current
        task.ready = ready
        task.until_s = math.inf if limit_s is None else self.now_s + max(0.0, limit_s)
        self._go(task)
        task.ready, task.until_s = None, math.inf
        return ready()

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        self.block(lambda: False, seconds)

    def chance(self, share: float) -> bool:
        """Whether what has this chance comes true."""
        return self.random.random() < share

    # --- the baton

    def _go(self, task: Task) -> None:
        self._next(task)
        if task.is_killed:
            raise Killed

    def _next(self, task: Task) -> None:
        self._is_switching = True
        self.steps += 1
        chosen = self._choose(task)
        self._is_switching = False
        if chosen is task:
            return
        self.current = chosen
        chosen.gate.release()
        if not task.is_over:
            task.gate.acquire()

    def _choose(self, task: Task) -> Task:
        """Who goes on. While the simulation ends, whoever is left, to be killed."""
        alive = [other for other in self._tasks if not other.is_over]
        self._tasks = alive
        if self.is_over:
            return alive[-1]
        if self.steps > MOST_STEPS:
            return self._give_up(Stuck(f"no end after {MOST_STEPS} steps: {self._who_waits(alive)}"))
        ready = [o for o in alive if o.ready is None or o.is_killed or self.now_s >= o.until_s or o.ready()]
        if not ready:
            until_s = min(other.until_s for other in alive)
            if until_s == math.inf:
                return self._give_up(Stuck(f"everybody waits for ever: {self._who_waits(alive)}"))
            self.now_s = until_s
            ready = [other for other in alive if other.until_s <= until_s]
        chosen = ready[0] if len(ready) == 1 else self.random.choice(ready)
        self.trace = zlib.crc32(f"{chosen.name} {self.now_s}".encode(), self.trace)
        return chosen

    def _who_waits(self, alive: list[Task]) -> str:
        return ", ".join(f"{task.name} ({'ready' if task.ready is None else 'waits'})" for task in alive)

    def _give_up(self, error: BaseException) -> Task:
        self.failures.append(error)
        main = self._tasks[0]
        main.is_killed = True
        self.is_over = True
        return main

    def kill(self, process: Any) -> None:
        """End the threads of a process wherever they are; the caller's own ends with the exception."""
        for task in self._tasks:
            if task.process is process and not task.is_over:
                task.is_killed = True
        if self.current.process is process:
            raise Killed

    def names_alive(self, *starts: str) -> list[str]:
        """Names of threads that have not ended, of those that begin so."""
        return [task.name for task in self._tasks if not task.is_over and task.name.startswith(starts)]

    def end(self) -> None:
        """Kill what is left. To be called on the main thread."""
        self.is_over = True
        main = self._tasks[0]
        for task in self._tasks[1:]:
            task.is_killed = True
        while any(not task.is_over for task in self._tasks[1:]):
            self._next(main)

    # --- any line

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._on_line if "/outcore/" in frame.f_code.co_filename else None

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and self._seen is not None:
            self._seen.add((frame.f_code.co_filename, frame.f_lineno))
        elif event == "line" and not self._is_switching and not self.is_over and self.chance(LINE_SHARE):
            self.step()
        return self._on_line


# --- what the product's modules find under the names of the standard library


_running: list[Simulation] = []


def running() -> Simulation:
    """The simulation that is under way."""
    return _running[-1]


class Lock:
    """`threading.Lock`, or `RLock`."""

    again = False

    def __init__(self) -> None:
        self._simulation = running()
        self._owner: Task | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        simulation = self._simulation
        if simulation.is_over:
            return True
        simulation.step()
        me = simulation.current
        if self._owner is me and not self.again:
            raise Stuck(f"{me.name} waits for a lock that it holds itself")
        if self._owner is not None and self._owner is not me:
            if not blocking:
                return False
            simulation.block(self._is_free, None if timeout < 0 else timeout)
            if self._owner is not None:
                return False
        self._owner, self._depth = me, self._depth + 1
        return True

    def _is_free(self) -> bool:
        return self._owner is None or self._owner.is_over

    def release(self) -> None:
        if self._simulation.is_over:
            return
        self._depth -= 1
        if not self._depth:
            self._owner = None

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    """A lock that its holder may take again."""

    again = True


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._simulation = running()
        self._lock = lock or RLock()
        self._waiting: list[list[bool]] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    acquire = property(lambda self: self._lock.acquire)
    release = property(lambda self: self._lock.release)

    def wait(self, timeout: float | None = None) -> bool:
        told = [False]
        self._waiting.append(told)
        depth, self._lock._depth, self._lock._owner = self._lock._depth, 0, None
        try:
            self._simulation.block(lambda: told[0], timeout)
        finally:
            if told in self._waiting:
                self._waiting.remove(told)
            if not self._simulation.current.is_killed:
                self._lock.acquire()
                self._lock._depth = depth
        return told[0]

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait as threading does. A condition that is true at the time limit although nobody told is a lost wake-up: a
        failure."""
        simulation = self._simulation
        until_s = None if timeout is None else simulation.now_s + timeout
        was_told = True
        while not (found := predicate()):
            if until_s is not None and simulation.now_s >= until_s:
                break
            was_told = self.wait(None if until_s is None else until_s - simulation.now_s)
        if found and not was_told and not simulation.is_over:
            simulation.failures.append(Stuck(f"{simulation.current.name} was not told of what it waited for"))
        return found

    def notify(self, n: int = 1) -> None:
        for told in self._waiting[:n]:
            told[0] = True
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._simulation = running()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._simulation.step()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._simulation.block(self.is_set, timeout)
        return self._is_set


class Semaphore:
    """`threading.Semaphore`."""

    def __init__(self, value: int = 1) -> None:
        self._simulation = running()
        self._value = value

    def acquire(self) -> bool:
        self._simulation.block(lambda: self._value > 0)
        self._value -= 1
        return True

    def release(self) -> None:
        self._value += 1
        self._simulation.step()


class Thread:
    """`threading.Thread`."""

    def __init__(
        self, *, target: Callable[..., Any], args: tuple[Any, ...] = (), name: str = "thread", daemon: bool = False
    ) -> None:
        self._simulation, self._run, self.name = running(), lambda: target(*args), name
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._simulation.start(self._run, self.name)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_over

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        assert task is not None
        if not self._simulation.is_over:
            self._simulation.block(lambda: task.is_over, timeout)


class SimpleQueue:
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._simulation = running()
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._simulation.step()

    def get(self) -> Any:
        self._simulation.block(lambda: bool(self._items))
        return self._items.popleft()


class Pool:
    """`ThreadPoolExecutor` of one thread; of more a real one, as no thread of the product's waits for those."""

    def __new__(cls, max_workers: int, **more: Any) -> Any:
        return super().__new__(cls) if max_workers == 1 else ThreadPoolExecutor(max_workers, **more)

    def __init__(self, max_workers: int, thread_name_prefix: str = "pool") -> None:
        self._calls: SimpleQueue = SimpleQueue()
        Thread(target=self._work, name=thread_name_prefix).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def submit(self, call: Callable[..., Any], *args: Any) -> None:
        self._calls.put(lambda: call(*args))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._calls._items.clear()
        self._calls.put(None)


THREADING = SimpleNamespace(
    Lock=Lock, RLock=RLock, Condition=Condition, Event=Event, Semaphore=Semaphore, Thread=Thread,
    get_ident=lambda: id(running().current), current_thread=lambda: running().current,
)  # fmt: skip
TIME = SimpleNamespace(
    monotonic=lambda: running().now_s, perf_counter=lambda: running().now_s,
    time=lambda: running().wall_s + running().now_s, sleep=lambda seconds: running().sleep(seconds),
    strftime=real_time.strftime, localtime=real_time.localtime,
)  # fmt: skip
STANDARD = {
    "threading": THREADING,
    "time": TIME,
    "queue": SimpleNamespace(SimpleQueue=SimpleQueue),
    "SimpleQueue": SimpleQueue,
    "ThreadPoolExecutor": Pool,
    "atexit": SimpleNamespace(register=lambda fn: None, unregister=lambda fn: None),
    "weakref": SimpleNamespace(ref=weakref.ref, finalize=lambda *args, **more: SimpleNamespace(detach=lambda: None)),
}


@contextlib.contextmanager
def installed(simulation: Simulation) -> Iterator[Simulation]:
    """The product's modules have the simulation's threads, clock and queues, and nothing is collected by chance."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for name, module in list(sys.modules.items()):
        if name.startswith(PREFIXES):
            for own, value in STANDARD.items():
                if own in (found := vars(module)):
                    before.append((found, own, found[own]))
                    found[own] = value
    was_on = gc.isenabled()
    gc.disable()
    _running.append(simulation)
    try:
        yield simulation
    finally:
        try:
            simulation.end()
        finally:
            gc.collect() if simulation.steps > 20_000 else gc.collect(0)
            _running.pop()
            for found, own, value in before:
                found[own] = value
            if was_on:
                gc.enable()
