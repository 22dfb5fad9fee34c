"""The panels in a browser over a model that pretends: quick enough to look at every corner of a page."""

import socket
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("fastapi")

from outcore.ui.api import PanelsApi, Place
from outcore.ui.api import children as children_module
from outcore.ui.app import create_app
from outcore.ui.settings import UiSettings
from tests.serve.running import until
from tests.ui.test_errors import PRETENDER

pytestmark = [
    pytest.mark.skipif(find_spec("gradio") is None, reason="the panels' packages are not installed"),
    pytest.mark.more,
    pytest.mark.timeout(600),
]
HOSTILE = """<div style="position:fixed;inset:0;z-index:9999;background:red">covers</div>
<form action="/v1/runs" method="post"><input name="a" value="b"><button>Send</button></form>
<img src=x onerror="window.pwned=1"><svg onload="window.pwned=1"></svg><style>body{display:none}</style>
<script>window.pwned=1</script><iframe src="/health"></iframe>

[a](javascript:window.pwned=1) [b](data:text/html,x) [c](JaVaScRiPt:1) [d](/v1/runs) ![e](/v1/runs)
[good](https://example.org/) **bold** `<b>` {{value}} ${window.pwned=1}

```html
<div style="position:fixed">
```
"""
LIVE = "form, input, img, svg, style, script, iframe, [style], [onerror], [onload], [name]"


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """Routes and panels on a real port of this process: `url`, `http`, `folder`."""
    from outcore.serve.additions import Server

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    port, folder = listening.getsockname()[1], tmp_path_factory.mktemp("panels")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(children_module, "PROGRAM", (sys.executable, str(PRETENDER)))
        server = Server(create_app(UiSettings(port=port), PanelsApi(Place())), log_level="error")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until(lambda: server.started, 120)
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=120) as http:
            yield SimpleNamespace(url=url, http=http, folder=Path(folder))
        server.should_exit = True
        thread.join(60)


@pytest.fixture
def page(chromium, here):
    """A page of the panels at desktop width."""
    context = chromium.new_context(viewport={"width": 1280, "height": 860})
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.goto(here.url)
    yield page
    context.close()


def tab(page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).first.click()


def load(here, model: str = "quick") -> None:
    if here.http.get("/v1/model").json()["state"] != "ready":
        here.http.post("/v1/model", json={"model": model})
        until(lambda: here.http.get("/v1/model").json()["state"] == "ready")


def forget(here) -> None:
    """No conversation is kept."""
    for one in here.http.get("/v1/conversations").json()["data"]:
        here.http.delete(f"/v1/conversations/{one['id']}")


def harmless(page, place: str) -> None:
    assert page.locator(place).locator(LIVE).count() == 0
    assert not page.evaluate("window.pwned") and page.locator("body").is_visible()


def test_html_in_an_answer_is_text_also_after_a_reload(page, here):
    load(here)
    tab(page, "Chat")
    page.locator("#message textarea").fill(f"say {HOSTILE}")
    page.locator("#send").click()
    page.locator("#timings", has_text="tokens").wait_for()
    for _ in range(2):
        answer = page.locator("#chat article.assistant .md")
        answer.locator("strong", has_text="bold").wait_for()
        harmless(page, "#chat .oc")
        links = [link.get_attribute("href") for link in answer.locator("a").all()]
        assert links == ["https://example.org/"]
        assert '<div style="position:fixed">' in answer.locator("pre code").inner_text()
        assert "{{value}} ${window.pwned=1}" in answer.inner_text() and "covers</div>" in answer.inner_text()
        page.reload()
        tab(page, "Chat")


def test_titles_names_rows_and_refusals_are_text(page, here):
    forget(here)
    here.http.post("/v1/conversations", json={"title": HOSTILE})
    run = here.folder / "logs" / "<img src=x onerror=window.pwned=1>"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"event": "header", "run": "<svg onload=window.pwned=1>", "config": {}}\n')
    (here.folder / "rows.jsonl").write_text('{"text": "<img src=x onerror=window.pwned=1>"}\n' * 40)
    page.reload()
    tab(page, "Runs")
    page.locator("#run_state", has_text="<img src=x").wait_for()
    harmless(page, "#run_state .oc")
    tab(page, "Chat")
    page.locator("#conversation input").first.click()
    harmless(page, "#conversation li")
    tab(page, "Train")
    page.locator("button.label-wrap", has_text="Data").first.click()
    page.locator("#field_dataset textarea").fill("rows.jsonl")
    page.get_by_role("button", name="Look at the data").click()
    page.locator("pre", has_text="<img src=x").first.wait_for()
    assert not page.evaluate("window.pwned")
