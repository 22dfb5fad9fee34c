"""The C++ extension: the one that came with the wheel, else built once per source, flags and compiler of the machine.

    python -m outcore.optim

What is built here is `<cache>/<key of source and flags>-<key of compiler>/outcore_optim.so`, where the cache is
`<environment>/torch_extensions/outcore_optim`, or ~/.cache/outcore/torch_extensions/outcore_optim for an environment
that cannot be written. A dozen small files without torch's headers: about 18 s of one core, shared by all cores, once.
Built aside and renamed into place, under a lock that the kernel frees when its holder dies, so any number of processes
may call it at once.

No -march=native and no fast-math: the kernels are compiled once per instruction set and chosen at run time, so the file
works on any processor of the architecture, and neither rounding nor NaN are optimised away. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outcore.common.deadline import TIMEOUT_S
from outcore.common.files import built_folder
from outcore.common.os_layer import lock_file
from outcore.common.quantities import format_s

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "native"
SOURCES = (
    "abi.h",
    "lanes.h",
    "compressed.h",
    "threads.h",
    "pool.h",
    "kernels.cpp",
    "pool.cpp",
    "digest.cpp",
    "api.cpp",
    "products.h",
    "product_vectors.h",
    "plain_products.h",
    "product_kernels.cpp",
    "products.cpp",
)
LIBRARY_NAME = "outcore_optim.dll" if os.name == "nt" else "outcore_optim.so"
SHIPPED = SOURCE_DIR / LIBRARY_NAME
"""Path of the library in a wheel."""
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # the same roundings with and without fused multiply-add
    "-fno-math-errno",  # sqrt as an instruction; changes no value
    "-fno-trapping-math",  # both sides of a choice may be computed; changes no value
)
LINK_FLAGS = ("-shared", "-pthread", "-s")
VARIANTS_X86: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "avx2": ("-mavx2",),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"),
}
VARIANTS_OTHER: dict[str, tuple[str, ...]] = {"baseline": ()}
PRODUCT_VARIANTS_X86: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avxvnni": ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"),
    "avx512vnni": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c"),
}
BUILD_COMMAND = f"{sys.executable} -m outcore.optim"
COMMAND_TIMEOUT_S = 300.0
LOCK_POLL_S = 0.1


class ExtensionUnavailable(RuntimeError):
    """The CPU optimizer's C++ extension cannot be had here; the message says why and what to do."""


class CompilerMissing(ExtensionUnavailable):
    """There is no C++ compiler."""


class BuildFailed(ExtensionUnavailable):
    """The compiler refused."""


def build_extension(
    prefix: str | Path | None = None, compiler: str | None = None, lock_timeout_s: float = TIMEOUT_S
) -> Path:
    """The library's path: the wheel's, where one came along and loads (else that is said), or the one built here, now
    when this source, these flags and this compiler have not been built yet.

    - `prefix`: root of the environment (default: this interpreter's).
    - `compiler`: name or path (default: the first of g++, clang++, c++ on PATH).

    Without a compiler a library built earlier from the same source and flags is taken. Raises CompilerMissing,
    BuildFailed (both ExtensionUnavailable), or TimeoutError when another process builds for longer than
    `lock_timeout_s`."""
    if compiler is None and _loads(SHIPPED):
        return SHIPPED
    cache = cache_dir(prefix)
    source_key = _source_key()
    found = find_compiler(compiler)
    if found is None:
        for library in sorted(cache.glob(f"{source_key}-*/{LIBRARY_NAME}")):
            return library
        raise CompilerMissing(
            f"no C++ compiler ({compiler or ', '.join(COMPILERS)}) on PATH, so the CPU optimizer cannot be built and "
            f"would run in torch, several times slower. Install one (Ubuntu, Debian, WSL2: sudo apt install g++; "
            f"Fedora: sudo dnf install gcc-c++; conda: conda install gxx), then run: {BUILD_COMMAND}"
        )
    folder = cache / f"{source_key}-{_digest(_compiler_version(found))[:8]}"
    library = folder / LIBRARY_NAME
    if library.exists():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildFailed(f"cannot make the folder {cache} for the CPU optimizer: {error}") from error
    with _lock(cache / f"{folder.name}.lock", lock_timeout_s):
        if not library.exists():  # another process may have built it while this one waited
            _build_into(folder, found)
    return library


def _loads(library: Path) -> bool:
    """Whether the wheel's library is there and fits this machine; says why where it does not."""
    if not library.exists():
        return False
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        logger.warning("the wheel's CPU kernels do not load here (%s): they are compiled instead", error)
        return False
    return True


def find_compiler(compiler: str | None = None) -> str | None:
    """Full path of the compiler to use, or None."""
    for name in (compiler,) if compiler else COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    return None


def cache_dir(prefix: str | Path | None = None) -> Path:
    """Folder where built libraries are kept."""
    return built_folder(prefix) / "torch_extensions" / "outcore_optim"


def variants(machine: str | None = None) -> dict[str, tuple[str, ...]]:
    """Name -> compiler flags of the instruction sets built on this architecture."""
    return VARIANTS_X86 if (machine or platform.machine()).lower() in ("x86_64", "amd64") else VARIANTS_OTHER


def product_variants(machine: str | None = None) -> dict[str, tuple[str, ...]]:
    """`variants` for products of packed weights, which have instructions of their own."""
    return PRODUCT_VARIANTS_X86 if variants(machine) is VARIANTS_X86 else VARIANTS_OTHER


def compile_into(folder: Path, compiler: Sequence[str], system: str, machine: str) -> Path:
    """Compile the library for `system` ("linux", "windows") and `machine` into a folder that is there; its path."""
    objects: list[str] = []
    units = [("kernels.cpp", name, (*flags, f"-DOUTCORE_VARIANT={name}")) for name, flags in variants(machine).items()]
    units += [
        ("product_kernels.cpp", f"product_{name}", (*flags, f"-DOUTCORE_VARIANT={name}"))
        for name, flags in product_variants(machine).items()
    ]
    units += [(f"{name}.cpp", name, ()) for name in ("pool", "digest", "api", "products")]
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        compiling = []
        for source, name, flags in units:
            objects.append(str(folder / f"{name}.o"))
            command = [*compiler, *FLAGS, *flags, "-c", str(SOURCE_DIR / source), "-o", objects[-1]]
            compiling.append(compilers.submit(_run, command))
        for done in compiling:
            done.result()
    library = folder / ("outcore_optim.dll" if system == "windows" else "outcore_optim.so")
    _run([*compiler, *LINK_FLAGS, "-o", str(library), *objects])
    for path in objects:
        os.unlink(path)
    return library


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _source_key() -> str:
    texts = [(SOURCE_DIR / name).read_text() for name in SOURCES]
    return _digest(platform.machine(), repr((FLAGS, LINK_FLAGS, variants(), product_variants())), *texts)[:16]


def _compiler_version(compiler: str) -> str:
    return _run([compiler, "--version"]).splitlines()[0]


def _build_into(folder: Path, compiler: str) -> None:
    """Compile beside `folder`, then rename: the folder exists only complete."""
    began_s = time.monotonic()
    logger.info("building the CPU optimizer with %s (once)", compiler)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        compile_into(aside, [compiler], platform.system().lower(), platform.machine())
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    logger.info("built %s in %s", folder / LIBRARY_NAME, format_s(time.monotonic() - began_s))


def _run(command: Sequence[str]) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND_TIMEOUT_S, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{' '.join(command)} did not end within {format_s(COMMAND_TIMEOUT_S)}") from error
    except OSError as error:
        raise BuildFailed(f"cannot run {command[0]}: {error}") from error
    if done.returncode == 0:
        return done.stdout
    output = done.stderr + done.stdout
    complaint = re.search(r"^.*(?:error|undefined reference).*$", output, re.M)
    lines = output.strip().splitlines() or [f"exit code {done.returncode}"]
    raise BuildFailed(
        f"the CPU optimizer does not compile here: {(complaint.group(0) if complaint else lines[-1]).strip()}\n"
        f"command: {' '.join(command)}\nIt needs g++ 11 or clang++ 12 or later with its C++ headers (Ubuntu, Debian: "
        f"sudo apt install g++); then run: {BUILD_COMMAND}"
    )


@contextlib.contextmanager
def _lock(path: Path, timeout_s: float) -> Iterator[None]:
    deadline_s = time.monotonic() + timeout_s
    try:
        handle = path.open("w")
    except OSError as error:
        raise BuildFailed(f"cannot write to {path.parent}: {error}") from error
    with handle:
        while True:
            try:
                lock_file(handle.fileno())
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"another process has been building the CPU optimizer for {format_s(timeout_s)} (it holds the "
                        f"lock on {path}); wait for it to end, or end it"
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield


if __name__ == "__main__":  # by the installer, before torch is there
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(build_extension(sys.argv[1]))
