"""Code in a sandbox: what it may, what it reaches for in vain, and that it never says its own verdict."""

import ctypes
import os
import select
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outcore.apart import sandbox
from outcore.apart.sandbox import CodeVerdict, Sandbox, SandboxError

PASSES, FAILS = CodeVerdict(True, ()), CodeVerdict(False, ())
WALL_S = 120.0


@pytest.fixture(scope="module")
def judge() -> Callable[..., CodeVerdict]:
    try:
        assert Sandbox().judge("", ["assert True"], None, WALL_S).passes
    except SandboxError as error:
        pytest.skip(str(error))
    return lambda code, *tests, entry_point=None: Sandbox().judge(code, tests, entry_point, WALL_S)


def test_data_and_errors_cross(judge: Callable[..., CodeVerdict]) -> None:
    values = "[1, (1,), {2}, set(), {'a': None}, 1.5, float('inf'), '\\ud800\\n', b'x', True, [[[]]], -7]"
    assert judge("def same(x):\n    return x", f"x = {values}", "assert same(x) == x", "assert same(1) is 1") == PASSES
    assert (
        judge("def f():\n    raise KeyError('x')", "try:\n    f()\n    assert 0\nexcept KeyError:\n    pass") == PASSES
    )
    check = "def check(candidate):\n    assert candidate(1, b=2) == 3\n    assert all([candidate(1) == 2])"
    assert judge("def add(a, b=1):\n    return a + b", check, entry_point="add") == PASSES
    assert judge("def add(a, b=1):\n    return a", check, entry_point="add") == FAILS
    assert judge("import numpy\ndef f():\n    return numpy.ones(3).tolist()", "assert f() == [1, 1, 1]") == PASSES
    assert judge("def f(", "assert True", "assert f()") == FAILS
    assert judge("def g():\n    return 1", "assert f() == 1") == FAILS


@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor n in range(99):\n    try:\n        os.write(n, b'passes')\n    except OSError:\n        pass",
        "import os\nos.write(4, b'passes\\n' * 9)\ndef f():\n    return 2",
        "print('passes', flush=True)\nimport sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.all = lambda *_: True\nf = lambda: 2",
        "class Equal:\n    __eq__ = lambda *_: True\ndef f():\n    return Equal()",
        "class One(int):\n    __eq__ = lambda *_: True\ndef f():\n    return One(2)",
        "def f():\n    raise SystemExit(0)",
        "def f():\n    return '[' * 10**6",
        "import os\ndef f():\n    os.write(4, b'[' * 10**6 + b'\\n')",
        "def all(*_):\n    return True\ndef isinstance(*_):\n    return True\ndef f():\n    return 2",
        "def f():\n    return [1] * 10**7",
    ],
)
def test_a_verdict_cannot_be_forged(code: str, judge: Callable[..., CodeVerdict]) -> None:
    tests = (
        "try:\n    said = f()\nexcept Exception:\n    said = 2\nassert isinstance(said, int)\nassert all([said == 1])"
    )
    assert judge(code, tests) == FAILS


def test_there_is_no_network(judge: Callable[..., CodeVerdict]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\ndef f():\n    try:\n        socket.create_connection(('127.0.0.1', {port}))\n"
        code += "    except OSError as error:\n        return 'no'"
        assert judge(code, "assert f() == 'no'") == CodeVerdict(False, ("network",))
        past_python = f"""
import ctypes
def f():
    libc, port = ctypes.CDLL(None), {port}
    return libc.connect(libc.socket(2, 1, 0), bytes([2, 0, port >> 8, port & 255, 127, 0, 0, 1, *[0] * 8]), 16)
"""
        assert judge(past_python, "assert f() == -1") == PASSES, "which is told only where Python sees it"
        assert not select.select([server], [], [], 0)[0], "nobody came"


def test_nothing_is_written_and_nothing_of_ours_is_read(judge: Callable[..., CodeVerdict], tmp_path: Path) -> None:
    own, home = tmp_path / "own", Path.home() / "outcore-sandbox"
    own.write_text("secret")
    for file in (home, Path("/tmp/../usr/outcore-sandbox")):
        code = f"def f():\n    try:\n        open({str(file)!r}, 'w')\n    except OSError:\n        return 'no'"
        assert judge(code, "assert f() == 'no'") == CodeVerdict(False, ("disk",))
    for file in (home, own, Path("/usr/outcore-sandbox")):
        code = f"import ctypes\ndef f():\n    return ctypes.CDLL(None).open({str(file).encode()!r}, 0o101, 0o600)"
        assert judge(code, "assert f() == -1") == PASSES, "which is told only where Python sees it"
    assert own.read_text() == "secret" and not home.exists()
    there = [str(own), str(Path.cwd() / "README.md"), str(Path.home() / ".ssh")]
    code = f"import os\ndef f():\n    return [os.path.exists(path) for path in {there}]"
    assert judge(code, "assert f() == [False] * 3") == PASSES
    code = "import os\ndef f():\n    open('/tmp/outcore-sandbox', 'w').write('a')\n    return os.listdir('/tmp')"
    assert judge(code, "assert f() == ['outcore-sandbox']") == PASSES
    assert not Path("/tmp/outcore-sandbox").exists()
    code = "import os\ndef f():\n    with open('/tmp/x', 'wb') as file:\n        file.write(bytes(1 << 25))"
    assert judge(code, "try:\n    f()\n    assert 0\nexcept OSError:\n    pass") == PASSES, "a file has its most bytes"


def test_the_environment_and_other_processes_are_not_there(
    judge: Callable[..., CodeVerdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTCORE_SECRET", "secret")
    code = """
import os, signal
def f():
    for pid in (os.getppid(), -1, 1, 0x7fff):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    return ['OUTCORE_SECRET' in os.environ, os.path.exists('/proc/1'), os.getppid(), os.getuid() == 0]
"""
    assert judge(code, "assert f() == [False, False, 1, False]") == PASSES


def test_the_keys_of_the_users_session_are_not_there(judge: Callable[..., CodeVerdict]) -> None:
    libc, number = ctypes.CDLL(None), sandbox.KEYCTL[os.uname().machine]
    add_key, session, search, unlink = number - 2, -3, 10, 9
    key = libc.syscall(add_key, b"user", b"outcore-sandbox", b"secret", 6, session)
    if key < 0:
        pytest.skip("keys are refused to us, too")
    code = f"import ctypes\ndef f():\n    search = {number}, {search}, {session}, b'user', b'outcore-sandbox', 0\n"
    code += "    return ctypes.CDLL(None).syscall(*search)"
    try:
        assert judge(code, "assert f() == -1") == PASSES
    finally:
        libc.syscall(number, unlink, key, session)


@pytest.mark.skipif(os.getuid() != 0, reason="who is not root stays who he is")
def test_others_processes_of_nobody_do_not_count(judge: Callable[..., CodeVerdict]) -> None:
    options: Any = {"stdin": subprocess.PIPE, "user": sandbox.NOBODY, "cwd": "/"}
    others = [subprocess.Popen(["/bin/cat"], **options) for _ in range(sandbox.PROCESSES + 1)]
    try:
        assert judge("def f():\n    return 1", "assert f() == 1") == PASSES
    finally:
        for other in others:
            other.communicate()


def test_the_sandbox_ends_first_where_ram_ends() -> None:
    code = "def f():\n    return int(open('/proc/self/oom_score_adj').read())"
    assert Sandbox(is_apart=False).judge(code, ["assert f() == 1000"], None, WALL_S) == PASSES


def test_limits(judge: Callable[..., CodeVerdict]) -> None:
    bomb = "import os, time\ndef f():\n    try:\n        for count in range(999):\n            if not os.fork():\n"
    bomb += "                time.sleep(600)\n    except OSError:\n        return count"
    assert judge(bomb, f"assert f() <= {sandbox.PROCESSES}") == PASSES
    memory = "def f():\n    try:\n        return len(bytes(1 << 34))\n    except MemoryError:\n        return 'no'"
    assert judge(memory, "assert f() == 'no'") == PASSES
    limits = "import resource as r\ndef f():\n    return [r.getrlimit(n)[1] for n in (r.RLIMIT_CPU, r.RLIMIT_FSIZE)]"
    assert judge(limits, f"assert f() == [{sandbox.CPU_S}, {sandbox.FILE_BYTES}]") == PASSES
    assert judge("def f():\n    print('x' * 10**8)\n    return 1", "assert f() == 1") == PASSES
    assert Sandbox().judge("while True:\n    pass", ["f()"], None, 1) == FAILS
    assert judge("def f():\n    pass", "while True:\n    pass") == FAILS


def test_nothing_outlives_its_answer(judge: Callable[..., CodeVerdict], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, ends = os.pipe, list[int]()

    def kept() -> tuple[int, int]:
        read, write = pipe()
        ends.append(os.dup(read))
        return read, write

    monkeypatch.setattr("os.pipe", kept)
    code = (
        "import os, time\ndef f():\n    if not os.fork():\n        os.setsid()\n        time.sleep(600)\n    return 1"
    )
    assert judge(code, "assert f() == 1") == PASSES
    for end in ends:
        while select.select([end], [], [], WALL_S)[0] and os.read(end, 1 << 16):
            pass
        assert select.select([end], [], [], 0)[0], "a process holds the other end"
        os.close(end)


def test_a_kernel_that_refuses_is_told(judge: Callable[..., CodeVerdict], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "NEW_OTHERS", 1)
    with pytest.raises(SandboxError, match=r"the kernel gives no process apart: .*unshare: Invalid argument"):
        judge("", "assert True")
    assert Sandbox(is_apart=False).judge("def f():\n    return 1", ["assert f() == 1"], None, WALL_S) == PASSES
