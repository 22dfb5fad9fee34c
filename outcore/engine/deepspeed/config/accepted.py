"""DeepSpeed's own parser asked before anything is built, so that nothing in the file fails deep inside."""

from __future__ import annotations

import copy
from typing import Any


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
