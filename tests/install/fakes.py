"""Fake machines, environments and commands for the installer's tests: nothing is ever installed."""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from outcore.common.quantities import GIB
from outcore.install.environment import Environment
from outcore.machine import Gpu, Machine

REPOSITORY = Path(__file__).resolve().parents[2]


def machine(**changes) -> Machine:
    """A Linux box without a GPU, unless told otherwise."""
    plain = Machine(
        os_family="linux", os_name="Ubuntu 24.04 LTS", kernel="6.8.0", architecture="x86_64", is_wsl2=False,
        python_version="3.12.1", cpu_name="a CPU", cpu_cores=4, cpu_threads=8, ram_total_bytes=64 * GIB,
        ram_available_bytes=60 * GIB,
    )  # fmt: skip
    return replace(plain, **changes)


def gpu_machine(
    driver: str = "580.65.06", cuda: str | None = "13.0", capability: tuple[int, int] | None = (8, 9), **changes
) -> Machine:
    gpu = Gpu(0, "NVIDIA GeForce RTX 4070 Laptop GPU", 8 * GIB, capability, driver)
    return machine(gpus=(gpu,), driver_version=driver, cuda_driver_version=cuda, **changes)


def fake_environment(prefix: Path, packages: Mapping[str, str] | None = None) -> Environment:
    """A folder that looks like an environment with these packages installed."""
    environment = Environment(prefix, "a test")
    environment.bin_dir.mkdir(parents=True, exist_ok=True)
    environment.python.write_text("#!/bin/sh\n")
    site = prefix / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True, exist_ok=True)
    for name, version in (packages or {}).items():
        add_package(environment, name, version)
    return environment


def add_package(environment: Environment, name: str, version: str, url: str | None = None) -> None:
    info = environment.prefix / "lib/python3.11/site-packages" / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if url is not None:
        (info / "direct_url.json").write_text(json.dumps({"url": url}))


class FakeStream:
    """Stands in for starting pip or a build: answers in turn, remembers what was asked."""

    def __init__(self, *answers: tuple[int, str] | Callable[[], None]) -> None:
        self.answers = list(answers)
        self.commands: list[list[str]] = []
        self.environs: list[dict[str, str]] = []

    def __call__(self, command: Sequence[str], environ: Mapping[str, str], heard: Callable[[str], None]) -> int:
        self.commands.append(list(command))
        self.environs.append(dict(environ))
        answer = self.answers.pop(0) if self.answers else (0, "")
        if callable(answer):
            answer()
            return 0
        code, output = answer
        for line in output.splitlines():
            heard(line)
        return code


class FakeExecute:
    """Answers by the first key that occurs in the command line; everything else succeeds silently."""

    def __init__(self, **answers: tuple[int, str]) -> None:
        self.answers = answers
        self.commands: list[str] = []

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        line = " ".join(command)
        self.commands.append(line)
        for key, (code, text) in self.answers.items():
            if key in line:
                return subprocess.CompletedProcess(list(command), code, text if code == 0 else "", text)
        return subprocess.CompletedProcess(list(command), 0, "3.11" if "version_info" in line else "", "")
