"""DeepSpeed's C++ extensions, built where its engine is asked for, so that its first step does not stall for minutes.

They are cached in the environment (`<prefix>/torch_extensions`), where DeepSpeed finds them through its own
TORCH_EXTENSIONS_DIR; a key beside each says which Python, torch, DeepSpeed and CPU it was built for. Each is built by a
child of the environment's interpreter: about 20 s per source file of torch headers."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outcore.common.files import read_object
from outcore.common.quantities import GIB
from outcore.install.environment import Environment
from outcore.install.packages import Stream
from outcore.install.progress import InstallProgress
from outcore.machine import available_ram_bytes, detect_cpu, remove_stale_locks

# A compiler on torch's headers takes up to 2.0 GB (M).
RAM_PER_COMPILE_BYTES = 2 * GIB
PROBE = "outcore.install.verify.probe"
KEY_NAME = "built-for.json"


@dataclass(frozen=True)
class Extension:
    """One of DeepSpeed's op builders."""

    name: str
    builder: str
    """Class name of its builder, which the accelerator resolves."""
    what_for: str


@dataclass(frozen=True)
class BuildResult:
    name: str
    built: bool
    reason: str = ""
    """Why not, in one line."""


def extensions_for(accelerator: str) -> tuple[Extension, ...]:
    """Extensions that training uses; torch's own AdamW runs on the GPU, so no fused optimizer is among them, and what
    goes to a drive is moved by outcore."""
    adam = Extension("cpu_adam", "CPUAdamBuilder", "the optimizer in RAM")
    if accelerator == "cpu":
        # DeepSpeed loads it whenever the CPU accelerator starts its process group: without it nothing trains.
        return (adam, Extension("deepspeed_shm_comm", "ShareMemCommBuilder", "collectives on the CPU"))
    return (adam,)


def extensions_dir(prefix: str | Path | None = None) -> Path:
    """Folder where an environment's built extensions are, this interpreter's by default:
    `<prefix>/torch_extensions`."""
    return Path(prefix if prefix is not None else sys.prefix) / "torch_extensions"


def extension_environment(
    accelerator: str, prefix: str | Path | None = None, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables a process needs to load (or build) the extensions: update `os.environ` with them before DeepSpeed.

    TORCH_EXTENSIONS_DIR unless the user set it, PATH with the environment's `ninja`, MAX_JOBS by RAM, DS_ACCELERATOR
    on a machine without a GPU ('cpu'), and a TORCH_CUDA_ARCH_LIST that DeepSpeed's builder can parse."""
    root = Path(prefix if prefix is not None else sys.prefix)
    scripts = str(root / ("Scripts" if os.name == "nt" else "bin"))
    path = [entry for entry in environ.get("PATH", "").split(os.pathsep) if entry and entry != scripts]
    variables = {
        "TORCH_EXTENSIONS_DIR": environ.get("TORCH_EXTENSIONS_DIR") or str(extensions_dir(root)),
        "PATH": os.pathsep.join([scripts, *path]),  # another version of ninja would build everything again
        "MAX_JOBS": environ.get("MAX_JOBS") or str(compile_jobs()),
    }
    if accelerator == "cpu":
        variables["DS_ACCELERATOR"] = "cpu"
    if environ.get("TORCH_CUDA_ARCH_LIST"):
        variables["TORCH_CUDA_ARCH_LIST"] = sanitise_arch_list(environ["TORCH_CUDA_ARCH_LIST"])
    return variables


def build_key(environment: Environment, accelerator: str, root: str | Path = "/") -> dict[str, str]:
    """Key of what a built extension depends on; when any of it changes, it is built again.

    The CPU belongs to it because DeepSpeed compiles for exactly this one (-march=native)."""
    installed = environment.installed()
    cpu = detect_cpu(Path(root))
    return {
        "accelerator": accelerator,
        "python": environment.python_version,
        "cpu": f"{cpu.name} {' '.join(cpu.simd)}",
        **{name: installed[name].version if name in installed else "" for name in ("torch", "deepspeed")},
    }


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
    by_ram = available_ram_bytes(root) // RAM_PER_COMPILE_BYTES
    return int(max(1, min(os.cpu_count() or 1, by_ram)))


def is_built(directory: Path, extension: Extension, key: Mapping[str, str]) -> bool:
    """Whether the shared object is there, made for this `key`, and no half-finished build is."""
    folder = directory / extension.name
    has_object = any(folder.glob(f"{extension.name}*.so"))
    return has_object and not (folder / "lock").exists() and read_object(folder / KEY_NAME) == dict(key)


def any_was_built(directory: Path) -> bool:
    """Whether somebody has asked for extensions before: those are built again when torch or the CPU changes."""
    return any((directory / extension.name).is_dir() for extension in extensions_for("cpu"))


def missing_prerequisite() -> str:
    """Why no extension can be built here ('' when they can)."""
    return "no C++ compiler" if shutil.which("c++") is None and shutil.which("g++") is None else ""


def build_all(
    environment: Environment,
    accelerator: str,
    environ: Mapping[str, str],
    stream: Stream,
    progress: InstallProgress,
    log_path: Path,
) -> tuple[BuildResult, ...]:
    """Build what is not built yet, one after the other. A failure is a result with its reason, not an exception."""
    directory, key = Path(environ["TORCH_EXTENSIONS_DIR"]), build_key(environment, accelerator)
    results = []
    for name in remove_stale_locks(directory):
        progress.say(f"{name}: removed the lock of a build that was interrupted")
    for extension in extensions_for(accelerator):
        if is_built(directory, extension, key):
            results.append(BuildResult(extension.name, True))
            continue
        reason = missing_prerequisite()
        if reason:
            progress.say(f"{extension.name}: not built, {reason}")
            results.append(BuildResult(extension.name, False, reason))
            continue
        folder = directory / extension.name
        # Built for another CPU, torch or Python: ninja would not notice the CPU.
        if read_object(folder / KEY_NAME) not in ({}, key):
            shutil.rmtree(folder)
        result = _build(environment, extension, environ, stream, progress, log_path)
        if result.built:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / KEY_NAME).write_text(json.dumps(key, indent=2) + "\n", encoding="utf-8")
        results.append(result)
    return tuple(results)


def _build(
    environment: Environment,
    extension: Extension,
    environ: Mapping[str, str],
    stream: Stream,
    progress: InstallProgress,
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
            remove_stale_locks(Path(environ["TORCH_EXTENSIONS_DIR"]))
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
