"""Properties of a settings field beside its name, type, default and docstring; and the table of all fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import ge, gt, le, lt
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Spec:
    """Doors by which a field may be given beside `--name` and YAML's `name:`, and which values it takes."""

    aliases: tuple[str, ...] = ()
    """Other tools' names for it; accepted as flags and in YAML."""
    file: tuple[str, ...] = ()
    """Dotted keys of deepspeed_config.json that mean it, the strongest first; a number is a place in a list."""
    file_unit: float = 1.0
    """Unit that the file counts in, in units of the field."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of its values -> ours."""
    file_words: Mapping[str, str] = field(default_factory=dict)
    """Values of the file, where they are of another kind -> ours."""
    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None
    usual: str = ""
    """Values that people take, said where one is out of range."""
    names: bool = False
    """Whether it is names with commas between them, which YAML may also give as a list."""
    mapping: bool = False
    """Whether it is a JSON object, which YAML may also give as a mapping."""
    bare: str | None = None
    """Value of the flag when it stands alone."""
    common: bool = False
    """Whether the short `--help` lists it."""


def setting(default: Any, **spec: Any) -> Any:
    """A field of the settings: its default, and what `Spec` says of it."""
    return dataclasses.field(default=default, metadata={"spec": Spec(**spec)})


@dataclass(frozen=True)
class Field:
    """One row of the table."""

    name: str
    annotation: Any
    default: Any
    help: str
    group: str
    """Title under which `--help` lists it."""
    spec: Spec

    @property
    def is_optional(self) -> bool:
        """Whether None ("not said") is a value."""
        return get_origin(self.annotation) in (Union, types.UnionType)

    @property
    def kind(self) -> Any:
        """Type of the field where it is said: bool, int, float, str or a Literal."""
        if not self.is_optional:
            return self.annotation
        return next(a for a in get_args(self.annotation) if a is not type(None))

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a choice; () of anything else."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def words_beside(self) -> tuple[str, ...]:
        """Words that a number may also be, such as auto."""
        beside = [] if self.choices else [a for a in get_args(self.annotation) if get_origin(a) is Literal]
        return tuple(word for literal in beside for word in get_args(literal))

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false."""
        return self.kind is bool

    def range_problem(self, value: Any) -> str:
        """Say which values are allowed when this number is none of them; '' when it is, or is no number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return ""
        spec, is_finite = self.spec, math.isfinite(value)
        given = ((spec.above, "above", gt), (spec.least, "at least", ge))
        given += ((spec.below, "below", lt), (spec.most, "at most", le))
        bounds = [(bound, words, holds) for bound, words, holds in given if bound is not None]
        if is_finite and all(holds(value, bound) for bound, _, holds in bounds):
            return ""
        words = " and ".join(f"{words} {bound}" for bound, words, _ in bounds)
        if spec.least is not None and spec.most is not None:
            words = f"from {spec.least} to {spec.most}"
        return words if is_finite else " and ".join(filter(None, (words, "finite")))


def _docs_of(cls: type) -> dict[str, str]:
    """The docstring under each field that this class itself declares, by field name."""
    tree = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for node, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            value = following.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[node.target.id] = inspect.cleandoc(value.value).replace("\n", " ")
    return docs


@cache
def fields_of(cls: type) -> dict[str, Field]:
    """The rows of a settings class by name, in the order of its groups (its bases, the last first)."""
    hints = get_type_hints(cls)
    docs: dict[str, str] = {}
    groups: dict[str, str] = {}
    for base in cls.__mro__:
        if dataclasses.is_dataclass(base):
            own = _docs_of(base)
            docs |= own
            groups |= dict.fromkeys(own, inspect.cleandoc(base.__doc__ or "").partition("\n")[0].rstrip("."))
    unshown = getattr(cls, "UNSHOWN", ())
    return {
        f.name: Field(
            *(f.name, hints[f.name], f.default, docs.get(f.name, ""), groups.get(f.name, "")),
            dataclasses.replace(_spec(f), common=False) if f.name in unshown else _spec(f),
        )
        for f in dataclasses.fields(cls)
    }


def _spec(one: dataclasses.Field) -> Spec:
    return one.metadata.get("spec", Spec())
