"""Frozen weights on a drive, more of them than the slots hold through which they are read ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration

import outcore.hf
from outcore.common.quantities import KIB
from outcore.hf import ground
from tests.hf.callers import tiny, with_lora

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.arange(32).view(2, 16) + 4


@pytest.fixture(autouse=True)
def few_small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ground, "CPU_SLOT_BYTES", 64 * KIB)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_packed_matrices_and_what_is_not_packed_do_not_wait_for_each_other(tmp_path: Path) -> None:
    found = []
    for nvme in (None, tmp_path):
        model = tiny("llama", num_hidden_layers=8, hidden_size=256, intermediate_size=512, lora=True)
        found.append(gradients(outcore.hf.stream(model, nvme_offload_path=nvme, quantize="nf4")))
    assert not [name for name, grad in found[0].items() if not torch.equal(grad, found[1][name])]


def test_encoder_and_decoder_do_not_wait_for_each_other(tmp_path: Path) -> None:
    config = BartConfig(
        vocab_size=64, d_model=64, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=256, decoder_ffn_dim=256,
        encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=64, dropout=0.0,
    )  # fmt: skip
    found = []
    for nvme in (None, tmp_path):
        torch.manual_seed(0)
        found.append(gradients(outcore.hf.stream(with_lora(BartForConditionalGeneration(config), "phi"), nvme=nvme)))
    assert not [name for name, grad in found[0].items() if not torch.equal(grad, found[1][name])]
