"""Image-text models by name: loaded plain into RAM, told apart into text and vision, streamed.

transformers says where the text model and its head are; whatever else a model has (towers, projectors, mergers) sees.
No model is known by its name."""

from __future__ import annotations

from typing import Any

from torch import nn

from outcore.data import DataError
from outcore.data.pictures import PictureEncoder, load_processor


def load_image_text(name: str, *, trust_remote_code: bool = False, attention: str = "auto", **config: Any) -> Any:
    """The model in RAM, in the type that its weights are published in. DataError for one that takes no pictures."""
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    found = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **config)
    if found.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and not trust_remote_code:
        raise DataError(f"{name} takes no pictures: {found.model_type} is a model of text alone")
    told = {} if attention == "auto" else {"attn_implementation": attention}
    return AutoModelForImageTextToText.from_pretrained(
        name, config=found, dtype="auto", trust_remote_code=trust_remote_code, **told
    )


def encoder_of(name: str, model: Any, *, max_tokens: int | None = None, **how: Any) -> PictureEncoder:
    """The encoder with this model's processor; `how` as for `load_processor`."""
    processor = load_processor(name, **how)
    told = (getattr(model.config, "image_token_id", None), getattr(processor, "image_token_id", None))
    tokens = {token for token in told if isinstance(token, int)}
    if not tokens:
        raise DataError(f"{name} tells no token that stands for a picture")
    return PictureEncoder(processor, tokens, max_tokens)


def vision_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Parameters of all that sees, by name: what is neither the text model nor its embedding and head."""
    text = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    of_text = {id(p) for module in text if module is not None for p in module.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in of_text}
