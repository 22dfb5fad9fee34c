"""A server of the test's own process, on a free port of this machine."""

import json
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

from outcore.infer.opening import InferSettings, open_engine
from outcore.serve import ServeSettings
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
    """A server on a thread. `additions`: routes of rooms above."""

    def __init__(self, folder, settings: ServeSettings, additions=lambda service: (), **infer):
        from outcore.serve.app import create_app
        from outcore.serve.service import Service
        from outcore.serve.stopping import Server

        opened = open_engine(str(folder), InferSettings(**{"context": 256, "ram_gib": 1, "page_tokens": 8, **infer}))
        self.service = Service(opened, settings)
        self.app = app = create_app(self.service, additions(self.service))
        self.server = Server(app, host="127.0.0.1", port=0)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self):
        self.server.should_exit = True
        self._thread.join(120)
        assert not self._thread.is_alive()


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
