"""Settings of an evaluation: one frozen value, from flags or from JSON, checked when it is made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from types import MappingProxyType
from typing import Any


class EvaluationError(ValueError):
    """The evaluation cannot be done; the message says why and what to do. `param`: the setting it is about."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of one evaluation. Raises EvaluationError that names the field with an impossible value."""

    tasks: tuple[str, ...]
    """Own tasks (`outcore_...`) and names of lm-evaluation-harness: tasks, groups, tags."""
    limit: int | float | None = None
    """Documents of each task; below 1: a share of them. None: all."""
    num_fewshot: int | None = None
    """Examples before each question; None: as the task says."""
    apply_chat_template: bool = False
    system_instruction: str | None = None
    gen_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the tasks' own generation settings."""
    seed: int = 1234
    """Key of the few-shot examples and of answers that are drawn."""
    include_path: str | None = None
    """Folder with further tasks in the harness's YAML."""
    note_tokens: int | None = None
    """Tokens of questions that are answered before the answers are noted; None: one pass over all layers."""

    def __post_init__(self) -> None:
        tasks = tuple(name.strip() for name in self.tasks)
        object.__setattr__(self, "tasks", tasks)
        object.__setattr__(self, "gen_kwargs", MappingProxyType(dict(self.gen_kwargs)))
        if not tasks or not all(tasks):
            raise EvaluationError("tasks is empty. Name at least one: --tasks outcore_endings", "tasks")
        if twice := sorted({name for name in tasks if tasks.count(name) > 1}):
            raise EvaluationError(f"tasks names {twice[0]} twice.", "tasks")
        is_number = isinstance(self.limit, (int, float)) and not isinstance(self.limit, bool) and isfinite(self.limit)
        if self.limit is not None and not (is_number and (0 < self.limit < 1 or self.limit == int(self.limit) >= 1)):
            raise EvaluationError(
                f"limit is {self.limit!r}, but must be a whole number of documents, or a share between 0 and 1.",
                "limit",
            )
        for name, least in (("num_fewshot", 0), ("seed", 0), ("note_tokens", 1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise EvaluationError(f"{name} is {value!r}, but must be a whole number of at least {least}.", name)
        if self.system_instruction is not None and not self.apply_chat_template:
            raise EvaluationError(
                "system_instruction is said in a chat: give apply_chat_template too, or leave it out.",
                "system_instruction",
            )

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> EvaluationSettings:
        """Settings of a JSON object; `tasks` may be one text with commas. Unknown names are an error."""
        known = {one.name for one in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise EvaluationError(f"{unknown[0]} is no setting; known are {', '.join(sorted(known))}.", unknown[0])
        found = {name: value for name, value in given.items() if value is not None}
        tasks = found.get("tasks", ())
        if isinstance(tasks, str):
            tasks = [name for name in tasks.split(",") if name.strip()]
        if not isinstance(tasks, Sequence) or not all(isinstance(name, str) for name in tasks):
            raise EvaluationError("tasks must be a list of names.", "tasks")
        for name, kind, words in (
            ("apply_chat_template", bool, "true or false"),
            ("system_instruction", str, "a text"),
            ("gen_kwargs", Mapping, "an object"),
            ("include_path", str, "a folder"),
        ):
            if name in found and not isinstance(found[name], kind):
                raise EvaluationError(f"{name} must be {words}.", name)
        return cls(**{**found, "tasks": tuple(tasks)})

    def as_json(self) -> dict[str, Any]:
        """All fields, as JSON has them."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return found | {"tasks": list(self.tasks), "gen_kwargs": dict(self.gen_kwargs)}

    def key(self, *more: str) -> str:
        """Name of these settings for this model: an unfinished evaluation with the same one is gone on with."""
        text = json.dumps([self.as_json(), *more], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
