"""DeepSpeed's forecast: the measured runs, bytes by stage and by GPUs, agreement with the configuration builder."""

import dataclasses
from typing import Any

import pytest

from outcore.model import preset_shape
from outcore.plan import constants as k
from outcore.plan.deepspeed.forecast import OFFLOADS, plan_deepspeed
from outcore.plan.profile import RunRequest, load_hardware
from outcore.plan.record import Plan
from outcore.sizing.activations import layer_activation_bytes, layer_backward_bytes
from outcore.sizing.layouts import DeepSpeedLayout, Staged
from tests.plan.fakes import server

LAPTOP = load_hardware("rtx4070-laptop")


def planned(shape, *layout: Any, on=LAPTOP, seq_length: int = 1024, **more: Any) -> Plan:
    """A run of DeepSpeed's in this layout: stage, homes of optimizer and parameters, micro-batch, accumulation."""
    shape = preset_shape(shape) if isinstance(shape, str) else shape
    return plan_deepspeed(shape, RunRequest(), on, seq_length, DeepSpeedLayout(*layout, **more))


MEASURED_ON = server(host_layer_s=0.0031)
"""The host's rate was not measured there; ZeRO-3 without offload says this much."""


@pytest.mark.parametrize(("layout", "accumulation", "step_s", "tensors_gb", "rss_gb"), [
    (("zero3", "cpu", "cpu"), 4, 1.796, 3.748, 33.76), (("zero3", "cpu", "cpu"), 1, 0.848, 3.747, 34.14),
    (("none", "none", "none"), 4, 0.484, 24.79, 2.68),
])  # fmt: skip
def test_measured_runs_of_llama_1b(layout, accumulation, step_s, tensors_gb, rss_gb):
    """Stock DeepSpeed on an H200.

    Autograd held two gradients of the head then; where states are offloaded that was not the peak: the norm of
    the tied weight's gradient is.
    """
    p = planned("llama-1b", *layout, 4, accumulation, on=MEASURED_ON, packed_attention="masks")
    assert p.time.step_s == pytest.approx(step_s, rel=0.20)
    assert p.tensor_bytes / 1e9 == pytest.approx(tensors_gb, rel=0.10)
    assert p.expected_bytes("ram", "pinned") / 1e9 == pytest.approx(rss_gb, rel=0.10)


@pytest.mark.parametrize(("rows", "tensors"), [(4, 3_747_276_288), (8, 3_743_546_112), (16, 5_129_775_616)])
def test_measured_tensors_of_llama_1b(rows, tensors):
    """Peaks of torch's allocator on an H200."""
    p = planned("llama-1b", "zero3", "cpu", "cpu", rows, 1, on=server())
    assert p.tensor_bytes == pytest.approx(tensors, rel=0.02)


def test_norm_of_a_large_gradient_by_hand():
    def parts(name, gpus=1, stage="zero3", optimizer="cpu", staged=None):
        p = planned(name, stage, optimizer, optimizer, 1, 1, staged, on=server(num_gpus=gpus), seq_length=16)
        wanted = ("norm of the largest gradient", "gradients before they are summed", "gathered parameters")
        return tuple(p.part_bytes("vram", part) for part in wanted)

    tied, untied = 128256 * 2048, 128256 * 4096
    assert parts("llama-1b") == (2 * tied + 8 * 250_000_000, 2 * tied, 2 * tied)  # a copy, 250 M elements in fp64
    # Before the layers' backward, with what is fetched ahead and ends within a layer's largest weight.
    assert parts("llama-8b") == (2 * untied + 8 * 250_000_000, 2 * untied, 2 * (500_000_000 + 4096 * 14336))
    assert parts("llama-1b", gpus=2)[0] == (2 + 8) * tied // 2
    assert parts("llama-1b", optimizer="none")[0] == parts("llama-1b", stage="zero2")[0] == 0
    # In pieces of 16.8 M elements it is no peak any more.
    assert parts("llama-1b", staged=Staged("split"))[0] == 0


def test_the_limit_on_live_parameters_holds_the_head():
    for name, in_layer in (("llama-1b", 2048 * 8192), ("llama-8b", 4096 * 14336)):
        p = planned(name, "zero3", "cpu", "cpu", 8, 1, on=server(), seq_length=16384)
        assert p.part_bytes("vram", "gathered parameters") == 2 * (500_000_000 + in_layer)
    assert p.part_bytes("vram", "activation checkpoints") == 8 * 16384 * 4096 * 2 * 33


def test_bytes_by_hand_without_offload():
    n = 8_030_261_248
    p = planned("llama-8b", "none", "none", "none", 1, 1, packed_attention="masks")
    parts = {name: p.part_bytes("vram", name) for name in ("parameters", "gradients", "master", "moments")}
    assert parts == {"parameters": 2 * n, "gradients": 2 * n, "master": 4 * n, "moments": 8 * n}
    # The head's backward: three fp32 logits of a chunk, and the head's gradient. All of it is gone in the step, whose
    # fp32 gradients take its room.
    chunk = (256 << 20) // (4 * 128256)
    assert p.part_bytes("vram", "logits of one chunk") == 3 * 4 * chunk * 128256
    assert p.part_bytes("vram", "gradients before they are summed") == 2 * 128256 * 4096
    assert p.part_bytes("vram", "activation checkpoints") == 1024 * 4096 * 2 * 33
    work = 3 * 4 * chunk * 128256 + 2 * 128256 * 4096 + 1024 * 4096 * 2 * 33
    assert p.part_bytes("vram", "fp32 gradients in the step beyond activations") == 4 * n - work
    assert p.part_bytes("vram", "masks of packed rows") == 1024 * 1024 * 3  # boolean, and 16-bit numbers made of it
    assert p.expected_bytes("vram") - p.tensor_bytes > k.NCCL_BYTES > 0.5e9
    assert not p.fits and p.tier("vram").short_bytes == p.used_bytes("vram") - LAPTOP.vram_bytes


def test_gradients_alive_where_a_layers_backward_is_the_peak():
    layout = DeepSpeedLayout("zero3", "cpu", "cpu", 8, 1)
    dense, sparse = preset_shape("llama-8b"), preset_shape("qwen3-30b-a3b")
    for shape, alive in ((dense, 4096 * 14336), (sparse, sparse.layer_params[0])):  # one weight's; all experts'
        p = plan_deepspeed(shape, RunRequest(), server(), 16384, layout)
        activations = layer_backward_bytes(shape, RunRequest().element_bytes, 16384, 8 * 16384)
        assert p.part_bytes("vram", "activations of the largest unit") == activations
        assert p.part_bytes("vram", "gradients before they are summed") == 2 * alive
        adapters = plan_deepspeed(shape.with_lora(8), RunRequest(), server(), 16384, layout)
        assert adapters.part_bytes("vram", "gradients before they are summed") == 0


def test_documents_borders_take_the_masks_place():
    shape, layout = preset_shape("llama-8b"), DeepSpeedLayout("zero3", "cpu", "cpu", 1, 1)
    masked, probed = dataclasses.replace(layout, packed_attention="masks"), server(device_memory_gb_per_s=4000.0)
    by_borders, by_masks = (plan_deepspeed(shape, RunRequest(), probed, 16384, way) for way in (layout, masked))
    assert by_masks.part_bytes("vram", "masks of packed rows") == 3 * 16384**2
    assert by_masks.part_bytes("vram", "attention over packed rows") == 0
    assert by_borders.part_bytes("vram", "masks of packed rows") == 0
    assert by_borders.part_bytes("vram", "attention over packed rows") == 0  # not yet where the feed-forward part peaks
    at_the_head = plan_deepspeed(shape, RunRequest(), probed, 2048, DeepSpeedLayout("none", "none", "none", 1, 1))
    # fp32 gradients: of queries, 128 rows for each of 16 documents; of 8 heads' keys or values for each of 32
    assert at_the_head.part_bytes("vram", "attention over packed rows") == 4 * 4096 * (128 * 16 + 2048)
    assert by_borders.time.compute_s < by_masks.time.compute_s
    in_fp32 = plan_deepspeed(shape, RunRequest(precision="fp32"), server(), 1024, layout)
    assert in_fp32.part_bytes("vram", "masks of packed rows") == 5 * 1024**2


def test_a_tied_heads_gradient_waits_for_the_embeddings():
    shape, layout = preset_shape("llama-1b"), DeepSpeedLayout("zero3", "cpu", "cpu", 8, 1)
    of_head = 2 * 128256 * 2048
    long, short = (plan_deepspeed(shape, RunRequest(), server(), length, layout) for length in (16384, 16))
    assert shape.tied and long.part_bytes("vram", "activations of the largest unit") > 0
    assert long.part_bytes("vram", "gradients before they are summed") == of_head + 2 * 2048 * 8192
    assert short.part_bytes("vram", "gradients before they are summed") == of_head  # their sum, whose norm is taken
    on_gpu = plan_deepspeed(shape, RunRequest(), server(), 16, DeepSpeedLayout("none", "none", "none", 8, 1))
    assert on_gpu.part_bytes("vram", "gradients before they are summed") == 2 * of_head  # few logits


@pytest.mark.parametrize(("stage", "divided"), [
    ("none", ()), ("zero1", ("master", "moments")), ("zero2", ("master", "moments", "gradients")),
    ("zero3", ("master", "moments", "gradients", "parameters")),
])  # fmt: skip
def test_stages_divide_by_the_gpus(stage, divided):
    one, four = (planned("llama-1b", stage, "none", "none", 1, 1, on=server(num_gpus=gpus)) for gpus in (1, 4))
    for name in ("parameters", "gradients", "master", "moments"):
        share = 4 if name in divided else 1
        assert four.part_bytes("vram", name) == one.part_bytes("vram", name) // share
    assert four.tokens_per_step == 4 * one.tokens_per_step


def test_every_stage_plans_and_offload_empties_the_gpu():
    shape = preset_shape("llama-3b")
    for stage, homes in OFFLOADS.items():
        staged = Staged("split") if stage == "infinity" else None
        used = [planned(shape, stage, *home, 1, 8, staged).used_bytes("vram") for home in homes]
        assert used == sorted(used, reverse=True), stage


def test_without_activation_checkpointing_every_layer_is_kept():
    layout = DeepSpeedLayout("none", "none", "none", 1, 1)
    shape = preset_shape("llama-1b")
    kept = plan_deepspeed(shape, RunRequest(activation_checkpointing=False), server(), 1024, layout)
    recomputed = plan_deepspeed(shape, RunRequest(), server(), 1024, layout)
    of_all = 16 * layer_activation_bytes(shape, RunRequest().element_bytes, 1024, 1024)
    assert kept.part_bytes("vram", "activations of the largest unit") == of_all
    assert recomputed.part_bytes("vram", "activations of the largest unit") == 0  # the head's logits are more
    assert kept.time.compute_s < recomputed.time.compute_s


def test_notes_say_what_was_not_measured():
    one = planned("tiny", "zero2", "none", "none", 2, 4)
    assert any("not" in note and "measured" in note for note in one.notes) or any("derived" in n for n in one.notes)
    assert any("divides nothing" in note for note in one.notes)
    assert dataclasses.replace(one, parts=()).used_bytes("vram") == 0
