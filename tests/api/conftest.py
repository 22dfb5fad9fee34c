"""A tiny model in a folder, and the LLM over it that most tests share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import outcore
from tests.infer.models import save_tiny_model

SMALL: dict[str, Any] = {"context": 256, "ram_gib": 1, "page_tokens": 8}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """(folder, model, tokenizer)."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return folder, *save_tiny_model(folder)


@pytest.fixture(scope="session")
def llm(tiny: tuple[Path, Any, Any]) -> Iterator[outcore.LLM]:
    with outcore.LLM(str(tiny[0]), **SMALL) as found:
        yield found
