"""What the model continues in a sample: the prompt of the user as the data would render it, or one of the data."""

from __future__ import annotations

from typing import Any

from outcore.data import IGNORE_INDEX, PreparedData

DEFAULT_PROMPT = "def "
CHATS = ("messages", "sharegpt")


def sample_prompt(text: str | None, data: PreparedData, tokenizer: Any) -> list[int]:
    """Token ids. A chat's prompt goes through the chat template; without one of the user's own it is the beginning of
    an evaluation row, up to where the loss begins, and plain text gets a short start."""
    if text is not None:
        if data.summary.shape.startswith(CHATS) and getattr(tokenizer, "chat_template", None):
            turns = [{"role": "user", "content": text}]
            return list(
                tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
            )
        return tokenizer(text)["input_ids"]
    return _prompt_of_the_data(data) or tokenizer(DEFAULT_PROMPT)["input_ids"]


def _prompt_of_the_data(data: PreparedData) -> list[int]:
    """Tokens of the first row before the first that bears loss; [] of plain text, all of which does."""
    rows = data.eval if data.eval is not None else data.train
    batch = rows.batch([0])
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    first = next((index for index, label in enumerate(labels) if label != IGNORE_INDEX), 0)
    return ids[:first] if first > 1 else []
