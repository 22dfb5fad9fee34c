"""The random generators that training draws from, saved and restored exactly: Python, NumPy, torch, CUDA.

--deterministic: every operation in a fixed order, so that a run on a GPU repeats bit for bit."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic

from outcore.checkpoint import ShardReader, TensorPlan, write_shard


def seed_everything(seed: int) -> None:
    """Seed every generator that training draws from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_random_state(folder: Path, rank: int) -> tuple[dict[str, Any], Path, int]:
    """Write this rank's torch states as `rng-<rank>-of-…`; returns the JSON part, the file and its CRC-32."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    numpy_state: Any = np.random.get_state()
    tensors["numpy"] = torch.from_numpy(np.asarray(numpy_state[1]).astype(np.int64))
    version, words, gauss = random.getstate()
    tensors["python"] = torch.tensor(words, dtype=torch.int64)
    plans = [TensorPlan(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    path = folder / f"rng{rank}-00001-of-00001.safetensors"
    crc = write_shard(path, plans, tensors.__getitem__)
    numbers = {"python_version": version, "python_gauss": gauss}
    numbers["numpy"] = [str(numpy_state[0]), int(numpy_state[2]), int(numpy_state[3]), float(numpy_state[4])]
    return numbers, path, crc


def load_random_state(folder: Path, rank: int, numbers: dict[str, Any]) -> bool:
    """Restore what `save_random_state` wrote; False when that rank has no file (more ranks than at the save)."""
    reader = ShardReader(folder, f"rng{rank}")
    if "torch" not in reader:
        return False
    torch.set_rng_state(reader.read("torch"))
    if torch.cuda.is_available() and "cuda" in reader:
        torch.cuda.set_rng_state(reader.read("cuda"))
    name, position, has_gauss, cached = numbers["numpy"]
    np.random.set_state((name, reader.read("numpy").numpy().astype(np.uint32), position, has_gauss, cached))
    words = tuple(int(w) for w in reader.read("python").tolist())
    random.setstate((numbers["python_version"], words, numbers["python_gauss"]))
    return True


CUBLAS_WORKSPACE = ":4096:8"
"""Workspaces with which cuBLAS repeats itself (its documentation, "Results reproducibility"): eight of 4 MiB."""


class NotDeterministic(RuntimeError):
    """A run that was to repeat bit for bit needs an operation that torch has in no fixed order."""


def fix_order() -> None:
    """For the rest of the process, before anything is computed on a GPU.

    Without `warn_only`: with it torch's attention kernels add up gradients in any order. New memory is not filled with
    NaN, which torch does beside this switch to find reads of it: it costs a pass over every buffer."""
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
