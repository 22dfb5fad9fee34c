"""Markers that need hardware are skipped, with the reason, where the hardware is missing."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from outcore.install.bootstrap import add_to_path

USER = tempfile.TemporaryDirectory(prefix="outcore-tests-")
"""What is kept for a user is kept for these tests alone; from here on, before another conftest imports the package."""
os.environ["XDG_DATA_HOME"] = USER.name


@pytest.fixture(autouse=True)
def fresh_user() -> Iterator[None]:
    """No test finds what another one kept for the user."""
    yield
    shutil.rmtree(os.path.join(USER.name, "outcore"), ignore_errors=True)


SLOW_LIMIT_S = 3600
"""Of a slow test without a limit of its own: hundreds of examples, or every pattern of 32 bits."""
ROOMS_THAT_SYNC = {"storage", "faults", "checkpoint", "monitor"}
"""Whose tests wait for the drive as a run does; elsewhere nobody cuts the power, and waiting took an eighth."""


FEW_ROOMS = 3
"""Runs of so few rooms are someone's who waits: what other rooms' scripts need is not imported for them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked `more`, too, as CI does")


def pytest_configure(config: pytest.Config) -> None:
    # The environment's own ninja checks DeepSpeed's extensions; another version would compile them all again.
    add_to_path(os.path.dirname(sys.executable))
    # Tiny models gain nothing from a second thread, and beside another test process on the same cores they lose much:
    # an operation of microseconds then waits a millisecond for a thread that is not running. Children inherit it.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Where a machine asks for no compiled files, each of the many children would compile the package again, 1 s.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # runs no test itself: its workers do
    gc.disable()  # until all is collected: what is imported stays
    import torch
    from hypothesis import settings

    torch.set_num_threads(1)
    # On a machine that is busy an example of milliseconds may take hypothesis's 200 at any time.
    settings.register_profile("no deadline", deadline=None)
    settings.load_profile("no deadline")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    chosen = config.getoption("-m") or ""
    num_cases: Counter[tuple[Path, str]] = Counter()
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        elif "gds" in item.keywords and "gds" not in chosen:
            item.add_marker(pytest.mark.skip(reason="needs a proven GPUDirect Storage path: run with -m gds"))
        elif "slow" in item.keywords and "slow" not in chosen:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
        elif isinstance(item, pytest.Function):
            num_cases[item.path, item.originalname] += 1
            _choose(item, num_cases[item.path, item.originalname], config.getoption("--all"))


def _choose(item: pytest.Function, case: int, all_cases: bool) -> None:
    """Leave out what is marked `more`, unless all are asked for; `case` counts the cases of one test from 1."""
    more = item.get_closest_marker("more")
    if not all_cases and more is not None and case > more.kwargs.get("after", 0):
        item.add_marker(pytest.mark.skip(reason="more of what another test holds: run with --all"))
    if "slow" in item.keywords and item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))


def pytest_collection_finish(session: pytest.Session) -> None:
    if len({item.path.relative_to(Path(__file__).parent).parts[0] for item in session.items}) > FEW_ROOMS:
        # A process has one fork server: the first who asks for it says what it has imported, for tests/forked.py, too.
        from outcore.apart import process
        from tests.forked import IMPORTED

        process.PRELOADED.extend(IMPORTED)
    gc.enable()
    gc.freeze()  # a million objects that stay to the end: looking through all of them takes half a second each time


@pytest.fixture(autouse=True, scope="module")
def _sync_only_checks(request: pytest.FixtureRequest) -> Iterator[None]:
    """os.fsync raises for a descriptor that is not open, and does nothing more."""
    with pytest.MonkeyPatch.context() as patch:
        if not ROOMS_THAT_SYNC & set(request.path.parts):
            patch.setattr(os, "fsync", lambda file: os.fstat(file if isinstance(file, int) else file.fileno()) and None)
        yield


@pytest.fixture(autouse=True)
def _linear_as_torch_has_it() -> Iterator[None]:
    """DeepSpeed's zero.Init replaces torch.nn.functional.linear for the whole process, and says that it stays so."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.nn.functional.linear is not torch._C._nn.linear:
        torch.nn.functional.linear = torch._C._nn.linear


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A command takes signals for its whole process, which here is that of the tests that follow, too."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _logging_as_new() -> None:
    """Libraries that earlier tests imported may have silenced logging for the whole process; ours must be heard."""
    logging.disable(logging.NOTSET)
    if logging.root.level > logging.WARNING:
        logging.root.setLevel(logging.WARNING)
    loggers = logging.root.manager.loggerDict  # thousands, and before each test
    for name in [name for name in loggers if name.startswith("outcore")]:
        if isinstance(logger := loggers[name], logging.Logger):
            logger.disabled, logger.propagate = False, True
            if logger.level != logging.NOTSET:  # setting it empties the caches of all those loggers
                logger.setLevel(logging.NOTSET)


@pytest.fixture
def only_own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed models of earlier tests of this process, which share the device's budget, are not counted."""
    from outcore.hf import ground

    monkeypatch.setattr(ground, "_ALIVE", weakref.WeakSet())


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread: tiny models are slower on several, and sums are in one order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def engines() -> Iterator[list]:
    """Engines put here are closed at the end; name it last, so that it is before what they use is closed."""
    made: list = []
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def fixed_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As --deterministic runs, until the test ends."""
    import torch.utils.deterministic

    from outcore.train.process.random_state import fix_order

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fix_order()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
