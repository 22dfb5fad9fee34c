"""A child without what Windows lacks: python without_posix.py WORK. Refuses it to files of `outcore`, not to others.

WORK doors: every module is imported but those that are of Linux only. WORK train: a tiny model is trained and
generates; the server is imported."""

import builtins
import io
import os
import pkgutil
import signal
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "readline", "posix", "_posixsubprocess")
CALLS = (
    "fork", "pread", "pwrite", "preadv", "pwritev", "statvfs", "posix_fadvise", "posix_fallocate", "memfd_create",
    "sched_getaffinity", "getuid", "geteuid", "killpg", "setsid", "getpgid", "nice", "symlink",
    "O_DIRECT", "O_DIRECTORY", "O_CLOEXEC", "mkfifo", "fchmod", "chown", "major", "minor", "getloadavg",
)  # fmt: skip
SIGNALS = ("SIGHUP", "SIGKILL", "SIGPIPE", "SIGUSR1", "SIGUSR2", "SIGALRM", "pthread_sigmask", "pause", "alarm")
KERNEL = ("/proc", "/sys", "/dev")
SMALL = '{"num_hidden_layers":2,"hidden_size":64,"intermediate_size":128}'


def is_ours(name: object) -> bool:
    return str(name).partition(".")[0] == "outcore"


class Lacking:
    """A module that has not these names for our files."""

    def __init__(self, module: Any, names: tuple[str, ...]) -> None:
        self.__dict__["of"], self.__dict__["names"] = module, names

    def __getattr__(self, name: str) -> Any:
        if name in self.names:
            raise AttributeError(f"Windows has no {self.of.__name__}.{name}")
        return getattr(self.of, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.of, name, value)


def refuse() -> None:
    """From here on."""
    real_import, real_open = builtins.__import__, builtins.open
    stand_ins = {"os": Lacking(os, CALLS), "signal": Lacking(signal, SIGNALS)}

    def importing(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if is_ours((globals or {}).get("__name__")) and name in MODULES:
            raise ImportError(f"Windows has no {name}")
        if is_ours((globals or {}).get("__name__")) and name in stand_ins:
            return stand_ins[name]
        return real_import(name, globals, locals, fromlist, level)

    def opening(file: Any, *rest: Any, **more: Any) -> Any:
        caller = sys._getframe(1)
        while caller.f_globals.get("__name__") == "pathlib" and caller.f_back:
            caller = caller.f_back
        if str(file).startswith(KERNEL) and str(file) != os.devnull and is_ours(caller.f_globals.get("__name__")):
            raise FileNotFoundError(2, "Windows has no such path", str(file))
        return real_open(file, *rest, **more)

    builtins.__import__, builtins.open = importing, opening  # type: ignore[assignment]
    io.open = opening  # type: ignore[assignment]


def doors() -> None:
    """Every module is imported."""
    import importlib

    import outcore

    for module in pkgutil.walk_packages(outcore.__path__, "outcore."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:  # an optional package of others
                assert error.name and not is_ours(error.name), module.name


def train() -> None:
    from outcore import cli

    def outcore(*arguments: str) -> None:
        assert not cli.main(list(arguments)), arguments

    Path("text.txt").write_text("def and return, " * 2000)
    outcore(
        *("train", "--dataset", "text.txt", "--config_overrides", SMALL, "--max_steps", "2", "--seq_length", "32"),
        *("--sample_tokens", "0", "--save_steps", "1"),
    )
    (model,) = Path("final_model").iterdir()
    Path("prompts.jsonl").write_text('{"prompt": "def "}\n')
    outcore("generate", str(model), "--input", "prompts.jsonl", "--output", "said.jsonl", "--max_tokens", "4")
    assert Path("said.jsonl").read_text()
    import outcore.serve


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

    from outcore.common import os_layer
    from tests.machine.windows_fakes import FakeMsvcrt

    sys.modules["msvcrt"], os_layer.IS_WINDOWS = FakeMsvcrt(), True
    signal.SIGBREAK = signal.SIGUSR1  # type: ignore[attr-defined]
    refuse()
    {"doors": doors, "train": train}[sys.argv[1]]()
    print("worked")
