"""Compiled layers and passes in slots, as a GPU runs them, say what eager layers say (here without code generation)."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outcore.infer import InferenceEngine
from outcore.infer.opening import InferSettings, open_engine
from outcore.infer.passes.graphs import SmallPasses, rounded_up
from outcore.sizing.inference import AttentionLimits
from tests.flow.models import tiny_loaded
from tests.infer.models import TinyEngine, greedy_by_transformers, on_the_drive, prompts_of

pytestmark = pytest.mark.usefixtures("one_thread")


def slots_used(one: TinyEngine) -> dict:
    return {size: slot.runs for size, slot in one.runner.small._slots.items()}


@pytest.mark.more(after=1)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_slots_say_what_transformers_says(family, monkeypatch):
    loaded = tiny_loaded(family)
    prompts = prompts_of(6)
    expected = [greedy_by_transformers(loaded.model.eval(), prompt, 20) for prompt in prompts]
    one = TinyEngine(family, loaded=loaded, small=True)
    told: list[int] = []
    monkeypatch.setattr(one.engine.scheduler.cost, "add", lambda rows, seconds: told.append(rows))
    assert one.greedy(prompts, 20) == expected
    assert one.engine.counts.accepted > 0, "guesses are rows of one sequence"
    used = slots_used(one)
    assert len(used) > 2 and max(used.values()) > 1
    assert len(told) == one.engine.counts.passes - len(used), "a slot's first pass makes what later ones find"
    one.close()


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_slots_read_long_rows_in_pieces(family):
    """Rows that see more than may be read together, as at 100,000 tokens of context."""
    loaded = tiny_loaded(family)
    prompts = prompts_of(2)
    expected = [greedy_by_transformers(loaded.model.eval(), prompt, 20) for prompt in prompts]
    one = TinyEngine(family, loaded=loaded, small=True, tiny={"limits": AttentionLimits(gathered=256)})
    assert one.greedy(prompts, 20) == expected and slots_used(one)
    one.close()


class ReplayedPasses(SmallPasses):
    """Captures as a GPU does: what Python keeps changes with the capture alone, tensors with the replay alone."""

    def _capture(self, function):
        place, handed = copy.copy(self.attention._place), copy.deepcopy(self._handed._kept)
        function()
        for name, before in handed.items():
            self._handed._kept[name].copy_(before)

        def replay():
            now, self.attention._place = self.attention._place, copy.copy(place)
            function()
            self.attention._place = now

        return SimpleNamespace(replay=replay)


def test_a_layer_that_the_cpu_computes_between_graphs_finds_its_own_pages(monkeypatch):
    loaded = tiny_loaded("llama")
    prompts = prompts_of(3)
    expected = [greedy_by_transformers(loaded.model.eval(), prompt, 12) for prompt in prompts]
    one = TinyEngine("llama", loaded=loaded, speculates=False)
    flow = one.runner.flow
    monkeypatch.setattr(flow.arrival, "stays", lambda part: False)
    last, cpu = flow.units.layer_units[-1], torch.device("cpu")
    one.runner.small = ReplayedPasses(flow, one.runner.attention, one.cache, cpu, is_on_cpu=lambda part: part is last)
    assert one.greedy(prompts, 12) == expected
    assert any(slot.runs > 2 and slot.is_captured for slot in one.runner.small._slots.values())
    one.close()


@pytest.mark.more
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gemma3_text", "gpt_oss"))]
)
def test_compiled_layers_say_what_transformers_says(family):
    loaded = tiny_loaded(family)
    prompts = prompts_of(6)
    expected = [greedy_by_transformers(loaded.model.eval(), prompt, 12) for prompt in prompts]
    made = []

    def backend(module, inputs):
        made.append(inputs)
        return module

    one = TinyEngine(family, loaded=loaded, small=True, backend=backend)
    layers = one.runner.flow.runner.compiled
    passes, most = [], one.engine.max_tokens
    one.engine.observers.append(lambda works, seconds: passes.append([work.count for work in works]))
    assert one.engine.warm_up([8, 16, most - 3]) > 0 and one.engine.counts.passes == 0 and not len(one.cache.index)
    assert passes == [[8], [1], [1], [1], [16], [1], [1], [1]], "each prompt alone and whole, but what does not fit"
    passes.clear()
    assert one.engine.warm_up([8], 2) > 0 and passes == [[8], [1]]
    assert len(made) == 2 * layers.num_kinds, "one function for any number of tokens, one for a single token"
    assert one.greedy(prompts, 12) == expected and not layers.why_not
    scores = one.engine.score(prompts)
    assert one.engine.score(prompts[2:4]) == [pytest.approx(s, abs=1e-4) for s in scores[2:4]]
    assert len(made) == 2 * layers.num_kinds + 1, "of scores one more, for any number of tokens: that of the logits"
    layers.why_not = "compared"
    assert one.engine.score(prompts) == [pytest.approx(s, abs=1e-4) for s in scores]
    one.close()


def test_sizes_of_slots_waste_at_most_half():
    sizes = [rounded_up(count) for count in range(1, 200)]
    assert sizes[:9] == [1, 2, 3, 4, 6, 6, 8, 8, 12] and sizes == sorted(sizes)
    assert all(count <= size <= 1.5 * count for count, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 17


def test_on_a_cpu_layers_run_eagerly_and_say_so(tiny_folder):
    lines: list[str] = []
    opened = open_engine(str(tiny_folder[0]), InferSettings(context=64, device="cpu"), lines.append)
    layers = opened.engine.runner.flow.runner.compiled
    assert "on a GPU only" in layers.why_not and opened.engine.runner.small is None
    opened.close()
    with pytest.raises(ValueError, match="compile is"):
        InferSettings(compile="maybe")


def test_where_weights_stay_prompts_of_all_lengths_are_read_before_the_first_comes(tiny_folder, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(InferenceEngine, "warm_up", lambda engine, *lengths: asked.append(lengths) or 0.0)
    on_the_drive(monkeypatch)
    settings = InferSettings(context=64, device="cpu", compile="on", pass_tokens=64, chunk_tokens=48)
    for nvme_path in ((), (tmp_path,)):
        open_engine(str(tiny_folder[0]), replace(settings, nvme_path=nvme_path), lambda line: None).close()
    assert asked == [([8, 16, 32, 64], 4), ([8], 2)], "passes that read a drive are dear"


def test_where_pages_cross_the_link_slots_waste_at_most_an_eighth():
    sizes = [rounded_up(count, fine=True) for count in range(1, 200)]
    assert sizes[:18] == [*range(1, 17), 18, 18] and all(s <= c * 9 / 8 for c, s in enumerate(sizes, 1))
