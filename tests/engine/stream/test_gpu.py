"""The streaming engine on a CUDA device: the same results as the CPU's schedule and as plain PyTorch on the GPU."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.engine.stream import updates as updates_module
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.settings import StreamSettings
from tests.engine.inside import parts_of
from tests.engine.stream.training import LR, adapted, losses_of, plain_training, same
from tests.flow.models import packed_batch, padded_batch, plain_batch, set_dropout, tiny_loaded

pytestmark = pytest.mark.gpu

SETTINGS = StreamSettings(
    staging_bytes=64 * MIB, slot_bytes=MIB, num_slots=2, optimizer_threads=4, chunk_numel=1 << 14, compile="off"
)


def batches_of(step: int):
    kinds = [plain_batch, padded_batch, packed_batch]
    return [kinds[(step + m) % 3](2, 16, seed=100 * step + m) for m in range(2)]


def train(model: str, settings: StreamSettings, steps: int, *, dtype=torch.float32, dropout=0.0, look=None):
    loaded = tiny_loaded(model, dtype=dtype)
    set_dropout(loaded.model, dropout)
    with closing(build_stream_engine(loaded, settings, device="cuda", pinned_grant=False)) as engine:
        losses = losses_of(engine, range(steps), batches_of)
        engine.evaluate([plain_batch(seed=77)])
        if look is not None:
            look(engine)
        return losses, {n: p.detach().clone() for n, p in loaded.model.named_parameters()}


@pytest.mark.parametrize("model", ["llama", "gpt2", "gemma3_text", "mixtral"])
def test_fp32_equals_plain_adamw_on_the_gpu(model):
    reference = tiny_loaded(model)
    set_dropout(reference.model, 0.0)
    reference.model.cuda()
    expected, _ = plain_training(reference, 10, max_norm=SETTINGS.max_grad_norm, batches=batches_of)
    assert train(model, SETTINGS, 10)[0] == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.parametrize("changes", [{"activations": "ram"}, {"num_layer_buffers": 1}, {"slot_bytes": 4096}])
def test_residency_changes_no_bit(fixed_order, changes, compile):
    """Tiny layers finish in microseconds, so a missing wait between copy and compute shows as another loss."""
    settings = replace(SETTINGS, compile=compile)
    expected = train("llama", settings, 6, dtype=torch.bfloat16)
    assert same(train("llama", replace(settings, **changes), 6, dtype=torch.bfloat16), expected)


def test_pageable_homes_give_what_pinned_ones_give(fixed_order):
    pinned = train("llama", SETTINGS, 6)
    assert same(train("llama", replace(SETTINGS, staging_bytes=SETTINGS.lane_bytes), 6), pinned)


@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.parametrize("states", ["fp32", "split"])
@pytest.mark.parametrize("max_grad_norm", [0.1, 0.0])
def test_layers_that_stay_give_what_streamed_ones_give(fixed_order, max_grad_norm, states, compile):
    settings = replace(SETTINGS, states=states, max_grad_norm=max_grad_norm, compile=compile)
    expected = train("llama", replace(settings, resident_bytes=0), 8, dtype=torch.bfloat16)
    assert same(train("llama", replace(settings, resident_bytes=1 << 40), 8, dtype=torch.bfloat16), expected)


@pytest.mark.parametrize("states", ["fp32", "split"])
@pytest.mark.parametrize("resident_bytes", [0, 1 << 40])
@pytest.mark.parametrize("max_grad_norm", [1.0, 1e9])
def test_updates_ahead_of_the_norm_give_what_those_behind_it_give(
    fixed_order, monkeypatch, max_grad_norm, resident_bytes, states
):
    """Steps that clip and steps that do not."""
    for name in ("LEAST_GAIN", "MOST_WHOLE"):
        monkeypatch.setattr(updates_module, name, 0.0)
    settings = replace(SETTINGS, states=states, max_grad_norm=max_grad_norm, resident_bytes=resident_bytes)
    expected = train("llama", settings, 8, dtype=torch.bfloat16)
    assert same(train("llama", replace(settings, ahead_bytes=1 << 30), 8, dtype=torch.bfloat16), expected)


def test_layers_stay_as_far_as_the_allocator_is_allowed_to_reach(fixed_order):
    """All, one and a half layers' worth, then a cap that leaves nothing idle."""
    settings = replace(SETTINGS, resident_bytes=1 << 40)
    engine = build_stream_engine(tiny_loaded("llama"), settings, device="cuda", pinned_grant=False)
    other = None
    try:
        for step in range(3):
            engine.train_step(batches_of(step), LR)
        residents = parts_of(engine).residents
        num_layers = len(parts_of(engine).units.layers)
        assert residents.num_held == num_layers
        half = replace(SETTINGS, resident_bytes=residents.device_bytes * 3 // (2 * num_layers))
        other = build_stream_engine(tiny_loaded("llama"), half, device="cuda", pinned_grant=False)
        for step in range(3):
            other.train_step(batches_of(step), LR)
        assert parts_of(other).residents.num_held == 1
        assert residents.go_home("the test asks for it") and residents.num_held == 0
        allowed = torch.cuda.memory_reserved() + 128 * MIB  # a step takes less, and so much is always left alone
        torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
        for step in range(3, 6):
            engine.train_step(batches_of(step), LR)
        assert residents.num_held == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        engine.close()
        if other is not None:
            other.close()


@pytest.mark.parametrize("states", ["fp32", "split", "split8", "fp24_m8"])
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_states_on_nvme_give_what_ram_gives(fixed_order, tmp_path, max_grad_norm, states):
    settings = replace(SETTINGS, states=states, max_grad_norm=max_grad_norm, chunk_numel=1 << 12)
    expected = train("llama", settings, 6, dtype=torch.bfloat16)
    spilled = replace(settings, nvme_path=str(tmp_path), state_ram_bytes=0, state_ring_slots=4)
    assert same(train("llama", spilled, 6, dtype=torch.bfloat16), expected)


def test_resumed_with_states_elsewhere_it_goes_on_with_the_same_bits(fixed_order, tmp_path):
    def build(settings):
        return build_stream_engine(
            tiny_loaded("llama", dtype=torch.bfloat16), settings, device="cuda", pinned_grant=False, trial=False
        )

    on_nvme = {
        "nvme_path": str(tmp_path / "drive"), "state_ram_bytes": 0, "weight_ram_bytes": 0, "chunk_numel": 1 << 12,
    }  # fmt: skip
    (tmp_path / "saved").mkdir()
    engine, other = build(SETTINGS), build(replace(SETTINGS, states="split", **on_nvme))
    try:
        losses_of(engine, range(3), batches_of)
        state = engine.save(tmp_path / "saved", lambda path, crc: None)
        other.load(tmp_path / "saved", state)
        first, second = (losses_of(one, range(3, 6), batches_of) for one in (other, engine))
        assert first == second
    finally:
        engine.close()
        other.close()


def test_compiled_layers_equal_eager_ones():
    eager, _ = train("llama", SETTINGS, 6, dtype=torch.bfloat16)
    compiled, _ = train("llama", replace(SETTINGS, compile="on"), 6, dtype=torch.bfloat16)
    assert compiled == pytest.approx(eager, rel=2e-2)


def test_dropout_is_replayed_on_the_device():
    first, _ = train("gpt2", SETTINGS, 4, dropout=0.2)
    again, _ = train("gpt2", replace(SETTINGS, activations="ram"), 4, dropout=0.2)
    assert first == pytest.approx(again, rel=1e-3)


def test_fp16_with_loss_scaling():
    loaded = tiny_loaded("llama", dtype=torch.float16)
    settings = replace(SETTINGS, initial_loss_scale=2.0**24, loss_scale_hysteresis=1)
    with closing(build_stream_engine(loaded, settings, device="cuda", pinned_grant=False)) as engine:
        results = [engine.train_step(batches_of(0), 1e-3) for _ in range(20)]
        done = [r.loss for r in results if not r.skipped]
        assert results[0].skipped and done[-1] < done[0]


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_muon_follows_the_cpu_and_repeats_its_bits(fixed_order, engines, max_norm):
    settings = replace(SETTINGS, optimizer="muon", max_grad_norm=max_norm)
    engines.append(build_stream_engine(tiny_loaded("llama"), settings, device="cpu", pinned_grant=False))
    expected = losses_of(engines[-1], range(6), batches_of)
    found = train("llama", settings, 6)
    assert found[0] == pytest.approx(expected, rel=5e-3)
    assert same(train("llama", settings, 6), found)


def test_muon_with_states_on_a_drive_has_the_bits_of_ram(fixed_order, tmp_path):
    settings = replace(SETTINGS, optimizer="muon", max_grad_norm=0.5)
    on_drive = replace(settings, nvme_path=str(tmp_path), state_ram_bytes=0, state_ring_bytes=4096)
    assert same(train("llama", on_drive, 4), train("llama", settings, 4))


@pytest.mark.parametrize("recipe", ["float8_tensorwise", "float8_rowwise"])
@pytest.mark.parametrize("kind", ["whole", "adapters"])
def test_float8_products_are_the_same_compiled_in_graphs_and_eagerly(recipe, kind):
    def first_losses(**changes) -> list[float]:
        loaded = (
            adapted(r=16, dtype=torch.bfloat16) if kind == "adapters" else tiny_loaded("llama", dtype=torch.bfloat16)
        )
        set_dropout(loaded.model, 0.0)
        settings = replace(SETTINGS, **{"matmul": recipe, **changes})
        engine = build_stream_engine(loaded, settings, device="cuda", pinned_grant=False)
        try:
            return losses_of(engine, range(4), batches_of)
        finally:
            engine.close()

    eager = first_losses(cuda_graphs="off")
    assert first_losses(compile="on") == pytest.approx(eager, rel=1e-2)
    assert first_losses(compile="on", matmul="same") != eager


def test_fp16_sums_are_switched_on_while_the_engine_is_open():
    switch = torch.backends.cuda.matmul
    before, seen = switch.allow_fp16_accumulation, []
    settings = replace(SETTINGS, matmul="fp16_accumulation", states="fp32")
    losses, _ = train(
        "llama", settings, 3, dtype=torch.float16, look=lambda _: seen.append(switch.allow_fp16_accumulation)
    )
    expected, _ = train("llama", replace(settings, matmul="same"), 3, dtype=torch.float16)
    assert seen == [True] and switch.allow_fp16_accumulation is before
    assert losses == pytest.approx(expected, rel=2e-2)
