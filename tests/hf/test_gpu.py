"""Streaming through a GPU: its memory stays within the bound, and what is trained is that of the plain model there."""

from __future__ import annotations

import copy
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import outcore.hf
from outcore.cli import main
from outcore.common.quantities import GIB
from outcore.monitor import read_metrics
from tests.hf.callers import TRAINERS, tiny, tokenizer, with_lora
from tests.hf.test_by_name import expanded

pytestmark = pytest.mark.gpu
CAP_GIB = 2.5
DEVICE = torch.device("cuda", 0)


def big() -> Any:
    """3.4 GiB of layers in bf16, on the CPU, all with the first one's weights: drawing each takes a core a minute."""
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=30, num_attention_heads=16,
        num_key_value_heads=8, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    with torch.device("cpu"):
        one = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    drawn = one.state_dict()
    values = {name: drawn[re.sub(r"layers\.\d+", "layers.0", name)].clone() for name in model.state_dict()}
    model.load_state_dict(values, assign=True)
    model.model.rotary_emb = one.model.rotary_emb
    assert sum(p.nbytes for p in model.model.layers.parameters()) > 1.3 * CAP_GIB * GIB
    return model.train()


def with_adapters(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def step(model: Any, rows: int = 4, length: int = 512) -> float:
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (rows, length), device=DEVICE)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_a_model_larger_than_the_bound_trains_within_it(quantize: str | None) -> None:
    model = with_adapters(outcore.hf.stream(big(), vram_gib=CAP_GIB, quantize=quantize))
    assert model.device == DEVICE
    assert all(p.device.type == "cpu" for layer in model.base_model.model.model.layers for p in layer.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    torch.cuda.reset_peak_memory_stats()
    losses = []
    for _ in range(4):
        losses.append(step(model))
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.cuda.max_memory_allocated() < CAP_GIB * GIB
    assert losses[-1] < losses[0]


def test_hidden_states_wait_in_ram_and_rows_are_cut_where_the_bound_is_small() -> None:
    model = with_adapters(outcore.hf.stream(big(), vram_gib=0.9))
    torch.cuda.reset_peak_memory_stats()
    step(model, rows=16, length=128)
    peak = torch.cuda.max_memory_allocated()
    hidden = 30 * 16 * 128 * 2048 * 2
    layer = sum(p.nbytes for p in model.base_model.model.model.layers[0].parameters())
    ends = sum(p.nbytes for p in model.parameters() if p.device.type == "cuda")
    logits = 3 * 16 * 128 * 32_000 * 4
    assert peak < ends + 3 * layer + logits + hidden // 2, (peak, ends, layer, hidden)


def grads(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "gpt2"])
def test_losses_and_gradients_are_those_of_the_plain_model(family: str, lora: bool) -> None:
    plain = tiny(family, lora=lora).train().to(DEVICE)
    streamed = outcore.hf.stream(tiny(family, lora=lora).train(), compile="off")
    for _ in range(2):  # the second adds to the first
        assert step(plain, length=24) == step(streamed, length=24)
    wanted, found = grads(plain), grads(streamed)
    assert list(wanted) == list(found)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("lora", [False, True])
def test_compiled_layers_compute_what_the_plain_model_does(lora: bool) -> None:
    plain = tiny("llama", lora=lora).train().to(DEVICE)
    streamed = outcore.hf.stream(tiny("llama", lora=lora).train())
    for length in (24, 40, 31):
        assert step(streamed, length=length) == pytest.approx(step(plain, length=length), rel=1e-5)
    for name, grad in grads(plain).items():
        torch.testing.assert_close(grads(streamed)[name], grad, rtol=1e-3, atol=1e-5, msg=name)


def test_a_packed_base_is_the_resident_expanded_one() -> None:
    plain = expanded(tiny("llama").to(torch.bfloat16)).requires_grad_(False)
    plain = with_lora(plain).train().to(DEVICE)
    streamed = with_lora(outcore.hf.stream(tiny("llama").to(torch.bfloat16), quantize="nf4", compile="off")).train()
    assert step(plain, length=24) == step(streamed, length=24)
    for name, grad in grads(plain).items():
        torch.testing.assert_close(grads(streamed)[name], grad, rtol=2e-2, atol=1e-4, msg=name)


@pytest.mark.parametrize("which", ["sft", "dpo", "trainer"])
@pytest.mark.parametrize("lora", [False, True])
def test_trainers_run_on_it(which: str, lora: bool, tmp_path: Path) -> None:
    found = []
    for prepare in (lambda model: model, partial(outcore.hf.stream, compile="auto" if lora else "off")):
        given = {"reference": prepare(tiny("llama"))} if which == "dpo" and not lora else {}
        model = prepare(tiny("llama", lora=lora))
        trainer = TRAINERS[which](model, tmp_path, 3, use_cpu=False, **given)
        torch.manual_seed(7)
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_full_training_in_16_bits_keeps_masters_in_ram(tmp_path: Path) -> None:
    model = outcore.hf.stream(tiny("llama").to(torch.bfloat16))
    optimizer = outcore.hf.optimizer(model, 1e-2, max_grad_norm=0.5)
    trainer = TRAINERS["trainer"](model, tmp_path, 6, use_cpu=False, bf16=True, max_grad_norm=0.0)
    trainer.optimizer = optimizer
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert torch.cuda.memory_allocated() < GIB


def test_it_answers_as_the_plain_model() -> None:
    plain, streamed = tiny("llama").eval().to(DEVICE), outcore.hf.stream(tiny("llama").eval())
    ids = torch.arange(24, device=DEVICE).view(2, 12) + 4
    wanted = plain.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(wanted, streamed.generate(ids, max_new_tokens=6, do_sample=False))


def test_weights_changed_right_after_a_pass_do_not_change_what_it_gave() -> None:
    model = outcore.hf.stream(big().eval().requires_grad_(False))
    ids = torch.arange(512, device=DEVICE).view(1, 512)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits.clone()
        found = model(input_ids=ids).logits
        for p in model.model.layers.parameters():
            p.zero_()
    assert torch.equal(wanted, found)


def test_weights_on_a_drive_come_through_the_gpu(tmp_path: Path) -> None:
    plain = tiny("llama", lora=True).train().to(DEVICE)
    streamed = outcore.hf.stream(tiny("llama", lora=True).train(), nvme=tmp_path, compile="off")
    assert step(plain, length=24) == step(streamed, length=24)


@pytest.mark.parametrize("flags", [[], ["--lora_r", "4", "--quantize", "nf4", "--lora_export", "adapter"]])
@pytest.mark.parametrize("method", ["dpo", "classify", "embed", "distill"])
def test_methods_train_by_command(
    method: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny().save_pretrained("model")
    tokenizer().save_pretrained("model")
    row = {"prompt": "hello", "chosen": " world 1", "rejected": " test 2", "query": "hello", "positive": "world"}
    if method != "embed":
        row = {"text": "hello world"} if method != "dpo" else {k: row[k] for k in ("prompt", "chosen", "rejected")}
    rows = [row | ({"label": i % 2} if method == "classify" else {}) for i in range(24)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = ["--teacher", "model"] if method == "distill" else []
    usual = ["--dataset", "rows.jsonl", "--seq_length", "32", "--max_steps", "3", "--report_to", "none"]
    assert main(["train", "model", "--method", method, "--run_name", "run", *usual, *flags, *more]) == 0
    assert len(read_metrics("logs/run/metrics.jsonl").steps) == 3


def test_full_training_of_a_model_larger_than_the_bound_stays_within_it() -> None:
    """Gradients of layers and ends are within it, too."""
    model = outcore.hf.stream(big(), vram_gib=CAP_GIB)
    optimizer = outcore.hf.optimizer(model, 1e-5)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step(model, rows=16)
        optimizer.step()
        optimizer.zero_grad()
    logits = 3 * 16 * 512 * 32_000 * 4
    assert torch.cuda.max_memory_allocated() < CAP_GIB * GIB + logits
