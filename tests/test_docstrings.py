"""Docstrings read without the name above them: none starts with a word that needs it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests import house

FRAGMENTS = (
    *("Of ", "Likewise", "As ", "Where ", "By ", "The same", "None", "See ", "Those ", "These ", "Its ", "Their "),
    *("Inside, ", "Nothing: ", "'' "),
)
"""A method's docstring starts with a verb or what it gives, a field's with a noun."""
VAGUE = ("What ", "Who ", "How ", "Until ", "For people")
PLAIN_ROOMS = (
    *("checkpoint", "common", "config", "data", "engine", "flow", "install", "machine", "monitor", "optim"),
    *("performance", "plan", "probe", "sizing", "staging", "states", "storage", "train"),
)
"""Rooms where none of these words begins a docstring: the list grows until it has all."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring: of modules, classes and functions, and below fields."""
    for node in house.statements(path):
        for statement in getattr(node, "body", ()):
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def test_no_docstring_starts_with_a_fragment():
    found = [(path, line, text) for path in house.PACKAGE.rglob("*.py") for line, text in docstrings(path)]
    assert len(found) > 4000
    assert not [f"{path}:{line}: {text[:60]}" for path, line, text in found if text.strip().startswith(FRAGMENTS)]


def test_docstrings_of_plain_rooms_name_what_they_speak_of():
    files = [path for room in PLAIN_ROOMS for path in (house.PACKAGE / room).rglob("*.py")]
    found = [(path, line, text) for path in files for line, text in docstrings(path)]
    assert not [f"{path}:{line}: {text[:60]}" for path, line, text in found if text.strip().startswith(VAGUE)]
