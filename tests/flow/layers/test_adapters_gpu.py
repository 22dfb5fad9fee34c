"""Compiled layers with adapters on a CUDA device: the eager ones' losses, and no more memory than without adapters."""

from dataclasses import replace

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.settings import StreamSettings
from outcore.model import LoraSettings
from outcore.model.adapters import apply_lora
from outcore.model.facts import model_facts
from tests.flow.models import packed_batch, padded_batch, plain_batch, tiny_loaded

pytestmark = pytest.mark.gpu
SETTINGS = StreamSettings(staging_bytes=256 * MIB, slot_bytes=4 * MIB, num_slots=2, activations="ram", compile="on")
LR = 3e-3


def engine_with_adapters(settings: StreamSettings, targets: str = "auto", **fields):
    loaded = tiny_loaded("llama", dtype=torch.bfloat16, **fields)
    network = apply_lora(loaded.model, LoraSettings(r=4, alpha=8, dropout=0.0, target_modules=targets), seed=0)
    loaded = replace(loaded, model=network.train(), facts=model_facts(network))
    return build_stream_engine(loaded, settings, device="cuda", pinned_grant=False, trial=False)


def test_losses_are_the_eager_ones() -> None:
    kinds, found = [plain_batch, padded_batch, packed_batch], []
    for choice in ("off", "on"):
        engine = engine_with_adapters(replace(SETTINGS, compile=choice), num_hidden_layers=6)
        batches = [[kinds[(s + m) % 3](2, 16, seed=100 * s + m) for m in range(2)] for s in range(6)]
        found.append([engine.train_step(batch, LR).loss for batch in batches])
        engine.close()
    assert found[1] == pytest.approx(found[0], rel=2e-2)


def test_adapters_on_the_mlp_take_no_tensors_of_its_width() -> None:
    """peft's own code takes five more in a compiled backward."""
    width, rows, length = 8192, 4, 512
    peaks = []
    for targets in ("q_proj", "auto"):
        engine = engine_with_adapters(
            replace(SETTINGS, cuda_graphs="off", resident_bytes=0),
            targets,
            intermediate_size=width,
            num_hidden_layers=2,
        )
        torch.cuda.reset_peak_memory_stats()
        for step in range(2):
            engine.train_step([plain_batch(rows, length, seed=step)], LR)
        peaks.append(torch.cuda.max_memory_allocated())
        engine.close()
    assert peaks[1] - peaks[0] < rows * length * width * 2
