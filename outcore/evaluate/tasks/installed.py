"""Whether lm-evaluation-harness is here, and how it is kept from the network."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from outcore.evaluate.settings import EvaluationError

INSTALL = "pip install -r requirements/evaluate.txt"


def check_harness() -> None:
    """EvaluationError with the install line where lm-evaluation-harness is missing."""
    if importlib.util.find_spec("lm_eval") is None:
        raise EvaluationError(f"evaluation needs lm-evaluation-harness, which is not installed: {INSTALL}")


def harness_version() -> str:
    """The installed version; '' for none."""
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        return ""


def stay_offline() -> None:
    """Have the hub's clients in this process use what they hold already: without a network they would try for minutes.
    Their own switch is an environment variable that they read when they are imported, which has happened."""
    import datasets.config
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True
