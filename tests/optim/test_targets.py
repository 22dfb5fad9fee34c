"""Wheels that zig compiles for other machines: of the right machine, and the same bits under wine and qemu.

    pytest tests/optim/test_targets.py -m slow

Needs Debian's wine64, qemu-user-static and libc6-arm64-cross to run them; without these they are built only."""

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from outcore.optim.build import build_extension
from outcore.storage import windows_file
from tests.install.fakes import REPOSITORY

CHECK = Path(__file__).with_name("kernel_check.cpp")
ZIG = "ziglang==0.17.1"
RUNNERS = {"windows-amd64": ("wine",), "linux-aarch64": ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu")}
TRIPLES = {"windows-amd64": "x86_64-windows-gnu", "linux-aarch64": "aarch64-linux-gnu.2.17"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with the backend and its compiler to import; what zig built before is kept in its own cache."""
    folder = tmp_path_factory.mktemp("tools")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), "hatchling", ZIG]
    subprocess.run(pip, check=True, timeout=600)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY / "wheels")])}


@pytest.fixture(scope="module", params=["linux-aarch64", "windows-amd64"])
def target(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def library(target: str, tools: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels out of the wheel of this target."""
    folder = tmp_path_factory.mktemp(target)
    code = f"import backend; print(backend.build_wheel({str(folder)!r}, {{'target': {target!r}}}))"
    subprocess.run([sys.executable, "-c", code], env=tools, check=True, timeout=3000)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.endswith(
        {"windows-amd64": "win_amd64.whl", "linux-aarch64": "manylinux_2_17_aarch64.whl"}[target]
    )
    (name,) = [
        name for name in zipfile.ZipFile(wheel).namelist() if re.search(r"native/outcore_optim\.(dll|so)$", name)
    ]
    return Path(zipfile.ZipFile(wheel).extract(name, folder))


def lines_of(tools: dict[str, str], triple: str, runner: tuple[str, ...], library: Path, folder: Path) -> list[str]:
    """What the check prints with this library on this system."""
    numbers = {
        "ACCESS": windows_file.GENERIC_READ | windows_file.GENERIC_WRITE,
        "SHARE": windows_file.SHARE_READ_WRITE_DELETE,
        "CREATE": windows_file.CREATE_ALWAYS,
        "FLAGS": windows_file.FLAG_OVERLAPPED | windows_file.FLAG_NO_BUFFERING,
        "ALLOCATION": windows_file.ALLOCATION_INFO,
        "END_OF_FILE": windows_file.END_OF_FILE_INFO,
        "PENDING": windows_file.ERROR_IO_PENDING,
    }
    program = folder / "check.exe"
    zig = [
        sys.executable,
        "-m",
        "ziglang",
        "c++",
        "-target",
        triple,
        "-O1",
        "-std=c++17",
        str(CHECK),
        "-o",
        str(program),
    ]
    zig += [f"-D{name}={number}" for name, number in numbers.items()]
    subprocess.run(zig, env=tools, check=True, timeout=2400)
    shutil.copy(library, folder)
    ran = subprocess.run(
        [*runner, str(program), f"./{library.name}"], cwd=folder, capture_output=True, text=True, timeout=600,
        env=os.environ | {"WINEPREFIX": str(folder / "wine"), "WINEDEBUG": "-all"}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.replace("\r", "").splitlines()


def test_the_wheel_holds_a_library_of_its_machine(library: Path, target: str) -> None:
    data = library.read_bytes()
    if target == "windows-amd64":
        (at,) = struct.unpack_from("<I", data, 0x3C)
        machine, flags = struct.unpack_from("<HxxxxxxxxxxxxxxxxH", data, at + 4)
        assert data[:2] == b"MZ" and data[at : at + 4] == b"PE\0\0"
        assert machine == 0x8664 and flags & 0x2000  # AMD64; a DLL
        needed = set(re.findall(rb"[\w.-]+\.dll", data, re.I)) - {b"outcore_optim.dll"}
        assert {name.lower() for name in needed if not name.lower().startswith(b"api-ms-win-crt")} <= {
            b"kernel32.dll", b"ntdll.dll", b"advapi32.dll",
        }  # fmt: skip
    else:
        assert data[:6] == b"\x7fELF\x02\x01"
        assert struct.unpack_from("<HH", data, 16) == (3, 183)  # a shared object; AArch64
        versions = {tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_(2\.[0-9]+)", data)}
        assert versions and max(versions) <= (2, 17)


def test_its_kernels_give_the_bits_of_this_machines(
    library: Path, target: str, tools: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    runner = RUNNERS[target]
    if shutil.which(runner[0]) is None or (target == "linux-aarch64" and not Path(runner[2]).exists()):
        pytest.skip(f"{runner[0]} (with its C library) is not installed")
    theirs = lines_of(tools, TRIPLES[target], runner, library, tmp_path_factory.mktemp("theirs"))
    ours = lines_of(tools, "x86_64-linux-gnu.2.17", (), build_extension(), tmp_path_factory.mktemp("ours"))
    kernels = [line for line in theirs if line.startswith(("abi", "variant"))]
    assert len(kernels) > 5 and kernels == ours[: len(kernels)]
    if target == "windows-amd64":
        fields = windows_file.Overlapped
        places = [getattr(fields, name).offset for name in ("offset", "offset_high", "event")]
        reserved = theirs.pop(len(kernels) + 1)
        assert reserved in ("reserve 1 1", "reserve 0 1")  # the latter in versions of wine that cannot set space aside
        assert theirs[len(kernels) :] == [
            f"OVERLAPPED {ctypes.sizeof(fields)} {' '.join(map(str, places))}",
            "wrote 4096 bytes, error 0",
            "read 4096 bytes, error 0",
            f"read 0 bytes, error {windows_file.ERROR_HANDLE_EOF}",
            "equal 1",
            f"size {(5 << 30) + 5096} of {(5 << 30) + 5096}, flush 1, type {windows_file.FILE_TYPE_DISK}",
            "removed while open 1",
        ]


def test_a_processor_without_avx2_gives_the_same_bits(
    tools: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if shutil.which("qemu-x86_64-static") is None:
        pytest.skip("qemu-x86_64-static is not installed")
    triple, library = "x86_64-linux-gnu.2.17", build_extension()
    old = lines_of(tools, triple, ("qemu-x86_64-static", "-cpu", "Nehalem"), library, tmp_path_factory.mktemp("old"))
    ours = lines_of(tools, triple, (), library, tmp_path_factory.mktemp("ours"))
    assert len(old) == 6 and old == ours[:6]  # the interface, and the baseline in five formats; it has no other
