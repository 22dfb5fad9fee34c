"""Graphs of layers: the bookkeeping with a stand-in that replays on the CPU, and real captures on a GPU."""

import math
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.engine.stream import blueprint
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.layers import GraphPool, LayerGraphs, draws_random_numbers
from outcore.flow.layers import graphs as module
from outcore.flow.layers.graphs import CALLS_BEFORE, _Graph
from outcore.flow.parts import discover_units
from outcore.sizing import streaming
from tests.engine.inside import parts_of
from tests.flow.models import packed_batch, plain_batch, set_dropout, tiny_loaded

SETTINGS = StreamSettings(
    staging_bytes=16 * MIB, slot_bytes=MIB, num_slots=2, optimizer_threads=1, chunk_numel=1 << 14, compile="on"
)
LR = 3e-3


class Rerun:
    """Stands for a graph: runs the function again on the same tensors, into the same result."""

    def __init__(self, call, output):
        self.call, self.output = call, output

    def replay(self):
        self.output.copy_(self.call())


class CpuGraphs(LayerGraphs):
    """Captures by remembering the call."""

    def _capture(self, call, static):
        unused = None if call.sums is None else [t.clone() for t in call.sums]
        output = replace(call, sums=unused).on(static)
        return _Graph(Rerun(lambda: call.on(static), output), static, output)  # type: ignore[arg-type]


def twice(weights, hidden, args, kwargs, grad=None, sums=()):
    for total in sums:
        total.add_(grad)
    return hidden * weights[0] + kwargs["shift"]


def call(graphs, hidden, shift, name="f"):
    return graphs.run(name, twice, [WEIGHT], hidden, (None,), {"shift": shift, "cache": False})


WEIGHT = torch.full((3,), 2.0)


@pytest.fixture(autouse=True)
def _worth_it(monkeypatch):
    monkeypatch.setattr(streaming, "GRAPH_LONG_S", math.inf)  # however busy the machine is


def test_every_call_gets_its_own_result_from_its_own_inputs():
    graphs = CpuGraphs(torch.device("cpu"))
    results = [call(graphs, torch.full((2, 3), float(i)), torch.tensor(float(10 * i))) for i in range(CALLS_BEFORE + 6)]
    assert graphs.num_graphs == 1
    assert [float(r[0, 0]) for r in results] == [12.0 * i for i in range(CALLS_BEFORE + 6)]
    WEIGHT.fill_(3.0)  # another layer's weights in the same buffer
    try:
        assert float(call(graphs, torch.ones(2, 3), torch.tensor(0.0))[0, 0]) == 3.0
    finally:
        WEIGHT.fill_(2.0)


def test_gradients_are_added_once_per_call_to_the_sums_of_that_call():
    graphs = CpuGraphs(torch.device("cpu"))
    mine, yours = torch.zeros(2, 3), torch.zeros(2, 3)
    shift = {"shift": torch.tensor(0.0), "cache": False}
    for i in range(CALLS_BEFORE + 4):
        for sums in (mine, yours):
            grad = torch.full((2, 3), float(i + 1) * (1 if sums is mine else 10))
            graphs.run("b", twice, [WEIGHT], torch.ones(2, 3), (None,), shift, grad, [sums])
    expected = sum(range(1, CALLS_BEFORE + 5))
    assert graphs.num_graphs == 2
    assert float(mine[0, 0]) == expected and float(yours[1, 2]) == 10 * expected


def test_sums_of_another_type_in_the_same_memory_have_a_graph_of_their_own():
    """Where gradients leave through one buffer, those that come once are summed there in the parameters' type."""
    graphs, memory = CpuGraphs(torch.device("cpu")), torch.zeros(6)
    shift = {"shift": torch.tensor(0.0), "cache": False}
    once = memory.view(torch.bfloat16)[:6].view(2, 3)
    for sums in (memory.view(2, 3), once):
        for _ in range(CALLS_BEFORE + 2):
            sums.zero_()
            graphs.run("b", twice, [WEIGHT], torch.ones(2, 3), (None,), shift, torch.full((2, 3), 7.0), [sums])
            assert torch.equal(sums, torch.full_like(sums, 7.0))
    assert graphs.num_graphs == 2


def test_an_expanded_input_is_held_dense():
    mask = torch.arange(3.0).expand(4, 3)
    held = module.empty_like(mask)
    torch._foreach_copy_([held], [mask])
    assert torch.equal(held, mask) and held.is_contiguous()
    transposed = torch.empty(2, 3).t()
    assert module.empty_like(transposed).stride() == transposed.stride()


def test_shapes_names_and_buffers_have_graphs_of_their_own():
    graphs = CpuGraphs(torch.device("cpu"))
    zero = torch.tensor(0.0)
    for rows in (1, 2):
        for name in ("f", "g"):
            for _ in range(CALLS_BEFORE + 2):
                assert call(graphs, torch.ones(rows, 3), zero, name).shape == (rows, 3)
    assert graphs.num_graphs == 4
    other = torch.full((3,), 5.0)
    for _ in range(CALLS_BEFORE + 2):
        found = graphs.run("f", twice, [other], torch.ones(1, 3), (None,), {"shift": zero, "cache": False})
        assert float(found[0, 0]) == 5.0
    assert graphs.num_graphs == 5


def test_rare_shapes_and_shapes_beyond_the_limit_run_without(monkeypatch):
    monkeypatch.setattr(module, "MAX_GRAPHS", 2)
    graphs = CpuGraphs(torch.device("cpu"))
    for rows in range(1, 6):
        for _ in range(CALLS_BEFORE):
            call(graphs, torch.ones(rows, 3), torch.tensor(1.0))
    assert graphs.num_graphs == 0
    for rows in range(1, 6):
        for _ in range(2):
            assert call(graphs, torch.ones(rows, 3), torch.tensor(1.0)).shape == (rows, 3)
    assert graphs.num_graphs == 2


def test_every_buffer_of_the_shape_that_came_first_has_a_graph(monkeypatch):
    """Layers that stay on the device are buffers of their own, however many."""
    monkeypatch.setattr(module, "MAX_GRAPHS", 1)
    graphs, layers = CpuGraphs(torch.device("cpu")), [torch.full((3,), float(i)) for i in range(4)]
    for rows in (1, 2):
        for _ in range(CALLS_BEFORE + 1):
            for i, layer in enumerate(layers):
                shift = {"shift": torch.tensor(0.0), "cache": False}
                assert float(graphs.run("f", twice, [layer], torch.ones(rows, 3), (None,), shift)[0, 0]) == i
    assert graphs.num_graphs == len(layers)


@pytest.mark.parametrize(("share", "captured"), [(math.inf, 0), (0.0, 1)])
def test_calls_that_take_long_run_without_unless_launches_do(monkeypatch, share, captured):
    monkeypatch.setattr(streaming, "GRAPH_LONG_S", -1.0)
    monkeypatch.setattr(streaming, "LAUNCH_SHARE", share)
    graphs = CpuGraphs(torch.device("cpu"))
    for i in range(CALLS_BEFORE + 3):
        assert float(call(graphs, torch.full((1, 3), float(i)), torch.tensor(0.0))[0, 0]) == 2.0 * i
    assert graphs.num_graphs == captured


def test_a_host_that_waits_for_a_full_queue_does_not_count_as_launching(monkeypatch):
    graphs, busy, clock_s = CpuGraphs(torch.device("cpu")), [True], [0.0]
    monkeypatch.setattr(streaming, "GRAPH_LONG_S", -1.0)
    monkeypatch.setattr(module, "wait_for", lambda at, what: busy.clear())
    monkeypatch.setattr(module, "elapsed_s", lambda begin, end: 1.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock_s[0]))

    def queued(weights, hidden, args, kwargs):
        clock_s[0] += len(busy)
        busy[:] = [True]
        return hidden * weights[0]

    for _ in range(CALLS_BEFORE + 2):
        assert float(graphs.run("f", queued, [WEIGHT], torch.ones(1, 3), (), {})[0, 0]) == 2.0
    assert graphs.num_graphs == 0


def test_after_a_capture_that_cannot_be_ended_work_goes_on_in_its_own_stream(monkeypatch):
    current = ["own"]

    class Capture:
        def capture_begin(self, **_):
            """As torch's, whose stream is the current one."""

        def capture_end(self):
            raise RuntimeError("operation failed due to a previous error during capture")

    @contextmanager
    def in_stream(stream):
        current[0] = stream
        yield  # torch's does not go back where its block fails

    for name, value in {
        "CUDAGraph": Capture, "graph_pool_handle": object, "stream": in_stream,
        "synchronize": lambda device: None, "empty_cache": object, "current_blas_handle": object,
        "current_stream": lambda device: current[0], "set_stream": lambda stream: current.__setitem__(0, stream),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(module, "_capture_stream", lambda device: "captures")
    with pytest.raises(RuntimeError, match="previous error"), module.GraphPool(torch.device("cuda", 0)).capture():
        assert current == ["captures"]
    assert current == ["own"]


def test_a_failed_capture_says_why_once_and_goes_on(caplog):
    graphs = LayerGraphs(torch.device("cpu"))
    with caplog.at_level("WARNING"):
        for i in range(CALLS_BEFORE + 3):
            result = call(graphs, torch.full((1, 3), float(i)), torch.tensor(0.0))
            assert float(result[0, 0]) == 2.0 * i
    assert graphs.why_not and graphs.num_graphs == 0
    assert len([r for r in caplog.records if "CUDA graphs" in r.getMessage()]) == 1


def train(graphs: bool, device: str, steps: int = 4, compile: str = "on", family: str = "llama", dropout: float = 0.0):
    loaded = tiny_loaded(family, dtype=torch.bfloat16)
    set_dropout(loaded.model, dropout)
    engine = build_stream_engine(
        loaded, replace(SETTINGS, cuda_graphs="auto" if graphs and device == "cuda" else "off", compile=compile),
        device=device, pinned_grant=False, trial=False,
    )  # fmt: skip
    compiled = parts_of(engine).flow.runner.compiled
    assert compiled is not None
    if graphs and device == "cpu":  # where build takes no graphs
        compiled.graphs = CpuGraphs(torch.device("cpu"))
        compiled.graphs_fit_eager = compile == "off" and not draws_random_numbers(parts_of(engine).units)
    try:
        batches = [plain_batch(2, 16, seed=1), packed_batch(2, 16, seed=2), plain_batch(2, 16, seed=3)]
        losses = [engine.train_step(batches, LR).loss for _ in range(steps)]
        engine.evaluate([plain_batch(seed=9)])
        captured = compiled.graphs.num_graphs if compiled.graphs is not None else 0
        return losses, [p.detach().clone() for p in engine.loaded.model.parameters()], captured
    finally:
        engine.close()


FAMILIES = ("llama", "gemma2", "gpt2")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("device", "compile", "family"), [
    pytest.param("cpu", "on", "llama", marks=pytest.mark.slow), *(("cpu", "off", family) for family in FAMILIES),
    pytest.param("cuda", "on", "llama", marks=pytest.mark.gpu),
    *(pytest.param("cuda", "off", family, marks=pytest.mark.gpu) for family in FAMILIES),
])  # fmt: skip
def test_training_is_the_same_with_graphs(device, compile, family):
    plain, graphed = (train(graphs, device, compile=compile, family=family) for graphs in (False, True))
    assert graphed[2] > 0 and plain[2] == 0
    assert graphed[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], graphed[1], strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_training_with_dropout_captures_nothing(device):
    assert train(True, device, compile="off", family="gpt2", dropout=0.1)[2] == 0


def test_layers_with_dropout_are_not_captured():
    loaded = tiny_loaded("gpt2", dtype=torch.float32)
    units = discover_units(loaded)
    settings = replace(SETTINGS, compile="off")
    fits = []
    for rate in (0.0, 0.1):
        for part in loaded.model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = rate
        found = blueprint._compiled(loaded, units, settings, torch.device("cuda"), 0.0)
        fits.append(found.graphs_fit_eager)
        assert found.why_not == "compile: off"
    assert fits == [True, False]
    assert not blueprint._compiled(loaded, units, settings, torch.device("cpu"), 0.0).graphs_fit_eager
    assert not blueprint._compiled(loaded, units, settings, torch.device("cuda"), 0.01).graphs_fit_eager


def test_eager_graphs_are_for_layers_that_are_not_compiled():
    loaded = tiny_loaded("llama", dtype=torch.float32)
    settings = replace(SETTINGS, compile="auto")
    found = blueprint._compiled(loaded, discover_units(loaded), settings, torch.device("cuda"), 0.0)
    assert found.graphs_fit_eager and found.is_active(0) and not found.has_eager_graphs(0)
    found.give_up("the test asks for it")
    assert found.has_eager_graphs(0)


@pytest.mark.gpu
def test_no_lane_is_given_the_stream_of_captures():
    """torch has 32 streams of a priority and hands them out in turn, so forty meet each of them."""
    device = torch.device("cuda", 0)
    work = torch.zeros(1, device=device)
    with GraphPool(device).capture():
        work.add_(1)
        capturing = torch.cuda.current_stream(device).cuda_stream
    lanes = {torch.cuda.Stream(device).cuda_stream for _ in range(40)}
    assert len(lanes) == 32 and capturing not in lanes
