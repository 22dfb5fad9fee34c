"""States, parameters and gradients of shares on the drive: bits as in RAM, bytes moved once."""

import math
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.common.quantities import MIB, round_up
from outcore.engine.base import EngineError
from outcore.engine.deepspeed.staged.states import Share, ShareStates, element_offsets
from outcore.flow.weights import Scratch
from outcore.optim import AdamWHyper, OptimizerPool, state_format
from outcore.optim.formats.chunk_state import STATE_NAMES
from outcore.staging.pool.pool import HostMemory, pageable
from outcore.states import RingSize
from outcore.states.placement import GradPlace
from outcore.storage import TensorSpec, open_engine
from tests.refused import failing, refused
from tests.storage.faulty import FaultyEngine

CHUNK = 4096


@pytest.fixture
def pool():
    """Of one test: a ring that broke or was closed leaves what it had at the optimizer to the pool, which would report
    it to the next ring."""
    with_threads = OptimizerPool(2)
    yield with_threads
    with_threads.close(cancel=True)


class SmallChunks(Share):
    """Of several chunks with a few thousand elements."""

    def chunks(self, state_format, chunk_numel=CHUNK):
        return super().chunks(state_format, chunk_numel)


class OnDrive:
    """16-bit tensors by `ds_id`, in whole blocks: what `StagedParams` and `StagedGradients` are to the states."""

    def __init__(self, scratch, kind, numels):
        self.numels = numels
        self.store = scratch.store(
            kind, [TensorSpec(f"{i}", torch.bfloat16, (round_up(n, 2048),)) for i, n in enumerate(numels)]
        )

    def store_place(self, ds_id, start):
        return self.store, f"{ds_id}", 2 * start

    def place(self, ds_id, start):
        return GradPlace(*self.store_place(ds_id, start), torch.bfloat16)

    def zeros(self, ds_id):
        return torch.zeros(self.numels[ds_id], dtype=torch.bfloat16)

    def put(self, ds_id, value):
        blocks = pageable(round_up(value.nbytes, 4096))
        blocks[: value.nbytes] = value.view(torch.uint8)
        self.store.submit_write(f"{ds_id}", blocks).wait(60)

    def get(self, ds_id):
        blocks = pageable(round_up(2 * self.numels[ds_id], 4096))
        self.store.submit_read(f"{ds_id}", blocks).wait(60)
        return blocks[: 2 * self.numels[ds_id]].view(torch.bfloat16).clone()


class Run:
    """Shares of `numels`. `drive` None: all in RAM; else which of parameters and gradients are on the drive, too."""

    def __init__(self, numels, pool, folder, states, drive=None, num_slots=1, ram_bytes=0, engine=None):
        generator = torch.Generator().manual_seed(5)
        self.numels = numels
        self.scratch = Scratch([folder], engine) if drive is not None else None
        self.params = OnDrive(self.scratch, "parameters", numels) if "params" in (drive or ()) else None
        self.gradients = OnDrive(self.scratch, "gradients", numels) if "gradients" in (drive or ()) else None
        self.shares = []
        for index, (numel, offset) in enumerate(zip(numels, element_offsets(numels, 0, 1), strict=True)):
            home = torch.randn(numel, generator=generator).bfloat16()
            grad = None if self.gradients is not None else torch.zeros(numel, dtype=torch.bfloat16)
            if self.params is not None:
                self.params.put(index, home)
                home = None
            share = SmallChunks(
                SimpleNamespace(ds_id=index), index, index // 2, numel, index % 2, offset, torch.bfloat16, grad, home,
            )  # fmt: skip
            share.loan = grad if home is None else None
            self.shares.append(share)
        self.states = ShareStates(
            self.shares, state_format(states), HostMemory(), pool, params=self.params, gradients=self.gradients,
            scratch=self.scratch, state_ram_bytes=None if drive is None else ram_bytes,
            ring=RingSize(64 * MIB, num_slots),
        )  # fmt: skip
        self.updates = 0

    def update(self, without=()):
        self.updates += 1
        generator = torch.Generator().manual_seed(self.updates)
        for share in self.shares:
            value = torch.randn(share.numel, generator=generator).bfloat16()
            share.has_grad = share.index not in without
            share.is_zeroed = False
            if not share.has_grad:
                continue
            if self.gradients is not None:
                self.gradients.put(share.index, value)
            else:
                share.grad.copy_(value)
        self.states.update(
            lambda group: AdamWHyper(lr=1e-2 + group, step=self.updates, weight_decay=0.1, grad_scale=0.5, seed=3)
        )

    def weights(self, share):
        return share.home.clone() if share.home is not None else self.params.get(share.index)

    def values(self):
        self.states.settle()
        found = [self.weights(share) for share in self.shares]
        for share in self.shares:
            found += [self.states.read(share, name) for name in STATE_NAMES]
        self.states.flush()
        return found

    def moved(self):
        """Bytes of states (read, written) since this was last asked, of all updates so far."""
        self.states.wait_written()
        before = getattr(self, "_before", (0, 0))
        self._before = (self.states.ring.read_bytes, self.states.ring.written_bytes)
        return self._before[0] - before[0], self._before[1] - before[1]

    def close(self):
        assert self.states.close()
        if self.scratch is not None:
            self.scratch.close()


PLACES = [(), ("params",), ("gradients",), ("params", "gradients")]


def rewrite(run):
    """As resuming into a living engine does."""
    run.states.settle()
    generator = torch.Generator().manual_seed(100 + run.updates)
    for share in run.shares:
        run.states.write(share, {name: torch.rand(share.numel, generator=generator) for name in STATE_NAMES})
    run.states.flush()


def compare(both):
    in_ram, on_drive = (run.values() for run in both)
    assert all(torch.equal(a, b) for a, b in zip(in_ram, on_drive, strict=True))


def compare_weights(both, weights):
    in_ram, on_drive = both
    for here, there in zip(in_ram.shares, on_drive.shares, strict=True):
        assert torch.equal(here.home, weights(there))


@pytest.mark.more(after=1)
@pytest.mark.parametrize("examples", [8, 40])
def test_wherever_things_live_no_bit_changes(tmp_path_factory, pool, examples):
    """`part`: an update where every other share got no gradient; `wait`: the drive has all parameters."""

    @given(
        st.lists(st.sampled_from([64, 1000, 2048, 2100, CHUNK, CHUNK + 100, 3 * CHUNK]), min_size=1, max_size=7),
        st.sampled_from(PLACES), st.integers(1, 8), st.sampled_from(["split", "fp32", "split8", "fp32_m8", "fp24_m8"]),
        st.sampled_from([0, 100_000]),
        st.lists(st.sampled_from(["update", "part", "settle", "look", "wait", "rewrite"]), min_size=1, max_size=8),
    )  # fmt: skip
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(numels, drive, num_slots, states, ram_bytes, actions):
        folder = tmp_path_factory.mktemp("states")
        both = [Run(numels, pool, folder, states), Run(numels, pool, folder, states, drive, num_slots, ram_bytes)]
        for action in actions:
            if action == "look":
                compare(both)
            for run in both:
                if action in ("update", "part"):
                    run.update(without=range(0, len(numels), 2) if action == "part" else ())
                elif action == "settle":
                    run.states.settle()
                elif action == "rewrite":
                    rewrite(run)
                elif action == "wait":
                    run.states.wait_written()
            if action == "wait":
                compare_weights(both, both[1].weights)
            elif action in ("update", "part") and drive == ("params",):
                compare_weights(both, lambda share: share.loan)
        compare(both)
        for run in both:
            run.close()

    check()


@pytest.mark.more(after=1)
@pytest.mark.parametrize("drive", PLACES, ids=lambda places: "-".join(places) or "states")
def test_a_flush_in_the_middle_of_an_update_changes_no_bit(tmp_path, pool, drive):
    """Kept chunks leave for the drive while those whose update waits for a gradient stay."""
    engine = FaultyEngine(open_engine("auto", num_threads=8))
    numels = [CHUNK] * 12
    both = [Run(numels, pool, tmp_path, "split"), Run(numels, pool, tmp_path, "split", drive, 6, engine=engine)]
    engine.delay(0.002)
    ended = threading.Event()

    def ask():
        while not ended.is_set():
            both[1].states.settle()
            ended.wait(random.random() * 0.15)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(8):
            for run in both:
                run.update()
    finally:
        ended.set()
        asking.join()
    compare(both)
    for run in both:
        run.close()


@pytest.mark.more(after=4)
@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("after", [0, 20])
@pytest.mark.parametrize("drive", PLACES, ids=lambda places: "-".join(places) or "states")
def test_a_failed_transfer_reaches_whoever_waits_and_the_ring_ends(tmp_path, pool, drive, kind, after):
    engine = FaultyEngine(open_engine("auto", num_threads=4))
    run = Run([CHUNK] * 12, pool, tmp_path, "split", drive, 6, engine=engine)
    run.update()
    run.states.wait_written()
    assert run.states.ring.written_bytes
    engine.fail(kind, after=after, matches=lambda file, offset, n_bytes: "gradients" not in str(file.path))
    with pytest.raises(EngineError, match="injected fault"):
        for _ in range(4):
            run.update()
            run.states.wait_written()
    for ask in (run.states.wait_written, run.states.settle, run.update):
        refused(EngineError, "injected fault", ask)
    run.close()


def test_closing_with_chunks_that_are_kept_and_on_their_way_starts_nothing(tmp_path, pool):
    engine = FaultyEngine(open_engine("auto", num_threads=4))
    run = Run([CHUNK] * 12, pool, tmp_path, "split", (), 6, engine=engine)
    run.update()
    engine.delay(0.05)
    run.update()
    assert run.states.close()
    written = run.states.ring.written_bytes
    refused(EngineError, "closed", run.states.settle)
    assert run.states.ring.written_bytes == written
    run.close()


@pytest.mark.parametrize("end", ["settle", "close"])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_transfer_that_was_accepted_is_waited_for_when_the_next_of_its_chunk_is_refused(
    tmp_path, pool, monkeypatch, kind, end
):
    """States first, then parameters: the states' transfer is under way when the parameters' cannot be submitted."""
    engine = FaultyEngine(open_engine("auto", num_threads=4))
    run = Run([CHUNK] * 12, pool, tmp_path, "split", ("params",), 6, engine=engine)
    run.update()
    run.states.settle()  # nothing is in the ring, and nothing is read ahead
    assert run.states.state_store is not None and run.params is not None
    submit, accepted = getattr(run.states.state_store, f"submit_{kind}"), []

    def accept(*args, **kwargs):
        accepted.append(submit(*args, **kwargs))
        return accepted[-1]

    monkeypatch.setattr(run.states.state_store, f"submit_{kind}", accept)
    monkeypatch.setattr(run.params.store, f"submit_{kind}", failing(RuntimeError("refused while being submitted")))
    engine.delay(math.inf, kind)
    worked_s = run.states.ring.optimizer_time.total_s()
    with pytest.raises(EngineError, match="refused"):
        run.update()
        run.states.wait_written()
    assert [transfer.done() for transfer in accepted] == [False]
    threading.Timer(0.2, engine.let_go).start()
    if end == "close":
        assert run.states.close()
    else:
        refused(EngineError, "refused", run.states.settle)
    assert [transfer.done() for transfer in accepted] == [True]
    if kind == "read":
        assert run.states.ring.optimizer_time.total_s() == worked_s, "a chunk of which a part was missing was updated"
    run.close()


@pytest.mark.parametrize(("num_slots", "kept"), [(1, 0), (2, 1), (4, 3), (7, 6), (24, 9)])
def test_what_the_ring_keeps_is_neither_written_nor_read_again(tmp_path, pool, num_slots, kept):
    """Ten shares of one chunk. Without reading ahead: every slot but one keeps a chunk, and that one flows."""
    run = Run([CHUNK] * 10, pool, tmp_path, "split", (), num_slots)
    chunk_bytes = state_format("split").chunk_bytes(CHUNK)
    assert run.states.nvme_bytes == 10 * chunk_bytes and run.states.ring.kept_bytes == kept * chunk_bytes
    run.update()
    assert run.moved() == (10 * chunk_bytes, (10 - kept) * chunk_bytes)
    for _ in range(4):
        run.update()
        assert run.moved() == ((10 - kept) * chunk_bytes,) * 2
    run.states.settle()
    assert run.moved() == (0, kept * chunk_bytes)  # the drive has everything
    run.states.settle()
    assert run.moved() == (0, 0)
    run.update()
    assert run.moved() == (10 * chunk_bytes, (10 - kept) * chunk_bytes)
    run.close()


@pytest.mark.parametrize(("numels", "num_slots", "first", "later"), [
    ([CHUNK, 64] * 4, 3, None, ((CHUNK, 2), (64, 4))),
    ([CHUNK // 2] * 6 + [CHUNK] * 2, 5, (((CHUNK, 2), (CHUNK // 2, 6)), ((CHUNK // 2, 4),)), ((CHUNK // 2, 4),)),
])  # fmt: skip
def test_slots_keep_what_is_worth_most(tmp_path, pool, numels, num_slots, first, later):
    """Small shares flow past large ones that are kept; what those leave over keeps smaller ones."""
    run = Run(numels, pool, tmp_path, "split", (), num_slots)

    def size(chunks):
        return sum(count * state_format("split").chunk_bytes(numel) for numel, count in chunks)

    run.update()
    moved = run.moved()
    assert first is None or moved == tuple(size(chunks) for chunks in first)
    for _ in range(3):
        run.update()
        assert run.moved() == (size(later),) * 2
    run.close()


def test_a_write_that_fails_when_the_kept_chunks_leave_stops_the_run(tmp_path, pool):
    run = Run([CHUNK] * 4, pool, tmp_path, "split", (), 4)
    run.update()
    run.states.wait_written()
    run.states.state_store.submit_write = failing(OSError(28, "No space left on device"))
    refused(Exception, "No space left", run.states.settle)
    refused(Exception, "No space left", run.update)
    run.close()
