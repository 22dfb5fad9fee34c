"""Weights that travel: the next pass's uploads begin while tokens of this one are chosen."""

from types import SimpleNamespace

import torch

from outcore.flow import discover_units
from outcore.flow.weights import WeightHomes
from outcore.infer.opening.arrival import ResidentWeights
from outcore.staging.pool import HostMemory
from tests.flow.models import tiny_loaded


class Noted:
    """A `WeightArrival` that notes what it is told."""

    def __init__(self) -> None:
        self.said: list = []
        self.stalls, self.device_bytes = SimpleNamespace(), 0

    def begin(self, sequence):
        self.said.append(("begin", *(part.index for part in sequence)))

    def acquire(self, at):
        self.said.append(("acquire", at))
        return torch.zeros(0)

    def release(self, at):
        self.said.append(("release", at))

    def abort(self, deadline=None):
        self.said.append(("abort",))


def test_the_next_pass_is_begun_ahead_and_given_up_where_it_is_another():
    units = discover_units(tiny_loaded("llama"))
    homes = WeightHomes(units.all, HostMemory(), {part.index: part.layout.home_numel for part in units.all}, None)
    homes.adopt()
    one, two = units.layer_units[:2]
    noted = Noted()
    weights = ResidentWeights([p for p in units.all if p not in (one, two)], homes, noted, torch.device("cpu"))
    assert weights.stays(units.embed) and not weights.stays(one)

    def run(sequence) -> list:
        noted.said.clear()
        weights.begin(sequence)
        for at in range(len(sequence)):
            weights.acquire(at)
            weights.release(at)
        return [entry for entry in noted.said if entry[0] in ("begin", "abort")]

    begin = ("begin", one.index, two.index)
    whole = [units.embed, one, two, units.head]
    assert run(whole) == [begin, begin], "and once more, ahead"
    assert run(whole) == [begin], "what was begun ahead is used"
    assert run(whole[:3]) == [begin], "the head stays, so this is the same to the lanes"
    assert run([units.embed, one]) == [("abort",), ("begin", one.index), ("begin", one.index)]
    weights.abort()
    assert run(whole) == [begin, begin], "after a failure nothing is taken for begun"
