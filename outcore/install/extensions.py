"""DeepSpeed's C++ extensions, built now so that training does not stall for minutes at its first step.

They are cached in the environment, in a folder per Python, torch and accelerator (torch does not tell them apart there
by itself), and DeepSpeed finds them through its own TORCH_EXTENSIONS_DIR. Each is built by a child process of the
environment's interpreter: about 20 s per source file of torch headers, 4-5 min in all on two cores.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outcore.install.environment import Environment
from outcore.install.pip import Stream
from outcore.install.progress import Progress
from outcore.machine.host import detect_ram
from outcore.units import GIB

# A compiler on torch's headers takes up to 1.5 GiB (M).
RAM_PER_COMPILE_BYTES = 2 * GIB
PROBE = "outcore.install.probe"


@dataclass(frozen=True)
class Extension:
    """One of DeepSpeed's op builders."""

    name: str
    builder: str
    """Class name of its builder, which the accelerator resolves."""
    what_for: str
    required: bool


@dataclass(frozen=True)
class BuildResult:
    name: str
    built: bool
    reason: str = ""
    """Why not, in one line."""


def extensions_for(accelerator: str) -> tuple[Extension, ...]:
    """Those that training uses; torch's own AdamW runs on the GPU, so no fused optimizer is among them."""
    common = (
        Extension("pin_memory", "PinMemoryBuilder", "locked buffers for NVMe offload", False),
        Extension("async_io", "AsyncIOBuilder", "DeepSpeed's NVMe offload", False),
    )
    adam = Extension("cpu_adam", "CPUAdamBuilder", "the optimizer of RAM and NVMe offload", True)
    if accelerator == "cpu":
        # DeepSpeed loads it whenever the CPU accelerator starts its process group: without it nothing trains.
        return (adam, Extension("deepspeed_shm_comm", "ShareMemCommBuilder", "collectives on the CPU", True), *common)
    return (adam, *common)


def extensions_dir(accelerator: str | None = None, prefix: str | Path | None = None) -> Path:
    """Where the built extensions of an environment are: `<prefix>/torch_extensions/<python>-<torch>-<accelerator>`.

    Defaults: this interpreter's environment, and 'cuda' where an NVIDIA device is present, else 'cpu'. RuntimeError
    when torch is not installed there. An interpreter whose folder is not writable gets ~/.cache/outcore instead.
    """
    if prefix is not None:
        root, version, python = Path(prefix), _torch_version(Path(prefix)), _python_tag(Path(prefix))
    else:
        root, python = Path(sys.prefix), f"cp{sys.version_info[0]}{sys.version_info[1]}"
        try:
            version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError as error:
            raise RuntimeError(f"torch is not installed in {root}: run `python setup.py`") from error
        if not os.access(root, os.W_OK):  # a system interpreter: training may still have to build something
            root = Path.home() / ".cache" / "outcore"
    return root / "torch_extensions" / f"{python}-torch{version}-{accelerator or default_accelerator()}"


def default_accelerator(environ: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> str:
    """'cuda' or 'cpu', without importing torch: DeepSpeed's own override first, then the device files."""
    chosen = environ.get("DS_ACCELERATOR")
    if chosen:
        return chosen
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return "cpu"
    has_device = any((dev / name).exists() for name in ("nvidiactl", "nvidia0", "dxg"))
    return "cuda" if has_device and shutil.which("nvidia-smi") else "cpu"


def extension_environment(
    accelerator: str | None = None,
    prefix: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Variables a process needs to load (or build) the extensions: update `os.environ` with them before DeepSpeed.

    TORCH_EXTENSIONS_DIR unless the user set it, PATH with the environment's `ninja`, MAX_JOBS by RAM, DS_ACCELERATOR
    on a machine without a GPU, and a TORCH_CUDA_ARCH_LIST that DeepSpeed's builder can parse.
    """
    root = Path(prefix if prefix is not None else sys.prefix)
    chosen = accelerator or default_accelerator(environ)
    scripts = str(root / ("Scripts" if os.name == "nt" else "bin"))
    path = environ.get("PATH", "").split(os.pathsep)
    variables = {
        "TORCH_EXTENSIONS_DIR": environ.get("TORCH_EXTENSIONS_DIR") or str(extensions_dir(chosen, prefix)),
        "PATH": os.pathsep.join(path if scripts in path else [scripts, *path]),
        "MAX_JOBS": environ.get("MAX_JOBS") or str(compile_jobs()),
    }
    if chosen == "cpu":
        variables["DS_ACCELERATOR"] = "cpu"
    if environ.get("TORCH_CUDA_ARCH_LIST"):
        variables["TORCH_CUDA_ARCH_LIST"] = sanitise_arch_list(environ["TORCH_CUDA_ARCH_LIST"])
    return variables


def sanitise_arch_list(text: str) -> str:
    """'8.9;9.0a;10.0f+PTX;Hopper' -> '8.9;9.0;10.0+PTX': DeepSpeed's builder only reads numbers."""
    kept: list[str] = []
    for entry in re.split(r"[;\s,]+", text.strip()):
        match = re.fullmatch(r"(\d+\.\d+)[a-z]?(\+PTX)?", entry)
        token = match.group(1) + (match.group(2) or "") if match else ""
        if token and token not in kept:
            kept.append(token)
    return ";".join(kept)


def compile_jobs(root: str | Path = "/") -> int:
    """Compilers that fit side by side: one per core, 2 GiB of RAM each."""
    by_ram = detect_ram(Path(root)).available_bytes // RAM_PER_COMPILE_BYTES
    return int(max(1, min(os.cpu_count() or 1, by_ram)))


def is_built(directory: Path, extension: Extension) -> bool:
    """Whether the shared object is there and no half-finished build is."""
    folder = directory / extension.name
    return any(folder.glob(f"{extension.name}*.so")) and not (folder / "lock").exists()


def remove_stale_lock(directory: Path, name: str, proc: Path = Path("/proc")) -> bool:
    """Remove the lock of a build that was killed (torch would wait for it for ever); True when one was removed.

    A build in progress has its `ninja` and compilers working in the extension's folder: then the lock stays.
    """
    folder = directory / name
    lock = folder / "lock"
    if not lock.exists():
        return False
    for cwd in proc.glob("[0-9]*/cwd"):
        try:
            if os.path.realpath(cwd) == os.path.realpath(folder):
                return False
        except OSError:
            continue  # a process that ended meanwhile, or another user's
    lock.unlink(missing_ok=True)
    return True


def missing_prerequisite(extension: Extension, accelerator: str) -> str:
    """Why an extension cannot be built here ('' when it can): its headers or compiler are not there."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        return "no C++ compiler"
    if extension.name == "async_io":
        if not has_header("libaio.h"):
            return "libaio's headers are not installed"
        if accelerator == "cuda" and find_nvcc() is None:
            return "nvcc is not installed"
    return ""


def has_header(name: str) -> bool:
    """Whether the C compiler would find a header in the usual places or in CPATH and friends."""
    folders = ["/usr/include", "/usr/local/include"]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    if multiarch:
        folders.append(f"/usr/include/{multiarch}")
    for variable in ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"):
        folders += [folder for folder in os.environ.get(variable, "").split(os.pathsep) if folder]
    folders += re.findall(r"-I\s*(\S+)", os.environ.get("CFLAGS", ""))
    return any(os.path.exists(os.path.join(folder, name)) for folder in folders)


def find_nvcc() -> Path | None:
    """nvcc where torch looks for it: CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home and (Path(home) / "bin" / "nvcc").exists():
            return Path(home) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path:
        return Path(on_path)
    usual = Path("/usr/local/cuda/bin/nvcc")
    return usual if usual.exists() else None


def build_all(
    environment: Environment,
    accelerator: str,
    environ: Mapping[str, str],
    stream: Stream,
    progress: Progress,
    log_path: Path,
) -> tuple[BuildResult, ...]:
    """Build what is not built yet, one after the other. A failure is a result with its reason, not an exception."""
    directory = Path(environ["TORCH_EXTENSIONS_DIR"])
    results = []
    for extension in extensions_for(accelerator):
        if remove_stale_lock(directory, extension.name):
            progress.say(f"{extension.name}: removed the lock of a build that was interrupted")
        if is_built(directory, extension):
            results.append(BuildResult(extension.name, True))
            continue
        reason = missing_prerequisite(extension, accelerator)
        if reason:
            progress.say(f"{extension.name}: not built, {reason}")
            results.append(BuildResult(extension.name, False, reason))
            continue
        results.append(_build(environment, extension, environ, stream, progress, log_path))
    return tuple(results)


def _build(
    environment: Environment,
    extension: Extension,
    environ: Mapping[str, str],
    stream: Stream,
    progress: Progress,
    log_path: Path,
) -> BuildResult:
    progress.begin(f"building {extension.name} ({extension.what_for})")
    lines: list[str] = []

    def heard(line: str) -> None:
        lines.append(line)
        step = re.match(r"\[(\d+)/(\d+)\]", line)
        if step:
            progress.detail(f"{step.group(1)} of {step.group(2)} files")

    code = 1
    try:
        code = stream([str(environment.python), "-m", PROBE, "build", extension.builder], environ, heard)
    finally:
        progress.end(code == 0)
        if code != 0:
            remove_stale_lock(Path(environ["TORCH_EXTENSIONS_DIR"]), extension.name)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("a", encoding="utf-8") as log:
            log.write(f"== {extension.name}: exit code {code}\n" + "\n".join(lines) + "\n")
    if code == 0:
        return BuildResult(extension.name, True)
    return BuildResult(extension.name, False, explain_build("\n".join(lines), log_path))


def explain_build(output: str, log_path: Path) -> str:
    """The first thing a compiler complained about, in one line."""
    if "Python.h: No such file" in output:
        return "Python's headers are not installed"
    if "No space left on device" in output:
        return "the drive is full"
    if "Killed signal terminated program" in output or "out of memory" in output.lower():
        return "the compiler ran out of memory: MAX_JOBS=1 needs less"
    error = re.search(r"^.*?(?:fatal )?error: .*$", output, re.M)
    last = [line for line in output.splitlines() if line.strip()]
    return f"{(error.group(0) if error else (last or ['no message'])[-1]).strip()[:160]} (all of it in {log_path})"


def _torch_version(root: Path) -> str:
    folders = [root / "Lib" / "site-packages", *sorted((root / "lib").glob("python3.*/site-packages"))]
    for dist in importlib.metadata.distributions(name="torch", path=[str(folder) for folder in folders]):
        return dist.version
    raise RuntimeError(f"torch is not installed in {root}: run `python setup.py`")


def _python_tag(root: Path) -> str:
    folders = sorted((root / "lib").glob("python3.*/site-packages"))
    if not folders:  # Windows keeps one Python per environment
        return f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return "cp" + folders[0].parent.name.removeprefix("python").replace(".", "")
