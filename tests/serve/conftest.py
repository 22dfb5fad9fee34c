"""A server over a tiny model, on a free port of this machine."""

from dataclasses import replace

import pytest

from outcore.serve import ServeSettings
from tests.infer.models import save_tiny_model
from tests.serve.running import Running


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """(folder, model, tokenizer)."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    model, tokenizer = save_tiny_model(folder)
    return folder, model, tokenizer


@pytest.fixture(scope="session")
def start(tiny_folder, tmp_path_factory):
    """A function that starts a server with these settings; all are stopped in the end."""
    running = []

    def start_one(settings=None, **infer):
        settings = settings or ServeSettings()
        settings = replace(settings, logs=tmp_path_factory.mktemp("logs"), name=settings.name or "tiny")
        running.append(Running(tiny_folder[0], settings, **infer))
        return running[-1]

    yield start_one
    for one in running:
        one.stop()


@pytest.fixture(scope="session")
def server(start):
    """One with the usual settings."""
    return start(ServeSettings(max_answer_tokens=64, max_body_bytes=100_000, max_queue=40))


@pytest.fixture(scope="session")
def openai():
    """Imported where it is asked for: it takes seconds."""
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(openai, server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120)
