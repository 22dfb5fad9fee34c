"""LoRA's automatic targets: layers that peft and the model take adapters on, whatever the architecture calls linear."""

import pytest
import torch
import transformers

from outcore.engine.stream.check.gradients import why_not_trained
from outcore.model import LoadedModel, LoraSettings
from outcore.model.adapters import apply_lora, linear_names
from outcore.model.facts import model_facts, resolve_attention
from tests.flow.models import needs, tiny_loaded

pytestmark = pytest.mark.usefixtures("one_thread")
LEFT_OUT = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "nemotron_h", "falcon_h1"), "out_proj"),
    **dict.fromkeys(("llama4_text", "phimoe"), "router"),
    "deepseek_v4": "o_a_proj",
}
"""Architectures of which an earlier choice failed, and what peft refuses there or what is linear by its class only."""


@pytest.mark.more(after=4)
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in LEFT_OUT])
def test_automatic_targets_are_taken_by_peft_and_the_model(name):
    config = transformers.AutoConfig.for_model(name)
    loaded = tiny_loaded(name, attention=resolve_attention(config, "auto")[0])
    found = linear_names(loaded.model)
    assert found and not any(LEFT_OUT[name] in path.split(".") for path in found)
    model = apply_lora(loaded.model, LoraSettings(r=2), 0)
    adapted = LoadedModel(model, loaded.config, model_facts(model), loaded.abilities, loaded.words)
    assert why_not_trained(adapted) == ""


def test_a_linear_layer_with_a_forward_of_its_own_is_adapted_where_it_maps_features():
    loaded = tiny_loaded("falcon")
    kinds = {type(loaded.model.get_submodule(name)) for name in linear_names(loaded.model)}
    assert [kind.__name__ for kind in kinds] == ["FalconLinear"] and torch.nn.Linear not in kinds


def test_a_model_of_the_users_own_takes_adapters() -> None:
    """It has no `generate`, which peft would wrap for a causal language model."""
    own = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 7))
    adapted = apply_lora(own, LoraSettings(r=2, target_modules="1"), seed=0)
    adapted(torch.arange(3)).sum().backward()
    trained = [name for name, p in adapted.named_parameters() if p.grad is not None]
    assert len(trained) == 2 and all(".1.lora_" in name for name in trained)
