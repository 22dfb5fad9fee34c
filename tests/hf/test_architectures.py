"""Models with several lists of layers, and layers that give and take more than hidden states: pictures, encoders."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

import outcore.hf
from outcore.hf.layer import is_streamed
from outcore.model.trial import shrink_config

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
Case = tuple[Any, dict[str, torch.Tensor], int]
"""(model, batch, lists that are streamed)"""


def _with_pictures(config: Any, model: Any, first: int, num: int, **pixels: torch.Tensor) -> Case:
    ids = torch.randint(0, 280, (1, 12))
    ids[0, first : first + num] = 290
    if hasattr(config, "vision_start_token_id"):
        ids[0, first - 1], ids[0, first + num] = 292, 293
    return model, {"input_ids": ids, "labels": ids.clone(), **pixels}, 2


def qwen2_5_vl() -> Case:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32,
        "patch_size": 14, "window_size": 28, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = hf.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, image_token_id=290, video_token_id=291,
        vision_start_token_id=292, vision_end_token_id=293,
    )  # fmt: skip
    pixels = {"pixel_values": torch.randn(16, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    model, batch, lists = _with_pictures(config, hf.Qwen2_5_VLForConditionalGeneration(config), 3, 4, **pixels)
    return model, batch | {"mm_token_type_ids": (batch["input_ids"] == 290).long()}, lists


def qwen3_vl() -> Case:
    """Pictures are added to the hidden states between layers, too (DeepStack)."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    vision = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32,
        "patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64,
    }  # fmt: skip
    config = hf.Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": rope, "head_dim": 8}, vision_config=vision, image_token_id=290,
        video_token_id=291, vision_start_token_id=292, vision_end_token_id=293,
    )  # fmt: skip
    pixels = {"pixel_values": torch.randn(16, 3 * 2 * 16 * 16), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    model, batch, _ = _with_pictures(config, hf.Qwen3VLForConditionalGeneration(config), 3, 4, **pixels)
    return model, batch | {"mm_token_type_ids": (batch["input_ids"] == 290).long()}, 3


def gemma3() -> Case:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = hf.Gemma3Config(
        text_config=TEXT | {"head_dim": 8, "sliding_window": 8, "layer_types": kinds}, vision_config=vision,
        mm_tokens_per_image=4, image_token_index=290, boi_token_index=292, eoi_token_index=293,
    )  # fmt: skip
    model = hf.Gemma3ForConditionalGeneration(config)
    model, batch, lists = _with_pictures(config, model, 3, 4, pixel_values=torch.randn(1, 3, 28, 28))
    return model, batch | {"token_type_ids": (batch["input_ids"] == 290).long()}, lists


def smolvlm() -> Case:
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": 56, "patch_size": 14,
    }  # fmt: skip
    config = hf.SmolVLMConfig(
        text_config=TEXT | {"model_type": "llama", "pad_token_id": 1}, vision_config=vision, image_token_id=290,
        scale_factor=2, pad_token_id=1,
    )  # fmt: skip
    model = hf.SmolVLMForConditionalGeneration(config)
    return _with_pictures(config, model, 3, 4, pixel_values=torch.randn(1, 1, 3, 56, 56))


def _classified(model_type: str) -> Callable[[], Case]:
    def make() -> Case:
        config = shrink_config(hf.AutoConfig.for_model(model_type))
        config.num_labels = 3
        model = hf.AutoModelForSequenceClassification.from_config(config)
        ids = torch.randint(5, 50, (2, 12))
        mask = torch.ones_like(ids)
        mask[1, 8:] = 0
        return model, {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 2])}, 1

    return make


def t5() -> Case:
    """Layers hand on their bias for positions; the decoder's look at what the encoder's give."""
    config = hf.T5Config(
        vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    ids = torch.randint(5, 300, (2, 12))
    return hf.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids[:, :7].clone()}, 2


def whisper() -> Case:
    config = hf.WhisperConfig(
        vocab_size=300, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=20,
        pad_token_id=1, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2, begin_suppress_tokens=None,
    )  # fmt: skip
    batch = {"input_features": torch.randn(2, 8, 40), "labels": torch.randint(5, 300, (2, 7))}
    return hf.WhisperForConditionalGeneration(config), batch, 2


def vit() -> Case:
    config = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=28, patch_size=14
    )
    batch = {"pixel_values": torch.randn(2, 3, 28, 28), "labels": torch.tensor([0, 1])}
    return hf.ViTForImageClassification(config), batch, 1


def _answers(model_type: str) -> Callable[[], Case]:
    def make() -> Case:
        config = shrink_config(hf.AutoConfig.for_model(model_type))
        ids = torch.randint(5, 50, (2, 12))
        return hf.AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids.clone()}, 1

    return make


CASES: dict[str, Callable[[], Case]] = {
    "qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl, "gemma3": gemma3, "smolvlm": smolvlm, "t5": t5,
    "whisper": whisper, "vit": vit, "bert": _classified("bert"), "modernbert": _classified("modernbert"),
    "qwen3_next": _answers("qwen3_next"), "mamba2": _answers("mamba2"), "gpt_oss": _answers("gpt_oss"),
    "bloom": _answers("bloom"), "deepseek_v3": _answers("deepseek_v3"), "glm4_moe": _answers("glm4_moe"),
    "gemma3n_text": _answers("gemma3n_text"), "falcon_h1": _answers("falcon_h1"), "opt": _answers("opt"),
}  # fmt: skip

ADDED_UP_OTHERWISE = ("t5", "whisper", "gemma3n_text")
"""Several layers use one tensor, each of them several times: their gradients are added up in another order."""


@pytest.mark.more(after=8)
@pytest.mark.parametrize("which", CASES)
def test_gradients_are_those_of_the_plain_model(which: str) -> None:
    found = []
    for prepare in (lambda model: model, outcore.hf.stream):
        torch.manual_seed(0)
        model, batch, num_lists = CASES[which]()
        model = prepare(model).train()
        torch.manual_seed(1)
        loss = model(**batch).loss
        loss.backward()
        found.append((loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (loss, wanted), (loss_too, grads) = found
    assert len({path.rpartition(".")[0] for path, m in model.named_modules() if is_streamed(m)}) == num_lists
    assert torch.equal(loss, loss_too) and list(wanted) == list(grads)
    if which not in ADDED_UP_OTHERWISE:
        assert not [name for name, grad in wanted.items() if not torch.equal(grad, grads[name])]
    for name, grad in wanted.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-7)
    layers = [weakref.ref(m) for m in model.modules() if is_streamed(m)]
    del model, loss, loss_too, found
    gc.collect()
    assert not any(layer() for layer in layers), "the memory goes with the model"
