"""Random numbers by place, not by order: dropout in a recomputed layer repeats what its forward drew.

Every call of a unit on a micro-batch starts the generators from a seed made of (run seed, step, micro-batch, unit), so
the numbers depend neither on the schedule nor on residency nor on prefetching."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(seed: int, step: int, micro_batch: int, unit: int) -> int:
    """A 63-bit seed."""
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_batch}/{unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class PartRandom:
    """Seeds the CPU's and the device's default generator for one step. Micro-batch m of rank r is number m *
    world_size + r of the step, so one rank that takes them all in this order draws the same."""

    def __init__(self, device: torch.device, seed: int, step: int, rank: int = 0, world_size: int = 1) -> None:
        self.device, self.seed, self.step = device, seed, step
        self.rank, self.world_size = rank, world_size

    def at(self, micro_batch: int, unit: int) -> None:
        """Start the generators for this call."""
        value = seed_of(self.seed, self.step, micro_batch * self.world_size + self.rank, unit)
        torch.default_generator.manual_seed(value)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(value)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """The default generators are afterwards as they were before."""
    cpu = torch.default_generator.get_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
