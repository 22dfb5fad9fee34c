"""Runs in a child process: DeepSpeed's engine and the streaming one on the same tiny model and data, on the CPU.

Usage: python stream_deepspeed_child.py FOLDER STAGE PRECISION
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.engine.deepspeed.build import build_engine, init_process_group, resolve
from outcore.engine.deepspeed.settings import RunFacts
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.settings import StreamSettings
from outcore.model import ModelSettings, load_model
from tests.engine.deepspeed.config_cases import settings_of
from tests.flow.models import packed_batch, plain_batch

LR = 1e-3


def batches_of(step: int):
    return [plain_batch(2, 16, seed=2 * step), packed_batch(2, 16, seed=2 * step + 1)]


def main(folder: Path, stage: str, precision: str) -> None:
    torch.set_num_threads(2)
    settings = ModelSettings(
        preset="llama-1b",
        precision=precision,
        seq_length=64,
        config_overrides={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 128,
        },
    )
    init_process_group(False, 0)
    flags = {"zero_stage": stage, "gradient_accumulation_steps": 2, "learning_rate": LR}
    run = settings_of({}, flags, precision)
    resolved, _ = resolve(run, settings, RunFacts(device="cpu"), None)
    theirs = build_engine(resolved, settings, None)
    mine = build_stream_engine(
        load_model(settings),
        StreamSettings(
            staging_bytes=8 * MIB, slot_bytes=65536, num_slots=2, optimizer_threads=1, optimizer_backend="torch"
        ),
        device="cpu",
        pinned_grant=False,
    )
    tolerance = 2e-4 if precision == "fp32" else 5e-3

    def step_both(step: int) -> None:
        a, b = theirs.train_step(batches_of(step), LR), mine.train_step(batches_of(step), LR)
        print(f"step {step}: deepspeed {a.loss:.6f} norm {a.grad_norm:.4f}, stream {b.loss:.6f} norm {b.grad_norm:.4f}")
        assert b.loss == pytest.approx(a.loss, rel=tolerance) and b.tokens == a.tokens
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=20 * tolerance)

    for step in range(4):
        step_both(step)
    first, second = folder / "theirs", folder / "mine"
    for path in (first, second):
        path.mkdir()
    state = theirs.save(first, lambda path, crc: None)
    mine.load(first, state)
    assert mine.updates == 4
    for step in range(4, 7):
        step_both(step)
    state = mine.save(second, lambda path, crc: None)
    theirs.load(second, state)
    for step in range(7, 10):
        step_both(step)
    mine.close()
    theirs.close()
    print("engines agree")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
