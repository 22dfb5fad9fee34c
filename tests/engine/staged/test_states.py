"""States of shares on the drive, updated to and fro: bits as in RAM, and bytes counted, without DeepSpeed's engine."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.common.quantities import MIB
from outcore.engine.deepspeed.staged.shares import Share, element_offsets
from outcore.engine.deepspeed.staged.states import RingSize, ShareStates
from outcore.flow.weights import Scratch
from outcore.optim import AdamWHyper, OptimizerPool, state_format
from outcore.optim.formats.chunk_state import STATE_NAMES
from outcore.staging.pool.host_memory import HostMemory
from tests.refused import refused

NUMEL = 4096
"""Of a share that fills a slot."""


@pytest.fixture(scope="module")
def pool():
    with_threads = OptimizerPool(2)
    yield with_threads
    with_threads.close(cancel=True)


def hyper(step):
    return AdamWHyper(lr=1e-2, step=step, weight_decay=0.1, grad_scale=0.5, seed=3)


class Shares:
    """Shares of `numels` with states on the drive (`num_slots` of the ring) or in RAM (None), the same every time."""

    def __init__(self, numels, pool, folder, num_slots, states="split"):
        generator = torch.Generator().manual_seed(5)
        self.grads = [torch.empty(numel, dtype=torch.bfloat16) for numel in numels]
        self.shares = [
            Share(
                SimpleNamespace(ds_id=index), index, index // 2, numel, 0, offset, torch.bfloat16,
                grad, torch.randn(numel, generator=generator).bfloat16(),
            )
            for index, (numel, offset, grad) in enumerate(
                zip(numels, element_offsets(numels, 0, 1), self.grads, strict=True)
            )
        ]  # fmt: skip
        self.scratch = Scratch([folder]) if num_slots else None
        self.states = ShareStates(
            self.shares, state_format(states), HostMemory(), pool, params=None, gradients=None, scratch=self.scratch,
            state_ram_bytes=0 if num_slots else None, ring=RingSize(64 * MIB, num_slots or 1),
        )  # fmt: skip
        self.updates = 0

    def update(self):
        self.updates += 1
        generator = torch.Generator().manual_seed(self.updates)
        for grad in self.grads:
            grad.copy_(torch.randn(grad.numel(), generator=generator))
        self.states.update(lambda group: hyper(self.updates))

    def values(self):
        self.states.settle()
        kept = [share.home.clone() for share in self.shares]
        for share in self.shares:
            kept += [self.states.read(share, name) for name in STATE_NAMES]
        self.states.flush()
        return kept

    def moved(self):
        """Bytes (read, written) since this was last asked, of all updates so far."""
        self.states.wait_written()
        before = getattr(self, "_before", (0, 0))
        self._before = (self.states.ring.read_bytes, self.states.ring.written_bytes)
        return self._before[0] - before[0], self._before[1] - before[1]

    def close(self):
        assert self.states.close()
        if self.scratch is not None:
            self.scratch.close()


@pytest.mark.parametrize(("num_slots", "kept"), [(1, 0), (2, 1), (4, 3), (7, 6), (24, 9)])
def test_what_the_ring_keeps_is_neither_written_nor_read_again(tmp_path, pool, num_slots, kept):
    """Ten shares of one chunk. Without reading ahead: every slot but one keeps a chunk, and that one flows."""
    shares = Shares([NUMEL] * 10, pool, tmp_path, num_slots)
    chunk_bytes = state_format("split").chunk_bytes(NUMEL)
    assert shares.states.nvme_bytes == 10 * chunk_bytes and shares.states.ring.kept_bytes == kept * chunk_bytes
    shares.update()
    assert shares.moved() == (10 * chunk_bytes, (10 - kept) * chunk_bytes)
    for _ in range(4):
        shares.update()
        assert shares.moved() == ((10 - kept) * chunk_bytes,) * 2
    shares.states.settle()
    assert shares.moved() == (0, kept * chunk_bytes)  # the drive has everything
    shares.states.settle()
    assert shares.moved() == (0, 0)
    shares.update()
    assert shares.moved() == (10 * chunk_bytes, (10 - kept) * chunk_bytes)
    shares.close()


def test_small_shares_flow_past_those_that_are_kept(tmp_path, pool):
    """A slot that keeps a share of a few elements would be lost to the large ones."""
    numels = [NUMEL, 64, NUMEL, 64, NUMEL, 64, NUMEL, 64]
    shares = Shares(numels, pool, tmp_path, 3)
    large, small = (state_format("split").chunk_bytes(numel) for numel in (NUMEL, 64))
    shares.update()
    shares.moved()
    for _ in range(3):
        shares.update()
        assert shares.moved() == (2 * large + 4 * small,) * 2
    shares.close()


def test_slots_that_large_chunks_leave_over_keep_smaller_ones(tmp_path, pool):
    """Half a slot is worth less than a whole one, and more than nothing."""
    shares = Shares([NUMEL // 2] * 6 + [NUMEL] * 2, pool, tmp_path, 5)
    large, small = (state_format("split").chunk_bytes(numel) for numel in (NUMEL, NUMEL // 2))
    shares.update()
    assert shares.moved() == (2 * large + 6 * small, 4 * small)
    for _ in range(3):
        shares.update()
        assert shares.moved() == (4 * small, 4 * small)
    shares.close()


ACTIONS = st.lists(st.sampled_from(["update", "settle", "look", "wait"]), min_size=1, max_size=8)


@given(
    st.lists(st.sampled_from([64, 1000, 2300, NUMEL]), min_size=1, max_size=9), st.integers(1, 8),
    st.sampled_from(["split", "fp32", "split8", "fp24_m8"]), ACTIONS,
)  # fmt: skip
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_passes_to_and_fro_change_no_bit(tmp_path_factory, pool, numels, num_slots, states, actions):
    folder = tmp_path_factory.mktemp("states")
    both = [Shares(numels, pool, folder, slots, states) for slots in (None, num_slots)]
    for action in actions:
        for shares in both:
            if action == "update":
                shares.update()
            elif action == "settle":
                shares.states.settle()
            elif action == "wait":
                shares.states.wait_written()
        if action == "look":
            compare(both)
    compare(both)
    for shares in both:
        shares.close()


def compare(both):
    in_ram, on_drive = (shares.values() for shares in both)
    assert all(torch.equal(a, b) for a, b in zip(in_ram, on_drive, strict=True))


def test_a_write_that_fails_when_the_kept_chunks_leave_stops_the_run(tmp_path, pool):
    shares = Shares([NUMEL] * 4, pool, tmp_path, 4)
    shares.update()
    shares.states.wait_written()

    def no_room(*args, **kwargs):
        raise OSError(28, "No space left on device")

    shares.states.state_store.submit_write = no_room
    refused(Exception, "No space left", shares.states.settle)
    refused(Exception, "No space left", shares.update)
    shares.close()
