"""A pool and an engine for a module of lanes' tests."""

from collections.abc import Iterator

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.staging import PinnedPool
from outcore.storage import PosixEngine, StorageEngine


@pytest.fixture(scope="module")
def pool() -> Iterator[PinnedPool]:
    with PinnedPool(12 * MIB, device=torch.device("cpu"), write_combined_bytes=1 * MIB) as pool:
        yield pool
        assert pool.free_bytes == pool.capacity_bytes  # every lane of these tests gave its slots back


@pytest.fixture(scope="module")
def engine() -> Iterator[StorageEngine]:
    with PosixEngine(num_threads=4) as engine:
        yield engine
