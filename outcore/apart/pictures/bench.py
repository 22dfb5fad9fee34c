"""Work that turns a client's conversation with pictures into tokens and pixels: its processor's own, and the decoding
of what strangers send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outcore.apart.bench import Bench, plain_message
from outcore.data.pictures import PictureEncoder, conversation_of, marked
from outcore.data.rows import read_messages

PLACE = "\ue000picture\ue000"
"""Stands in a text for a picture while messages are read: letters that mean nothing, which no text may hold."""


class PictureBench(Bench):
    """Works for one model that sees; no path is opened and nothing is fetched."""

    def __init__(self, pictures: PictureEncoder, end_tokens: Sequence[int], most_tokens: int) -> None:
        super().__init__(pictures.tokenizer, end_tokens, most_tokens)
        self._pictures = pictures

    def __reduce__(self) -> tuple[Any, ...]:
        return PictureBench, (self._pictures, self._ends, self._most_tokens)

    def prompt(
        self, messages: Any, tools: list[Any] | None, variables: Mapping[str, Any], goes_on: bool
    ) -> tuple[str, list[int], dict[str, Any]]:
        """Text and tokens of a conversation, as of text alone, and what the model reads of its pictures."""
        own = list[Any]()
        told = marked(messages, own, PLACE)
        if not isinstance(told, list) or not told:
            raise ValueError("messages is empty: give at least one.")
        if None in own:
            raise ValueError("a message holds a picture's part without a picture. Send it as a data: URL (base64).")
        read, _ = read_messages([plain_message(one, "text and pictures only") for one in told], "messages")
        talk = conversation_of(read, own, mark=PLACE)
        text = self._pictures.written(talk, tools, goes_on=goes_on, **variables)
        self._check(text)
        seen = self._pictures.inputs_of(text, talk)
        ids = seen.pop("input_ids")[0].tolist()
        del seen["attention_mask"]
        return text, ids, {name: value.numpy() for name, value in seen.items()}
