"""The panels in a browser over a model that pretends: quick enough to look at every corner of a page."""

import re
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

from outcore.checkpoint.folders import MANIFEST
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
    opened(page, here)
    yield page
    context.close()


def opened(page, here) -> None:
    """Load the page and wait until it has asked for everything that it begins with."""
    page.goto(here.url)
    page.locator("#start_talk").wait_for(timeout=90_000)
    tab(page, "Chat")
    page.locator("#chat .oc").wait_for()


def tab(page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).first.click()


def unload(here) -> None:
    if here.http.get("/v1/model").json()["state"] == "ready":
        here.http.delete("/v1/model")


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
        opened(page, here)
        tab(page, "Chat")


def test_titles_names_rows_and_refusals_are_text(page, here):
    forget(here)
    here.http.post("/v1/conversations", json={"title": HOSTILE})
    run = here.folder / "logs" / "<img src=x onerror=window.pwned=1>"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"event": "header", "run": "<svg onload=window.pwned=1>", "config": {}}\n')
    (here.folder / "rows.jsonl").write_text('{"text": "<img src=x onerror=window.pwned=1>"}\n' * 40)
    opened(page, here)
    tab(page, "Runs")
    page.locator("#run_state", has_text="<img src=x").wait_for()
    harmless(page, "#run_state .oc")
    tab(page, "Chat")
    page.locator("#conversation label", has_text="<div style").wait_for()
    harmless(page, "#conversation label span")
    tab(page, "Train")
    page.locator("button.label-wrap", has_text="Data").first.click()
    page.locator("#field_dataset textarea").fill("rows.jsonl")
    page.get_by_role("button", name="Look at the data").click()
    page.locator("pre", has_text="<img src=x").first.wait_for()
    assert not page.evaluate("window.pwned")
    page.locator("#field_dataset textarea").fill("<img src=x onerror=window.pwned=1>.jsonl")
    page.get_by_role("button", name="Look at the data").click()
    page.locator("#notice", has_text="<img src=x").wait_for()
    harmless(page, "#notice .oc")
    page.get_by_role("button", name="Dismiss").click()
    page.locator("#notice [role=alert]").wait_for(state="detached")


def ask(page, words: str, tokens: int | None = None) -> None:
    """Send a message in Chat, with a limit to its answer."""
    if tokens is not None:
        accordion = page.locator("button.label-wrap", has_text="System prompt").first
        accordion.click()
        page.get_by_label("Longest answer, tokens").first.fill(str(tokens))
        accordion.click()
    page.locator("#message textarea").fill(words)
    page.keyboard.press("Enter")


def test_an_answer_goes_on_over_a_reload_and_is_stopped(page, here):
    load(here)
    forget(here)
    opened(page, here)
    tab(page, "Chat")
    ask(page, "go on", 1900)
    page.locator("#chat article.assistant", has_text="word3").wait_for()
    assert page.locator("#stop_answer").is_visible() and not page.locator("#send").is_visible()
    opened(page, here)
    tab(page, "Chat")
    page.locator("#chat article.assistant", has_text="word20").wait_for()
    page.locator("#stop_answer").click()
    page.locator("#timings", has_text="stopped").wait_for()
    assert page.locator("#send").is_visible() and not page.locator("#stop_answer").is_visible()
    (kept,) = here.http.get("/v1/conversations").json()["data"]
    finish = here.http.get(f"/v1/conversations/{kept['id']}").json()["messages"][-1]["finish"]
    assert finish == "cancelled"


def test_who_sends_while_the_model_loads_waits(page, here, monkeypatch):
    monkeypatch.setenv("PRETENDER_LOADS_S", "6")
    forget(here)
    opened(page, here)
    tab(page, "Chat")
    page.locator("#model input").fill("quick")
    page.keyboard.press("Escape")
    page.locator("#load_model").click()
    page.locator("#model_state", has_text="Loading quick").wait_for()
    ask(page, "hello")
    page.locator("#chat article", has_text="quick is still being loaded").wait_for()
    assert page.locator("[role=alert]:visible, .error:visible").count() == 0
    page.locator("#chat article.assistant", has_text="word0 word1 word2").wait_for()
    page.locator("#model_state", has_text="quick is loaded").wait_for()
    assert not page.locator("#launch pre").is_visible(), "the launch descriptor, unasked"
    page.locator("button.label-wrap:visible", has_text="How the model is loaded").click()
    page.locator("#launch pre").wait_for()
    assert "--preset=latency" in here.http.get("/v1/model").json()["command"]


def test_who_is_refused_may_send_again(page, here):
    unload(here)
    for _ in range(8):  # the button came back before the refusal, and sometimes not at all
        ask(page, "hello")
        page.locator("#notice", has_text="load one first").wait_for()
        page.locator("#send").wait_for()
        assert not page.locator("#stop_answer").is_visible()
        page.locator("#notice button").click()
        page.locator("#notice [role=alert]").wait_for(state="detached")


def test_conversations_are_listed_searched_and_deleted(page, here):
    load(here)
    forget(here)
    for title in ("Cats", "Dogs"):
        here.http.post("/v1/conversations", json={"title": title})
    opened(page, here)
    tab(page, "Chat")
    listed = page.locator("#conversation label")
    listed.filter(has_text="Cats").wait_for()
    assert listed.all_inner_texts() == ["Dogs", "Cats"]
    page.locator("#search_conversations textarea, #search_conversations input").fill("cat")
    listed.filter(has_text="Dogs").wait_for(state="detached")
    listed.filter(has_text="Cats").click()
    page.locator("#delete_conversation").click()
    page.locator("#delete_conversation_yes").click()
    listed.filter(has_text="Dogs").wait_for()
    assert listed.all_inner_texts() == ["Dogs"]
    assert [one["title"] for one in here.http.get("/v1/conversations").json()["data"]] == ["Dogs"]


def test_a_message_is_changed_in_its_place(page, here):
    load(here)
    forget(here)
    opened(page, here)
    tab(page, "Chat")
    ask(page, "say one", 3)
    page.locator("#timings", has_text="3 tokens").wait_for()
    page.get_by_role("button", name="Edit").click()
    page.locator("#chat .text").fill("say two")
    page.keyboard.press("Enter")
    page.locator("#chat article.assistant", has_text="two").wait_for()
    (kept,) = here.http.get("/v1/conversations").json()["data"]
    path = f"/v1/conversations/{kept['id']}"  # what is drawn word by word is kept when it has ended
    until(lambda: [m["content"] for m in here.http.get(path).json()["messages"]] == ["say two", "two"])


@pytest.mark.parametrize("size", [(1280, 860), (390, 844), (1280, 560)])
def test_the_message_box_is_always_in_view(chromium, here, size):
    load(here)
    context = chromium.new_context(viewport={"width": size[0], "height": size[1]})
    page = context.new_page()
    opened(page, here)
    tab(page, "Chat")
    for scrolled in (0, 10_000):
        page.mouse.wheel(0, scrolled)
        page.wait_for_timeout(300)
        for place in ("#message textarea", "#send"):
            box = page.locator(place).bounding_box()
            assert box and box["y"] >= 0 and box["y"] + box["height"] <= size[1], (place, box)
    chosen = page.locator("#model").bounding_box()
    assert chosen and chosen["width"] > min(size[0] - 40, 400), "a model's name has room"
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    context.close()


def test_three_ways_begin(page, here):
    unload(here)
    tab(page, "Start")
    page.locator("#start_base input, #start_base textarea").fill("/no/such")
    page.locator("#start_data input, #start_data textarea").fill("mine.jsonl")
    page.locator("#start_teach").click()
    page.locator("#field_model_name_or_path").wait_for()
    assert page.locator("#field_model_name_or_path input").input_value() == "/no/such"
    tab(page, "Start")
    page.locator("#start_fits").click()
    page.locator("#start_forecast", has_text="tokens/s").wait_for()
    page.locator("#start_model input").fill("quick")
    page.keyboard.press("Enter")
    page.locator("#start_talk").click()
    page.locator("#message textarea").wait_for()
    page.locator("#model_state", has_text="quick is loaded").wait_for()
    assert page.locator("#model input").input_value() == "quick"
    assert "--preset=latency" in here.http.get("/v1/model").json()["command"]


def test_what_is_missing_is_said_where_it_is_asked(page, here):
    tab(page, "Start")
    page.locator("#start_teach").click()
    page.locator("#notice", has_text="Name both first").wait_for()
    assert page.locator("#start_teach").is_visible(), "it went on to train `tiny`"
    page.locator("#start_fits").click()
    page.locator("#start_forecast", has_text="tokens/s").wait_for()
    page.locator("#start_asked input").fill("/no/such")
    page.keyboard.press("Enter")
    page.locator("#start_fits").click()
    page.locator("#notice", has_text="--allowed_folder /no/such").wait_for()
    assert "tokens/s" not in page.locator("#start_forecast").inner_text(), "the forecast of another model"
    tab(page, "Machine")
    page.locator("#notice [role=alert]").wait_for(state="detached")  # it is about the panel that was left


def test_a_file_that_is_uploaded_can_be_trained_on(page, here, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"text": "mine"}\n')
    tab(page, "Start")
    for name, said in (("mine.jsonl", "uploads/mine.jsonl"), ("mine.jsonl", "uploads/mine.jsonl")):
        page.locator("#start_upload").locator("..").locator("input[type=file]").first.set_input_files(tmp_path / name)
        until(lambda said=said: page.locator("#start_data input, #start_data textarea").first.input_value() == said)
    tab(page, "Train")
    page.locator("button.label-wrap", has_text="Data").first.click()
    (tmp_path / "mine.jsonl").write_text('{"text": "another"}\n')
    page.locator("#upload").locator("..").locator("input[type=file]").first.set_input_files(tmp_path / "mine.jsonl")
    until(lambda: page.locator("#field_dataset textarea").input_value() == "uploads/mine-2.jsonl")
    asked = {"fields": {"preset": "tiny", "dataset": ["uploads/mine-2.jsonl"]}}
    assert "mine-2.jsonl: 1 document" in here.http.post("/v1/data/preview", json=asked).text


def test_a_stopped_run_and_models_of_the_folder_are_among_the_models(page, here):
    (here.folder / "small.gguf").touch()
    step = here.folder / "checkpoints" / "one" / "step-00000005"
    step.mkdir(parents=True)
    (step / MANIFEST).write_text("{}")
    assert here.http.get("/v1/runs").json()["data"][0]["model"] == "checkpoints/one"
    tab(page, "Train")
    tab(page, "Start")
    page.locator("#start_model input").click()
    for name in ("checkpoints/one", "small.gguf"):
        page.get_by_role("option", name=name).wait_for()


def test_a_refused_message_comes_back_into_its_box_also_after_a_reload(page, here):
    load(here)
    forget(here)
    opened(page, here)
    box = page.locator("#message textarea")
    ask(page, "x" * 3000)
    page.locator("#timings", has_text="too many tokens").wait_for()
    until(lambda: box.input_value() == "x" * 3000)
    opened(page, here)
    until(lambda: box.input_value() == "x" * 3000)
    assert page.locator("#chat article").count() == 0
    ask(page, "say short", 3)
    answers = page.locator("#chat article.assistant")
    answers.filter(has_text="short").wait_for()

    def is_answered(number: int) -> bool:
        if box.input_value():  # Enter sends nothing while the last answer ends
            box.press("Enter")
        return answers.count() > number and page.locator("#send").is_visible()

    for number in range(1, 8):
        box.fill("say " + "y" * 190)
        until(lambda number=number: is_answered(number))
    page.locator("#chat", has_text="messages were left out").wait_for()


def test_what_is_typed_while_an_answer_is_written_stays(page, here):
    load(here)
    forget(here)
    opened(page, here)
    box = page.locator("#message textarea")
    ask(page, "go on", 1900)
    page.locator("#chat article.assistant", has_text="word3").wait_for()
    box.fill("and then")
    page.locator("#chat article.assistant", has_text="word60").wait_for()
    box.press("Enter")
    page.locator("#stop_answer").click()
    page.locator("#timings", has_text="stopped").wait_for()
    assert box.input_value() == "and then"


def test_new_makes_no_second_empty_conversation(page, here):
    load(here)
    forget(here)
    page.goto(here.url)
    for _ in range(3):
        page.get_by_role("tab", name="Chat", exact=True).first.click()
        page.locator("#new_conversation").click()
    page.locator("#conversation label").first.wait_for()
    page.wait_for_timeout(500)
    assert len(here.http.get("/v1/conversations").json()["data"]) == 1


def test_what_is_sent_right_after_new_is_not_of_the_old_conversation(page, here, monkeypatch):
    from outcore.ui.panels.chat import ChatPanel

    load(here)
    forget(here)
    old = here.http.post("/v1/conversations", json={"title": "Old"}).json()["id"]
    opened(page, here)
    page.locator("#conversation label", has_text="Old").wait_for()
    unused, goes_on, first = ChatPanel._unused, threading.Event(), iter([True])

    def held(self, told):
        if next(first, False):
            goes_on.wait(60)
        return unused(self, told)

    monkeypatch.setattr(ChatPanel, "_unused", held)
    try:
        page.locator("#new_conversation").click()
        ask(page, "say hello")
        page.locator("#timings", has_text="tokens").wait_for()
    finally:
        goes_on.set()
    assert here.http.get(f"/v1/conversations/{old}").json()["messages"] == []
    page.locator("#conversation label:has(:checked)", has_text="say hello").wait_for()


def test_a_conversation_comes_back_with_its_sampling(page, here):
    forget(here)
    here.http.post("/v1/conversations", json={"title": "Warm", "sampling": {"top_k": 7}})
    here.http.post("/v1/conversations", json={"title": "Cold", "sampling": {"temperature": 0}})
    opened(page, here)
    page.locator("button.label-wrap", has_text="System prompt").first.click()
    fields = [page.get_by_label(name).first for name in ("Temperature", "Top K")]
    page.locator("#conversation label:has(:checked)", has_text="Cold").wait_for()
    until(lambda: [field.input_value() for field in fields] == ["0", ""])
    page.locator("#conversation label", has_text="Warm").click()
    until(lambda: [field.input_value() for field in fields] == ["", "7"])


def test_a_search_without_a_find_says_so(page, here):
    after = "getComputedStyle(document.querySelector('#conversation'), '::after').content"
    forget(here)
    opened(page, here)
    assert page.evaluate(after) == "none"
    here.http.post("/v1/conversations", json={"title": "Cats"})
    opened(page, here)
    page.locator("#conversation label", has_text="Cats").wait_for()
    assert page.evaluate(after) == "none"
    page.locator("#search_conversations textarea, #search_conversations input").fill("zebra")
    until(lambda: "No conversation" in page.evaluate(after))


def test_a_refusal_moves_nothing_and_the_focus_of_a_tab_is_whole(page, here):
    unload(here)
    tab(page, "Start")
    button = page.locator("#start_teach")
    before = button.bounding_box()
    button.click()
    page.locator("#notice [role=alert]").wait_for()
    assert button.bounding_box() == before
    page.get_by_role("tab", name="Start", exact=True).first.focus()
    page.keyboard.press("Tab")
    # the row of tabs cuts off what lies outside
    assert page.evaluate("getComputedStyle(document.activeElement).outlineOffset") == "-3px"


def test_sizes_stay_whole_on_a_phone_and_a_long_name_keeps_clear_of_the_arrow(page, here):
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate("document.querySelector('#chat .oc').innerHTML = '<table><tr><td><td class=n>9 MB</table>'")
    assert page.evaluate("getComputedStyle(document.querySelector('#chat td.n')).whiteSpace") == "nowrap"
    tab(page, "Start")
    box = page.get_by_label("Model").first
    box.fill("models/a-model-with-a-name-that-is-longer-than-its-box.gguf")
    name, arrow = box.bounding_box(), page.locator(".icon-wrap").first.bounding_box()
    assert name["x"] + name["width"] <= arrow["x"] + 1


@pytest.mark.parametrize("path", ["/gradio_api/queue/join", "/gradio_api/upload", "/gradio_api/run/x"])
def test_the_panels_own_routes_take_no_longer_bodies_either(here, path):
    kind = "multipart/form-data; boundary=x" if path.endswith("upload") else "application/json"
    begin = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
    pieces = (begin if number == 0 else b" " * (1 << 20) for number in range(20))
    assert here.http.post(path, content=pieces, headers={"Content-Type": kind}).status_code == 413


def test_forecast_and_start_are_in_view_on_a_phone_and_recipes_fill_the_form(chromium, here):
    context = chromium.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    opened(page, here)
    tab(page, "Train")
    page.locator("#headline", has_text="tokens/s").wait_for()
    page.locator(
        "#field_model_name_or_path", has_text=re.compile("Model to teach.*model_name_or_path", re.S)
    ).wait_for()
    for scrolled in (0, 10_000):
        page.mouse.wheel(0, scrolled)
        page.wait_for_timeout(300)
        for place in ("#headline", "#start_training"):
            box = page.locator(place).bounding_box()
            assert box and box["y"] >= 0 and box["y"] + box["height"] <= 844, (place, box)
    page.get_by_role("button", name="Adapters over 4 bits").click()
    page.locator("button.label-wrap", has_text="The same as a command line").click()
    page.locator("#command", has_text="--learning_rate 0.0002 --lora_r 16 --quantize nf4").wait_for(timeout=120_000)
    page.get_by_role("button", name="All weights").click()
    page.locator("#command", has_text="--lora_r").wait_for(state="detached")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()


def test_evaluate_loads_a_model_itself(page, here):
    unload(here)
    tab(page, "Evaluate")
    page.locator("#start_evaluation").click()
    page.locator("#notice", has_text="load one first").wait_for()  # what is refused is said in one place
    assert page.locator("[role=alert]:visible, .error:visible, .toast-body:visible").count() == 1
    page.locator("#evaluated_model input").fill("quick")
    page.keyboard.press("Enter")
    page.locator("#evaluated_load_model").click()
    page.locator("#evaluated_model_state", has_text="quick is loaded").wait_for()
    page.locator("#notice [role=alert]").wait_for(state="detached")
    assert "--preset=throughput" in here.http.get("/v1/model").json()["command"]


PANELS = ("Start", "Train", "Runs", "Chat", "Evaluate", "Machine")
FOCUSED = """() => {
  const at = document.activeElement, label = at.closest("label") || at;
  const outlined = (e) => {
    const look = getComputedStyle(e);
    return look.outlineStyle !== "none" && parseFloat(look.outlineWidth) >= 2;
  };
  window.passed = window.passed || new Map();
  if (!passed.has(at)) passed.set(at, passed.size);
  return [at === document.body ? -1 : passed.get(at), outlined(at) || outlined(label), at.outerHTML.slice(0, 200)];
}"""


def unfold(page) -> None:
    page.evaluate(
        "document.querySelectorAll('button.label-wrap:not(.open)').forEach((b) => b.offsetParent && b.click())"
    )
    page.wait_for_timeout(800)


def test_the_keyboard_reaches_everything_and_shows_where_it_is(page, here):
    for name in PANELS:
        tab(page, name)
        unfold(page)
        page.get_by_role("tab", name=name, exact=True).first.focus()
        before = None
        for _ in range(300):
            page.keyboard.press("Tab")
            number, is_outlined, html = page.evaluate(FOCUSED)
            if number == -1:  # through the page and out of it
                break
            assert number != before, f"Tab stays in {html}"
            assert is_outlined, f"{name}: the focus is not to be seen on {html}"
            before = number
        else:
            raise AssertionError(f"{name}: the keyboard goes round in circles")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast_and_every_part_a_name(chromium, here, scheme):
    """Rules of WCAG 2, levels A and AA, by axe-core: contrast of 4.5:1 at least, names of fields, roles."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="requirements/test.txt has it")
    context = chromium.new_context(viewport={"width": 1280, "height": 860}, color_scheme=scheme)
    page = context.new_page()
    opened(page, here)
    for name in PANELS:
        tab(page, name)
        unfold(page)
        for red in page.locator("#delete_run:visible, #delete_conversation:visible").all():
            assert red.evaluate("(e) => getComputedStyle(e).backgroundColor") == "rgb(185, 28, 28)"
        found = axe.Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa"]}).response["violations"]
        assert not found, [(one["id"], one["nodes"][0]["html"]) for one in found]
    context.close()


def test_a_killed_server_is_said_with_the_command_that_brings_it_back(chromium, panels):
    context = chromium.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto(panels.url)
    page.locator("#start_talk").wait_for(timeout=90_000)
    panels.process.kill()
    page.get_by_text("The panels' server does not answer").wait_for(timeout=30_000)
    command = page.locator("#gone pre").inner_text()
    assert command == f"cd {panels.folder} && outcore ui --port {panels.url.rpartition(':')[2]}"
    page.wait_for_timeout(3000)
    assert page.locator(".toast-body:visible, .error:visible").count() == 0, "said once"
    context.close()
