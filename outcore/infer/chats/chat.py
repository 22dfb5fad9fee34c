"""A request in the shape of a chat, over HTTP or in a line of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outcore.infer.chats.parsing import AnswerParser, Mode, Parsed, TemplateParser, marks_of, takes_tools
from outcore.infer.requests import Prompts

CHAT_FIELDS = frozenset({"messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"})
"""Fields that only a chat has."""


class ChatError(ValueError):
    """A field of a chat that cannot be."""

    def __init__(self, message: str, field: str, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code


class Chat:
    """A conversation as tokens, and what reads the answers to it. ChatError for what cannot be."""

    def __init__(self, prompts: Prompts, fields: Mapping[str, Any]) -> None:
        messages, tools = fields.get("messages"), _tools_of(fields, prompts)
        if not isinstance(messages, list) or not messages:
            raise ChatError("messages must be a list of at least one message.", "messages")
        if not isinstance(fields.get("logprobs") or False, bool):
            raise ChatError("logprobs must be true or false; top_logprobs is the number beside it.", "logprobs")
        if not isinstance(fields.get("parallel_tool_calls") or False, bool):
            raise ChatError("parallel_tool_calls must be true or false.", "parallel_tool_calls")
        self._most_calls = 1 if fields.get("parallel_tool_calls") is False else None
        more = fields.get("chat_template_kwargs") or {}
        if not isinstance(more, dict):
            raise ChatError("chat_template_kwargs must be an object.", "chat_template_kwargs")
        if "chat_template" in more:  # a program of the client's, which nothing stops
            raise ChatError("chat_template_kwargs are variables of the model's own template.", "chat_template_kwargs")
        if tools:
            more = {**more, "tools": tools}
        try:
            self._prompt = prompts.text_of(messages, **more)
        except (ValueError, TypeError) as error:
            raise ChatError(str(error), "messages") from error
        self.ids = tuple(prompts.tokenizer(self._prompt, add_special_tokens=False)["input_ids"])
        self._tools, self._template = tools, getattr(prompts.tokenizer, "response_template", None)
        self._marks = marks_of(prompts.tokenizer, with_tools=bool(tools))
        self._begins_in: Mode = "reasoning" if self._prompt.rstrip().endswith("<think>") else "content"

    @property
    def keeps_special(self) -> bool:
        """Whether answers are read by marks that the tokenizer calls special."""
        return self._template is not None

    def parser(self, name: str) -> AnswerParser | TemplateParser:
        """What tells an answer's parts apart; calls of tools are named after `name`."""
        if self._template is not None:
            parser = TemplateParser(name, self._template, self._prompt, self._tools)
        else:
            parser = AnswerParser(name, self._marks, self._begins_in)
        parser.whole.most_calls = self._most_calls
        return parser

    def parts_of(self, name: str, text: str) -> Parsed:
        """A whole answer, told apart."""
        parser = self.parser(name)
        parser.add(text)
        parser.finish()
        return parser.whole


def _tools_of(fields: Mapping[str, Any], prompts: Prompts) -> list[Any]:
    tools, choice = fields.get("tools") or [], fields.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
        raise ChatError("tools must be a list of functions.", "tools")
    if choice not in ("auto", "none", None):
        raise ChatError("tool_choice must be auto or none; a call is not forced here.", "tool_choice")
    if not tools or choice == "none":
        return []
    if not takes_tools(prompts.tokenizer):
        raise ChatError("This model's chat template knows no tools.", "tools", "unsupported_parameter")
    return tools
