"""Units in tiles on a CUDA device: the same results as whole ones, and training where whole ones do not fit."""

import gc
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.settings import StreamSettings
from tests.engine.inside import parts_of
from tests.flow.models import plain_batch, set_dropout, tiny_loaded

pytestmark = pytest.mark.gpu

SETTINGS = StreamSettings(
    staging_bytes=256 * MIB, slot_bytes=4 * MIB, num_slots=4, optimizer_threads=4, chunk_numel=1 << 16, compile="off"
)
LR = 1e-3
CAP_BYTES = 640 * MIB
LARGE: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 1, "vocab_size": 1024}
"""A layer of 110 M parameters: 0.2 GiB in bf16, with its gradients about 1 GiB of buffers."""


@pytest.fixture
def capped():
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(CAP_BYTES / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def train(settings: StreamSettings, count: int, model="llama", dtype=torch.bfloat16, steps=2, device="cuda", **fields):
    """(losses, plan, weights) after a few steps of `count` micro-batches."""
    loaded = tiny_loaded(model, dtype=dtype, **fields)
    set_dropout(loaded.model, 0.0)
    with closing(build_stream_engine(loaded, settings, device=device, pinned_grant=False)) as engine:
        batches = [plain_batch(2, 48, seed=m) for m in range(count)]
        losses = [engine.train_step(batches, LR).loss for _ in range(steps)]
        losses.append(engine.evaluate(batches).loss)
        weights = {n: p.detach().clone() for n, p in loaded.model.named_parameters()}
        return losses, parts_of(engine).tile_plan, weights


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("model", ["llama", "gpt2", "gemma2", "mixtral"])
def test_tiles_on_the_gpu_train_as_whole_units_do(model, count):
    """fp32; tiles in the ring, sums that come up again and rows of the embedding are ordered by events only here."""
    torch.backends.cuda.matmul.allow_tf32 = False
    whole = train(replace(SETTINGS, tiling="off"), count, model, torch.float32)
    tiled = train(replace(SETTINGS, tiling="on", tile_bytes=6000), count, model, torch.float32)
    assert tiled[1].tiled and not whole[1].tiled
    assert tiled[0] == pytest.approx(whole[0], rel=1e-4)


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_tiles_from_the_drive_train_as_those_from_ram_do(tmp_path, model, device="cuda"):
    """Many small tiles, so that one read into a buffer that is still in use shows."""
    settings = replace(SETTINGS, tiling="on", tile_bytes=6000, chunk_numel=1 << 12, states="split")
    spilled = replace(settings, nvme_path=str(tmp_path), weight_ram_bytes=0, state_ram_bytes=0)
    in_ram = train(settings, 2, model, steps=4, device=device)
    found = train(spilled, 2, model, steps=4, device=device)
    assert found[1].tiled and found[0] == pytest.approx(in_ram[0], rel=1e-3)


def test_a_layer_that_does_not_fit_trains_in_tiles(capped):
    def whole() -> str:
        try:
            train(replace(SETTINGS, tiling="off"), 1, **LARGE)
        except torch.OutOfMemoryError as error:
            return str(error)
        return ""

    assert "out of memory" in whole()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses, plan, _ = train(SETTINGS, 2, steps=3, **LARGE)
    assert 1 in plan.indices and "layer 0" in plan.reason
    assert torch.cuda.max_memory_allocated() < CAP_BYTES
    assert losses[-1] < losses[0] - 0.5
    expected, _, _ = train(replace(SETTINGS, tiling="off"), 2, device="cpu", steps=1, **LARGE)
    assert losses[0] == pytest.approx(expected[0], rel=1e-2)
