"""Ten minutes of random traffic over a striped store with digests; every byte read is compared with a model.

Run with `pytest -m slow tests/storage/test_soak.py`. A round of a second is part of the default run.
"""

import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from outcore.common.quantities import KIB, MIB
from outcore.optim.digest import crc32_digest
from outcore.storage import DigestRule, PosixEngine, TensorSpec, TensorStore, Transfer

SOAK_S = 600.0
WAIT_S = 120.0
TENSOR_BYTES = [1, 4095, 70_001, 3 * MIB + 5, 20 * MIB, 33 * MIB + 4096]
IN_FLIGHT = 24


def soak(base: Path, duration_s: float, seed: int) -> dict[str, int]:
    """Random reads and writes until `duration_s` is over; returns what it did.

    Requests under way never overlap a write under way: what overlapping requests do to each other is nobody's promise.
    """
    rng = np.random.default_rng(seed)
    paths = [base / "a", base / "b", base / "c"]
    specs = [TensorSpec(f"t{n}", torch.uint8, (size,)) for n, size in enumerate(TENSOR_BYTES)]
    model = {spec.name: torch.zeros(spec.shape, dtype=torch.uint8) for spec in specs}
    done = {"reads": 0, "writes": 0, "bytes": 0}
    engine = PosixEngine(6, 512 * KIB)
    store = TensorStore.create(paths, specs, engine, stripe_bytes=256 * KIB, digests=DigestRule(crc32_digest))
    pending: list[tuple[str, str, int, int, torch.Tensor, Transfer]] = []
    start_rss_bytes = None

    def settle(keep: int) -> None:
        while len(pending) > keep:
            kind, name, start, stop, tensor, transfer = pending.pop(0)
            assert transfer.wait(WAIT_S) == stop - start
            if kind == "reads":
                assert torch.equal(tensor, model[name][start:stop]), (name, start, stop)
            done[kind] += 1
            done["bytes"] += stop - start

    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        choice = rng.random()
        spec = specs[rng.integers(len(specs))]
        start = int(rng.integers(0, spec.n_bytes))
        stop = start + 1 + int(min(spec.n_bytes - start - 1, rng.exponential(MIB)))
        if rng.random() < 0.3:
            start, stop = start - start % 4096, min(spec.n_bytes, -(-stop // 4096) * 4096)
        kind = "writes" if choice < 0.5 else "reads"
        while any(
            name == spec.name and start < their_stop and their_start < stop and "writes" in (kind, their_kind)
            for their_kind, name, their_start, their_stop, *_ in pending
        ):
            settle(len(pending) - 1)
        if kind == "writes":
            tensor = torch.from_numpy(rng.integers(0, 256, stop - start, dtype=np.uint8))
            model[spec.name][start:stop] = tensor
            transfer = store.submit_write(spec.name, tensor, start, priority=int(rng.integers(-1, 2)))
        else:
            tensor = torch.empty(stop - start, dtype=torch.uint8)
            transfer = store.submit_read(spec.name, tensor, start, priority=int(rng.integers(-1, 2)))
        pending.append((kind, spec.name, start, stop, tensor, transfer))
        settle(IN_FLIGHT)
        if start_rss_bytes is None and done["reads"] + done["writes"] > 300:
            start_rss_bytes = psutil.Process().memory_info().rss
    settle(0)
    for name, expected in model.items():
        back = torch.empty_like(expected)
        store.submit_read(name, back).wait(WAIT_S)
        assert torch.equal(back, expected), name
    if start_rss_bytes is not None:
        assert psutil.Process().memory_info().rss - start_rss_bytes < 300 * MIB
    store.delete()
    engine.close()
    return done


@pytest.mark.parametrize(
    "seconds", [1.0, pytest.param(SOAK_S, marks=(pytest.mark.slow, pytest.mark.timeout(SOAK_S + 300)))]
)
def test_random_traffic(tmp_path: Path, seconds: float):
    done = soak(tmp_path, seconds, seed=int(seconds))
    assert done["reads"] and done["writes"]
    assert seconds == 1.0 or min(done["reads"], done["writes"]) > 1000
