"""Servers on a free port of this machine: of the test's own process, or `outcore serve` as a process."""

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outcore.infer.opening import InferSettings
from outcore.serve import ServeSettings, listen, open_server
from tests.waiting import until


def get(server, path):
    with urllib.request.urlopen(server.url + path, timeout=120) as reply:
        return reply.read().decode()


def send(server, path, body):
    """(status, bytes) of what was sent."""
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(asked, timeout=120) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


class Running:
    """A server on a thread. `additions`: routes of rooms above; `more`: further models, as NAME=MODEL."""

    def __init__(self, folder, settings: ServeSettings, additions=lambda service: (), more=(), **infer):
        from outcore.serve.models import bases_of

        found = InferSettings(**{"context": 256, "ram_gib": 1, "page_tokens": 8, **infer})
        services = []

        def added(service):
            services.append(service)
            return additions(service)

        bases = bases_of(settings.name, str(folder), None, more) if more else ()
        listening = listen("127.0.0.1", 0)
        self.server = open_server(str(folder), found, settings, listening, added, lambda line: None, bases)
        (self.service,) = services
        self.app = self.server.config.app
        self._thread = threading.Thread(target=self.server.run, args=([listening],), daemon=True)
        self._thread.start()
        until(lambda: self.server.started)
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self):
        self.server.should_exit = True
        self._thread.join(120)
        assert not self._thread.is_alive()


@contextmanager
def served(model: Path, folder: Path, *flags: str) -> Iterator[str]:
    """Address of an `outcore serve` over this model; what it says lies in `folder`."""
    command = [sys.executable, "-m", "outcore.cli", "serve", "--port=0", *flags, f"--log_dir={folder / 'logs'}", "--"]
    with open(folder / "said", "w+b") as said:
        process = subprocess.Popen([*command, str(model)], stdout=said, stderr=said)
        try:
            while b"listening on http" not in (words := (folder / "said").read_bytes()):
                if process.poll() is not None:
                    raise RuntimeError(words.decode())
                time.sleep(0.05)
            yield words.partition(b"listening on ")[2].split()[0].decode().removesuffix("/v1")
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def held(engine):
    """Let no pass run meanwhile; what was noted before is done."""
    is_held, is_over = threading.Event(), threading.Event()
    engine.call_soon(lambda: is_held.set() or is_over.wait(120))
    assert is_held.wait(120)
    try:
        yield
    finally:
        is_over.set()
