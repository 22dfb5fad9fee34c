"""World of states: steps of a small model whose optimizer states lie in RAM and on a drive, against a plain run.

The real homes, ring, optimizer pool (its torch backend, threads and all), gradient arena, lanes and queue of updates.
Gradients come down from a simulated device; what a forward, a save and a load would see is compared with AdamW applied
to each part as a whole."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch

from outcore.common.errors import EngineError
from outcore.common.quantities import KIB
from outcore.engine.base import NonFiniteLossError
from outcore.engine.stream.gradients.arena import GradientArena
from outcore.engine.stream.updates import (
    AheadUpdater,
    DriveUpdater,
    PartUpdates,
    RamUpdater,
    UpdatedWeights,
)
from outcore.flow.parts import Part, SlabLayout
from outcore.flow.weights import WeightHomes
from outcore.optim import (
    BLOCK_NUMEL,
    FORMATS,
    AdamWHyper,
    Backend,
    ChunkJob,
    ChunkState,
    OptimizerPool,
    UpdateFailed,
    open_backend,
    reference,
)
from outcore.staging.lanes import DownloadLane, LaneSettings
from outcore.staging.pool import HostMemory, PinnedPool
from outcore.states import GradPlace, Homes, RingSize, SecondHomes, StateChunk, StateRing, cut_states, open_store, spill
from outcore.storage import DigestRule, PosixEngine, StorageError, TensorSpec, TensorStore, aligned_bytes
from tests.simulation.drive import Drive, Faults
from tests.simulation.lanes import GARBAGE, copy, digest
from tests.simulation.link import Device
from tests.simulation.threads import Simulation

CPU = torch.device("cpu")
FAMILIES = ("master", "exp_avg", "exp_avg_sq")
BAD = float("inf")
UPDATE_CHUNK = reference.update_chunk


class Plain:
    """A part as AdamW makes it in one piece."""

    def __init__(self, part: Part, backend: Backend, form: Any, offset: int) -> None:
        self.form, self.numel, self.offset, self.backend = form, part.layout.trainable_numel, offset, backend
        self.param = torch.zeros(self.numel, dtype=part.dtype)
        for slot, parameter in zip(part.layout.slots, part.parameters, strict=True):
            self.param[slot.offset : slot.end] = parameter.detach().view(-1)
        self.buffer = torch.from_numpy(aligned_bytes(form.chunk_bytes(self.numel)))
        self.states.initialise()

    @property
    def states(self) -> ChunkState:
        return ChunkState(self.form, self.buffer, self.numel, self.param)

    def update(self, grad: torch.Tensor, hyper: AdamWHyper) -> None:
        self.backend.update(self.form, ChunkJob(grad, self.buffer, self.param, self.offset), hyper)


class HomesOfAll(Homes):
    """Homes whose gradients may lie on the drive, too. `gradients`: the store that has them, by part."""

    gradients: TensorStore | None = None

    def grad_place(self, chunk: StateChunk) -> GradPlace | None:
        if self.gradients is None:
            return None
        return GradPlace(self.gradients, chunk.unit.name, 2 * chunk.start, torch.bfloat16)


class States:
    """A model of a few parts, what updates it, and the plain run. `turns`: through the ring alone, to and fro."""

    def __init__(self, simulation: Simulation, drive: Drive) -> None:
        pick = simulation.random
        self.simulation, self.drive = simulation, drive
        self.turns = pick.random() < 0.4
        self.is_deferred = self.turns or pick.random() < 0.6
        drive.faults = Faults(
            error=pick.choice([0, 0, 0, 4]), short=pick.choice([0, 0, 50]), slow_s=pick.choice([0, 0.05])
        )
        drive.is_quiet = True
        self.engine = PosixEngine(pick.randint(1, 3), pick.choice([4, 64]) * KIB, max_requests=pick.choice([2, 64]))
        self.undo = ExitStack()
        self.undo.callback(self.engine.close)
        self.stores: list[TensorStore] = []
        self.digests = DigestRule(digest) if pick.random() < 0.5 else None
        self.values = torch.Generator().manual_seed(pick.getrandbits(32))
        self.parts = [self._part(index) for index in range(pick.randint(2, 4))]
        backend = open_backend("torch")
        form, chunk_numel = pick.choice([f for f in FORMATS if not f.short_residual]), BLOCK_NUMEL * pick.randint(1, 3)
        chunks = cut_states(self.parts, form, chunk_numel)
        self.plain = {p.index: Plain(p, backend, form, chunks[p.index][0].element_offset) for p in self.parts}
        everything = [chunk for part in self.parts for chunk in chunks[part.index]]
        total = sum(chunk.n_bytes for chunk in everything)
        spill(everything, int(total * pick.choice([0, 0.3, 0.7, 1])), compress=pick.random() < 0.3)
        ends = {part.index: [0, *(chunk.stop for chunk in chunks[part.index])] for part in self.parts}
        share = pick.choice([1.0, 1.0, 0.5])
        cuts = {index: max(at for at in found if at <= share * found[-1]) for index, found in ends.items()}
        weights = WeightHomes(self.parts, HostMemory(), cuts, cast(Any, self))
        store = open_store(everything, cast(Any, self))
        memory = HostMemory()
        self.homes = HomesOfAll(self.parts, memory, form, chunks, store, weights=weights, backend=backend)
        if self.turns and pick.random() < 0.4:
            self.homes.gradients = self.store(
                "gradients", [TensorSpec(p.name, torch.uint8, (2 * p.layout.numel + 4 * KIB,)) for p in self.parts]
            )
        self.fails, self.has_failed = pick.choice([0, 0, 0, 0.05]), False
        self.pool = OptimizerPool(pick.randint(1, 3), backend=backend)
        self.errors = pick.choice([0, 0, 0, 10])
        self.device = Device(simulation, 1, self.errors, lambda host: True)
        staging = PinnedPool(64 * KIB, device="cpu", probe=False)
        settings = LaneSettings(pick.choice([4, 8]) * KIB, num_slots=pick.randint(1, 3), num_streams=1)
        self.lane = DownloadLane(staging, self.engine, CPU, settings, streams=self.device)
        waits = {} if pick.random() < 0.5 else {i: at for i, at in cuts.items() if at < ends[i][-1]}
        sizes = [2 * part.layout.trainable_numel for part in self.parts]
        limit = None if self.is_deferred or pick.random() < 0.3 else max(sizes) * 2 + 8192
        self.arena = GradientArena(self.parts, memory, limit, weights_from=waits)
        flowing = [self.flowing(part) for part in self.parts]
        self.ring: StateRing | None = None
        if any(flowing):
            self.ring = StateRing(
                self.homes, flowing if self.is_deferred else flowing[::-1], self.pool, memory,
                RingSize(pick.choice([32, 64, 256]) * KIB, pick.choice([2, 3, 5, 24])),
                keep_param=None if self.turns else self.arena.keep_weights, turns=self.turns,
            )  # fmt: skip
        drive.is_quiet = False
        early = [] if self.ring is not None else [part for part in self.parts if pick.random() < 0.7]
        ahead = AheadUpdater(RamUpdater(self.homes, self.pool), SecondHomes(self.homes, early, memory))
        self.updates = PartUpdates(
            self.homes, self.arena, ahead,
            residents=cast(Any, SimpleNamespace(slab=lambda part: None, update=lambda part, hyper, guard: False)),
            drive=None if self.ring is None else DriveUpdater(self.homes, self.ring, self.pool),
        )  # fmt: skip
        self.source = UpdatedWeights(self.homes, self.updates, self.arena)
        self.made, self.way = 0, 1
        self.spoiled: Part | None = None

    def _part(self, index: int) -> Part:
        pick = self.simulation.random
        sizes = [pick.choice([1, 40, 256, 300, 512]) for _ in range(pick.randint(1, 3))]
        made = [torch.nn.Parameter(self._drawn(size)) for size in sizes]
        layout = SlabLayout([(f"p{index}.{number}", parameter) for number, parameter in enumerate(made)])
        return Part(index, f"part {index}", layout, [], made)

    def _drawn(self, numel: int) -> torch.Tensor:
        return torch.randn(numel, generator=self.values).bfloat16()

    def store(self, kind: str, specs: list[TensorSpec]) -> TensorStore:
        """A `Scratch` of the simulated drive."""
        folder = self.drive.root / kind.replace(" ", "-")
        self.stores.append(TensorStore.create([folder], specs, self.engine, digests=self.digests))
        return self.stores[-1]

    def flowing(self, part: Part) -> list[StateChunk]:
        """The part's chunks that go through the ring: all, where gradients lie on the drive."""
        return self.homes[part].chunks if self.homes.gradients is not None else self.homes.flowing(part)

    def update_chunk(self, *args: Any) -> None:
        """A chunk's update, which fails now and then where the optimizer's threads make it."""
        if self.simulation.current.name.startswith("optimizer") and self.simulation.chance(self.fails):
            self.has_failed = True
            raise RuntimeError("this update fails")
        UPDATE_CHUNK(*args)

    # --- steps

    def run(self) -> None:
        """Train, look, load, and close, now and then in the middle of it."""
        pick, error = self.simulation.random, None
        try:
            for _ in range(pick.randint(1, 4)):
                (self._turn if self.turns else self._step)()
                if pick.random() < 0.3:
                    self._look()
                if pick.random() < 0.15:
                    self._load()
            if pick.random() < 0.8:
                self._forward()
                self._look()
        except NonFiniteLossError:
            assert self.spoiled is not None, "a gradient is called bad and is not"
        except (EngineError, StorageError, UpdateFailed, RuntimeError) as raised:
            is_given = self.drive.struck or self.device.failed or self.has_failed
            assert is_given, f"an error that nothing gave: {raised!r}"
            error = raised
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        self.updates.close()
        self.lane.close(cancel=error is not None)
        self.pool.close(cancel=True)
        self.drive.is_quiet = True
        for store in self.stores:
            store.delete()
        self.undo.close()
        self.simulation.block(lambda: self.device.is_idle)
        left = self.simulation.names_alive("state-ring", "optimizer", "gradient-guard")
        assert not left, f"closed, and these threads run on: {left}"

    def _hyper(self, grad_scale: float = 1.0) -> AdamWHyper:
        return AdamWHyper(lr=0.05, step=self.made + 1, weight_decay=0.1, grad_scale=grad_scale, seed=3)

    def _gradient(self, part: Part) -> torch.Tensor:
        grad = self._drawn(part.layout.trainable_numel)
        for start, end in part.layout.gaps():
            grad[start:end] = 0
        return grad

    def _forward(self) -> None:
        """Every part as the next forward finds it."""
        for part in self.parts:
            self.source.wait_current(part)
            assert self.source.is_current(part)
            self._compare_params(part)

    def _compare_params(self, part: Part) -> None:
        expected = self.plain[part.index].param
        kept = self.source.cached(part)
        found = self.homes.weights.read_range(part, 0, part.layout.numel)
        assert torch.equal(found, expected), f"{part.name}: other parameters than a plain run has"
        if kept is not None:
            assert torch.equal(kept, expected[-len(kept) :]), f"{part.name}: what waits in RAM is not what was made"

    def _step(self) -> None:
        pick = self.simulation.random
        self.updates.begin_step()
        self._forward()
        hyper, shipped = self._hyper(), []
        ahead = hyper if self.is_deferred and pick.random() < 0.6 else None
        spoiled = pick.choice(self.parts) if not self.is_deferred and pick.random() < 0.1 else None
        for part in reversed(self.parts):
            grad = self._gradient(part)
            if part is spoiled:
                grad[pick.randrange(part.layout.slots[0].numel)], self.spoiled = BAD, part
            norm = float(torch.linalg.vector_norm(grad.double()))
            while (home := self.arena.try_take(part)) is None:
                self.updates.make_room()
            transfer = self._ship(grad, home)
            shipped.append((part, grad, transfer))
            if not self.is_deferred:
                knows = pick.random() < 0.5
                self.updates.submit(part, transfer, hyper, guard=True, norm_of=(lambda p, n=norm: n) if knows else None)
                if part is not spoiled:
                    self.plain[part.index].update(grad, hyper)
            elif ahead is not None:
                self.updates.submit_ahead(part, transfer, ahead)
        if not self.is_deferred:
            self.made += 1
            return
        final = pick.choice([hyper, hyper, replace(hyper, grad_scale=0.25), None])
        if ahead is not None:
            self.updates.settle(final, ahead)
        if final is None:
            for _, _, transfer in shipped:
                transfer.wait()
            return
        for part, grad, transfer in reversed(shipped):
            self.updates.submit(part, transfer, final)
            self.plain[part.index].update(grad, final)
        self.made += 1

    def _ship(self, grad: torch.Tensor, home: torch.Tensor) -> Any:
        """A gradient's way down; its memory on the device is used again as soon as that is allowed."""
        source = torch.full_like(grad, float("nan"))
        self.device.compute(lambda: copy(source, grad))
        transfer = self.lane.submit_host(source, home)
        if self.simulation.chance(0.5):
            transfer.wait_stream()
            self.device.compute(lambda: copy(source, torch.full_like(source, GARBAGE)))
        return transfer

    def _turn(self) -> None:
        """A step as an engine makes it that knows all gradients: everything at once, each pass the other way."""
        pick, hyper = self.simulation.random, self._hyper()
        self.homes.flush_states()
        tickets, in_ram = [], []
        for part in self.parts[:: self.way]:
            grad = self._gradient(part)
            given: torch.Tensor | None = grad
            if self.homes.gradients is not None:
                given = None
                self.homes.gradients.submit_write(part.name, grad.view(torch.uint8), 0).wait(60.0)
            flowing = self.flowing(part)
            if self.ring is not None and flowing:
                tickets.append(self.ring.submit(part, flowing, given, hyper))
            if self.homes.gradients is None and (jobs := self.homes.jobs(part, grad)) is not None:
                in_ram.append(self.pool.submit(part.name, part.index, jobs, hyper))
            self.plain[part.index].update(grad, hyper)
            if pick.random() < 0.2:
                self.simulation.sleep(pick.random())
        for ticket in in_ram:
            assert self.pool.wait(ticket).status == "done"
        if self.ring is not None:
            for ticket in tickets:
                self.ring.wait(ticket)
            if pick.random() < 0.3:
                self.ring.wait_written()
            self.ring.turn()
            self.way = -self.way
        self.made += 1
        self._forward()

    # --- saves and loads

    def _look(self) -> None:
        """All states as a save finds them."""
        self.updates.drain()
        for family in FAMILIES:
            for part in self.parts:
                expected = self.plain[part.index].states.read(family)
                for slot in part.layout.slots:
                    found = self.homes.read_state(slot.name, family).view(-1)
                    assert torch.equal(found, expected[slot.offset : slot.end]), f"{slot.name}: another {family}"

    def _load(self) -> None:
        self.updates.drain()
        for part in self.parts:
            for slot in part.layout.slots:
                values = {family: self._drawn(slot.numel).float().abs() for family in FAMILIES}
                self.homes.write_states(slot.name, cast(Any, values))
                for family, value in values.items():
                    whole = torch.zeros(-(-slot.numel // BLOCK_NUMEL) * BLOCK_NUMEL)[: self.plain[part.index].numel]
                    whole[: slot.numel] = value
                    self.plain[part.index].states.write(cast(Any, family), whole, slot.offset)
        self.homes.flush_states()
        self.arena.forget_weights()


def world(simulation: Simulation, drive: Drive) -> None:
    """Run it."""
    states = States(simulation, drive)
    with mock.patch.object(reference, "update_chunk", states.update_chunk):
        states.run()
