"""Tiny models in a folder, made once; guesses that do not depend on the clock."""

import pytest

from outcore.infer.schedule import PassCost
from tests.infer.models import save_tiny_model

FREE_GUESSES = 12


@pytest.fixture(autouse=True)
def free_guesses(monkeypatch):
    """Guesses are made whatever they cost: what passes of tiny models take is noise."""
    monkeypatch.setattr(PassCost, "worth", lambda self, chances, rows=1: min(FREE_GUESSES, len(chances)))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """(folder, model, tokenizer)."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model, tokenizer = save_tiny_model(folder)
    return folder, model, tokenizer
