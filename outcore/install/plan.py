"""Plan of a set-up (`--dry-run`), and what native Windows can and cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outcore.common.quantities import format_gb
from outcore.install.environment import Environment
from outcore.install.extensions import build_key, extensions_for, is_built
from outcore.install.packages import install_steps
from outcore.install.progress import InstallProgress
from outcore.install.requirement_set import NEEDED_BYTES, RequirementSet

WINDOWS_WORDS = """
Native Windows. What works here: reports and planning (forecasts of performance_test.py), preparing data.
What does not: DeepSpeed (no build for Windows), kvikio and GPUDirect Storage (no Windows wheels,
no cuFile), and CUDA (the registry's torch wheels for Windows are CPU only). So there is no training here.
What does all of it: Ubuntu under WSL2 with the NVIDIA driver of Windows (install none inside WSL2):
  in PowerShell as administrator: wsl --install -d Ubuntu-24.04     then restart
  inside Ubuntu: sudo apt-get update && sudo apt-get install -y git build-essential python3-venv python3-dev
  clone this repository inside Ubuntu's own home (not under /mnt/c, which is slow), then: python3 setup.py
"""


def make_plan(
    environment: Environment, chosen: RequirementSet, repository: Path, extensions: Path | None
) -> dict[str, Any]:
    """The plan as plain data; `extensions` is the folder where extensions would be built, None where none would."""
    why = environment.needs_install(chosen, repository)
    unmet = environment.unmet_pins(chosen.pins) if environment.exists else dict.fromkeys(chosen.pins, "")
    commands = [["uv", "pip", "install", *step.arguments] for step in install_steps(chosen, repository)]
    is_asked = extensions is not None and "deepspeed" in chosen.pins
    wanted = extensions_for(chosen.accelerator) if is_asked else ()
    key = build_key(environment, chosen.accelerator)
    return {
        "set": chosen.name,
        "reason": chosen.reason,
        "environment": str(environment.prefix),
        "makes_environment": not environment.exists,
        "why_install": why,
        "packages": {name: {"wanted": chosen.pins[name], "found": unmet[name]} for name in sorted(unmet)},
        "commands": [" ".join(command) for command in commands] if why else [],
        "extensions_to_build": [e.name for e in wanted if extensions and not is_built(extensions, e, key)],
        "needed_bytes": NEEDED_BYTES[chosen.name] if why and "torch" in unmet else 0,
    }


def print_plan(plan: dict[str, Any], progress: InstallProgress) -> None:
    if plan["why_install"] is None:
        progress.say("would install nothing: every pinned package is there")
    else:
        space = f", needing {format_gb(plan['needed_bytes'])}" if plan["needed_bytes"] else ""
        progress.say(f"would install (because {plan['why_install']}){space}:")
        for name, entry in plan["packages"].items():
            progress.say(f"  {name} {entry['wanted']}" + (f" (there is {entry['found']})" if entry["found"] else ""))
        for command in plan["commands"]:
            progress.say(f"  $ {command}")
    progress.say(f"would build: {', '.join(plan['extensions_to_build']) or 'nothing'}")
    progress.say("dry run: nothing was changed")
