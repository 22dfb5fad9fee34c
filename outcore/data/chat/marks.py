"""Which characters of a rendered conversation each message wrote, for any chat template.

The template is compiled a second time, with marks that its loops over the messages write: one where a message's turn of
the loop begins, one where it ends. Taken out again, the marks leave the very text that the template itself renders;
that is checked for every conversation (template.py). No template has to be rewritten by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from outcore.data.basis import TemplateError

OPEN, CLOSE = "\U0010fff0", "\U0010fff1"
"""Private characters around a mark. A conversation that contains one is refused."""
_MARK = re.compile(f"{OPEN}([be])(\\d+):(-?\\d+){CLOSE}")
_BEGIN, _END = "outcore_mark_begin", "outcore_mark_end"


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Characters `start` to `end` of the rendering, and the message that wrote them; None: the template itself."""

    start: int
    end: int
    message: int | None


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation as the template writes it, in pieces that cover it from beginning to end."""

    text: str
    pieces: tuple[TextPiece, ...]

    def of(self, message: int) -> list[TextPiece]:
        """The pieces that one message wrote, in order; usually one."""
        return [piece for piece in self.pieces if piece.message == message]


class MarkedTemplate:
    """A chat template's marked twin, compiled once."""

    def __init__(self, source: str) -> None:
        """Compiles it as transformers compiles the template. Raises TemplateError when the source is no template."""
        import jinja2
        from jinja2 import nodes
        from transformers.utils import chat_template_utils

        try:
            environment = chat_template_utils._compile_jinja_template(source).environment
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the tokenizer's chat template is not valid Jinja: {error}") from error
        _mark_loops(tree, nodes)
        self._numbers: dict[int, int] = {}
        self._open: set[int] = set()
        self._marked = environment.from_string(tree, {_BEGIN: self._begin, _END: self._end})

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Rendering:
        """The text, and who wrote it. Raises what the template raises."""
        self._numbers = {id(message): number for number, message in enumerate(messages)}
        self._open.clear()
        text, pieces = _taken_apart(self._marked.render(messages=messages, **variables))
        return Rendering(text, tuple(pieces))

    def _begin(self, loop: int, item: Any) -> str:
        number = self._numbers.get(id(item))
        if number is None:
            return ""
        self._open.add(loop)
        return f"{OPEN}b{loop}:{number}{CLOSE}"

    def _end(self, loop: int) -> str:
        if loop not in self._open:
            return ""
        self._open.discard(loop)
        return f"{OPEN}e{loop}:-1{CLOSE}"


@lru_cache(maxsize=16)
def marked_template(source: str) -> MarkedTemplate:
    """The compiled pair of one template's source."""
    return MarkedTemplate(source)


def _taken_apart(marked: str) -> tuple[str, list[TextPiece]]:
    """The text without marks, and its pieces; a message inside another's turn of the loop owns its own part."""
    pieces: list[TextPiece] = []
    texts: list[str] = []
    stack: list[tuple[int, int]] = []
    position = written = 0

    def take(end: int) -> None:
        nonlocal written
        if part := marked[position:end]:
            texts.append(part)
            pieces.append(TextPiece(written, written + len(part), stack[-1][1] if stack else None))
            written += len(part)

    for mark in _MARK.finditer(marked):
        take(mark.start())
        position = mark.end()
        kind, loop, number = mark[1], int(mark[2]), int(mark[3])
        while stack and any(open_loop == loop for open_loop, _ in stack):
            stack.pop()  # `continue` and `break` skip the mark at the end of the loop's body
        if kind == "b":
            stack.append((loop, number))
    take(len(marked))
    return "".join(texts), pieces


def _mark_loops(tree: Any, nodes: Any) -> None:
    """Inserts marks into every loop with a named item; an item that is no message writes none when it runs."""

    def call(name: str, *arguments: Any) -> Any:
        return nodes.Output([nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)])

    loops = [loop for loop in tree.find_all(nodes.For) if isinstance(loop.target, nodes.Name)]
    for number, loop in enumerate(loops):
        item, constant = loop.target.name, nodes.Const(number)
        for block in _blocks(loop.body, nodes):
            for at, node in reversed(list(enumerate(block))):
                if (
                    isinstance(node, nodes.Assign)
                    and isinstance(node.target, nodes.Name)
                    and _takes(node.node, item, nodes)
                ):
                    block.insert(at + 1, call(_BEGIN, constant, nodes.Name(node.target.name, "load")))
        if name := _indexed(loop, nodes):
            taken = nodes.Getitem(nodes.Name(name, "load"), nodes.Name(item, "load"), "load")
            loop.body.insert(0, call(_BEGIN, constant, taken))
        loop.body.insert(0, call(_BEGIN, constant, nodes.Name(item, "load")))
        loop.body.append(call(_END, constant))
    numbers = {id(loop): number for number, loop in enumerate(loops)}
    for block in [tree.body, *(block for node in tree.find_all(nodes.Node) for block in _lists(node))]:
        for at, node in reversed(list(enumerate(block))):
            if id(node) in numbers:
                block.insert(at + 1, call(_END, nodes.Const(numbers[id(node)])))
    for node in tree.find_all(nodes.Node):
        node.set_environment(tree.environment)
        if node.lineno is None:
            node.set_lineno(1)


def _lists(node: Any) -> list[list[Any]]:
    """The lists of statements inside a node."""
    found = (getattr(node, name, None) for name in ("body", "else_", "elif_"))
    return [value for value in found if isinstance(value, list)]


def _blocks(body: list[Any], nodes: Any) -> list[list[Any]]:
    """The statements of a loop, also those under conditions, but not those of loops inside it."""
    found = [body]
    for node in body:
        if isinstance(node, nodes.If):
            for inner in _lists(node):
                found += _blocks(inner, nodes)
    return found


def _takes(expression: Any, item: str, nodes: Any) -> bool:
    """True for `messages[k]` in a loop over numbers k: the loop's turn is then that message's."""
    if not isinstance(expression, nodes.Getitem):
        return False
    names = [expression.arg, *expression.arg.find_all(nodes.Name)]
    return any(isinstance(name, nodes.Name) and name.name == item for name in names)


def _indexed(loop: Any, nodes: Any) -> str | None:
    """The list that a loop over numbers reads directly (`messages[k]`), if it is made outside of the loop."""
    made = {node.target.name for node in loop.find_all(nodes.Assign) if isinstance(node.target, nodes.Name)}
    for found in loop.find_all(nodes.Getitem):
        is_item = isinstance(found.arg, nodes.Name) and found.arg.name == loop.target.name
        if is_item and isinstance(found.node, nodes.Name) and found.node.name not in made:
            return str(found.node.name)
    return None
