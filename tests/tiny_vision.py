"""A tiny image-text model with random weights, its processor and its chat template, as a folder that loads; and
pictures to show it."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import LlavaProcessor

from tests.hf.callers import tokenizer

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}: {% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<picture>{% else %}{{ p['text'] }}{% endif %}{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)
SIDE, PATCH = 28, 14
TOKENS = (SIDE // PATCH) ** 2
"""Placeholders of one picture."""


def processor() -> Any:
    """Pictures of 28 x 28 pixels in four tokens."""
    text = copy.deepcopy(tokenizer())  # the cached one stays as it is
    text.add_special_tokens({"additional_special_tokens": ["<picture>"]})
    size = {"height": SIDE, "width": SIDE}
    pixels = transformers.CLIPImageProcessor(size=size, crop_size=size)
    return LlavaProcessor(
        pixels, text, patch_size=PATCH, vision_feature_select_strategy="full", chat_template=TEMPLATE,
        image_token="<picture>", num_additional_image_tokens=0,
    )  # fmt: skip


def model(made: Any) -> Any:
    """SigLIP's tower, a projector and Llama."""
    text = {
        "model_type": "llama", "vocab_size": len(made.tokenizer), "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 1,
        "eos_token_id": 2, "bos_token_id": 3, "max_position_embeddings": 256,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH, "vision_use_head": False,
    }  # fmt: skip
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, vision_feature_select_strategy="full", vision_feature_layer=-1,
        image_token_index=made.tokenizer.convert_tokens_to_ids("<picture>"),
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config)


def save(folder: Path) -> Path:
    """Model and processor as a folder."""
    made = processor()
    model(made).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def picture(color: Any = "red", size: tuple[int, int] = (40, 30), kind: str = "PNG", **options: Any) -> bytes:
    """A picture of one color in a file's bytes."""
    file = io.BytesIO()
    Image.new(options.pop("mode", "RGB"), size, color).save(file, kind, **options)
    return file.getvalue()


def save_gemma3(folder: Path) -> Path:
    """A model whose template writes `<look>` for a picture, which becomes four `<soft>`."""
    text = copy.deepcopy(tokenizer())
    text.add_special_tokens({"additional_special_tokens": ["<look>", "<soft>", "<seen>"]})
    text.save_pretrained(folder)
    names = {"boi_token": "<look>", "image_token": "<soft>", "eoi_token": "<seen>"}
    text = transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens=names)
    pixels = transformers.Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    template = TEMPLATE.replace("<picture>", "<look>")
    transformers.Gemma3Processor(pixels, text, chat_template=template, image_seq_length=TOKENS).save_pretrained(folder)
    look, soft, seen = text.convert_tokens_to_ids(["<look>", "<soft>", "<seen>"])
    words = {
        "vocab_size": len(text), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 3,
        "max_position_embeddings": 256,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": PATCH,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=words, vision_config=vision, mm_tokens_per_image=TOKENS, image_token_index=soft,
        boi_token_index=look, eoi_token_index=seen,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder
