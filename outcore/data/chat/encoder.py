"""Conversations to tokens, with the tokens that the assistant wrote marked: only they carry loss.

Three ways, the first that applies:
1. The template marks assistant text itself ({% generation %}): transformers returns the mask.
2. The template is prefix-stable: rendering messages 0..i-1 with the generation prompt, and 0..i, gives beginnings of
   the whole rendering; the characters between the two are turn i. Checked for every conversation.
3. The template rewrites earlier turns (Qwen3 drops their reasoning): each turn must begin where its generation prompt
   ends, its words must stand right there (but for an emptied reasoning block), and the turn's end token is included.
Anything else is an error: a guessed mask would train on the user's words. The whole text is tokenised once; a token
that reaches over a boundary carries no loss.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from outcore.data.errors import TemplateError, shorten
from outcore.data.rows import ChatExample
from outcore.data.sources import RowError

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_EMPTIED_REASONING = re.compile(r"\s*(<think>\s*</think>\s*)?")

_CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}{%- if message['role'] == 'assista"
    "nt' -%}{%- generation -%}{{- message['content'] + END -}}{%- endgeneration -%}{%- else "
    "-%}{{- message['content'] + END -}}{%- endif -%}{{- '\\n' -}}{%- endfor -%}{%- if add_generation_prompt "
    "-%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def default_template(tokenizer: Any) -> str:
    """ChatML, its turns ended by <|im_end|> where the tokenizer has that token, by its own EOS token otherwise."""
    knows_chatml = tokenizer.convert_tokens_to_ids("<|im_end|>") not in (None, tokenizer.unk_token_id)
    return _CHATML.replace("END", "'<|im_end|>'" if knows_chatml else "eos_token")


def ensure_chat_template(tokenizer: Any) -> str | None:
    """Gives a tokenizer without chat template the default one; returns what to tell, None if it had one."""
    if tokenizer.chat_template:
        return None
    tokenizer.chat_template = default_template(tokenizer)
    end = "<|im_end|>" if "'<|im_end|>'" in tokenizer.chat_template else tokenizer.eos_token
    return f"the tokenizer has no chat template: conversations are written as ChatML, each turn ended by {end}"


@dataclass(frozen=True)
class ChatEncoder:
    """Turns conversations into (token ids, loss mask); `train_on_all` puts loss on every token."""

    tokenizer: Any
    train_on_all: bool = False

    def encode(self, example: ChatExample) -> tuple[np.ndarray, np.ndarray]:
        """(ids uint32 [n], carries loss bool [n]).

        Raises RowError when the template refuses the conversation, TemplateError when it cannot be told what the
        assistant wrote.
        """
        if self.train_on_all:
            ids = self._tokenise(self.render(example.messages, example.tools))
            return ids, np.ones(len(ids), dtype=bool)
        template = self.tokenizer.get_chat_template(tools=example.tools)
        if _GENERATION_TAG.search(template) and self.tokenizer.is_fast:
            return self._by_generation_tag(example)
        return self._by_turns(example)

    def split_last_turn(self, example: ChatExample) -> tuple[np.ndarray, np.ndarray]:
        """For encoder-decoder models: (ids before the last assistant turn, ids of its words)."""
        last = max(i for i, message in enumerate(example.messages) if message["role"] == "assistant")
        asked = self.render(example.messages[:last], example.tools, generation_prompt=True)
        return self._tokenise(asked), self._tokenise(example.messages[last]["content"])

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, generation_prompt: bool = False) -> str:
        """The conversation as the template writes it."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # jinja2's TemplateError and whatever the template's own code raises
            raise RowError(f"the tokenizer's chat template refuses this conversation: {shorten(str(error))}") from error
        return str(text)

    def _tokenise(self, text: str) -> np.ndarray:
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.uint32)

    def _by_generation_tag(self, example: ChatExample) -> tuple[np.ndarray, np.ndarray]:
        self.render(example.messages, example.tools)  # a refusal by the template is told apart from a missing mask
        try:
            encoded = self.tokenizer.apply_chat_template(
                example.messages,
                tools=example.tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
            )
        except OverflowError:  # transformers looks for the token of character -1 when a mark at the start is empty
            encoded = {"input_ids": [], "assistant_masks": []}
        ids = np.asarray(encoded["input_ids"], dtype=np.uint32)
        mask = np.asarray(encoded["assistant_masks"], dtype=bool)
        if not mask.any() and any(_is_spoken(message) for message in example.messages):
            raise TemplateError(
                "the tokenizer's chat template has {% generation %} marks, but they cover no token of a conversation "
                "that has assistant text. Correct the template (the mark must enclose the assistant's content)"
            )
        return ids, mask

    def _by_turns(self, example: ChatExample) -> tuple[np.ndarray, np.ndarray]:
        text = self.render(example.messages, example.tools)
        spans = self.assistant_spans(example, text)
        if not self.tokenizer.is_fast:
            return self._tokenise_pieces(text, spans)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.asarray(encoded["input_ids"], dtype=np.uint32)
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        mask = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            mask |= (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 1] > offsets[:, 0])
        return ids, mask

    def _tokenise_pieces(self, text: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Tokenizers without offsets: piece by piece, each wholly inside or outside an assistant turn."""
        ids, mask, position = [], [], 0
        for start, end in [*spans, (len(text), len(text))]:
            for piece, is_assistant in ((text[position:start], False), (text[start:end], True)):
                if piece:
                    tokens = self._tokenise(piece)
                    ids.append(tokens)
                    mask.append(np.full(len(tokens), is_assistant))
            position = end
        return np.concatenate(ids), np.concatenate(mask)

    def assistant_spans(self, example: ChatExample, text: str) -> list[tuple[int, int]]:
        """(start, end) character positions in `text`, the whole rendering, of every assistant turn."""
        messages, tools = example.messages, example.tools
        spans: list[tuple[int, int]] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:i], tools, generation_prompt=True) if i else ""
            through = self.render(messages[: i + 1], tools)
            if not text.startswith(before):  # e.g. a second assistant turn in a row, or a template without the prompt
                before = self.render(messages[:i], tools) if i else ""
            if not text.startswith(before):
                raise _unstable(i, "it renders the messages before it differently once it is there")
            if text.startswith(through) and through.startswith(before):
                spans.append((len(before), len(through)))
            elif _is_spoken(message):
                spans.append(self._span_of_words(text, len(before), message["content"], i))
            if len(spans) > 1 and spans[-1][0] < spans[-2][1]:
                raise _unstable(i, "its turns overlap")
        return spans

    def _span_of_words(self, text: str, start: int, content: str, i: int) -> tuple[int, int]:
        words = content.rsplit("</think>", 1)[-1].strip()
        reasoning = _EMPTIED_REASONING.match(text, start)
        assert reasoning is not None  # the pattern also matches nothing
        if not words or not text.startswith(words, reasoning.end()):
            raise _unstable(i, "the assistant's words do not follow its generation prompt")
        end = reasoning.end() + len(words)
        marks = [token for token in self.tokenizer.all_special_tokens if text.startswith(token, end)]
        return start, end + max((len(token) for token in marks), default=0)


def _is_spoken(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and bool(str(message["content"]).strip())


def _unstable(i: int, why: str) -> TemplateError:
    return TemplateError(
        f"the tokenizer's chat template does not let the assistant's tokens be told apart (message {i + 1}: {why}). "
        f"Mark them in the template with {{% generation %}} ... {{% endgeneration %}}, set train_on_prompt: true to "
        "train on everything, or use another tokenizer's template"
    )
