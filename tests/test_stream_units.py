"""Units run one after another give the loss and the gradients of the whole model under plain autograd."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from stream_models import (
    FAMILIES,
    assert_same_grads,
    needs,
    packed_batch,
    padded_batch,
    plain_batch,
    plain_gradients,
    set_dropout,
    tiny_loaded,
)
from torch import nn

from outcore.engine.stream import discovery
from outcore.engine.stream.accumulator import GradAccumulator
from outcore.engine.stream.check import why_config_not_streamed, why_not_streamed
from outcore.engine.stream.discovery import discover_units, find_stack
from outcore.engine.stream.layout import ALIGN_NUMEL, SlabLayout
from outcore.engine.stream.rng import UnitRandom, generators_kept
from outcore.engine.stream.runner import UnitRunner
from outcore.engine.stream.shell import StreamUnsupported
from outcore.engine.stream.unit_weights import UnitWeights
from outcore.model import shrink

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def slab_of(unit) -> torch.Tensor:
    slab = torch.zeros(unit.layout.numel, dtype=unit.layout.dtype)
    for view, parameter in zip(unit.layout.views(slab), unit.parameters, strict=True):
        view.copy_(parameter.detach())
    return slab


def run_units(loaded, batches, *, chunk_bytes=4 * 128 * 16, seed=None):
    """(mean loss, mean auxiliary loss, gradients by name), unit by unit, without any engine."""
    units = discover_units(loaded)
    runner = UnitRunner(
        units,
        vocab_size=loaded.facts.vocab_size,
        aux_coefficient=loaded.token_loss().aux_coefficient,
        logits_chunk_bytes=chunk_bytes,
    )
    total = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    slabs = {id(unit): slab_of(unit) for unit in units.all}
    sums = {id(u): GradAccumulator(u.layout, torch.full((u.layout.numel,), float("nan"))) for u in units.all}
    ce = aux = 0.0

    def start(micro_batch, unit):
        if seed is not None:
            UnitRandom(CPU, seed, 1).at(micro_batch, unit.index)

    with generators_kept(CPU):
        for m, batch in enumerate(batches):
            start(m, units.embed)
            log = runner.embed(slabs[id(units.embed)], batch)
            hidden, inputs, routers, counts = log.hidden, [], [], []
            for i, unit in enumerate(units.layer_units):
                inputs.append(hidden)
                start(m, unit)
                hidden, found = runner.layer(i, slabs[id(unit)], hidden, log.call(i))
                routers += found
                counts.append(len(found))
            result = runner.head.one(
                slabs[id(units.head)], hidden, batch, log, routers, grad_scale=1.0 / total, into=sums[id(units.head)]
            )
            ce += float(result.ce_sum) / total
            aux += float(result.aux_loss * result.n_tokens) / total if result.aux_loss is not None else 0.0
            grad, end = result.grad_hidden, len(routers)
            for i in reversed(range(len(units.layers))):
                unit = units.layer_units[i]
                start(m, unit)
                grad_routers = result.grad_routers[end - counts[i] : end]
                end -= counts[i]
                grad = runner.layer_backward(
                    i, slabs[id(unit)], inputs[i], log.call(i), grad, grad_routers, sums[id(unit)]
                )
            start(m, units.embed)
            runner.embed_backward(slabs[id(units.embed)], batch, grad, sums[id(units.embed)])
    grads = {}
    for unit in units.all:
        flat = sums[id(unit)].complete()
        assert bool(torch.isfinite(flat).all())
        grads |= dict(zip([s.name for s in unit.layout.trainable_slots], unit.layout.grad_views(flat), strict=True))
    return ce, aux, grads


@pytest.mark.parametrize("kind", [plain_batch, padded_batch, packed_batch])
@pytest.mark.parametrize("model_type", [*FAMILIES, "ctrl", "openai-gpt"])
def test_loss_and_gradients_equal_plain_autograd(model_type, kind):
    loaded = tiny_loaded(model_type)
    set_dropout(loaded.model, 0.0)
    if kind is packed_batch and not loaded.abilities.packing:
        pytest.skip(f"{model_type} does not train on packed documents: {loaded.abilities.packing_reason}")
    batches = [kind(2, 20, seed=1), kind(1, 13, seed=2)]
    ce, aux, expected = plain_gradients(loaded, batches)
    mine_ce, mine_aux, mine = run_units(loaded, batches)
    assert mine_ce == pytest.approx(ce, rel=1e-5)
    assert mine_aux == pytest.approx(aux, rel=1e-5, abs=1e-9)
    assert_same_grads(mine, expected)
    with torch.no_grad():  # the model's own parameters are in their places again
        assert float(loaded.token_loss()(loaded.model, batches[0]).loss_sum) > 0


def test_a_head_that_reads_a_number_from_its_decoder():
    """Falcon-H1 scales its logits by `self.model.lm_head_multiplier`."""
    loaded = tiny_loaded("falcon_h1", lm_head_multiplier=0.3, embedding_multiplier=2.0)
    set_dropout(loaded.model, 0.0)
    assert why_not_streamed(loaded) == ""
    batches = [plain_batch(2, 20, seed=1), padded_batch(2, 13, seed=2)]
    ce, _, expected = plain_gradients(loaded, batches)
    mine_ce, _, mine = run_units(loaded, batches)
    assert mine_ce == pytest.approx(ce, rel=1e-5)
    assert_same_grads(mine, expected)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_balancing_loss_of_the_routers_and_its_gradients(model_type):
    loaded = tiny_loaded(model_type, output_router_logits=True, router_aux_loss_coef=0.5)
    batches = [plain_batch(2, 20, seed=1), padded_batch(2, 16, seed=2)]
    ce, aux, expected = plain_gradients(loaded, batches)
    assert aux > 0.1
    mine_ce, mine_aux, mine = run_units(loaded, batches)
    assert mine_ce == pytest.approx(ce, rel=1e-5)
    assert mine_aux == pytest.approx(aux, rel=1e-5)
    assert_same_grads(mine, expected)


@pytest.mark.parametrize("model_type", ["gpt2", "phi"])
def test_dropout_is_replayed_in_recomputation(model_type):
    """The gradient along a direction equals the change of the (seeded) loss: only so if both draw the same numbers."""
    loaded = tiny_loaded(model_type)
    set_dropout(loaded.model, 0.3)
    batches = [plain_batch(2, 20, seed=1), plain_batch(2, 20, seed=1)]
    loss, _, grads = run_units(loaded, batches, seed=7)
    assert run_units(loaded, batches, seed=7)[0] == loss
    assert run_units(loaded, batches, seed=8)[0] != loss
    generator = torch.Generator().manual_seed(3)
    parameters = dict(loaded.model.named_parameters())
    direction = {n: torch.randn(p.shape, generator=generator) * p.detach().std() for n, p in parameters.items()}
    slope = sum(float((grads[n] * direction[n]).sum()) for n in grads)
    losses = []
    for step in (1e-3, -1e-3):
        with torch.no_grad():
            for name, p in parameters.items():
                p.add_(direction[name], alpha=step)
        losses.append(run_units(loaded, batches, seed=7)[0])
        with torch.no_grad():
            for name, p in parameters.items():
                p.add_(direction[name], alpha=-step)
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(slope, rel=0.03)


def test_kinds_of_layers_get_their_own_masks():
    loaded = tiny_loaded("gemma3_text")
    units = discover_units(loaded)
    log = units.record({"input_ids": torch.zeros((1, 12), dtype=torch.long)})
    kinds = loaded.config.get_text_config().layer_types
    assert len(set(kinds)) == 2
    by_kind = {kind: [c.kwargs["position_embeddings"] for c, k in zip(log.calls, kinds) if k == kind] for kind in kinds}
    for tables in by_kind.values():
        assert all(table is tables[0] for table in tables)


def test_tied_weights_have_one_home():
    tied, untied = discover_units(tiny_loaded("gpt2")), discover_units(tiny_loaded("llama"))
    assert tied.tied and len(tied.all) == len(tied.layers) + 1
    assert not untied.tied and len(untied.all) == len(untied.layers) + 2
    names = [slot.name for unit in tied.all for slot in unit.layout.slots]
    assert len(names) == len(set(names))
    assert [unit.index for unit in untied.all] == list(range(len(untied.all)))


def test_layout_puts_trainable_parameters_first_and_aligned():
    frozen = nn.Parameter(torch.ones(7, 3), requires_grad=False)
    free = nn.Parameter(torch.ones(300))
    layout = SlabLayout([("frozen", frozen), ("free", free), ("more", nn.Parameter(torch.ones(5)))])
    assert [slot.name for slot in layout.slots] == ["free", "more", "frozen"]
    assert all(slot.offset % ALIGN_NUMEL == 0 for slot in layout.slots)
    assert layout.trainable_numel == 3 * ALIGN_NUMEL and layout.numel == 4 * ALIGN_NUMEL
    assert layout.gaps() == [(300, 512), (517, 768)]
    assert layout.num_params == 326 and layout.size_bytes == layout.numel * 4
    with pytest.raises(ValueError, match="several types"):
        SlabLayout([("a", free), ("b", nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))])


def test_frozen_parameters_get_no_gradient():
    loaded = tiny_loaded("llama")
    for name, p in loaded.model.named_parameters():
        p.requires_grad_("self_attn" in name or "lm_head" in name)
    batches = [plain_batch()]
    _, _, expected = plain_gradients(loaded, batches)
    units = discover_units(loaded)
    assert not units.embed.is_trainable and units.head.is_trainable
    runner = UnitRunner(units, vocab_size=128)
    log = runner.embed(slab_of(units.embed), batches[0])
    total = int((batches[0]["labels"][:, 1:] != -100).sum())
    hidden, inputs = log.hidden, []
    for i, unit in enumerate(units.layer_units):
        inputs.append(hidden)
        hidden, _ = runner.layer(i, slab_of(unit), hidden, log.call(i))
    into = GradAccumulator(units.head.layout, torch.empty(units.head.layout.numel))
    result = runner.head.one(slab_of(units.head), hidden, batches[0], log, grad_scale=1 / total, into=into)
    last = units.layer_units[-1]
    found = GradAccumulator(last.layout, torch.empty(last.layout.numel))
    runner.layer_backward(
        len(inputs) - 1, slab_of(last), inputs[-1], log.call(len(inputs) - 1), result.grad_hidden, [], found
    )
    mine = dict(
        zip([s.name for s in last.layout.trainable_slots], last.layout.grad_views(found.complete()), strict=True)
    )
    assert set(mine) == {name for name in expected if f"layers.{len(inputs) - 1}." in name}
    assert_same_grads(mine, {name: expected[name] for name in mine})


def test_models_that_cannot_be_streamed_are_named_with_the_reason():
    loaded = tiny_loaded("llama")
    loaded.loss_fn = lambda model, batch: None
    with pytest.raises(StreamUnsupported, match="its own loss"):
        discover_units(loaded)
    loaded = tiny_loaded("llama")
    layers = loaded.model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(StreamUnsupported, match="shared by layers 0 and 1"):
        discover_units(loaded)
    loaded = tiny_loaded("llama")
    loaded.model.model.spare = nn.Linear(3, 3)
    with pytest.raises(StreamUnsupported, match=r"parameters of model.spare take no part"):
        discover_units(loaded)
    loaded = tiny_loaded("llama")
    loaded.model.model.layers[1].mlp.up_proj.to(torch.bfloat16)
    with pytest.raises(
        StreamUnsupported, match=r"several types, bfloat16 among float32 \(model.layers.1.mlp.up_proj.weight\)"
    ):
        discover_units(loaded)
    loaded = tiny_loaded("llama")
    loaded.model.model.layers = nn.ModuleList([loaded.model.model.layers[0]] * 2)
    with pytest.raises(StreamUnsupported, match="one and the same"):
        discover_units(loaded)
    with pytest.raises(StreamUnsupported, match="no list of layers"):
        find_stack(nn.Linear(2, 2), {})


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
    with pytest.raises(StreamUnsupported, match="computes on the hidden states between layers 0 and 1"):
        discover_units(loaded)


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
    assert "what layer is this" in why_not_streamed(loaded)
    loaded = tiny_loaded("llama")
    loaded.model.model.norm.forward = lambda hidden: hidden[7]
    with pytest.raises(StreamUnsupported, match="layer by layer: IndexError"):
        discover_units(loaded)
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
    with pytest.raises(StreamUnsupported, match="weights of embed_tokens without calling it"):
        discover_units(loaded)


def test_what_a_model_writes_to_in_place_has_memory():
    assert discover_units(tiny_loaded("ctrl")).writes_embedding
    assert discover_units(tiny_loaded("llama")).writes_embedding is False


FALCON = {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 8}
PUBLISHED = {
    "falcon-40b": {**FALCON, "hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60},
    "falcon-11b": {**FALCON, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 16384},
    "mamba2-2.7b": {"model_type": "mamba2", "hidden_size": 2560, "num_heads": 80, "n_groups": 1},
    "bamba-9b": {"model_type": "bamba", "attn_layer_indices": [9, 18, 27]},
    "granite-4-tiny": {
        "model_type": "granitemoehybrid",
        "hidden_size": 1536,
        "num_hidden_layers": 40,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "num_local_experts": 62,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    },
    "lfm2-8b-a1b": {
        "model_type": "lfm2_moe",
        "num_hidden_layers": 24,
        "layer_types": (["conv", "conv", "full_attention"] * 8),
    },
    "longcat-flash": {"model_type": "longcat_flash"},
    "dbrx": {"model_type": "dbrx", "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 5e5}},
    "ministral-3": {"model_type": "ministral3"},
    "xlstm-7b": {"model_type": "xlstm"},
    "roberta-large": {"model_type": "roberta", "is_decoder": True, "hidden_size": 1024, "num_attention_heads": 16},
    "modernbert-decoder": {"model_type": "modernbert-decoder"},
    "trocr-decoder": {"model_type": "trocr"},
    "deepseek-v2-lite": {"model_type": "deepseek_v2", "q_lora_rank": None, "num_experts_per_tok": 6},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_are_made_tiny_and_streamed(name):
    fields = dict(PUBLISHED[name])
    assert why_config_not_streamed(transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)) == ""


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gemma3", "parameters of model.vision_tower, model.multi_modal_projector take no part in its language-model"),
        ("gemma3n_text", "it runs 3 (layers, altup_projections, altup_unembed_projections)"),
        ("gemma4_text", "its layers get a learned tensor besides the hidden states (made of parameters of"),
        ("zamba2", "its layers are of several classes"),
        ("lfm2_moe", "a tiny copy of it could not be built and run to try it"),  # its own defaults do not fit together
    ],
)
def test_models_that_are_not_streamed_get_the_true_reason(model_type, reason):
    assert reason in why_config_not_streamed(transformers.AutoConfig.for_model(model_type))


@pytest.mark.parametrize(
    ("model_type", "from_scratch_too"), [("ernie4_5_moe", True), pytest.param("flint", False, marks=needs("flint"))]
)
def test_parameters_that_stay_in_fp32_are_the_reason_before_a_model_is_made(model_type, from_scratch_too):
    """ERNIE-4.5's constructor makes its routers in fp32; Flint's are kept so when trained weights are loaded."""
    config = transformers.AutoConfig.for_model(model_type)
    named = r"several types, float32 among bfloat16 \(model.layers.\d.*--precision fp32"
    assert re.search(named, why_config_not_streamed(config, dtype=torch.bfloat16, trained=True))
    assert bool(re.search(named, why_config_not_streamed(config, dtype=torch.bfloat16))) == from_scratch_too
    assert why_config_not_streamed(config, trained=True) == ""


def test_a_tiny_copy_that_does_not_run_says_nothing_of_the_model(monkeypatch):
    """Whatever `shrink` does not know yet: the reason is that, not the first thing that failed."""
    monkeypatch.setattr(shrink, "_KV_HEADS", ())
    fields = dict(PUBLISHED["falcon-40b"])
    why = why_config_not_streamed(transformers.AutoConfig.for_model(fields.pop("model_type"), **fields))
    assert why.startswith("a tiny copy of it could not be built and run to try it (RuntimeError")


@pytest.mark.parametrize("model_type", ["ernie4_5_moe", "afmoe"])
def test_a_model_may_have_frozen_parameters_of_its_own(model_type):
    loaded = tiny_loaded(model_type)
    assert any(not p.requires_grad for p in loaded.model.parameters())
    assert why_not_streamed(loaded) == ""


@pytest.mark.parametrize("model_type", ["qwen2", "gemma2", "mixtral", "gpt2"])
def test_a_tiny_copy_shows_that_a_model_can_be_streamed(model_type):
    assert why_not_streamed(tiny_loaded(model_type)) == ""


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
    assert "other gradients than as a whole" in why_not_streamed(loaded)
    loaded.model.__class__ = type("Broken", (Model,), {"_from_config": None})
    assert "could not be built" in why_not_streamed(loaded)


def test_leaves_of_a_slab_are_made_once_and_keep_no_gradient():
    units = discover_units(tiny_loaded("llama"))
    unit, weights = units.layer_units[0], UnitWeights()
    slab, other = slab_of(unit), slab_of(unit)
    leaves, trainable = weights.leaves(unit, slab)
    assert weights.leaves(unit, slab)[0] is leaves and weights.leaves(unit, other)[0] is not leaves
    slab.fill_(2.0)  # as an upload into a buffer that has held the unit before
    (grad,) = torch.autograd.grad(trainable[0].square().sum(), trainable[:1])
    assert torch.equal(grad, torch.full_like(grad, 4.0))
    assert all(leaf.grad is None for leaf in leaves)
