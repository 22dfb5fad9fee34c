"""DeepSpeed is told through environment variables which accelerator it has and who its peers are: set here, once.

Under the `deepspeed` launcher they are there already and are kept; a plain `python train_model.py` becomes a group of
one. Without a CUDA GPU DeepSpeed's CPU accelerator is used.

A worker ends when its launcher does: after `kill -9` nobody else ends it, and it would train beside its successor.

A thread looks twice a second whether the launcher is still this process's parent, and whether the `deepspeed` command
is still the launcher's. If not, the process gets SIGTERM: the run finishes its step and saves. It is ended for good
after GRACE_S, should it hang in a collective whose peers are gone. A run that nobody launched has nobody to watch:
`nohup python train_model.py &` outlives its shell."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from outcore.common.ports import free_port
from outcore.machine import remove_stale_locks

GROUP_OF_ONE = "OUTCORE_GROUP_OF_ONE"
"""Holds the process that became a group of one by itself, and its port: a child that inherits the variables as they are
is another group, with a port, and a buffer in shared memory that is named by it, of its own."""

LOADING_S = 8.0
"""Loading an extension that is built takes less, also on a busy machine."""


def extensions_dir() -> Path:
    """Folder in which set-up builds DeepSpeed's C++ extensions: inside the environment, so that they go with its
    torch."""
    return Path(sys.prefix) / "torch_extensions"


def accelerator() -> Any:
    """DeepSpeed's; imported late, because it reads the environment."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def remove_stale_builds(environ: Mapping[str, str], say: Callable[[str], None] = print) -> None:
    """Remove the locks that killed builds of extensions left: torch would wait for them, for ever and without a word.

    Rank 0 of each host does it; the others wait for what it then builds."""
    if environ.get("LOCAL_RANK", "0") != "0":
        return
    root = _builds(environ)
    for name in remove_stale_locks(root):
        say(f"engine: removed the lock that a killed build of DeepSpeed's {name} had left in {root}")


def tell_of_builds(environ: Mapping[str, str]) -> None:
    """Have DeepSpeed say on stderr before it compiles an extension that set-up did not: minutes without a word.

    Rank 0 of each host says it, which compiles; the others wait for it."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    jit_load = OpBuilder.jit_load
    if environ.get("LOCAL_RANK", "0") != "0" or hasattr(jit_load, "__wrapped__"):
        return

    def tell(builder: Any) -> None:
        print(
            f"engine: DeepSpeed compiles its extension {builder.name} into {_builds(environ)}: once, one to three "
            "minutes. In a clone, python setup.py --deepspeed does it ahead",
            file=sys.stderr,
            flush=True,
        )

    @functools.wraps(jit_load)
    def told(builder: Any, verbose: bool = True) -> Any:
        is_there = any(_builds(environ).glob(f"**/{builder.name}/{builder.name}*.so"))
        # What is there may be of another folder, torch or CPU: only the wait tells that it is compiled again.
        timer = threading.Timer(LOADING_S, tell, (builder,))
        if is_there:
            timer.start()
        else:
            tell(builder)
        try:
            return jit_load(builder, verbose)
        finally:
            timer.cancel()

    OpBuilder.jit_load = told  # pyright: ignore[reportAttributeAccessIssue]


def _builds(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")


def prepare_environment(
    has_cuda: bool, local_rank: int = -1, environ: MutableMapping[str, str] | None = None
) -> dict[str, str]:
    """Set what DeepSpeed reads, leaving what a launcher has set; returns what was added.

    TORCH_CUDA_ARCH_LIST entries such as '9.0a' break DeepSpeed's extension builder and lose their letter."""
    env = os.environ if environ is None else environ
    wanted = {
        "RANK": "0",
        "LOCAL_RANK": str(max(local_rank, 0)),
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE", "1")),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "",
    }
    if not has_cuda:
        wanted["DS_ACCELERATOR"] = "cpu"
    if extensions_dir().is_dir():
        wanted["TORCH_EXTENSIONS_DIR"] = str(extensions_dir())
    added: dict[str, str] = {}
    process, _, port = env.get(GROUP_OF_ONE, "").partition(" ")
    is_inherited = bool(port) and process != str(os.getpid()) and env.get("MASTER_PORT") == port
    for name, value in wanted.items():
        if name not in env or is_inherited:
            added[name] = value or str(free_port())
    if "MASTER_PORT" in added:
        added[GROUP_OF_ONE] = f"{os.getpid()} {added['MASTER_PORT']}"
    archs = env.get("TORCH_CUDA_ARCH_LIST", "")
    plain = re.sub(r"(\d)[a-z]\b", r"\1", archs)
    if plain != archs:
        added["TORCH_CUDA_ARCH_LIST"] = plain
    # Extensions are built by ninja and g++ from the environment's own bin folder as well.
    # It must come first: two versions of ninja see each other's builds as outdated and compile for minutes.
    bin_folder = str(Path(sys.executable).parent)
    if env.get("PATH", "").split(os.pathsep)[0] != bin_folder:
        added["PATH"] = bin_folder + os.pathsep + env.get("PATH", "")
    env.update(added)
    return added


def ask_processor_once() -> None:
    """Keep what `cpuinfo` finds out for this process: it takes 1.2 s, and DeepSpeed's builders and its CPU optimizer
    each ask anew."""
    import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


EVERY_S = 0.5
GRACE_S = 300.0
EXIT_CODE = 128 + signal.SIGTERM


def launchers() -> tuple[psutil.Process, ...]:
    """This process's parent, and the `deepspeed` command above it where there is one."""
    parent = psutil.Process().parent()
    if parent is None:
        return ()
    above = parent.parent()
    is_ours = above is not None and above.pid != 1 and "deepspeed" in " ".join(_command(above))
    return (parent, above) if above is not None and is_ours else (parent,)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def watch_launcher(local_rank: int, end: Callable[[], None] | None = None) -> threading.Thread | None:
    """Start watching when a launcher started this process; None when nobody did.

    `local_rank`: what the `deepspeed` launcher passes; torchrun is known by its environment."""
    if os.name == "nt" or (local_rank < 0 and "TORCHELASTIC_RUN_ID" not in os.environ):
        return None
    watched = launchers()
    thread = threading.Thread(target=_watch, args=(watched, end or _end), name="launcher watch", daemon=True)
    thread.start()
    return thread


def _watch(watched: tuple[psutil.Process, ...], end: Callable[[], None]) -> None:
    parent_pid = os.getppid()
    while os.getppid() == parent_pid and all(_is_alive(process) for process in watched):
        time.sleep(EVERY_S)
    end()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # another user's, under strict rules: its parenthood still tells
        return True


def _end() -> None:
    with suppress(OSError, ValueError):  # the pipe may have gone with the launcher
        sys.stderr.write("\nthe launcher of this process has ended, so the run ends as well\n")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(EXIT_CODE)
