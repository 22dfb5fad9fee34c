"""Which models can be taken apart into units, and the reason for those that cannot."""

import re

import pytest
import torch
import transformers
from torch import nn

from outcore.engine.stream.check.gradients import why_config_not_trained, why_not_trained
from outcore.flow.check import Trial, why_config_not_streamed
from outcore.flow.parts import StreamUnsupported, discover_units, discovery
from outcore.flow.parts.discovery import find_stack
from outcore.model.trial import shrink
from tests.flow.models import needs, tiny_loaded
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("one_thread")


def test_models_that_cannot_be_streamed_are_named_with_the_reason():
    loaded = tiny_loaded("llama")
    loaded.loss_fn = lambda model, batch: None
    refused(StreamUnsupported, "its own loss", lambda: discover_units(loaded))
    loaded = tiny_loaded("llama")
    layers = loaded.model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    refused(StreamUnsupported, "shared by layers 0 and 1", lambda: discover_units(loaded))
    loaded = tiny_loaded("llama")
    loaded.model.model.spare = nn.Linear(3, 3)
    refused(StreamUnsupported, r"parameters of model.spare take no part", lambda: discover_units(loaded))
    loaded = tiny_loaded("llama")
    loaded.model.model.layers[1].mlp.up_proj.to(torch.bfloat16)
    with pytest.raises(
        StreamUnsupported, match=r"several types, bfloat16 among float32 \(model.layers.1.mlp.up_proj.weight\)"
    ):
        discover_units(loaded)
    loaded = tiny_loaded("llama")
    loaded.model.model.layers = nn.ModuleList([loaded.model.model.layers[0]] * 2)
    refused(StreamUnsupported, "its layers 0 and 1 of layers are one and the same", lambda: discover_units(loaded))
    refused(StreamUnsupported, r"its decoder \(Linear\) has no list of layers", lambda: find_stack(nn.Linear(2, 2), {}))


def test_work_between_layers_is_seen():
    loaded = tiny_loaded("llama")
    decoder = loaded.model.model

    class Changed(type(decoder)):
        def forward(self, input_ids=None, **kwargs):
            hidden = self.embed_tokens(input_ids)
            tables = self.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
            for layer in self.layers:
                hidden = layer(hidden * 1.5, position_embeddings=tables)
            return hidden

    decoder.__class__ = Changed
    refused(StreamUnsupported, "computes on the hidden states between layers 0 and 1", lambda: discover_units(loaded))


def particular(loaded):
    """A loaded Llama whose decoder calls only layers of the class it knows."""
    kind, wanted = type(loaded.model.model), type(loaded.model.model.layers[0])

    class Particular(kind):
        def forward(self, *args, **kwargs):
            if not isinstance(self.layers[0], wanted):
                raise TypeError("what layer is this?")
            return super().forward(*args, **kwargs)

    loaded.model.model.__class__ = Particular
    return loaded


def test_errors_of_a_models_own_code_are_the_reason_and_ours_are_not(monkeypatch):
    loaded = particular(tiny_loaded("llama"))
    with pytest.raises(StreamUnsupported, match="layer by layer: TypeError: what layer is this") as caught:
        discover_units(loaded)
    assert isinstance(caught.value.__cause__, TypeError)
    assert "what layer is this" in why_not_trained(loaded)
    loaded = tiny_loaded("llama")
    loaded.model.model.norm.forward = lambda hidden: hidden[7]
    refused(StreamUnsupported, "layer by layer: IndexError", lambda: discover_units(loaded))
    loaded.model.model.norm.forward = lambda hidden: hidden + loaded.model.model.layers[0].input_layernorm.weight.mean()
    monkeypatch.setattr(discovery, "parameters_behind", lambda tensors: {}[7])
    with pytest.raises(KeyError):
        discover_units(loaded)


def test_weights_of_an_embedding_that_is_not_called_are_named():
    loaded = tiny_loaded("llama")
    kind = type(loaded.model.model)

    class Direct(kind):
        def forward(self, input_ids=None, **kwargs):
            return super().forward(inputs_embeds=self.embed_tokens.weight[input_ids], **kwargs)

    loaded.model.model.__class__ = Direct
    refused(StreamUnsupported, "weights of embed_tokens without calling it", lambda: discover_units(loaded))


FALCON = {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 8}
PUBLISHED = {
    "falcon-40b": {**FALCON, "hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60},
    "falcon-11b": {**FALCON, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 16384},
    "mamba2-2.7b": {"model_type": "mamba2", "hidden_size": 2560, "num_heads": 80, "n_groups": 1},
    "jamba-v0.1": {"model_type": "jamba"},
    "bamba-9b": {"model_type": "bamba", "attn_layer_indices": [9, 18, 27]},
    "granite-4-tiny": {
        "model_type": "granitemoehybrid", "hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 12,
        "num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_head": 64, "num_local_experts": 62,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    },
    "lfm2-8b-a1b": {
        "model_type": "lfm2_moe", "num_hidden_layers": 24, "layer_types": (["conv", "conv", "full_attention"] * 8),
    },
    "longcat-flash": {"model_type": "longcat_flash"},
    "dbrx": {"model_type": "dbrx", "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 5e5}},
    "ministral-3": {"model_type": "ministral3"}, "xlstm-7b": {"model_type": "xlstm"},
    "roberta-large": {"model_type": "roberta", "is_decoder": True, "hidden_size": 1024, "num_attention_heads": 16},
    "modernbert-decoder": {"model_type": "modernbert-decoder"}, "trocr-decoder": {"model_type": "trocr"},
    "deepseek-v2-lite": {"model_type": "deepseek_v2", "q_lora_rank": None, "num_experts_per_tok": 6},
}  # fmt: skip


@pytest.mark.more(after=5)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_are_made_tiny_and_streamed(name):
    fields = dict(PUBLISHED[name])
    assert why_config_not_trained(transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)) == ""


@pytest.mark.more(after=3)
@pytest.mark.parametrize(("model_type", "reason"), [
    ("gemma3", "parameters of model.vision_tower, model.multi_modal_projector take no part in its language-model"),
    ("gemma3n_text", "it runs 3 (layers, altup_projections, altup_unembed_projections)"),
    ("gemma4_text", "its layers get a learned tensor besides the hidden states (made of parameters of"),
    ("zamba2", "its layers get a learned tensor besides the hidden states"),
    pytest.param("hy_v4", "layer 2 uses what layer 1 returned beside them (prev_topk", marks=needs("hy_v4")),
    ("lfm2_moe", "a tiny copy of it could not be built and run to try it"),  # its own defaults do not fit together
])  # fmt: skip
def test_models_that_are_not_streamed_get_the_true_reason(model_type, reason):
    assert reason in why_config_not_trained(transformers.AutoConfig.for_model(model_type))


@pytest.mark.more(after=1)
@needs("glm_moe_dsa")
@pytest.mark.parametrize("every", [1, 4])
def test_what_a_layer_takes_from_an_earlier_one_is_found_whichever_layers_do_so(every):
    config = transformers.AutoConfig.for_model("glm_moe_dsa", index_topk_freq=every)
    why = why_config_not_trained(config)
    assert why.startswith("its layers hand each other more") if every > 1 else why == ""
    config.indexer_types = ["full"] * 40 + ["shared"] * (config.num_hidden_layers - 40)
    assert "(prev_topk_indices)" in why_config_not_trained(config)


@pytest.mark.parametrize(
    ("model_type", "from_scratch_too"), [("ernie4_5_moe", True), pytest.param("flint", False, marks=needs("flint"))]
)
def test_parameters_that_stay_in_fp32_are_the_reason_before_a_model_is_made(model_type, from_scratch_too):
    """ERNIE-4.5's constructor makes its routers in fp32; Flint's are kept so when trained weights are loaded."""
    config = transformers.AutoConfig.for_model(model_type)
    named = r"several types, float32 among bfloat16 \(model.layers.\d.*--precision fp32"
    assert re.search(named, why_config_not_trained(config, dtype=torch.bfloat16, trained=True))
    assert bool(re.search(named, why_config_not_trained(config, dtype=torch.bfloat16))) == from_scratch_too
    assert why_config_not_trained(config, trained=True) == ""


def test_a_tiny_copy_that_does_not_run_says_nothing_of_the_model(monkeypatch):
    """Whatever `shrink` does not know yet: the reason is that, not the first thing that failed."""
    monkeypatch.setattr(shrink, "_KV_HEADS", ())
    fields = dict(PUBLISHED["falcon-40b"])
    why = why_config_not_trained(transformers.AutoConfig.for_model(fields.pop("model_type"), **fields))
    assert why.startswith("a tiny copy of it could not be built and run to try it (RuntimeError")
    assert re.search(r", in Falcon\w+\.\w+\)$", why)  # the model's part


@pytest.mark.parametrize("model_type", ["ernie4_5_moe", "afmoe"])
def test_a_model_may_have_frozen_parameters_of_its_own(model_type):
    loaded = tiny_loaded(model_type)
    assert any(not p.requires_grad for p in loaded.model.parameters())
    assert why_not_trained(loaded) == ""


def test_a_trial_leaves_torch_its_threads_and_takes_one():
    """Two threads on a busy machine made the answer take a minute."""
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        config = transformers.AutoConfig.for_model("llama")
        look = Trial("threads", lambda loaded, batch: seen.append(torch.get_num_threads()) or 0.0)
        assert why_config_not_streamed(config, trial=look) == ""
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_head_that_looks_at_more_than_hidden_states_is_found_out():
    """A model whose units look right, but whose gradients are not those of the whole."""
    loaded = tiny_loaded("llama")
    kind = type(loaded.model.model)

    class Sneaky(kind):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.last_hidden_state = output.last_hidden_state * self.embed_tokens(kwargs["input_ids"]).mean()
            return output

    class Model(type(loaded.model)):
        def __init__(self, config):
            super().__init__(config)
            self.model.__class__ = Sneaky

    loaded.model.__class__ = Model
    loaded.model.model.__class__ = Sneaky
    assert "other gradients than as a whole" in why_not_trained(loaded)
    loaded.model.__class__ = type("Broken", (Model,), {"_from_config": None})
    assert "could not be built" in why_not_trained(loaded)
