"""Python code that nobody has read, judged by tests, in processes that reach nothing else (Linux).

Code and tests have a process each. The tests call the code's functions through two pipes, on which literals go alone
(None, bools, numbers, texts, bytes, lists, tuples, sets, dicts). So nothing that the code prints, overrides, returns or
ends makes the verdict, which only the tests' process can say.

Either process has namespaces of its own: no network, no other process, and a root that holds Python's folders,
read-only, and an empty /tmp in memory. It begins by exec, with an empty environment, no file but its pipes, nobody's
rights (the user's own, where that is not root) and limits. What it started ends with its keeper, and that with us.

The judge's process loads this file by its path, and its text is what runs inside: it imports nothing of ours."""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import errno
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CPU_S = 4
"""Seconds of one process's work."""
MEMORY_BYTES, FILE_BYTES, TEMPORARY_BYTES, REPLY_BYTES = 1 << 30, 1 << 24, 1 << 26, 1 << 22
"""Address space of a process, its largest file, all of /tmp, and what a function may return, written out."""
PROCESSES, FILES = 32, 64
NOBODY = 65534
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""All that is in the environment: else a library starts a thread for each core."""
NEW_USER, NEW_OTHERS = 0x10000000, 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000
"""unshare(2): users; mounts, host name, shared memory, processes, network."""
NO_SETUID, BIND_ALL, PRIVATE_ALL = 2, 0x1000 | 0x4000, 0x4000 | 0x40000
"""Flags of mount(2)."""
KEYCTL, JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}, 1
"""keyctl(2), by machine; refused to us, it is to the code."""
MOUNT_SETATTR, HERE, RECURSIVE, READ_ONLY_NO_SETUID = 442, -100, 0x8000, 1 | 2
DEATH_SIGNAL, DUMPABLE, NO_NEW_PRIVILEGES = 1, 4, 38
"""Options of prctl(2)."""


class SandboxError(RuntimeError):
    """The kernel gives no such process."""


class CodeVerdict(NamedTuple):
    """Outcome of one answer."""

    passes: bool
    tried: tuple[str, ...]
    """Names of what it reached for in vain: network, disk. Attempts past Python fail too, untold."""


class Sandbox:
    """Judges code by tests. `is_apart` False: with limits alone, without namespaces."""

    def __init__(self, is_apart: bool = True) -> None:
        self._is_apart, self._source = is_apart, Path(__file__).read_text(encoding="utf-8")
        self._python, paths = os.path.realpath(sys.executable), map(os.path.realpath, sys.path)
        self._path = ascii([path for path in paths if path.startswith(tuple(_prefixes()))])

    def judge(self, code: str, tests: Sequence[str], entry_point: str | None, wall_s: float) -> CodeVerdict:
        """Run the tests, of which a function `check` gets the code's `entry_point`, for `wall_s` seconds by the clock
        at most. SandboxError where the kernel refuses the processes."""
        calls, replies, verdict, notes = (os.pipe() for _ in range(4))
        passes, tried = False, ()
        ends, keepers = [calls[0], replies[1], notes[1], replies[0], calls[1], verdict[1]], list[int]()
        try:
            keepers.append(self._start("code", code, ends[:3]))
            keepers.append(self._start("tests", ascii((list(tests), entry_point)), ends[3:]))
            while ends:
                os.close(ends.pop())  # a process that is gone shows by the end of its pipes
            is_said = bool(select.select([verdict[0]], [], [], wall_s)[0])
            passes = is_said and os.read(verdict[0], 16) == b"passes"
        finally:
            for keeper in keepers:
                os.kill(keeper, signal.SIGKILL)
                os.waitpid(keeper, 0)
            os.set_blocking(notes[0], False)
            with contextlib.suppress(BlockingIOError):
                said = {*os.read(notes[0], 4096).decode(errors="replace").split()}
                tried = tuple(sorted(said & {"disk", "network"}))
            for end in (*ends, verdict[0], notes[0]):
                os.close(end)
        return CodeVerdict(passes and not tried, tried)

    def _start(self, role: str, text: str, pipes: Sequence[int]) -> int:
        """Begin a process that has these pipes, and `text` as its input. Returns the number of its keeper."""
        given = os.memfd_create("given")
        with open(given, "wb", closefd=False) as file:
            file.write(text.encode(errors="backslashreplace"))
        os.lseek(given, 0, os.SEEK_SET)
        failed, failing = os.pipe()  # exec closes it: what arrives is why there was none
        keeper = os.fork()
        if not keeper:
            try:
                self._keep(role, [given, *pipes], failing)
            except BaseException as error:
                os.write(failing, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(1)
        os.close(failing)
        os.close(given)
        with os.fdopen(failed) as file:
            why = file.read()
        if why:
            os.waitpid(keeper, 0)
            raise SandboxError(f"the kernel gives no process apart: {why}. code_without_sandbox has limits alone")
        return keeper

    def _keep(self, role: str, ends: Sequence[int], failing: int) -> None:
        """Be the keeper. Its child is the first process of the new namespace, with which all others there end; it ends
        with the keeper, which the code can neither see nor signal."""
        libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
        if self._is_apart:
            _checked("unshare", libc.unshare(NEW_OTHERS | (NEW_USER if user else 0)))
            for name, line in (
                ("setgroups", "deny"),
                ("uid_map", f"{user} {user} 1"),
                ("gid_map", f"{group} {group} 1"),
            ):
                if user:
                    Path("/proc/self", name).write_text(line)
        first = os.fork()
        if not first:
            libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            Path("/proc/self/oom_score_adj").write_text("1000")  # where RAM ends, this ends and not the training
            if self._is_apart:
                # Else it has the keys of the user's session.
                is_refused = libc.syscall(KEYCTL[os.uname().machine], JOIN_SESSION_KEYRING, None) < 0
                _checked("keyctl", is_refused and ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS))
                _change_root(libc)
            libc.prctl(DUMPABLE, 0, 0, 0, 0)  # nobody inside may look into it
            first = os.fork()
            if not first:
                self._become(libc, role, ends, failing, gives_up_root=self._is_apart and not user)
        os.closerange(3, 1 << 16)
        os.waitpid(first, 0)
        os._exit(0)

    def _become(self, libc: Any, role: str, ends: Sequence[int], failing: int, *, gives_up_root: bool) -> None:
        import fcntl  # here: Windows, which has no sandbox, has neither
        import resource

        null = os.open(os.devnull, os.O_RDWR)
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, failing + 1) for end in (ends[0], null, null, *ends[1:])]
        for place, end in enumerate(high):  # `failing` is behind all pipes, which were made before
            os.dup2(end, place)
        os.closerange(len(high), failing)
        os.closerange(failing + 1, 1 << 16)
        if gives_up_root:  # whom no limit of processes holds
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        # Last: exec fails where the user nobody has more processes than NPROC, also outside.
        for name, most in (("CPU", CPU_S), ("FSIZE", FILE_BYTES), ("NPROC", PROCESSES), ("NOFILE", FILES), ("CORE", 0)):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        os.execve(self._python, [self._python, "-ISBc", self._source, role, self._path], ENVIRONMENT)


def _prefixes() -> set[str]:
    return {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)}


def _checked(name: str, result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _change_root(libc: Any) -> None:
    """Have Python's folders, a few devices and an empty /tmp alone. Nothing of it stays when the process ends."""
    root = "/sys"  # a folder that is everywhere, to mount on

    def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
        given = (source.encode(), target.encode(), kind.encode(), flags, data.encode())
        _checked(f"mount {source} {target}", libc.mount(*given))

    mount("none", "/", "", PRIVATE_ALL)
    mount("tmpfs", root, "tmpfs", NO_SETUID, "size=1m,mode=755")
    bound = list[str]()
    for path in sorted({"/usr", "/lib", "/lib64", *_prefixes()}):
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path) and not path.startswith(tuple(f"{folder}/" for folder in bound)):
            os.makedirs(root + path)
            mount(path, root + path, "", BIND_ALL)
            bound.append(path)
    os.mkdir(f"{root}/dev")
    for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        Path(root + path).touch()
        mount(path, root + path, "", BIND_ALL)
    os.mkdir(f"{root}/tmp")
    wanted = (ctypes.c_uint64 * 4)(READ_ONLY_NO_SETUID, 0, 0, 0)
    _checked("mount_setattr", libc.syscall(MOUNT_SETATTR, HERE, root.encode(), RECURSIVE, wanted, 32))
    mount("tmpfs", f"{root}/tmp", "tmpfs", NO_SETUID, f"size={TEMPORARY_BYTES},nr_inodes=4096,mode=1777")
    os.chroot(root)  # from which no process may make itself a namespace of users
    os.chdir("/tmp")


# ------------------------------------------------------------------ inside


def literal(value: Any) -> str:
    """Write data as `ast.literal_eval` reads it. TypeError for what is none."""
    kind: Any = next((kind for kind in (bool, int, str, bytes) if isinstance(value, kind)), None)
    if kind is not None:
        return ascii(kind(value))
    if isinstance(value, float) and value == value:
        return ascii(float(value)).replace("inf", "1e999")
    if isinstance(value, list | tuple | set | frozenset):
        first, last = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
        return first + "".join(f"{literal(one)}," for one in value) + last if value or first != "{" else "set()"
    if isinstance(value, dict):
        return "{" + ",".join(f"{literal(key)}:{literal(one)}" for key, one in value.items()) + "}"
    if value is None:
        return "None"
    raise TypeError(f"{type(value).__name__} is no plain data")


def run_code(code: str) -> None:
    """Be the process of the code: do what the tests call for."""
    calls, replies = os.fdopen(3), os.fdopen(4, "w")
    sys.addaudithook(_watcher())
    space, failed = dict[str, Any](__name__="answer"), None
    try:
        exec(compile(code, "answer", "exec"), space)
    except BaseException as error:
        failed = error
    for line in calls:
        name, args, named = ast.literal_eval(line)
        try:
            if failed is not None:
                raise failed
            said = f"('value',{literal(space[name](*args, **named))})"
        except BaseException as error:
            said = ascii(("raised", type(error).__name__, str(error)[:500]))
        print(said, file=replies, flush=True)


def _watcher() -> Callable[[str, Any], None]:
    """Make a hook that tells when Python opens a socket, or changes a file outside /tmp."""
    write, absolute, decode, suppress = os.write, os.path.abspath, os.fsdecode, contextlib.suppress
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    changes = {f"os.{name}" for name in ("mkdir", "remove", "rename", "rmdir", "truncate", "chmod", "link", "symlink")}
    asks = {f"socket.{name}" for name in ("getaddrinfo", "gethostbyname", "gethostbyaddr", "sendto")}

    def watch(event: str, args: Any) -> None:
        note = b""
        if event in asks or (event == "socket.__new__" and args[1] != 1):  # AF_UNIX
            note = b"network "
        elif (event == "open" and args[2] & writes) or event in changes:
            with suppress(TypeError):
                paths = [absolute(decode(path)) for path in args[:2] if isinstance(path, (str, bytes, os.PathLike))]
                paths = paths[:1] if event == "open" else paths
                note = b"" if all(path.startswith(("/tmp/", "/dev/")) for path in paths) else b"disk "
        if note:
            with suppress(OSError):
                write(5, note)

    return watch


def run_tests(given: str) -> None:
    """Be the process of the tests: say the verdict when all have passed."""
    tests, entry_point = ast.literal_eval(given)
    replies, calls = os.fdopen(3, "rb"), os.fdopen(4, "w")

    def calling(name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            asked = f"({name!r},{literal(args)},{literal(named)})"
            try:
                print(asked, file=calls, flush=True)
                line = replies.readline(REPLY_BYTES)
                kind, *said = ast.literal_eval(line.decode() if line.endswith(b"\n") else "")
                raised = getattr(builtins, said[0], RuntimeError) if kind == "raised" else None
            except BaseException:
                os._exit(1)  # the code's process is gone or says no data, which no test may take for an error of its
            if raised is None:
                return said[0]
            raise raised(said[1]) if isinstance(raised, type) and issubclass(raised, Exception) else RuntimeError(said)

        return call

    nodes = [node for text in tests for node in ast.walk(ast.parse(text))]
    named = {node.id for node in nodes if isinstance(node, ast.Name)}  # what the tests define takes its place
    space: dict[str, Any] = {name: calling(name) for name in named - {*dir(builtins)}}
    if entry_point:
        space[entry_point] = calling(entry_point)
    for text in tests:
        exec(compile(text, "tests", "exec"), space)
    if entry_point and "check" in space:
        space["check"](calling(entry_point))
    os.write(5, b"passes")


if __name__ == "__main__":
    sys.path = ast.literal_eval(sys.argv[2])
    sys.set_int_max_str_digits(0)
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))  # which the process before exec may exceed
    {"code": run_code, "tests": run_tests}[sys.argv[1]](sys.stdin.read())
