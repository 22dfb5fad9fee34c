"""Reading and changing `deepspeed_config.json` without disturbing what the user wrote in it.

`read_config` gives the settings that the probe needs, with defaults. `apply_changes` merges the recommended keys into
the file: other keys, their order and the indentation stay; the old file is kept as `.bak`; the new one appears
atomically."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.common.os_layer import replace_file
from outcore.common.quantities import GIB
from outcore.probe.bench.lanes import ProbeStaging

DEFAULT_STAGING_BYTES = 8 * GIB
WRITE_COMBINED = ("auto", "on", "off")


class ConfigFileError(ValueError):
    """The configuration file cannot be used; the message says where and what is wrong."""


@dataclass(frozen=True)
class ProbeConfig:
    """Settings that the probe takes from the configuration."""

    staging: ProbeStaging
    nvme_path: str | None = None
    exists: bool = False
    note: str = ""
    """Said to the user when defaults are used."""


def read_config(path: Path) -> ProbeConfig:
    """The settings in `path`, or defaults with a note when it is missing. `ConfigFileError` when it is not usable."""
    if not path.exists():
        note = f"{path} does not exist: using the defaults (8 GiB of staging memory, write-combined auto)"
        return ProbeConfig(ProbeStaging(DEFAULT_STAGING_BYTES, "auto"), note=note)
    config = _load(path)
    block = config.get("outcore", {})
    if not isinstance(block, dict):
        raise ConfigFileError(f'{path}: "outcore" must be an object, got {type(block).__name__}')
    staging_bytes = _positive(path, block, "staging_bytes", DEFAULT_STAGING_BYTES)
    combined = block.get("write_combined", "auto")
    if combined not in WRITE_COMBINED:
        raise ConfigFileError(
            f'{path}: "outcore.write_combined" must be one of {", ".join(WRITE_COMBINED)}, got {combined!r}'
        )
    return ProbeConfig(ProbeStaging(staging_bytes, combined), _nvme_path(config, block), exists=True)


def apply_changes(path: Path, changes: dict[str, dict[str, Any]], create: bool = False) -> list[str]:
    """Merges `changes` (section -> key -> value, nested objects too) into the file; returns what changed, in words.

    Raises `ConfigFileError` when the file is missing and `create` is false, is not a JSON object, or cannot be written.
    """
    real = Path(os.path.realpath(path))
    if not real.exists():
        if not create:
            raise ConfigFileError(
                f"{path} does not exist, so there is nothing to apply the settings to: "
                "name the file with --config, or add --create to make one"
            )
        old_text, config = None, {}
    else:
        old_text, config = real.read_text(encoding="utf-8"), _load(real)
    said: list[str] = []
    for section, values in changes.items():
        existing = config.setdefault(section, {})
        if not isinstance(existing, dict):
            raise ConfigFileError(f'{path}: "{section}" must be an object, got {type(existing).__name__}')
        _merge(existing, values, section, said)
    if old_text is not None and not said:
        return []
    new_text = json.dumps(config, indent=_indent(old_text), ensure_ascii=False) + "\n"
    temporary = real.with_name(f".{real.name}.{secrets.token_hex(4)}.tmp")
    try:
        if old_text is not None:
            shutil.copy2(real, real.with_name(real.name + ".bak"))
        with temporary.open("w", encoding="utf-8") as file:
            file.write(new_text)
            file.flush()
            os.fsync(file.fileno())
        if old_text is not None:
            shutil.copymode(real, temporary)
        replace_file(temporary, real)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigFileError(
            f"{path} cannot be changed: {error.strerror or error}; nothing was changed in it"
        ) from error
    return said


def _merge(target: dict[str, Any], values: dict[str, Any], where: str, said: list[str]) -> None:
    for key, value in values.items():
        name = f"{where}.{key}"
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value, name, said)
        elif key not in target:
            target[key] = value
            said.append(f"{name} = {json.dumps(value)} (new)")
        elif target[key] != value:
            said.append(f"{name} = {json.dumps(value)} (was {json.dumps(target[key])})")
            target[key] = value


def _load(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigFileError(
            f"{path} is not valid JSON: {error.msg} in line {error.lineno}, column {error.colno}; correct it first"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigFileError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def _positive(path: Path, block: dict[str, Any], key: str, default: int) -> int:
    value = block.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigFileError(f'{path}: "outcore.{key}" must be a positive whole number, got {value!r}')
    return value


def _nvme_path(config: dict[str, Any], block: dict[str, Any]) -> str | None:
    """Ours, else the one that DeepSpeed's offload sections name."""
    if isinstance(block.get("nvme_path"), str):
        return block["nvme_path"]
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        for section in ("offload_param", "offload_optimizer"):
            offload = zero.get(section)
            if isinstance(offload, dict) and isinstance(offload.get("nvme_path"), str):
                return offload["nvme_path"]
    return None


def _indent(text: str | None) -> int | str:
    """The indentation the file uses; 2 when it has none."""
    match = re.search(r"^([ \t]+)\"", text or "", re.MULTILINE)
    if not match:
        return 2
    return "\t" if "\t" in match.group(1) else len(match.group(1))
