"""The planner's streaming engine against runs that were measured: seconds, tensors, resident memory."""

import dataclasses
import json
from pathlib import Path

import pytest

from outcore.common.quantities import GIB
from outcore.model import preset_shape
from outcore.plan import constants as k
from outcore.plan.request import RunRequest
from outcore.plan.stream.forecast import plan_stream
from outcore.sizing.activations import logits_bytes
from outcore.sizing.layouts import Residency, StreamLayout
from outcore.sizing.shape import shape_from_fields
from tests.plan.fakes import prototype_shape, server


def tensors_then(p, shape, tokens) -> float:
    """Bytes of tensors while autograd still computed the loss of a chunk, four fp32 logits at once."""
    now = ("logits of one chunk", "activations of the largest unit", "gradients before they are summed")
    head = logits_bytes(shape, tokens, 4.0) + 2 * shape.ends_params
    return p.tensor_bytes - sum(p.part_bytes("vram", name) for name in now) + head


@pytest.mark.parametrize(("states", "clip", "accumulation", "measured_s"), [
    ("fp32", 0.0, 4, 0.324), ("split8", 0.0, 4, 0.306), ("fp32", 0.0, 1, 0.253), ("split8", 0.0, 1, 0.170),
    ("fp32", 1.0, 4, 0.463), ("split8", 1.0, 4, 0.361),
])  # fmt: skip
def test_prototype_times_with_states_in_ram(states, clip, accumulation, measured_s):
    request = RunRequest(state_format=states, max_grad_norm=clip, staging_bytes=100 * GIB)  # it pinned everything
    p = plan_stream(prototype_shape(), request, server(), 1024, StreamLayout(4, accumulation))
    between_s = server().host_s(26 * k.STREAM_HOST_LAYERS_PER_UNIT)  # it had neither data nor a loop around its passes
    assert p.time.step_s - between_s == pytest.approx(measured_s, rel=0.20)


@pytest.mark.parametrize(("states", "measured_s", "mixed"), [("fp32", 8.71, 3.9), ("split8", 2.5, 4.2)])
def test_prototype_times_with_states_on_the_drive(states, measured_s, mixed):
    request = RunRequest(state_format=states, max_grad_norm=0.0)
    layout = StreamLayout(4, 4, residency=Residency(state_ram_bytes=0, compressed=False))
    p = plan_stream(prototype_shape(), request, server(drive_mixed_gb_per_s=mixed), 1024, layout)
    assert p.homes["optimizer states"] == "NVMe"
    assert p.time.step_s == pytest.approx(measured_s, rel=0.20)
    assert p.time.longest == "drive_s"


def test_prototype_resident_memory():
    fp32 = plan_stream(prototype_shape(), RunRequest(state_format="fp32"), server(), 1024, StreamLayout(4, 4))
    compact = plan_stream(prototype_shape(), RunRequest(state_format="split8"), server(), 1024, StreamLayout(4, 4))
    for p, measured_gib in ((fp32, 20.5), (compact, 11.4)):
        resident = p.tier("ram").used_bytes - p.part_bytes("ram", "page cache reserve")
        assert resident / GIB == pytest.approx(measured_gib, rel=0.10)


@pytest.mark.parametrize(("accumulation", "step_s", "tensors_gb"), [(1, 0.355, 5.124), (4, 0.520, 5.989)])
def test_measured_runs_of_llama_1b(accumulation, step_s, tensors_gb):
    """benchmarks/results/engines-h200-1gpu*.json; the pool held 3.51 GB that no home needed, and no longer does."""
    layout = StreamLayout(4, accumulation, cuda_graphs=False, residency=Residency())  # as the engine was then
    p = plan_stream(preset_shape("llama-1b"), RunRequest(state_format="fp32"), server(), 1024, layout)
    assert p.time.step_s == pytest.approx(step_s, rel=0.10)
    assert tensors_then(p, preset_shape("llama-1b"), 4096) / 1e9 == pytest.approx(tensors_gb, rel=0.03)
    assert (p.expected_bytes("ram", "pinned") + 3.51e9) / 1e9 == pytest.approx(26.1, rel=0.03)


# One H200 with 16 cores, benchmarks/plan/plan_vs_measured.py: shape, rows, states, clipping, seconds. Rates of the
# optimizer were not measured in that run; these are the ones that its forward passes tell. Its memory was that of an
# older engine; tests/benchmarks/test_plan_again.py has newer runs.
INFERRED = {"fp32": 4.15, "split": 3.75, "split8": 5.4}
H200_RUNS = [
    ((1024, 24, 16, 4, 4096, False), (2048, 2, 4), "split", 1.0, 0.253),
    ((2048, 24, 16, 4, 5632, False), (1024, 4, 4), "fp32", 1.0, 0.554),
    ((2048, 24, 16, 4, 5632, False), (1024, 4, 1), "split8", 0.0, 0.279),
    ((2048, 24, 32, 8, 6144, True), (4096, 1, 4), "split", 1.0, 0.731),
    ((2560, 32, 20, 4, 9216, False), (512, 4, 4), "split8", 1.0, 0.921),
]


@pytest.mark.parametrize(("widths", "rows", "states", "clip", "step_s"), H200_RUNS)
def test_measured_runs_with_one_rate_of_the_optimizer_for_each_format(widths, rows, states, clip, step_s):
    hidden, layers, heads, kv_heads, ffn, tied = widths
    fields = {
        "vocab_size": 128256 if tied else 32000, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": ffn,
        "max_position_embeddings": 16384, "tie_word_embeddings": tied,
    }  # fmt: skip
    hardware = server(
        vram_bytes=150754820096, h2d_gb_per_s=54.2, d2h_gb_per_s=54.1, ram_gb_per_s=80.8, compute_tflops=728.6,
        device_memory_gb_per_s=4184.3, optimizer_gparams_per_s=INFERRED,
    )  # fmt: skip
    seq_length, micro_batch, accumulation = rows
    layout = StreamLayout(micro_batch, accumulation, checkpoints_home="ram", residency=Residency())
    request = RunRequest(state_format=states, max_grad_norm=clip)
    shape = shape_from_fields("run", "llama", fields)
    p = plan_stream(shape, request, hardware, seq_length, layout)
    assert p.time.step_s == pytest.approx(step_s, rel=0.12)


def test_graphs_take_memory_where_layers_are_short_and_there_is_room():
    shape, fast = prototype_shape(), server()
    p = plan_stream(shape, RunRequest(), fast, 1024, StreamLayout(4, 4, checkpoints_home="ram"))
    measured_gb = 2.924 - 2.405  # peaks of tensors with and without graphs
    name, spare = "CUDA graphs of layers", "allocator's spare memory"
    assert p.part_bytes("vram", name) / 1e9 == pytest.approx(measured_gb, rel=0.4)
    assert tensors_then(p, shape, 4096) / 1e9 == pytest.approx(2.924, rel=0.08)
    slow = plan_stream(shape, RunRequest(), dataclasses.replace(fast, compute_tflops=20.0), 1024, StreamLayout(4, 4))
    assert slow.part_bytes("vram", "CUDA graphs of layers") == 0
    full = plan_stream(shape, RunRequest(), dataclasses.replace(fast, vram_bytes=5 * GIB), 1024, StreamLayout(4, 4))
    assert full.part_bytes("vram", "CUDA graphs of layers") == 0
    off = plan_stream(shape, RunRequest(), fast, 1024, StreamLayout(4, 4, checkpoints_home="ram", cuda_graphs=False))
    assert p.tensor_bytes - off.tensor_bytes == p.part_bytes("vram", name)
    assert p.part_bytes("vram", spare) - off.part_bytes("vram", spare) == k.GRAPH_SPARE_TENSORS * 4096 * 2048 * 2


RACE = Path(__file__).resolve().parents[2] / "benchmarks/results/stream_race-h200-eager-graphs.json"


def test_eager_layers_with_and_without_graphs_as_measured():
    """The measured engine's loss held half a chunk of fp32 logits more at its peak, which was the head's."""
    shape, request = prototype_shape(), RunRequest(state_format="fp32", max_grad_norm=0.0)
    runs = json.loads(RACE.read_text())["results"]
    chunk = 4 * 2048 * 32000
    for name, graphs in (("ours-fp32-eager", True), ("ours-fp32-eager-nographs", False)):
        layout, run = StreamLayout(4, 4, "ram", compiled=False, cuda_graphs=graphs), runs[name]
        p = plan_stream(shape, request, server(), 1024, layout)
        assert p.time.step_s == pytest.approx(run["step_s"], rel=0.10)
        assert p.expected_bytes("vram") + chunk // 2 == pytest.approx(run["peak_vram_bytes"], rel=0.05)
        assert p.tensor_bytes + chunk // 2 == pytest.approx(run["torch_peak_bytes"], rel=0.05)
