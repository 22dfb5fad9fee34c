"""--deterministic: every operation in a fixed order, so that a run on a GPU repeats bit for bit."""

from __future__ import annotations

import os
import re

import torch
import torch.utils.deterministic

CUBLAS_WORKSPACE = ":4096:8"
"""What cuBLAS asks for to repeat itself (its documentation, "Results reproducibility"): eight buffers of 4 MiB."""


class NotDeterministic(RuntimeError):
    """A run that was to repeat bit for bit needs an operation that torch has in no fixed order."""


def fix_order() -> None:
    """For the rest of the process, before anything is computed on a GPU.

    Without `warn_only`: with it torch's attention kernels add up gradients in any order. New memory is not filled with
    NaN, which torch does beside this switch to find reads of it: it costs a pass over every buffer.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def explain_order(error: BaseException) -> NotDeterministic | None:
    """Torch's complaint in words for people; None for any other error."""
    found = re.search(r"([^\n:]+?) does not have a deterministic implementation", str(error))
    if found is None:
        return None
    needed = found.group(1).strip()
    return NotDeterministic(
        f"--deterministic: this run needs {needed}, of which torch {torch.__version__} has no version with a fixed "
        "order. Leave --deterministic out: resuming is then exact but for the order of such sums. Or try another "
        "--attn_implementation. Checkpoints are intact."
    )
