"""Long rows on a CUDA device: losses of whole rows, and the bytes that are counted, with its own attention kernels."""

from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from outcore.common.quantities import GIB, MIB
from outcore.engine.stream.backward.layer import BackwardRunner
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.check import slab_of
from outcore.flow.layers import LongRows, PartRunner, RowHomes
from outcore.flow.parts import discover_units
from outcore.model import shape_from_config
from outcore.sizing.activations import long_layer_bytes
from outcore.staging import DownloadLane, LaneSettings, PinnedPool, UploadLane
from outcore.staging.pool import HostMemory
from tests.engine.inside import parts_of
from tests.flow.models import packed_batch, plain_batch, tiny_loaded

pytestmark = pytest.mark.gpu
WIDE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip
WIDE |= {"head_dim": 64, "max_position_embeddings": 65536, "num_hidden_layers": 2}
SETTINGS = StreamSettings(staging_bytes=256 * MIB, activations="ram", step_tokens=(4096,), row_tokens=4096)


@pytest.mark.parametrize("batch_of", [plain_batch, packed_batch])
@pytest.mark.parametrize(("compiled", "device_mib"), [("on", 64), ("on", None), ("off", 64), ("off", None)])
def test_losses_equal_those_of_whole_rows(batch_of, compiled, device_mib):
    """With little memory whole rows live in RAM, otherwise on the device."""
    found = []
    for tiling in ("off", "tokens"):
        loaded = tiny_loaded("llama", dtype=torch.bfloat16, **WIDE)
        settings = replace(SETTINGS, tiling=tiling, tile_bytes=4 * MIB, compile=compiled)
        if device_mib is not None and tiling == "tokens":
            settings = replace(settings, device_bytes=device_mib * MIB)
        with closing(build_stream_engine(loaded, settings, device="cuda", pinned_grant=False)) as engine:
            if tiling == "tokens":
                assert parts_of(engine).flow.runner.long_rows.homes._near == (device_mib is None)
            results = [engine.train_step([batch_of(1, 4096, seed=step)], 1e-3) for step in range(4)]
            found.append([(result.loss, result.grad_norm) for result in results])
    for (loss, norm), (tiled_loss, tiled_norm) in zip(*found, strict=True):
        assert tiled_loss == pytest.approx(loss, rel=5e-3) and tiled_norm == pytest.approx(norm, rel=3e-2)


@pytest.mark.parametrize("near", [False, True])
def test_counted_bytes_hold_a_layers_backward_with_the_flash_kernel(near):
    """Far: queries, keys, values and results of all groups together would not fit into them."""
    tokens, tile_tokens, device = 32768, 256, torch.device("cuda:0")
    loaded = tiny_loaded("llama", dtype=torch.bfloat16, **WIDE)
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(False)
    units = discover_units(loaded)
    units.buffers_to(device)
    with ExitStack() as opened:
        pool = opened.enter_context(PinnedPool(GIB, device=device, probe=False))
        up = opened.enter_context(UploadLane(pool, None, device, LaneSettings(MIB, 2)))
        down = opened.enter_context(DownloadLane(pool, None, device, LaneSettings(MIB, 2)))
        memory = HostMemory(pool)
        opened.callback(memory.close)
        homes = RowHomes(memory, (up, down), device, near=near)
        backward = BackwardRunner(PartRunner(units, long_rows=LongRows(units, tile_tokens, homes)))
        batch = {name: tensor.to(device) for name, tensor in plain_batch(1, tokens).items()}
        slab = slab_of(units.layer_units[0]).to(device)
        log = backward.runner.embed(slab_of(units.embed).to(device), batch)
        grad = homes.room_after(homes.room(log.hidden.shape, log.hidden.dtype)).copy_(torch.randn(log.hidden.shape))
        again = homes.room(grad.shape, grad.dtype, passes=True).copy_(grad)
        backward.layer(0, slab, log.hidden, log.call(0), again, (), None)  # libraries take their workspaces
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        backward.layer(0, slab, log.hidden, log.call(0), grad, (), None)
        peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
    counted = long_layer_bytes(shape_from_config("llama", loaded.config), 2, tokens, tile_tokens, near=near)
    kernels = 2 * 2 * tokens * 4 * 64  # keys' and values' gradients for each head of a group's queries (border_bytes)
    assert 0.5 * counted < peak_bytes < 1.05 * (counted + kernels), (peak_bytes, counted)
