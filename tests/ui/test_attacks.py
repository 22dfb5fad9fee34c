"""A page of another site in a real browser, against the panels' routes and the model's: nothing that it sends comes in,
and signing in works all the same."""

import http.server
import json
import threading
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("fastapi")

from outcore.evaluate.http import with_evaluations
from outcore.serve import ServeSettings, listen
from outcore.serve.additions import Server
from outcore.ui.api import PanelsApi, Place
from outcore.ui.app import create_app
from outcore.ui.settings import UiSettings
from tests.infer.models import save_tiny_model
from tests.serve.gate.test_routes import task_in
from tests.serve.running import Running, until

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(find_spec("gradio") is None, reason="the panels' packages are not installed"),
]
TOKEN = "a-long-enough-token"
PAGE = """<!doctype html><title>evil</title><img src="{url}{reads}"><iframe src="{url}/health" name="framed"></iframe>
<form id="form" method="post" enctype="text/plain" target="framed">
<input name='{{"title": "by a form", "x' value='": 1}}'></form><form id="plain" method="post" target="framed"></form>
<script>
const body = JSON.stringify({body}), paths = {paths};
async function tried(url, more) {{
  try {{ const {{type, status}} = await fetch(url, {{method: "POST", body, ...more}}); return type + " " + status; }}
  catch (error) {{ return "failed"; }}
}}
window.attack = async () => {{
  const said = [];
  for (const url of paths.map(path => "{url}" + path)) {{
    for (const type of ["text/plain", "application/x-www-form-urlencoded", "application/json"])
      for (const mode of ["no-cors", "cors"])
        said.push(await tried(url, {{mode, headers: {{"Content-Type": type}}, credentials: "include"}}));
    navigator.sendBeacon(url, new Blob([body], {{type: "text/plain"}}));
    for (const name of ["form", "plain"]) {{
      document.getElementById(name).action = url;
      document.getElementById(name).submit();
      await new Promise(done => setTimeout(done, 250));
    }}
  }}
  try {{ said.push((await fetch("{url}{reads}")).status); }} catch (error) {{ said.push("failed"); }}
  return said;
}};
</script>"""
OF_THE_MODEL = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/v1/files",
                "/v1/batches", "/v1/evaluations"]  # fmt: skip


def attack_on(url: str, paths: list[str], reads: str, **body: Any) -> str:
    """A page that sends this body to each of these paths, in every way that a browser knows."""
    return PAGE.format(url=url, paths=json.dumps(paths), reads=reads, body=json.dumps(body))


class Panels:
    """The routes on a real port. `seen`: (method, path, status) of each answer."""

    def __init__(self, *tokens: str) -> None:
        listening = listen("127.0.0.1", 0)
        port = listening.getsockname()[1]
        self.api, self.seen = PanelsApi(Place()), []
        app = create_app(UiSettings(port=port, tokens=tokens), self.api, with_panels=False)
        self.url = f"http://127.0.0.1:{port}"
        self.server = Server(self._noting(app), log_level="error")
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()
        until(lambda: self.server.started)

    def _noting(self, app):
        async def noting(scope, receive, send):
            async def told(message):
                if message["type"] == "http.response.start" and scope["path"] != "/favicon.ico":
                    self.seen.append((scope["method"], scope["path"], message["status"]))
                await send(message)

            await app(scope, receive, told if scope["type"] == "http" else send)

        noting.state = app.state
        return noting

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(60)


@contextmanager
def site(page: str):
    """Another site: its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()


@pytest.fixture
def started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    running = []

    def start(*tokens: str) -> Panels:
        running.append(Panels(*tokens))
        return running[-1]

    yield start
    for one in running:
        one.stop()


@pytest.mark.parametrize("tokens", [(), (TOKEN,)], ids=["open", "with a token"])
def test_a_page_of_another_site_gets_nothing_in(chromium, started, tokens):
    panels = started(*tokens)
    context = chromium.new_context()
    page = context.new_page()
    if tokens:  # a user who has signed in
        page.goto(f"{panels.url}/?token={TOKEN}")
    panels.seen.clear()
    for name in ("127.0.0.1", "localhost"):  # another port of the same name is another site's page, too
        with site(attack_on(panels.url, ["/v1/conversations"], "/v1/runs", title="by a page")) as evil:
            page.goto(evil.replace("localhost", name))
            said = page.evaluate("window.attack()")
            assert all(one in ("failed", "opaque 0") for one in said), said
    assert panels.seen and {status for _, _, status in panels.seen} == {403}, panels.seen
    assert panels.api.conversations.all() == []
    context.close()


def test_a_page_of_another_site_asks_no_model_and_runs_no_task(chromium, tmp_path, monkeypatch):
    """A task's file of Python ran by `fetch` with mode no-cors."""
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "tiny")
    mark = task_in(tmp_path / "evil")
    served = Running(tmp_path / "tiny", ServeSettings(logs=tmp_path / "logs" / "serve"), with_evaluations)
    refused = served.service.metrics.refused
    body = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi", "max_tokens": 1, "limit": 1}
    body |= {"tasks": ["evil_t"], "include_path": str(mark.parent)}
    page = chromium.new_page()
    try:
        with site(attack_on(served.url, OF_THE_MODEL, "/v1/models", **body)) as evil:
            page.goto(evil)
            said = page.evaluate("window.attack()")
        assert len(said) == 6 * len(OF_THE_MODEL) + 1 and all(one in ("failed", "opaque 0") for one in said), said
        turned_away = {status: count._value.get() for (status,), count in refused._metrics.items()}
        assert turned_away.keys() == {"403"} and turned_away["403"] > len(said), turned_away
        assert served.service.opened.engine.counts.passes == 0 and not mark.exists()
        assert not list((tmp_path / "logs" / "serve" / "files").iterdir())
    finally:
        page.close()
        served.stop()


def test_a_name_that_was_turned_to_this_machine_gets_nothing(chromium, started, tmp_path):
    panels = started()
    context = chromium.browser_type.launch_persistent_context(
        tmp_path / "profile", executable_path=chromium_path(), headless=True,
        args=["--no-sandbox", "--host-resolver-rules=MAP rebound.example 127.0.0.1"],
    )  # fmt: skip
    page = context.new_page()
    rebound = panels.url.replace("127.0.0.1", "rebound.example")
    assert page.goto(f"{rebound}/v1/runs").status == 403
    asked = "url => fetch(url, {method: 'POST', body: '{}', headers: {'Content-Type': 'application/json'}})"
    assert page.evaluate(f"async url => (await ({asked})(url)).status", f"{rebound}/v1/conversations") == 403
    assert panels.api.conversations.all() == []
    context.close()


def chromium_path() -> str:
    from tests.ui.conftest import CHROMIUM

    assert CHROMIUM is not None
    return CHROMIUM


def test_who_signs_in_by_the_form_is_in(chromium, started):
    panels = started(TOKEN)
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{panels.url}/v1/runs")
    page.locator("input[name=token]").fill("a-wrong-token")
    page.locator("button").click()
    page.get_by_text("The token is wrong").wait_for()
    page.locator("input[name=token]").fill(TOKEN)
    page.locator("button").click()
    page.wait_for_url(f"{panels.url}/")
    assert page.goto(f"{panels.url}/v1/runs").status == 200
    made = "async () => (await fetch('/v1/conversations', {method: 'POST', body: '{}', "
    made += "headers: {'Content-Type': 'application/json'}})).status"
    assert page.evaluate(made) == 200
    context.close()
