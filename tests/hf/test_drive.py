"""Frozen weights on a drive, more of them than the slots hold through which they are read ahead."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration

import outcore.hf
from outcore.common.quantities import KIB
from outcore.hf import ground
from outcore.staging import UploadLane
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


def test_a_failure_while_layers_stay_is_the_one_that_is_told(tmp_path: Path) -> None:
    """It comes between two layers, when reads of later ones are under way; the next pass is as ever."""
    model = tiny("llama", num_hidden_layers=6).eval().requires_grad_(False)
    wanted = model(input_ids=IDS).logits
    outcore.hf.stream(model, nvme_offload_path=tmp_path)

    def fail(*_: Any) -> None:
        raise KeyError("mine")

    hook = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(KeyError, match="mine"), outcore.hf.staying(model, 0):
        model(input_ids=IDS)
    hook.remove()
    assert torch.equal(model(input_ids=IDS).logits, wanted)


def test_layers_that_could_not_all_be_brought_do_not_stay(
    only_own_models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", num_hidden_layers=3).eval().requires_grad_(False)
    outcore.hf.stream(model, vram_gib=1)
    sent, theirs = list[Any](), UploadLane.submit_host
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(UploadLane, "submit_host", lambda *some, **more: _second_fails(sent) or theirs(*some, **more))
        outcore.hf.staying(model, 0).__enter__()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    wanted = copy.deepcopy(model)(input_ids=IDS).logits
    assert torch.equal(model(input_ids=IDS).logits, wanted), "weights as they are now"


def _second_fails(sent: list[Any]) -> None:
    sent.append(None)
    if len(sent) == 2:
        raise MemoryError
