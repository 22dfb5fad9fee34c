"""A request in the shape of a chat, over HTTP or in a line of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outcore.apart import too_long_code
from outcore.infer.chats.calls import AskedCalls, CallGrammar, Form, asked_of
from outcore.infer.chats.parsing import AnswerParser, Parsed, Reads, TemplateParser, takes_tools
from outcore.infer.chats.style import hidden_of, specials_of, style_of, thought_of
from outcore.infer.requests import Grammars, Prompts, Request, Sampling

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
"""Variables that `chat_template_kwargs` may not set: other fields do, or the client may not."""


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
        _check_calls(messages)
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
            self._prompt, self.ids, self.seen = prompts.of_chat(messages, tools, self.goes_on, **more)
        except (ValueError, TypeError) as error:
            raise ChatError(str(error), "messages", too_long_code(error)) from error
        self._tools, self._template = tools, getattr(prompts.tokenizer, "response_template", None)
        self._form = fields.get("response_format")
        self._called: Form | None = None
        """Form of answers that call tools, or may."""
        try:
            asked = asked_of(
                fields.get("tool_choice"), tools, is_one=not _flag(fields, "parallel_tool_calls", default=True)
            )
            self._learn(prompts, asked)
        except ChatError:
            raise
        except ValueError as error:
            raise ChatError(str(error), "tool_choice" if "tool_choice" in str(error) else "tools") from error

    def _learn(self, prompts: Prompts, asked: AskedCalls) -> None:
        """Find how this model writes thoughts and calls, and which form its answers have by that."""
        tokenizer, thought = prompts.tokenizer, thought_of(prompts.tokenizer)
        in_thought = thought is not None and self._prompt.rstrip().endswith(thought[0].strip())
        style = style_of(prompts) if self._tools else None
        functions = [tool["function"] for tool in self._tools]
        self._reads = Reads(
            thought, style, "reasoning" if in_thought else "content", 1 if asked.is_one else None,
            frozenset(function["name"] for function in functions if "grammar" in function),
            {function["name"]: _properties_of(function) for function in functions},
        )  # fmt: skip
        # A form is of an answer that is no call: clients send both.
        has_form = not asked.is_forced and (self._form or {"type": "text"}) != {"type": "text"}
        if style is not None and not has_form and (self._template is None or asked.is_forced):
            self._called = CallGrammar(style, specials_of(tokenizer), thought, in_thought=in_thought).form(asked)
        said = "".join((*(thought or ()), *((style.open, style.next, style.close) if style else ())))
        self._has_special = any(mark in said for mark in hidden_of(tokenizer))

    @property
    def form(self) -> tuple[Any, str]:
        """The form that answers must have, and the field that says so."""
        return (self._form, "response_format") if self._called is None else (self._called, "tools")

    @property
    def keeps_special(self) -> bool:
        """Whether answers are read by marks that the tokenizer calls special."""
        return self._has_special or (self._template is not None and self._called is None)

    def parser(self, name: str) -> AnswerParser | TemplateParser:
        """Make the parser that tells an answer's parts apart; ids of its calls contain `name`."""
        if self._template is not None and self._called is None:
            return TemplateParser(name, self._template, self._prompt, self._tools, self._reads.most_calls)
        return AnswerParser(name, self._reads)

    def parts_of(self, name: str, text: str) -> Parsed:
        """A whole answer, told apart."""
        parser = self.parser(name)
        parser.add(text)
        parser.finish()
        return parser.whole


def request_of(
    body: Mapping[str, Any],
    name: str,
    ids: tuple[int, ...],
    sampling: Sampling,
    grammars: Grammars,
    chat: Chat | None = None,
    deadline_s: float | None = None,
    priority: int = 0,
) -> Request:
    """A request for answers to these tokens, or to a chat, in as many choices and the form that the body asks for.
    ValueError for what cannot be."""
    count = 1 if body.get("n") is None else body["n"]
    grammar = grammars.of(*(chat.form if chat else (body.get("response_format"), "response_format")))
    reads: dict[str, Any] = {"goes_on": True}
    if chat:
        reads = {"keeps_special": chat.keeps_special, "goes_on": chat.goes_on, "seen": chat.seen}
    return Request(name, ids, sampling, count, priority, grammar, deadline_s, **reads)


def _check_calls(messages: list[Any]) -> None:
    """ChatError for a result without its call, and for a call that the conversation goes on from without a result."""
    asked: dict[str, int] = {}
    for number, message in enumerate([*messages, {"role": "end"}]):
        role, calls = (message.get("role"), message.get("tool_calls")) if isinstance(message, Mapping) else (None, None)
        if role == "tool":
            name = message.get("tool_call_id")
            if name is not None and asked.pop(name if isinstance(name, str) else "", None) is None:
                raise ChatError(
                    f"messages.{number}: a tool result is for {name!r}, which no call before it is.", "messages"
                )
        elif asked:
            name, place = next(iter(asked.items()))
            raise ChatError(f"messages.{place}: the call {name!r} has no tool result behind it.", "messages")
        ids = [call.get("id") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
        asked |= {name: number for name in ids if isinstance(name, str)}


def _tools_of(fields: Mapping[str, Any], prompts: Prompts) -> list[Any]:
    tools, choice = fields.get("tools") or [], fields.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        raise ChatError("tools must be a list of functions, each with a name.", "tools")
    if not tools or choice == "none":
        return []
    if not takes_tools(prompts.tokenizer):
        raise ChatError("This model's chat template knows no tools.", "tools", "unsupported_parameter")
    return tools


def _properties_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = function.get("parameters")
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _flag(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise ChatError(f"{name} must be true or false.", name)
    return default if value is None else value
