"""The streaming engine's forecast: bytes by hand, the prototype's measured times, spilling, properties."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.common.quantities import GIB, MIB, round_up
from outcore.engine.base import Host
from outcore.engine.stream.decision.decide import stream_decision
from outcore.model import preset_shape
from outcore.optim import FORMATS
from outcore.plan import constants as k
from outcore.plan.choose import choose
from outcore.plan.profile import RunRequest, load_hardware
from outcore.plan.stream.memory import plan_stream
from outcore.sizing.activations import checkpoint_bytes, layer_activation_bytes
from outcore.sizing.layouts import Residency, StreamLayout
from outcore.sizing.shape import shape_from_fields
from outcore.sizing.states import COMPRESSED_MOMENTS, COMPRESSION_ROOM, SPLIT_FORMATS, STATE_FORMATS
from outcore.sizing.training import needs_of_shape
from tests.plan.fakes import prototype_shape, server, settings_of
from tests.refused import refused

LAPTOP = load_hardware("rtx4070-laptop")


def test_bytes_by_hand_grouped_query_attention():
    shape = preset_shape("llama-8b")
    p = plan_stream(shape, RunRequest(state_format="fp32"), server(), 1024, StreamLayout(2, 4))
    n, layer, head = 8_030_261_248, 218_112_000, 525_340_672
    assert p.part_bytes("vram", "parameters") == 2 * (3 * layer + head)
    assert p.part_bytes("vram", "gradients") == 4 * head + 2 * 2 * head
    assert p.part_bytes("vram", "activation checkpoints") == checkpoint_bytes(shape, 2, 8192)
    # The head's backward is the worst moment: a chunk's logits, their gradient, the weight's before it is summed.
    chunk = (256 << 20) // (4 * 128256)
    assert p.part_bytes("vram", "logits of one chunk") == 2 * 2 * chunk * 128256
    eager = plan_stream(shape, RunRequest(state_format="fp32"), server(), 1024, StreamLayout(2, 4, compiled=False))
    assert eager.part_bytes("vram", "logits of one chunk") == (2 + 4 * 1.5) * (chunk // 2) * 128256
    assert p.part_bytes("vram", "gradients before they are summed") == 2 * head
    assert p.part_bytes("vram", "activations and gradients between units") == 2 * 8192 * 4096 * 2
    wide = plan_stream(shape, RunRequest(state_format="fp32"), server(), 8192, StreamLayout(8, 1, compiled=False))
    activations = layer_activation_bytes(shape, 2, 8192, 65536)
    assert wide.part_bytes("vram", "activations of the largest unit") == activations
    assert wide.part_bytes("vram", "gradients before they are summed") == 2 * layer
    homes = sum(p.part_bytes(tier, "parameters") + p.part_bytes(tier, "gradients") for tier in ("ram", "pinned"))
    assert homes == 4 * n
    assert p.part_bytes("ram", "master") == 4 * n
    assert p.part_bytes("ram", "moments") == 8 * n
    assert p.used_bytes("pinned") == 128 * MIB + 4 * n  # lanes' slots and all homes
    assert p.checkpoint_bytes == 14 * n
    assert p.tier("nvme").used_bytes == 3 * 14 * n  # two kept, one being written


def test_bytes_by_hand_tied_embeddings():
    p = plan_stream(preset_shape("llama-1b"), RunRequest(), server(), 1024, StreamLayout(2, 4))
    n, layer, embedding = 1_235_814_400, 60_821_504, 262_668_288
    head = embedding + 2048
    assert p.part_bytes("vram", "parameters") == 2 * (3 * layer + head)
    # a layer's sum and the tied weight's, which waits for its second use, in fp32; two 16-bit buffers on the way down
    assert p.part_bytes("vram", "gradients") == 4 * (layer + head) + 2 * 2 * head
    assert p.part_bytes("ram", "master") == 2 * n  # the residual beside the bf16 parameter
    assert p.part_bytes("ram", "moments") == 8 * n


def test_bytes_by_hand_mixture_of_experts():
    shape = preset_shape("qwen3-30b-a3b")
    request = RunRequest(state_format="split8")
    p = plan_stream(shape, request, server(), 1024, StreamLayout(1, 1))
    layer, n = shape.layer_params[0], 30_532_122_624
    homes = n + 48 * 2 * 128  # two norms of 128 in each layer, behind each of which a gap is left
    assert p.part_bytes("vram", "parameters") == 2 * (3 * (layer + 256) + 151936 * 2048 + 2048)  # all experts
    assert p.part_bytes("ram", "moments") == int(homes * (2 + 8 / 256))
    # but a token computes with few of them, in eager layers, because their routers have a balancing loss
    assert p.time.compute_s < 0.2 * k.EAGER_SLOWDOWN * 6 * n * 1024 / 540e12


def test_seconds_of_an_update_by_hand():
    bare = server(ram_gb_per_s=100.0)  # an update gets 78 GB/s of it
    assert bare.update_s("fp32", 1e9) == pytest.approx(28 / 78)
    assert bare.update_s("fp32", 1e9, 11e9) == pytest.approx(39 / 78)
    measured = server(ram_gb_per_s=100.0, optimizer_gparams_per_s={"fp32": 4.0, "split8": 5.0})
    assert measured.dram_gb_per_s == 112.0  # 4e9 updates of 28 bytes: more than the triad told
    assert measured.update_s("fp32", 1e9) == pytest.approx(1 / 4)
    assert measured.update_s("fp32", 1e9, 5.6e9) == pytest.approx((28 + 5.6) / 112)  # copies take their share
    assert measured.update_s("split8", 1e9, 5.6e9) == pytest.approx(1 / 5)  # bound by the cores: room for copies
    assert measured.update_s("split8", 1e9, 56e9) == pytest.approx((14.1 + 56) / 112)  # until they fill the memory
    assert measured.update_s("split", 1e9) == pytest.approx(26 / 112)  # not measured: by its bytes
    assert measured.update_s("fp24_m8", 1e9) == pytest.approx(1 / 5)  # as split8: it is bound by the cores, too
    assert server(ram_gb_per_s=200.0, optimizer_gparams_per_s={"fp32": 4.0}).dram_gb_per_s == 156.0
    refused(ValueError, "optimizer_gparams_per_s has 'fp31'", lambda: server(optimizer_gparams_per_s={"fp31": 1.0}))
    refused(ValueError, "rates above 0", lambda: server(optimizer_gparams_per_s={"fp32": 0.0}))


def test_homes_that_are_not_pinned_slow_a_link_by_their_share():
    assert server(copies_gb_per_s=10.0).with_copies(50.0, 0.2) == pytest.approx(1 / (0.8 / 50 + 0.2 / 10))
    assert server(copies_gb_per_s=60.0).with_copies(50.0, 0.2) == pytest.approx(50.0)


def test_a_measured_optimizer_sets_the_step():
    shape, layout, n = prototype_shape(), StreamLayout(4, 1, cuda_graphs=False), 1_213_302_784
    slow = server(optimizer_gparams_per_s=dict.fromkeys(STATE_FORMATS, 0.5))
    clipped = plan_stream(shape, RunRequest(state_format="split8"), slow, 1024, layout).time
    assert clipped.cpu_optimizer_s == pytest.approx(n / 0.5e9, rel=0.05) and clipped.step_s > n / 0.5e9
    free = plan_stream(shape, RunRequest(state_format="split8", max_grad_norm=0.0), slow, 1024, layout).time
    assert free.cpu_optimizer_s == pytest.approx(n / 0.5e9)  # the copies fit beside it


def test_spill_order_and_traffic():
    shape, layout = preset_shape("llama-3b"), StreamLayout(1, 8, tiling="off")
    n = shape.total_params
    seen = []
    for ram in (60, 30, 14, 12):
        p = plan_stream(shape, RunRequest(), dataclasses.replace(LAPTOP, ram_bytes=ram * GIB), 1024, layout)
        seen.append((p.homes["optimizer states"], p.homes["parameters"]))
        assert p.homes["gradients"] == "RAM"  # they wait for the norm
    assert seen[0] == ("RAM", "RAM")
    assert seen[1][0].startswith("RAM ") and seen[1][1] == "RAM"
    assert seen[2][0] == "NVMe" and seen[2][1].startswith("RAM ")
    everything = plan_stream(shape, RunRequest(), dataclasses.replace(LAPTOP, ram_bytes=8 * GIB), 1024, layout)
    assert everything.zero_stage == "infinity" and everything.offload == "all on NVMe"
    assert not everything.fits and everything.tier("ram").short_bytes > 0
    states = 2 + COMPRESSED_MOMENTS
    assert everything.drive_written_bytes_per_step == pytest.approx((states + 2) * n, rel=1e-6)
    ends = 2 * (shape.embedding_params + shape.head_params + shape.head_weight_numel)
    assert everything.drive_read_bytes_per_step == pytest.approx(states * n + ends, rel=1e-6)  # layers wait in RAM
    none = dataclasses.replace(LAPTOP, ram_bytes=8 * GIB)
    lending = dataclasses.replace(layout, checkpoints_home="ram")
    lent = 2 * 8 * 1024 * shape.hidden_size  # of each layer's home, by checkpoints
    reads = plan_stream(shape, RunRequest(), none, 1024, lending).drive_read_bytes_per_step
    layers = (2 * 28 - 3) * lent * 26 / 28  # of all but the last two; three are still there when backward begins
    assert reads == pytest.approx(states * n + ends + layers, rel=1e-6)
    # Without clipping likewise, where all gradients have homes; and whole micro-batches are lent.
    told = dataclasses.replace(lending, micro_batch=8, accumulation=6)
    free, few = (
        plan_stream(
            shape, RunRequest(max_grad_norm=0.0), server(), 1024,
            dataclasses.replace(told, residency=Residency(0, 0, gradient_bytes=bound)),
        )
        for bound in (None, 1)
    )  # fmt: skip
    home, micro = 2 * shape.layer_params[0], 2 * 8 * 1024 * shape.hidden_size
    fits = home // micro * micro
    assert 0 < fits < 6 * micro
    assert free.drive_read_bytes_per_step == pytest.approx(states * n + ends + (2 * 28 - 3) * fits * 26 / 28, rel=1e-6)
    assert few.drive_read_bytes_per_step == pytest.approx(states * n + ends + (2 * 28 - 3) * home, rel=1e-6)
    tiles = dataclasses.replace(layout, tiling="auto", device_bytes=4 * GIB)
    tiled = plan_stream(shape, RunRequest(), none, 1024, tiles)
    in_ram = sum(tiled.part_bytes(tier, "parameters") for tier in ("ram", "pinned"))
    assert in_ram == pytest.approx(2 * (shape.embedding_params + shape.head_params), rel=1e-6)  # what is in tiles


def test_without_clipping_few_gradients_are_enough():
    shape, layout = preset_shape("llama-3b"), StreamLayout(1, 8)
    request, n = RunRequest(max_grad_norm=0.0), shape.total_params
    plans = [
        plan_stream(shape, request, dataclasses.replace(LAPTOP, ram_bytes=ram * GIB), 1024, layout) for ram in (60, 12)
    ]
    gradients = [sum(p.part_bytes(tier, "gradients") for tier in ("ram", "pinned")) for p in plans]
    assert gradients == [2 * n, 3 * round_up(2 * max(shape.ends_params, *shape.layer_params), 4096)]


def test_budgets_that_an_engine_was_told():
    shape = preset_shape("llama-3b")
    n = shape.total_params
    slot_bytes = int((4 + COMPRESSED_MOMENTS + 2 * COMPRESSION_ROOM + 2) * 2**22) + 4096  # a block for its head
    told = Residency(state_ram_bytes=6 * n, weight_ram_bytes=0, gradient_bytes=1, state_ring_bytes=5 * slot_bytes + 9)
    layout = StreamLayout(1, 8, residency=told)
    p = plan_stream(shape, RunRequest(state_format="fp32", max_grad_norm=0.0), server(), 1024, layout)
    assert p.part_bytes("ram", "master") == 2 * n
    assert p.part_bytes("nvme", "moments") == int((COMPRESSED_MOMENTS + COMPRESSION_ROOM) * n / 2)
    assert p.part_bytes("nvme", "parameters") == 2 * n and p.part_bytes("pinned", "parameters") == 0
    assert p.part_bytes("ram", "ring of states on their way") == 5 * slot_bytes  # whole ones
    assert p.part_bytes("ram", "weights read ahead") == 512 * MIB
    least = 3 * round_up(2 * max(shape.ends_params, *shape.layer_params), 4096)
    assert sum(p.part_bytes(tier, "gradients") for tier in ("ram", "pinned")) == least
    whole = plan_stream(shape, RunRequest(), server(), 1024, StreamLayout(1, 8, residency=Residency()))
    assert not whole.uses_drive and whole.part_bytes("ram", "ring of states on their way") == 0


def test_a_frozen_base_spills_before_the_adapters_and_is_never_written():
    shape = preset_shape("qwen3-32b").with_lora(16)
    p = plan_stream(shape, RunRequest(), LAPTOP, 1024, StreamLayout(1, 8, "ram"))
    assert p.homes["optimizer states"] == "RAM" and "NVMe" in p.homes["parameters"]
    assert p.drive_written_bytes_per_step == 0 and p.drive_read_bytes_per_step > 0
    assert p.drive_life_steps is None and p.drive_life_days is None


def test_little_pinned_memory_costs_dram_traffic():
    shape, layout = preset_shape("llama-3b"), StreamLayout(2, 4)
    little = dataclasses.replace(LAPTOP, pinned_bytes=512 * MIB)
    plenty = plan_stream(shape, RunRequest(staging_bytes=40 * GIB), LAPTOP, 1024, layout)
    scarce = plan_stream(shape, RunRequest(), little, 1024, layout)
    assert scarce.used_bytes("pinned") <= 512 * MIB
    assert scarce.time.cpu_optimizer_s > plenty.time.cpu_optimizer_s
    assert any("pageable" in note for note in scarce.notes)
    assert not any("pageable" in note for note in plenty.notes)


@pytest.mark.parametrize("said", [
    {}, {"ram_gib": 24}, {"staging_gib": 1.0}, {"staging_gib": 1.0, "lane_slots": 6}, {"num_gpus": 2, "ram_gib": 24},
    {"lane_slot_bytes": 4 * MIB, "staging_gib": 1.0},
])  # fmt: skip
def test_plan_and_engine_pin_the_same(said):
    """The plan ignored lanes' settings, and what the engine pins beyond the default."""
    ranks, ram_bytes = said.pop("num_gpus", 1), said.pop("ram_gib", 100) * GIB
    hardware = server(num_gpus=ranks, ram_bytes=ram_bytes, pinned_bytes=ram_bytes // 2)
    shape = preset_shape("llama-8b").with_lora(16)
    run = settings_of(activations="device", precision="bf16", **said)
    needs = needs_of_shape(shape, 2, run.state_format, (1024,), ranks=ranks)
    told = stream_decision(run, needs, Host(True, ram_bytes, "run"), (1024,)).told
    staging_gib = said.get("staging_gib")
    request = RunRequest(staging_bytes=None if staging_gib is None else int(staging_gib * GIB))
    decided = StreamLayout(1, 1, staging_bytes=told.staging_bytes, lane_bytes=told.lane_bytes)
    as_told = plan_stream(shape, request, hardware, 1024, decided)
    assert as_told.part_bytes("pinned", "lanes' slots") == ranks * told.lane_bytes
    assert as_told.used_bytes("pinned") == pytest.approx(told.staging_bytes, rel=0.01)
    if not said.keys() & {"lane_slots", "lane_slot_bytes"}:  # of which a plan before the run knows nothing
        alone = plan_stream(shape, request, hardware, 1024, StreamLayout(1, 1))
        assert alone.part_bytes("pinned", "lanes' slots") == ranks * told.lane_bytes
        assert alone.used_bytes("pinned") == pytest.approx(told.staging_bytes, rel=0.01)


def test_tiles_are_the_engines_decision_by_hand():
    """Llama 8B, micro-batches of one row: 6.5 GiB hold two layers at a time and the vocabulary, 5 GiB do not."""
    shape, layer, vocabulary = preset_shape("llama-8b"), 218_112_000, 525_340_672
    less = plan_stream(shape, RunRequest(), LAPTOP, 1024, StreamLayout(1, 8, "ram"))
    assert not any("tiles" in note for note in less.notes) and less.fits
    assert less.part_bytes("vram", "parameters") == 2 * (2 * layer + vocabulary)
    assert less.part_bytes("vram", "gradients") == 4 * vocabulary + 2 * layer
    small = dataclasses.replace(LAPTOP, vram_bytes=LAPTOP.vram_bytes - 3 * GIB // 2)
    p = plan_stream(shape, RunRequest(), small, 1024, StreamLayout(1, 8, "ram"))
    assert any("embedding and head computed in tiles" in note for note in p.notes)
    assert p.part_bytes("vram", "parameters") == 2 * 3 * layer
    assert p.part_bytes("vram", "gradients") == (4 + 2 * 2) * layer
    assert p.part_bytes("vram", "tiles and their gradients") == 10 * (small.tensor_bytes // 96)
    whole = plan_stream(shape, RunRequest(), small, 1024, StreamLayout(1, 8, "ram", tiling="off"))
    assert whole.part_bytes("vram", "tiles and their gradients") == 0
    assert whole.part_bytes("vram", "parameters") == 2 * (layer + vocabulary)  # nothing else fits
    assert whole.part_bytes("vram", "gradients") == 4 * vocabulary + 2 * layer
    head = 2 * 525_340_672
    rows = 2 * 8 * 1024 * 4096  # at most: one row of the embedding for each token
    assert (p.time.h2d_s - whole.time.h2d_s) * 12.6e9 == pytest.approx(
        head - 2 * 525_336_576 + rows - 2 * 2 * layer, rel=1e-2
    )  # three layers are still there when backward begins, instead of one
    tiled = plan_stream(shape, RunRequest(), small, 1024, StreamLayout(1, 8, "ram", tiling="on"))
    assert any("all layers" in note for note in tiled.notes)
    weights = 2 * 32 * layer
    assert (tiled.time.h2d_s - p.time.h2d_s) * 12.6e9 == pytest.approx(
        weights * (3 * 8 - 2) + weights * (1 + 2 * 6), rel=1e-2
    )
    assert tiled.part_bytes("ram", "sums of tiled gradients") == 4 * layer


def test_a_huge_vocabulary_fits_a_small_gpu_in_tiles():
    fields = {
        "vocab_size": 1_000_000, "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 5632, "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }  # fmt: skip
    shape = shape_from_fields("wide", "llama", fields)
    answer = choose(shape, RunRequest(engine="stream"), LAPTOP).plan
    assert answer.fits and any("embedding and head" in note for note in answer.notes)
    whole = plan_stream(shape, RunRequest(), LAPTOP, 1024, StreamLayout(1, 8, tiling="off"))
    assert whole.tier("vram").short_bytes > 8 * GIB


def test_checkpoints_of_activations_in_ram_or_on_the_drive_leave_vram():
    shape = preset_shape("llama-3b")
    plans = {
        home: plan_stream(shape, RunRequest(), LAPTOP, 1024, StreamLayout(2, 4, checkpoints_home=home))
        for home in ("vram", "ram", "nvme")
    }
    name = "activation checkpoints"
    size = checkpoint_bytes(shape, 2, 8192)
    assert plans["vram"].part_bytes("vram", name) == size
    assert plans["nvme"].part_bytes("nvme", name) == 28 * 8192 * 3072 * 2  # every layer's input, as it is decided
    beyond = "activation checkpoints beyond gradients' homes"
    assert plans["ram"].part_bytes("ram", beyond) == 0  # 50 MB of a layer lie in its gradients' 201 MB
    long = plan_stream(shape, RunRequest(), LAPTOP, 16384, StreamLayout(2, 4, checkpoints_home="ram", tiling="off"))
    layer = shape.layer_params[0]
    one = 2 * 16384 * 3072  # bf16, of a row: of four micro-batches of two rows the first just fits
    assert 2 * one < 2 * layer < 4 * one
    assert long.part_bytes("pinned", beyond) == 26 * 3 * 2 * one
    assert plans["ram"].part_bytes("vram", name) == 3 * 8192 * 3072 * 2
    assert plans["ram"].part_bytes("vram", name) < size
    assert plans["ram"].time.h2d_s > plans["vram"].time.h2d_s
    assert plans["nvme"].drive_written_bytes_per_step == 26 * size // 29  # the last two layers' stay, and the output


def test_room_for_an_evaluation_by_hand():
    shape, e, tokens = prototype_shape().with_lora(8), 2, 4096
    p = plan_stream(shape, RunRequest(), server(), 4096, StreamLayout(1, 1, "ram", cuda_graphs=False))
    hidden, name = tokens * 2048 * e, "evaluation beyond a step"
    layer = int(0.6 * layer_activation_bytes(shape, 2, 4096, tokens)) + e * shape.adapter_params // 24
    chunk = (256 << 20) // (4 * 32000)  # tokens whose logits are there at once: 16-bit, and their gradient
    head = (2 + 2) * chunk * 32000
    step = max(layer, head) + (3 + 2) * hidden  # checkpoints of two layers and one on its way, two between units
    evaluated = int(2.5 / 4 * 4 * chunk * 32000) + 2 * 8 * hidden
    assert p.part_bytes("vram", name) == evaluated - step > 0
    longer = plan_stream(shape, RunRequest(), server(), 1024, StreamLayout(4, 4, cuda_graphs=False))
    assert longer.part_bytes("vram", name) == 0  # its checkpoints take more


def test_no_drive_nothing_spills():
    p = plan_stream(
        preset_shape("llama-8b"), RunRequest(), dataclasses.replace(LAPTOP, nvme_free_bytes=0), 1024, StreamLayout(1, 8)
    )
    assert not p.fits and p.tier("ram").short_bytes > 0 and not p.uses_drive


SIZES = st.sampled_from(["tiny", "llama-1b", "llama-3b", "llama-8b", "qwen3-30b-a3b"])


@settings(max_examples=25, deadline=None)
@given(SIZES, st.integers(6, 120), st.integers(1, 64), st.integers(0, 1))
def test_more_ram_never_hurts(name, ram_gib, more_gib, lora):
    shape = preset_shape(name).with_lora(8) if lora else preset_shape(name)
    few = choose(shape, RunRequest(), dataclasses.replace(LAPTOP, ram_bytes=ram_gib * GIB)).plan
    many = choose(shape, RunRequest(), dataclasses.replace(LAPTOP, ram_bytes=(ram_gib + more_gib) * GIB)).plan
    assert many.fits or not few.fits
    if few.fits:
        assert many.time.step_s <= few.time.step_s * 1.06  # plans within 5 % are taken for equal


@settings(max_examples=25, deadline=None)
@given(SIZES, st.integers(7, 11), st.sampled_from(["vram", "ram"]), st.integers(1, 3))
def test_bytes_and_time_grow_with_the_sequence(name, log_seq, home, micro):
    shape, layout = preset_shape(name), StreamLayout(micro, 2, checkpoints_home=home, cuda_graphs=False)
    short, long = (plan_stream(shape, RunRequest(), server(), s, layout) for s in (2**log_seq, 2 ** (log_seq + 1)))
    for tier in ("vram", "ram"):
        assert short.tier(tier).used_bytes <= long.tier(tier).used_bytes + 8  # shares are rounded down part by part
    assert short.time.step_s <= long.time.step_s
    assert short.time.step_s >= max(short.time.compute_s, short.time.h2d_s)


@settings(max_examples=20, deadline=None)
@given(SIZES, st.integers(8, 60), st.sampled_from(["fp32", "split", "fp32_m8", "split8", "fp24_m8"]))
def test_nothing_is_lost_between_the_tiers(name, ram_gib, states):
    shape = preset_shape(name)
    hardware = dataclasses.replace(LAPTOP, ram_bytes=ram_gib * GIB)
    p = plan_stream(shape, RunRequest(state_format=states), hardware, 1024, StreamLayout(1, 1))
    for part, bytes_per_param in (("parameters", 2), ("gradients", 2), ("master", STATE_FORMATS[states][0])):
        held = sum(p.part_bytes(tier, part) for tier in ("ram", "pinned", "nvme"))
        assert held == pytest.approx(bytes_per_param * needs_of_shape(shape, 2, states, (1024,)).trained, abs=4)
    if p.uses_drive and p.homes["optimizer states"] != "NVMe":
        assert p.tier("ram").used_bytes == pytest.approx(hardware.ram_bytes, abs=8)


def test_layers_are_recomputed_whatever_the_request_says():
    shape = preset_shape("llama-1b")
    kept, recomputed = (
        plan_stream(shape, RunRequest(activation_checkpointing=on), LAPTOP, 1024, StreamLayout(2, 4))
        for on in (False, True)
    )
    assert kept.time == recomputed.time and kept.parts == recomputed.parts
    assert [any("always recomputes" in note for note in p.notes) for p in (kept, recomputed)] == [True, False]


def test_packed_rows_by_borders_or_masks_by_hand():
    shape, borders, masks = prototype_shape(), "attention over packed rows", "masks of packed rows"
    layout = StreamLayout(4, 2)
    p = plan_stream(shape, RunRequest(), server(), 1024, layout)
    # 128 tokens of each of 16 documents, 2,048 wide, in fp32; keys and values of 16 heads for 4, twice, in 16 bits
    assert p.part_bytes("vram", borders) == 128 * 16 * 2048 * 4 + 2 * 2 * 4096 * 2048
    assert p.part_bytes("vram", masks) == 0
    asked = plan_stream(shape, RunRequest(), server(), 1024, dataclasses.replace(layout, packed_attention="masks"))
    assert asked.part_bytes("vram", borders) == 0
    assert asked.part_bytes("vram", masks) == 4096 * 1024 * 3 + 2 * 4096 * 1024 // 8  # in use, and as bits
    fp32 = plan_stream(shape, RunRequest(precision="fp32"), server(), 1024, layout)
    assert fp32.part_bytes("vram", masks) > 0 == fp32.part_bytes("vram", borders)


def test_formats_are_those_of_the_optimizer():
    planned = {name: sum(n_bytes) for name, n_bytes in STATE_FORMATS.items()}
    assert {f.name: f.bytes_per_param for f in FORMATS} == pytest.approx(planned)
    assert {f.name for f in FORMATS if f.split_master} == set(SPLIT_FORMATS)
    assert set(k.OPTIMIZER_DRAM_BYTES) == set(STATE_FORMATS)
