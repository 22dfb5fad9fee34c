"""Graphs of layers: the bookkeeping with a stand-in that replays on the CPU, and real captures on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stream_models import packed_batch, plain_batch, tiny_loaded

from outcore.engine.stream import graphs as module
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.graphs import CALLS_BEFORE, LayerGraphs, _Graph
from outcore.engine.stream.settings import StreamSettings
from outcore.units import MIB

SETTINGS = StreamSettings(
    staging_bytes=16 * MIB, slot_bytes=MIB, num_slots=2, optimizer_threads=1, chunk_numel=1 << 14, compile="on"
)
LR = 3e-3


class Rerun:
    """Stands for a graph: runs the function again on the same tensors, into the same results."""

    def __init__(self, call, outputs):
        self.call, self.outputs = call, outputs

    def replay(self):
        for old, new in zip(self.outputs, self.call(), strict=True):
            old.copy_(new)


class CpuGraphs(LayerGraphs):
    """Captures by remembering the call."""

    def _captured(self, shapes, function, weights, inputs, leaves, spec, num_grads):
        static = [t.clone() for t in inputs]
        tensors = iter(static[1 + num_grads :])
        args, kwargs = module.tree_unflatten([next(tensors) if torch.is_tensor(t) else t for t in leaves], spec)

        def call():
            return function(weights, static[0], args, kwargs, *static[1 : 1 + num_grads])

        outputs = call()
        as_tuple = (lambda: (call(),)) if torch.is_tensor(outputs) else call
        flat = (outputs,) if torch.is_tensor(outputs) else outputs
        return _Graph(Rerun(as_tuple, flat), static, outputs)  # type: ignore[arg-type]


def twice(weights, hidden, args, kwargs, *grad):
    scaled = hidden * weights[0] + kwargs["shift"]
    return (scaled, scaled.sum(0)) if grad else scaled


def call(graphs, hidden, shift, name="f"):
    return graphs.run(name, twice, [WEIGHT], hidden, (None,), {"shift": shift, "cache": False})


WEIGHT = torch.full((3,), 2.0)


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


def test_a_failed_capture_says_why_once_and_goes_on(caplog):
    graphs = LayerGraphs(torch.device("cpu"))
    with caplog.at_level("WARNING"):
        for i in range(CALLS_BEFORE + 3):
            result = call(graphs, torch.full((1, 3), float(i)), torch.tensor(0.0))
            assert float(result[0, 0]) == 2.0 * i
    assert graphs.why_not and graphs.num_graphs == 0
    assert len([r for r in caplog.records if "CUDA graphs" in r.getMessage()]) == 1


def train(graphs: bool, device: str, steps: int = 4):
    engine = build_stream_engine(
        tiny_loaded("llama", dtype=torch.bfloat16),
        replace(SETTINGS, cuda_graphs="auto" if graphs and device == "cuda" else "off"),
        device=device,
        pinned_grant=False,
        trial=False,
    )
    compiled = engine._parts.schedule.runner.compiled
    assert compiled is not None
    if graphs and device == "cpu":
        compiled.graphs = CpuGraphs(torch.device("cpu"))
    try:
        batches = [plain_batch(2, 16, seed=1), packed_batch(2, 16, seed=2), plain_batch(2, 16, seed=3)]
        losses = [engine.train_step(batches, LR).loss for _ in range(steps)]
        engine.evaluate([plain_batch(seed=9)])
        captured = compiled.graphs.num_graphs if compiled.graphs is not None else 0
        return losses, [p.detach().clone() for p in engine.loaded.model.parameters()], captured
    finally:
        engine.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_is_the_same_with_graphs(device):
    plain, graphed = train(False, device), train(True, device)
    assert graphed[2] > 0 and plain[2] == 0
    assert graphed[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], graphed[1], strict=True))
