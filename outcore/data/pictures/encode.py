"""Conversations with pictures as a model's batch: its own processor writes ids and pixels, and answers bear the loss.

Where an answer begins is found by encoding the conversation up to it, pictures included, so that placeholders of any
length are counted; that the tokens before it are the same in the whole conversation is looked at, not assumed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from outcore.data.basis import DataError, TemplateError, shorten
from outcore.data.layout import IGNORE_INDEX
from outcore.data.pictures.conversation import PictureTalk


def load_processor(name: str, *, chat_template: str | None = None, trust_remote_code: bool = False) -> Any:
    """The processor of an image-text model. DataError when it has none, or transformers lacks something for it."""
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (ImportError, AttributeError, OSError, ValueError, KeyError) as error:
        words = shorten(str(error).strip() or type(error).__name__, 200)
        raise DataError(
            f"{name}: transformers makes no processor for its pictures ({words}). Where it asks for torchvision or "
            "another package, install that; a folder needs preprocessor_config.json or processor_config.json."
        ) from error
    if getattr(processor, "image_processor", None) is None:
        raise DataError(f"{name} takes no pictures: its processor, {type(processor).__name__}, is of text alone")
    if chat_template is not None:
        processor.chat_template = chat_template
    if getattr(processor, "chat_template", None) is None:
        raise DataError(f"{name}: its processor has no chat template; give one with --chat_template")
    processor.tokenizer.padding_side = "right"
    processor.tokenizer.chat_template = processor.chat_template  # for who reads answers by it
    if processor.tokenizer.pad_token is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    return processor


Cut = tuple[int, bool]
"""Messages before this one, and whether the words that open an answer follow them."""

MOST_KNOWN = 1 << 20
"""Cuts whose place is remembered: of about 100 bytes each."""


class PictureEncoder:
    """Batches for one model."""

    def __init__(self, processor: Any, image_tokens: Collection[int], max_tokens: int | None = None) -> None:
        self._processor, self._max_tokens = processor, max_tokens
        self._image_tokens = torch.tensor(sorted(image_tokens))
        told = getattr(processor, "image_token", None)
        self._marks = [str(told)] if told else []
        tokens = processor.tokenizer.convert_ids_to_tokens(sorted(image_tokens))
        tokens += [getattr(processor, f"{kind}_token", None) for kind in ("video", "audio")]
        self._others = [str(token) for token in tokens if token and str(token) not in self._marks]
        """Words that, like marks, stand for what no text brings, and that count no places."""
        self._known = dict[bytes, int]()
        """Tokens before a cut, by what they follow from: a later epoch has the same rows."""

    def written(
        self, conversation: PictureTalk, tools: list[Any] | None = None, *, goes_on: bool = False, **variables: Any
    ) -> str:
        """The text up to where the answer begins, or, where it `goes_on`, to the end of the last message."""
        how = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on, "tools": tools}
        return self._text(conversation.messages, **how, **variables)

    def inputs_of(self, text: str, conversation: PictureTalk) -> dict[str, torch.Tensor]:
        """Inputs of one written conversation. DataError where its template left a picture out."""
        places, num = sum(map(text.count, self._marks)), len(conversation.pictures)
        if places and places != num:
            raise DataError(f"the chat template writes {places} places for {num} pictures")
        if places:  # else the template writes places by one of these; tools and variables are texts, too
            _refuse(text, self._others)
        inputs = self._inputs([text], [conversation.pictures])
        if torch.isin(inputs["input_ids"], self._image_tokens).any() != bool(num):
            raise DataError("pictures and placeholders do not go together after encoding")
        return inputs

    def batch(
        self, conversations: Sequence[PictureTalk], untrained: Sequence[Collection[int]], where: Sequence[Any]
    ) -> dict[str, torch.Tensor]:
        """Padded inputs of several, with labels. DataError names the row that cannot be trained."""
        texts = [self._text(one.messages) for one in conversations]
        inputs = self._inputs(texts, [one.pictures for one in conversations])
        inputs["labels"] = torch.full_like(inputs["input_ids"], IGNORE_INDEX)
        rows = [row[mask.bool()] for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
        for ids, conversation, place in zip(rows, conversations, where, strict=True):
            if self._max_tokens is not None and len(ids) > self._max_tokens:
                raise DataError(
                    f"{place}: {len(ids):,} tokens with pictures, more than --seq_length {self._max_tokens:,}: "
                    "a picture cannot be cut: raise it, or make the pictures smaller"
                )
            if torch.isin(ids, self._image_tokens).any() != bool(conversation.pictures):
                raise DataError(f"{place}: pictures and placeholders do not go together after encoding")
        answers = [_answers(*one) for one in zip(conversations, untrained, where, strict=True)]
        asked = {(row, *cut): None for row, cuts in enumerate(answers) for both in cuts for cut in both if cut}
        lengths = self._lengths([*asked], conversations, rows, where)
        for row, cuts in enumerate(answers):
            for first, last in cuts:
                begin, end = lengths[row, *first], lengths[row, *last] if last else len(rows[row])
                while end > begin and not self._processor.tokenizer.decode(rows[row][end - 1 : end]).strip():
                    end -= 1  # line breaks that a template writes behind a turn
                inputs["labels"][row, begin:end] = rows[row][begin:end]
        inputs["labels"][torch.isin(inputs["input_ids"], self._image_tokens)] = IGNORE_INDEX
        return inputs

    def save(self, folder: Path) -> None:
        """Write the processor beside a model."""
        self._processor.save_pretrained(folder)

    @property
    def tokenizer(self) -> Any:
        """The processor's."""
        return self._processor.tokenizer

    def _lengths(
        self, cuts: Sequence[tuple[int, *Cut]], conversations: Sequence[PictureTalk], rows: Sequence[Any], where: Any
    ) -> dict[tuple[int, *Cut], int]:
        """Tokens of a row's messages before each cut, which begin the whole conversation. All are encoded in one call:
        a processor takes milliseconds for each."""
        names = {cut: _name(conversations[cut[0]], cut, rows[cut[0]]) for cut in cuts}
        found = {cut: self._known[name] for cut, name in names.items() if name in self._known}
        decode = self._processor.tokenizer.decode  # an answer's first letters may join the blank before it in one token
        shown = {cut: conversations[cut[0]].shown_before(cut[1]) for cut in cuts if cut not in found}
        for some in ([cut for cut in shown if shown[cut]], [cut for cut in shown if not shown[cut]]):
            if not some:
                continue
            told = [(conversations[row].messages[:stop], opens) for row, stop, opens in some]
            texts = [self._text(messages, add_generation_prompt=opens) for messages, opens in told]
            inputs = self._inputs(texts, [shown[cut] for cut in some])
            for cut, padded, mask in zip(some, inputs["input_ids"], inputs["attention_mask"], strict=True):
                before, ids = padded[mask.bool()], rows[cut[0]]
                fewer = min(len(before), len(ids))
                differs = (before[:fewer] != ids[:fewer]).nonzero()
                found[cut] = same = int(differs[0]) if len(differs) else fewer
                if not decode(ids[same:]).startswith(decode(before[same:])):
                    raise TemplateError(
                        f"{where[cut[0]]}: the chat template writes the beginning of a conversation otherwise once an "
                        "answer follows, so that it cannot be told which tokens are the answer"
                    )
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        self._known.update((name, found[cut]) for cut, name in names.items())
        return found

    def _text(self, messages: Sequence[dict[str, Any]], **how: Any) -> str:
        for message in messages:
            for part in message["content"]:
                if part["type"] == "text":
                    _refuse(part["text"], [*self._marks, *self._others])
        return self._processor.apply_chat_template(list(messages), tokenize=False, **how)

    def _inputs(self, texts: list[str], pictures: list[list[Any]]) -> dict[str, torch.Tensor]:
        images = pictures if any(pictures) else None
        bos = getattr(self._processor.tokenizer, "bos_token", None)
        told = {"add_special_tokens": False} if bos and all(text.startswith(bos) for text in texts) else {}
        made = dict(self._processor(text=texts, images=images, padding=True, return_tensors="pt", **told))
        kinds = (value for name, value in made.items() if name.endswith("token_type_ids"))
        if any(bool((values > 1).any()) for values in kinds):
            raise DataError("a text holds a word that stands for a video or audio in this model, and brings none")
        return made


def _name(conversation: PictureTalk, cut: tuple[int, *Cut], ids: torch.Tensor) -> bytes:
    """Digest of what a cut's place follows from: the messages, the pictures' sizes, and the conversation's tokens."""
    told = repr((conversation.messages, [picture.size for picture in conversation.pictures], cut[1:]))
    return blake2b(told.encode("utf-8", "surrogatepass") + ids.numpy().tobytes(), digest_size=16).digest()


def _refuse(text: str, words: Sequence[str]) -> None:
    """DataError for a text with one of these words."""
    if (word := next((word for word in words if word in text), None)) is not None:
        kind = next((kind for kind in ("video", "audio") if kind in word), "picture")
        raise DataError(f"a text holds {word}, which stands for a {kind} in this model, and brings none")


def _answers(conversation: PictureTalk, untrained: Collection[int], where: Any) -> list[tuple[Cut, Cut | None]]:
    """Cuts around each trained answer; None: it ends with the conversation."""
    found, count = list[tuple[Cut, Cut | None]](), len(conversation.messages)
    for at, message in enumerate(conversation.messages):
        if message["role"] == "assistant" and at not in untrained:
            found.append(((at, True), (at + 1, False) if at + 1 < count else None))
    if not found:
        raise DataError(f"{where}: no answer to learn from")
    return found
