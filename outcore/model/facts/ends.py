"""Tokens that end what a model writes, set where other programs look for them.

`generate`, vLLM and converters read `generation_config.json`, and some the configuration. A base model whose chats end
their turns with another token than its text would run on in all of them, because both know the text's end only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

GENERATION_FILE = "generation_config.json"


def end_ids(eos_token_id: Any) -> list[int]:
    """`eos_token_id` as configurations write it (a number, several, or nothing) as a list."""
    if eos_token_id is None:
        return []
    return [int(token) for token in eos_token_id] if isinstance(eos_token_id, list | tuple) else [int(eos_token_id)]


def set_end_tokens(model: Any, tokenizer: Any, trained: Iterable[int]) -> list[int]:
    """Have what is exported of `model` (one of transformers') end its answers with the tokens that ended them so far,
    the tokenizer's EOS and those that the data trains. Returns all of them; nothing of a model without a configuration.
    """
    config, generation = getattr(model, "config", None), getattr(model, "generation_config", None)
    if config is None or not hasattr(config, "save_pretrained"):
        return []
    own = end_ids(tokenizer.eos_token_id)
    before = end_ids(generation.eos_token_id if generation is not None else None) or end_ids(config.eos_token_id)
    ends = list(dict.fromkeys([*before, *own, *trained]))
    if own and own[0] not in end_ids(config.eos_token_id):
        config.eos_token_id = own[0]  # one number: not every architecture's configuration takes more
    if generation is not None and ends:
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    return ends


def read_end_tokens(model: Any, folder: str | Path) -> None:
    """Give `model` the generation config that lies in `folder` beside an adapter or a checkpoint's configuration: its
    base has the one from before the training. Nothing where there is none."""
    from transformers import GenerationConfig

    if (Path(folder) / GENERATION_FILE).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
