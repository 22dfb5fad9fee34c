"""A tiny model in a folder, made once."""

import pytest

from tests.infer.models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """(folder, model, tokenizer)."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model, tokenizer = save_tiny_model(folder)
    return folder, model, tokenizer
