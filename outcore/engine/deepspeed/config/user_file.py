"""Reading deepspeed_config.json: everything that can be wrong with it before the model is known, told in words.

The rest is checked by the builder, and last by DeepSpeed's own parser (`check_by_deepspeed`), so that nothing in the
file fails deep inside, after the data has been read and the model built.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outcore.engine.deepspeed.config.keys import check_top_level

BLOCKS = ("optimizer", "optimizer.params", "scheduler", "scheduler.params", "zero_optimization", "aio", "outcore")
BLOCKS += ("zero_optimization.offload_param", "zero_optimization.offload_optimizer")


def read_user_config(path: str | Path) -> dict[str, Any]:
    """The user's deepspeed_config.json. ValueError with file, line and reason when it is not usable."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(
            f"--deepspeed_config {path}: no such file. The repository ships deepspeed_config.json at its root."
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"), object_pairs_hook=_no_key_twice)
    except RepeatedKey as error:
        raise ValueError(f"{path}: the key {error} is given twice in one block. Keep one of them.") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object with DeepSpeed's settings, got {type(config).__name__}.")
    try:
        check_top_level(config)  # before any data is read; the rest once the model is known
        _check_blocks(config)
    except ValueError as error:
        raise ValueError(str(error).replace("deepspeed_config.json", str(path), 1)) from error
    return config


class RepeatedKey(ValueError):
    """A JSON object has a key twice, of which readers silently take the last."""


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    block = dict(pairs)
    if len(block) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKey(repr(next(name for name in names if names.count(name) > 1)))
    return block


def _check_blocks(config: Mapping[str, Any]) -> None:
    """ValueError where a block is no JSON object, or what names a drive or a size is neither."""
    for name in BLOCKS:
        block = _at(config, name)
        is_switch = name == "zero_optimization" and isinstance(block, bool)
        if block is not None and block != "auto" and not is_switch and not isinstance(block, Mapping):
            raise ValueError(f"deepspeed_config.json: {name!r} must be a JSON object {{...}}, got {block!r}.")
    for device in ("offload_param", "offload_optimizer"):
        path = _at(config, f"zero_optimization.{device}.nvme_path")
        if path is not None and not isinstance(path, str):
            raise ValueError(
                f"deepspeed_config.json: zero_optimization.{device}.nvme_path must be the path of a folder, got "
                f"{path!r}."
            )
    number = _at(config, "zero_optimization.offload_param.max_in_cpu")
    if number not in (None, "auto") and (isinstance(number, bool) or not isinstance(number, int | float)):
        raise ValueError(
            "deepspeed_config.json: zero_optimization.offload_param.max_in_cpu must be a number of elements, got "
            f"{number!r}."
        )


def _at(config: Mapping[str, Any], dotted: str) -> Any:
    """The value under a dotted name; None where there is none."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def check_by_deepspeed(config: dict[str, Any]) -> None:
    """Let DeepSpeed's own parser read the resolved configuration (1 ms). ValueError naming the key it stumbles over."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    def refusal(some: dict[str, Any]) -> Exception | None:
        try:
            DeepSpeedConfig(copy.deepcopy(some))
        except Exception as error:  # AttributeError, TypeError, AssertionError ...: whatever it trips over
            return error
        return None

    error = refusal(config)
    if error is None:
        return
    culprits = [key for key in config if refusal({k: v for k, v in config.items() if k != key}) is None]
    where = culprits if len(culprits) == 1 else []
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        inner = [str(part) for part in first["loc"]]
        where = inner if inner[:1] == where else [*where, *inner]
        what = f"{first['msg']}, got {first['input']!r}"
    elif where:
        what += f" (its value is {config[where[0]]!r})"
    raise ValueError(
        f"deepspeed_config.json: DeepSpeed cannot read {'.'.join(where) or 'the configuration'}: {what}. Correct the "
        "value or delete the key."
    )
