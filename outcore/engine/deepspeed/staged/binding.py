"""The one module that replaces parts of DeepSpeed: its stage-3 optimizer and its parameter swapper, while a model is
loaded and an engine is made.

DeepSpeed looks both up by name when it needs them (`engine.py: _configure_zero_optimizer`, `partition_parameters.py:
Init.__init__`), so rebinding the names for that time is enough, and nothing of DeepSpeed is changed for anybody else.
Its internals move between releases: every version but the tested ones is refused."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from outcore.engine.base import EngineError
from outcore.engine.deepspeed.staged.session import StagedSession

TESTED_VERSIONS = ("0.19.8",)


def check_version(version: str | None = None) -> None:
    """EngineError unless the installed DeepSpeed (or `version`) is one this module was tested with."""
    if version is None:
        import deepspeed

        version = str(deepspeed.__version__)
    base = version.split("+")[0]
    if base not in TESTED_VERSIONS:
        raise EngineError(
            f"DeepSpeed {version} is installed; outcore's staged offload replaces parts of its internals and was "
            f"tested with {', '.join(TESTED_VERSIONS)}. Install that version "
            f"(pip install deepspeed=={TESTED_VERSIONS[-1]}), or "
            'set "outcore": {"offload": "stock"} in deepspeed_config.json to use DeepSpeed\'s own offload.'
        )


@contextmanager
def bound(make_optimizer: Any, make_param_swapper: Any) -> Iterator[None]:
    """Within this context DeepSpeed's ZeRO-3 takes these two instead of its own classes; `make_param_swapper` may be
    None."""
    check_version()
    from deepspeed.runtime.superoffload import superoffload_stage3  # derives from the class that is replaced below
    from deepspeed.runtime.zero import partition_parameters, stage3

    assert issubclass(superoffload_stage3.SuperOffloadOptimizer_Stage3, stage3.DeepSpeedZeroOptimizer_Stage3)
    with patch.object(stage3, "DeepSpeedZeroOptimizer_Stage3", make_optimizer):
        if make_param_swapper is None:
            yield
        else:
            with patch.object(partition_parameters, "AsyncPartitionedParameterSwapper", make_param_swapper):
                yield


def staged(session: StagedSession) -> AbstractContextManager[None]:
    """`bound` with our optimizer, and with the session's swapper for parameters on the drive."""
    check_version()
    from outcore.engine.deepspeed.staged.optimizer import StagedOptimizer

    make_swapper = None if session.params is None else lambda ds_config, dtype: session.params
    return bound(functools.partial(StagedOptimizer, session), make_swapper)
