"""Units run one after another give the loss and the gradients of the whole model under plain autograd."""

import pytest
import torch
from torch import nn

from outcore.engine.stream.check.gradients import run_units, why_not_trained
from outcore.flow.check import slab_of
from outcore.flow.layers.unit_weights import PartWeights
from outcore.flow.parts import SlabLayout, discover_units
from outcore.optim import BLOCK_NUMEL
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

pytestmark = pytest.mark.usefixtures("one_thread")


def check_units(loaded, batches) -> None:
    """Unit by unit, without any engine: the objective and its gradients are those of autograd over the whole model."""
    ce, aux, expected = plain_gradients(loaded, batches)
    numbers = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    found = [run_units(loaded, batch) for batch in batches]
    assert sum(float(objective) for objective, _ in found) / sum(numbers) == pytest.approx(ce + aux, rel=1e-5)
    shares = [number / sum(numbers) for number in numbers]
    mine = {n: sum(grads[n] * share for (_, grads), share in zip(found, shares)) for n in found[0][1]}
    assert_same_grads(mine, expected)


@pytest.mark.more(after=12)
@pytest.mark.parametrize("kind", [plain_batch, padded_batch, packed_batch])
@pytest.mark.parametrize("model_type", [*FAMILIES, "ctrl", "openai-gpt"])
def test_loss_and_gradients_equal_plain_autograd(model_type, kind):
    loaded = tiny_loaded(model_type)
    set_dropout(loaded.model, 0.0)
    if kind is packed_batch and not loaded.abilities.packing:
        pytest.skip(f"{model_type} does not train on packed documents: {loaded.abilities.packing_reason}")
    batches = [kind(2, 20, seed=1), kind(1, 13, seed=2)]
    check_units(loaded, batches)
    with torch.no_grad():  # the model's own parameters are in their places again
        assert float(loaded.token_loss()(loaded.model, batches[0]).loss_sum) > 0


def test_a_head_that_reads_a_number_from_its_decoder():
    """Falcon-H1 scales its logits by `self.model.lm_head_multiplier`."""
    loaded = tiny_loaded("falcon_h1", lm_head_multiplier=0.3, embedding_multiplier=2.0)
    set_dropout(loaded.model, 0.0)
    assert why_not_trained(loaded) == ""
    check_units(loaded, [plain_batch(2, 20, seed=1), padded_batch(2, 13, seed=2)])


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_balancing_loss_of_the_routers_and_its_gradients(model_type):
    loaded = tiny_loaded(model_type, output_router_logits=True, router_aux_loss_coef=0.5)
    batches = [plain_batch(2, 20, seed=1), padded_batch(2, 16, seed=2)]
    assert plain_gradients(loaded, batches)[1] > 0.1
    check_units(loaded, batches)


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
    assert all(slot.offset % BLOCK_NUMEL == 0 for slot in layout.slots)
    assert layout.trainable_numel == 3 * BLOCK_NUMEL and layout.numel == 4 * BLOCK_NUMEL
    assert layout.gaps() == [(300, 512), (517, 768)]
    assert layout.num_params == 326 and layout.size_bytes == layout.numel * 4
    with pytest.raises(ValueError, match="several types"):
        SlabLayout([("a", free), ("b", nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))])


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
