"""A request in the shape of a chat, over HTTP or in a line of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outcore.apart import too_long_code
from outcore.infer.chats.forced import Forced, forced_of
from outcore.infer.chats.parsing import AnswerParser, Mode, Parsed, TemplateParser, marks_of, takes_tools
from outcore.infer.requests import Prompts

CHAT_FIELDS = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
    }
)
"""Fields that only a chat has."""


NOT_VARIABLES = frozenset(
    {"chat_template", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"}
)
"""What `chat_template_kwargs` may not set: it is said elsewhere, or not the client's to say."""


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
        more = fields.get("chat_template_kwargs") or {}
        if not isinstance(more, dict):
            raise ChatError("chat_template_kwargs must be an object.", "chat_template_kwargs")
        if taken := NOT_VARIABLES & more.keys():  # chat_template: a program of the client's
            words = f"chat_template_kwargs are variables of the model's own template; {min(taken)} is none."
            raise ChatError(words, "chat_template_kwargs")
        self.goes_on = _flag(fields, "continue_final_message", default=False)
        """Whether the answer goes on with the last message."""
        if _flag(fields, "add_generation_prompt", default=not self.goes_on) is self.goes_on:
            words = "continue_final_message and add_generation_prompt are each other's opposite."
            raise ChatError(words, "continue_final_message")
        try:
            self._prompt, self.ids = prompts.of_chat(messages, tools, self.goes_on, **more)
        except (ValueError, TypeError) as error:
            raise ChatError(str(error), "messages", too_long_code(error)) from error
        self._tools, self._template = tools, getattr(prompts.tokenizer, "response_template", None)
        self._marks = marks_of(prompts.tokenizer, with_tools=bool(tools))
        self._begins_in: Mode = "reasoning" if self._prompt.rstrip().endswith("<think>") else "content"
        self._most_calls = None if _flag(fields, "parallel_tool_calls", default=True) else 1
        self.forced: Forced | None = None
        """What the answer must be where `tool_choice` leaves no other: a form, as `response_format` says it."""
        try:
            if (choice := fields.get("tool_choice")) not in ("auto", "none", None):
                opened = self._begins_in == "reasoning"
                self.forced = forced_of(choice, tools, is_one=self._most_calls == 1, begins_in_thought=opened)
        except ValueError as error:
            raise ChatError(str(error), "tool_choice") from error
        self._form = fields.get("response_format")  # of an answer that is no call, as clients send both

    @property
    def form(self) -> tuple[Any, str]:
        """The form that answers must have, and the field that says so."""
        return (self._form, "response_format") if self.forced is None else (self.forced, "tool_choice")

    @property
    def keeps_special(self) -> bool:
        """Whether answers are read by marks that the tokenizer calls special."""
        return self._template is not None and self.forced is None

    def parser(self, name: str) -> AnswerParser | TemplateParser:
        """What tells an answer's parts apart; calls of tools are named after `name`."""
        if self._template is not None and self.forced is None:
            return TemplateParser(name, self._template, self._prompt, self._tools, self._most_calls)
        return AnswerParser(name, self._marks, self._begins_in, self._most_calls)

    def parts_of(self, name: str, text: str) -> Parsed:
        """A whole answer, told apart."""
        parser = self.parser(name)
        parser.add(text)
        parser.finish()
        return parser.whole


def _tools_of(fields: Mapping[str, Any], prompts: Prompts) -> list[Any]:
    tools, choice = fields.get("tools") or [], fields.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        raise ChatError("tools must be a list of functions, each with a name.", "tools")
    if not tools or choice == "none":
        return []
    if not takes_tools(prompts.tokenizer):
        raise ChatError("This model's chat template knows no tools.", "tools", "unsupported_parameter")
    return tools


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _flag(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise ChatError(f"{name} must be true or false.", name)
    return default if value is None else value
