"""Docstrings read without the name above them: none starts with a word that needs it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests import house

FRAGMENTS = (
    *("Of ", "Likewise", "As ", "Where ", "By ", "The same", "None", "See ", "Those ", "These ", "Its ", "Their "),
    *("Inside, ", "Nothing: ", "'' ", "What ", "Who ", "How ", "Until ", "For people"),
)
"""A method's docstring starts with a verb or what it gives, a field's with a noun."""


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
