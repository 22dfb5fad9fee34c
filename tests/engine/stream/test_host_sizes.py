"""RAM that an engine asks for: gradients of all layers where it is free, the least where it is not."""

import pytest

from outcore.engine.stream import host_sizes
from outcore.engine.stream.gradients.arena import gradient_bytes_of, smallest_arena_bytes
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.parts import discover_units
from tests.flow.models import tiny_loaded


@pytest.mark.parametrize("spare_bytes", [-1, 0])
def test_gradients_get_homes_as_far_as_ram_is_free(monkeypatch: pytest.MonkeyPatch, spare_bytes: int):
    units = discover_units(tiny_loaded("llama", num_hidden_layers=6))
    needed = sum(gradient_bytes_of(unit) for unit in units.all)
    free_bytes = host_sizes.FREE_RAM_BYTES + needed + spare_bytes
    monkeypatch.setattr(host_sizes, "available_ram_bytes", lambda: free_bytes)
    least = smallest_arena_bytes(units.all)
    assert least < needed
    assert host_sizes.arena_bytes(units, StreamSettings(max_grad_norm=0)) == (None if spare_bytes == 0 else least)
    told = StreamSettings(max_grad_norm=0, gradient_bytes=12345)
    assert host_sizes.arena_bytes(units, told) == 12345
