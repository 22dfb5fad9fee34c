"""Initial weights made by several threads: bit for bit those of one thread."""

import threading

import pytest
import torch
from torch import nn

from outcore.model.facts import model_class_of
from outcore.model.weights import initialise
from outcore.model.weights.initialise import InitPlan, RandomStream, SharedStreamNeeded, meta_skeleton
from tests.model.cases import tiny_config


def draw_everything(out: torch.Tensor) -> None:
    nn.init.normal_(out, 1.0, 0.5)
    nn.init.trunc_normal_(out[:4], std=0.1)
    nn.init.uniform_(out[4:6], -1, 1)
    nn.init.kaiming_uniform_(out[6:8])
    nn.init.orthogonal_(out[8:12])
    out[12].bernoulli_(0.5)
    out[13:] = torch.dropout(out[13:], 0.0, True)


def made(
    skeleton: nn.Module, threads: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Every initial weight, and the names of the threads that called an initialiser."""
    seen: set[str] = set()
    generate = initialise.InitRegion._generate

    def watched(self, seeded):
        seen.add(threading.current_thread().name.split("_")[0])
        return generate(self, seeded)

    with monkeypatch.context() as patch:
        patch.setattr(initialise.torch, "get_num_threads", lambda: threads)
        patch.setattr(initialise.InitRegion, "_generate", watched)
        values = {name: v for region in InitPlan(skeleton).values(11) for name, v in region.items()}
    return values, seen


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_stream_of_ones_own_gives_the_default_generators_numbers():
    expected, found = torch.empty(16, 40), torch.empty(16, 40)
    with torch.no_grad():
        torch.manual_seed(5)
        draw_everything(expected)
        before = torch.get_rng_state()
        with RandomStream(5):
            draw_everything(found)
    assert torch.equal(expected, found)
    assert torch.equal(before, torch.get_rng_state())
    given = torch.Generator().manual_seed(1)
    with RandomStream(5):
        own = torch.empty(9).normal_(generator=given)
    assert torch.equal(own, torch.empty(9).normal_(generator=torch.Generator().manual_seed(1)))


def test_a_draw_without_a_generator_is_refused_before_it_is_made():
    before = torch.get_rng_state()
    for draw in (lambda: torch.rand(3), lambda: torch.randperm(4), lambda: torch.rand_like(torch.ones(2))):
        with RandomStream(0), pytest.raises(SharedStreamNeeded):
            draw()
    assert torch.equal(before, torch.get_rng_state())
    with RandomStream(0):
        assert torch.empty(2, device="meta").normal_().is_meta


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "t5", "mixtral", "gemma3_text", "mamba", "opt"])
def test_threads_give_the_values_of_one_thread(model_type, monkeypatch):
    config = tiny_config(model_type)
    skeleton = meta_skeleton(model_class_of(config), config)
    alone, _ = made(skeleton, 1, monkeypatch)
    before = torch.get_rng_state()
    together, seen = made(skeleton, 3, monkeypatch)
    assert_same(alone, together)
    assert "initial-weights" in seen
    assert all(p.is_meta for p in skeleton.parameters()) and torch.equal(before, torch.get_rng_state())


class Drawn(nn.Module):
    """Draws the way that only the default generator serves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.weight.data += torch.rand(5)


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(3, 3)


def test_layers_that_need_the_default_generator_get_it(monkeypatch):
    with torch.device("meta"):
        skeleton = Stack([Drawn(), nn.Linear(4, 4), Drawn()])
    alone, _ = made(skeleton, 1, monkeypatch)
    together, seen = made(skeleton, 2, monkeypatch)
    assert_same(alone, together)
    assert seen == {"initial-weights", "MainThread"} and len(alone) == 6


def test_layers_that_share_something_are_made_one_after_another(monkeypatch):
    with torch.device("meta"):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        for skeleton in (Stack([nn.Sequential(first), nn.Sequential(second)]), Stack([first, nn.Sequential(first)])):
            _, seen = made(skeleton, 2, monkeypatch)
            assert seen == {"MainThread"}


def test_large_layers_are_made_one_at_a_time(monkeypatch):
    with torch.device("meta"):
        skeleton = Stack([nn.Linear(8, 8, bias=False) for _ in range(3)])
    monkeypatch.setattr(initialise, "AHEAD_BYTES", 2 * 256 - 1)
    assert made(skeleton, 2, monkeypatch)[1] == {"MainThread"}
    monkeypatch.setattr(initialise, "AHEAD_BYTES", 2 * 256)
    assert "initial-weights" in made(skeleton, 2, monkeypatch)[1]


def test_an_initialiser_that_fails_says_so(monkeypatch):
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            if self.weight.is_cpu:
                raise ArithmeticError("no weights today")

    with torch.device("meta"):
        skeleton = Stack([nn.Linear(2, 2), Broken(2, 2)])
    with pytest.raises(ArithmeticError, match="today"):
        made(skeleton, 2, monkeypatch)
    assert all(p.is_meta for p in skeleton.parameters())
