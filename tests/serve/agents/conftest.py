"""A tiny model that reads as much as agents send."""

import pytest

from outcore.serve import ServeSettings
from tests.infer.models import save_tiny_model
from tests.serve.running import Running


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("agents") / "tiny"
    save_tiny_model(found, positions=16384)
    return found


@pytest.fixture(scope="package")
def wide(folder, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    running = Running(folder, ServeSettings(logs=logs, name="tiny", max_answer_tokens=300), context=4096)
    yield running
    running.stop()
