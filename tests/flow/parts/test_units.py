"""Units run one after another give the loss and the gradients of the whole model under plain autograd."""

import pytest
import torch
from torch import nn

from outcore.engine.stream.backward.head import StreamedHeadGradient
from outcore.engine.stream.backward.layer import BackwardRunner
from outcore.engine.stream.check.gradients import why_not_trained
from outcore.engine.stream.gradients.accumulator import GradAccumulator
from outcore.engine.stream.rng import PartRandom, generators_kept
from outcore.flow.layers import Head, HeadInput, PartRunner, RouterTaps
from outcore.flow.layers.unit_weights import PartWeights
from outcore.flow.parts import ALIGN_NUMEL, SlabLayout, discover_units
from tests.flow.models import (
    FAMILIES,
    assert_same_grads,
    packed_batch,
    padded_batch,
    plain_batch,
    plain_gradients,
    set_dropout,
    tiny_loaded,
)

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
    aux_coefficient = loaded.token_loss().aux_coefficient
    runner = PartRunner(units, taps=RouterTaps(units) if aux_coefficient else None)
    backward = BackwardRunner(runner)
    head = Head(runner, vocab_size=loaded.facts.vocab_size, logits_chunk_bytes=chunk_bytes)
    head_gradient = StreamedHeadGradient(head, aux_coefficient=aux_coefficient)
    total = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    slabs = {id(unit): slab_of(unit) for unit in units.all}
    sums = {id(u): GradAccumulator(u.layout, torch.full((u.layout.numel,), float("nan"))) for u in units.all}
    ce = aux = 0.0

    def start(micro_batch, unit):
        if seed is not None:
            PartRandom(CPU, seed, 1).at(micro_batch, unit.index)

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
            item, at = HeadInput(hidden, batch, log), id(units.head)
            result = head_gradient.one(slabs[at], item, routers, grad_scale=1.0 / total, into=sums[at])
            ce += float(result.ce_sum) / total
            aux += float(result.aux_loss * result.n_tokens) / total if result.aux_loss is not None else 0.0
            grad, end = result.grad_hidden, len(routers)
            for i in reversed(range(len(units.layers))):
                unit = units.layer_units[i]
                start(m, unit)
                grad_routers = result.grad_routers[end - counts[i] : end]
                end -= counts[i]
                grad = backward.layer(i, slabs[id(unit)], inputs[i], log.call(i), grad, grad_routers, sums[id(unit)])
            start(m, units.embed)
            backward.embed(slabs[id(units.embed)], batch, grad, sums[id(units.embed)])
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
    assert why_not_trained(loaded) == ""
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
    runner = PartRunner(units)
    log = runner.embed(slab_of(units.embed), batches[0])
    total = int((batches[0]["labels"][:, 1:] != -100).sum())
    hidden, inputs = log.hidden, []
    for i, unit in enumerate(units.layer_units):
        inputs.append(hidden)
        hidden, _ = runner.layer(i, slab_of(unit), hidden, log.call(i))
    into = GradAccumulator(units.head.layout, torch.empty(units.head.layout.numel))
    head = StreamedHeadGradient(Head(runner, vocab_size=128))
    result = head.one(slab_of(units.head), HeadInput(hidden, batches[0], log), grad_scale=1 / total, into=into)
    last = units.layer_units[-1]
    found = GradAccumulator(last.layout, torch.empty(last.layout.numel))
    BackwardRunner(runner).layer(
        len(inputs) - 1, slab_of(last), inputs[-1], log.call(len(inputs) - 1), result.grad_hidden, [], found
    )
    mine = dict(
        zip([s.name for s in last.layout.trainable_slots], last.layout.grad_views(found.complete()), strict=True)
    )
    assert set(mine) == {name for name in expected if f"layers.{len(inputs) - 1}." in name}
    assert_same_grads(mine, {name: expected[name] for name in mine})


def test_what_a_model_writes_to_in_place_has_memory():
    assert discover_units(tiny_loaded("ctrl")).writes_embedding
    assert discover_units(tiny_loaded("llama")).writes_embedding is False


def test_leaves_of_a_slab_are_made_once_and_keep_no_gradient():
    units = discover_units(tiny_loaded("llama"))
    unit, weights = units.layer_units[0], PartWeights()
    slab, other = slab_of(unit), slab_of(unit)
    leaves, trainable = weights.leaves(unit, slab)
    assert weights.leaves(unit, slab)[0] is leaves and weights.leaves(unit, other)[0] is not leaves
    slab.fill_(2.0)  # as an upload into a buffer that has held the unit before
    (grad,) = torch.autograd.grad(trainable[0].square().sum(), trainable[:1])
    assert torch.equal(grad, torch.full_like(grad, 4.0))
    assert all(leaf.grad is None for leaf in leaves)
