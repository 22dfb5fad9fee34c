"""A server over a tiny model, on a free port of this machine."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from outcore.infer.opening import InferSettings, open_engine
from outcore.serve import ServeSettings
from tests.infer.models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """(folder, model, tokenizer)."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    model, tokenizer = save_tiny_model(folder)
    return folder, model, tokenizer


class Running:
    """A server on a thread."""

    def __init__(self, folder, settings: ServeSettings, **infer):
        import uvicorn

        from outcore.serve.app import create_app
        from outcore.serve.service import Service

        opened = open_engine(str(folder), InferSettings(**{"context": 256, "ram_gib": 1, "page_tokens": 8, **infer}))
        self.service = Service(opened, settings)
        config = uvicorn.Config(create_app(self.service), host="127.0.0.1", port=0, log_level="error")
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        until = time.monotonic() + 30
        while not self.server.started and time.monotonic() < until:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self):
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


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
