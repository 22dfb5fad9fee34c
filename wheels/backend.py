"""Build backend of pyproject.toml: hatchling's wheel, plus the CPU kernels, compiled by zig for any of `TARGETS`.

    python -m build                                   sdist, and the wheel of this machine
    python -m build --wheel -C target=windows-amd64   another target's wheel; `TARGETS` names them

zig's compiler brings the C library of every target and links C++'s own statically, so that the wheel runs wherever its
tag says. A machine that is no target gets a wheel without kernels, which are then compiled at first use. setup.py at
the root of the repository is the installer and is never executed here."""

from __future__ import annotations

import importlib.util
import platform
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.build import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
)
from hatchling.builders.wheel import WheelBuilder

__all__ = [
    "build_editable", "build_sdist", "build_wheel",
    "get_requires_for_build_editable", "get_requires_for_build_sdist", "get_requires_for_build_wheel",
]  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
ZIG = "ziglang==0.17.1"
TARGETS = {
    "linux-x86_64": ("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64"),
    "linux-aarch64": ("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64"),
    "windows-amd64": ("x86_64-windows-gnu", "win_amd64"),
}
"""Name -> (zig's name of it, the wheel's platform tag). 2.17 is the oldest glibc whose symbols the kernels may use."""
Settings = Mapping[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """The compiler, where there is something to compile."""
    return [ZIG] if _target(config_settings) else []


def build_wheel(directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Build the wheel of the target that `config_settings` or this machine names; returns its file name."""
    target = _target(config_settings)
    with tempfile.TemporaryDirectory() as folder:
        extra: dict[str, Any] = {}
        if target:
            triple, tag = TARGETS[target]
            kernels = _build_module()
            # zig compiles a target's C and C++ libraries when it links for it first: 5 minutes on two busy cores.
            kernels.COMMAND_TIMEOUT_S = 1800.0
            library = kernels.compile_into(
                Path(folder), [sys.executable, "-m", "ziglang", "c++", "-target", triple], *target.split("-")
            )
            extra = {
                "tag": f"py3-none-{tag}",
                "pure_python": False,
                "force_include": {str(library): f"outcore/optim/native/{library.name}"},
            }
        else:
            print(f"{sysconfig.get_platform()} is none of {', '.join(TARGETS)}: the wheel has no CPU kernels")
        return Path(next(_Wheel(str(ROOT), extra).build(directory=directory, versions=["standard"]))).name


class _Wheel(WheelBuilder):
    """Hatchling's builder, told of the kernels and of their platform."""

    def __init__(self, root: str, extra: Mapping[str, Any]) -> None:
        super().__init__(root)
        self._extra = extra

    def get_default_build_data(self) -> dict[str, Any]:
        return super().get_default_build_data() | self._extra


def _target(config_settings: Settings) -> str | None:
    """Name of the target; None on a machine that is none. ValueError for an unknown one."""
    asked = (config_settings or {}).get("target")
    if asked is not None and asked not in TARGETS:
        raise ValueError(f"target={asked} is none of {', '.join(TARGETS)}")
    here = f"{platform.system()}-{platform.machine()}".lower()
    fits = here in TARGETS and "musl" not in (sysconfig.get_config_var("HOST_GNU_TYPE") or "")
    return asked or (here if fits else None)


def _build_module() -> ModuleType:
    """`outcore.optim.build` by its path: the package around it wants torch, which is not there yet."""
    sys.path.insert(0, str(ROOT))
    spec = importlib.util.spec_from_file_location("outcore_kernels", ROOT / "outcore" / "optim" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
