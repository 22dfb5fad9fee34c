"""Packed rows by torch's variable-length flash kernel on a CUDA device: what masks give, to rounding."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.parts import DeviceBatch
from outcore.model.packed import are_borders, borders_of, by_kernel
from outcore.model.packed.trial import KERNEL_TOLERANCE, kernel_error
from tests.engine.inside import parts_of
from tests.engine.stream.test_gpu import SETTINGS
from tests.engine.stream.training import weights_of
from tests.flow.models import packed_batch, padded_batch, plain_batch, set_dropout, tiny_loaded

pytestmark = pytest.mark.gpu

KERNEL_WORDS = "packed rows: variable-length flash attention"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads,kv_heads,width", [(4, 4, 64), (8, 2, 128), (6, 1, 80), (4, 2, 256), (4, 4, 16)])
@pytest.mark.parametrize("window", [None, 48, 3])
def test_the_kernel_equals_the_masked_path(dtype, heads, kv_heads, width, window):
    assert kernel_error(torch.device("cuda"), dtype, heads, kv_heads, width, window) < KERNEL_TOLERANCE


def test_documents_of_no_length_change_nothing():
    positions = torch.cat([torch.arange(n) for n in (100, 1, 59, 140)])[None]
    borders = borders_of(positions)
    assert borders is not None
    longer = torch.cat([borders, borders[-1:].expand(48)])
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 4, 300, 64, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    few, many = (by_kernel(q, k, v, b.cuda(), None, None) for b in (borders, longer))
    assert bool(torch.isfinite(few).all()) and torch.equal(few, many)


def packed(seed: int, lengths=(90, 3, 35)):
    batch = packed_batch(2, sum(lengths), seed=seed)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1).contiguous()
    return {**batch, "position_ids": positions}


def batches_of(step: int):
    others = [plain_batch(2, 128, seed=step), padded_batch(2, 128, seed=step)]
    return [packed(10 + step), others[step % 2], packed(20 + step, (1, 64, 63))]


def train(model_type: str, settings: StreamSettings, steps: int, dtype=torch.bfloat16):
    # GPT-2's config has dropout within attention
    loaded = tiny_loaded(model_type, dtype=dtype, max_position_embeddings=256, attn_pdrop=0.0)
    set_dropout(loaded.model, 0.0)
    with closing(build_stream_engine(loaded, settings, device="cuda", pinned_grant=False)) as engine:
        found = [engine.train_step(batches_of(step), 3e-3) for step in range(steps)]
        return [r.loss for r in found], engine.evaluate([packed(77)]).loss, engine.describe()


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_equals_masks(model_type, dtype):
    by_borders, seen, words = train(model_type, SETTINGS, 6, dtype)
    by_masks, expected, other = train(model_type, replace(SETTINGS, packed_attention="masks"), 6, dtype)
    assert KERNEL_WORDS in words and "packed rows: masks, as asked" in other
    assert by_borders == pytest.approx(by_masks, rel=1e-2) and seen == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_compiled_layers_and_graphs_equal_masks(model_type, graphs):
    """Enough steps for captures: every layer and micro-batch is a call of its shapes."""
    settings = replace(SETTINGS, compile="on", cuda_graphs=graphs)
    by_borders, seen, words = train(model_type, settings, 8)
    by_masks, expected, _ = train(model_type, replace(SETTINGS, packed_attention="masks"), 8)
    assert KERNEL_WORDS in words and "layers: compiled" in words
    assert by_borders == pytest.approx(by_masks, rel=1e-2) and seen == pytest.approx(expected, rel=1e-2)


def test_graphs_are_captured_with_borders():
    loaded = tiny_loaded("llama", dtype=torch.bfloat16)
    settings = replace(SETTINGS, compile="on", resident_bytes=0)
    with closing(build_stream_engine(loaded, settings, device="cuda", pinned_grant=False)) as engine:
        for step in range(8):
            engine.train_step([packed(step), packed(50 + step, (1, 64, 63))], 1e-3)
        compiled = parts_of(engine).flow.runner.compiled
        assert compiled is not None and compiled.graphs is not None
        graphs = compiled.graphs
        if not graphs._has_room():
            pytest.skip("the device is rather full")
        assert not graphs.why_not and 0 < graphs.num_graphs <= 2 * SETTINGS.num_layer_buffers


def test_layers_of_packed_rows_wait_for_nothing():
    """Neither the recording of the calls nor a layer, forward and backward, asks the device for a number."""
    loaded = tiny_loaded("llama", dtype=torch.bfloat16)
    settings = replace(SETTINGS, cuda_graphs="off")  # a layer as its graph would capture it
    with closing(build_stream_engine(loaded, settings, device="cuda", pinned_grant=False)) as engine:
        engine.train_step([packed(0)], 1e-3)
        parts_of(engine).updates.drain()
        runner, units = parts_of(engine).flow.runner, parts_of(engine).units
        backward = parts_of(engine).schedule.backward
        slabs = {unit.index: parts_of(engine).homes[unit].slab.cuda() for unit in units.all}
        batch = DeviceBatch(packed(1), torch.device("cuda"))
        assert batch.borders is not None and are_borders(batch.borders)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            log = runner.embed(slabs[0], batch)
            hidden = log.hidden
            for index, unit in enumerate(units.layer_units):
                assert are_borders(log.call(index).kwargs["attention_mask"])
                inner, _ = runner.layer(index, slabs[unit.index], hidden, log.call(index))
                backward.layer(index, slabs[unit.index], hidden, log.call(index), inner, [], None)
                hidden = inner
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "model_type,compiled", [("llama", "on"), ("llama", "off"), ("gpt2", "off"), ("mixtral", "off")]
)
def test_a_deterministic_run_repeats_every_bit(fixed_order, model_type, compiled):
    """Rows of many blocks of the flash kernel, packed and whole, as --deterministic runs them."""

    def parameters():
        loaded = tiny_loaded(model_type, dtype=torch.bfloat16, max_position_embeddings=2048, attn_pdrop=0.0)
        set_dropout(loaded.model, 0.0)
        settings = replace(SETTINGS, compile=compiled)
        with closing(build_stream_engine(loaded, settings, device="cuda", pinned_grant=False)) as engine:
            for step in range(3):
                engine.train_step([packed(step, (1000, 548)), plain_batch(2, 1548, seed=step)], 1e-2)
            return weights_of(engine)

    first, again = parameters(), parameters()
    assert [name for name in first if not torch.equal(first[name], again[name])] == []


def test_a_strict_switch_makes_the_backward_the_same_every_time():
    """torch.use_deterministic_algorithms(True) reaches the variable-length kernel; documents of many blocks."""
    lengths = (1500, 548)
    borders = borders_of(torch.cat([torch.arange(n) for n in lengths])[None])
    assert borders is not None
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, 4, sum(lengths), 64)
    q, k, v, grad = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(4))

    def gradients():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        output = by_kernel(leaves[0], leaves[1], leaves[2], borders.cuda(), None, None)
        return torch.autograd.grad(output, leaves, grad.transpose(1, 2))

    torch.use_deterministic_algorithms(True)
    try:
        first = gradients()
        assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(first, gradients(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
