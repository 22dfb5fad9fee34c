"""The whole way in a browser: train the tiny model, watch it, chat with it, evaluate it, see the history.

With OUTCORE_PICTURES=1 every panel is photographed at 1280 and 390 pixels into docs/pictures/.
"""

import io
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.serve.running import until
from tests.ui.conftest import ROOT, Panels

WIDTHS = {1280: 860, 390: 844}
PATIENCE = 1
"""Times the seconds of a quiet machine that are waited at most."""
PICTURES = ROOT / "docs" / "pictures"


class Visit:
    """A page of the panels; notes every address that it asks for."""

    def __init__(self, browser, url: str, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": WIDTHS[width]}, color_scheme=scheme, device_scale_factor=1
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE * 30_000)
        self.url, self.asked = url, []
        self.context.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)
        self.page.locator("#start_talk").wait_for(timeout=PATIENCE * 60_000)

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name, exact=True).first.click()

    def waits(self, place: str, words: str, seconds: float) -> None:
        """Until a place says these words (a pattern)."""
        from playwright.sync_api import TimeoutError as NotInTime

        found = self.page.locator(place).filter(has_text=re.compile(words, re.S)).first
        try:
            found.wait_for(timeout=PATIENCE * seconds * 1000)
        except NotInTime as error:
            raise AssertionError(f"{place} says {self.page.locator(place).all_inner_texts()}, not {words!r}") from error

    def field(self, name: str):
        return self.page.locator(f"#field_{name} input, #field_{name} textarea").first

    def open(self, title: str) -> None:
        self.page.locator("button.label-wrap", has_text=re.compile(f"^\\s*{re.escape(title)}")).first.click()

    def pick(self, place: str, option: str) -> None:
        """Choose from a list; the page's timer may be filling it."""
        self.page.locator(f"{place} input").first.click()
        self.page.get_by_role("option").filter(has_text=option).first.click()

    def download(self, link: Any) -> str:
        """The text of the file that a link gives."""
        with self.page.expect_download() as found:
            link.first.click()
        return Path(found.value.path()).read_text(encoding="utf-8")

    def picture(self, name: str, folder: Path) -> None:
        self.page.wait_for_timeout(700)
        from PIL import Image

        whole = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
        whole.quantize(64, dither=Image.Dither.NONE).save(folder / f"panel_{name}.png", optimize=True)

    @property
    def outside(self) -> list[str]:
        return [one for one in self.asked if not one.startswith((self.url, "data:", "blob:"))]


@contextmanager
def held_once(panels: Panels, truth: Callable[[], Any]) -> Iterator[None]:
    """Stop the model's server as soon as `truth` holds, so that its answer cannot end before the click arrives."""
    (server,) = [one for one in psutil.Process(panels.process.pid).children() if "serve" in one.cmdline()]
    until(truth, PATIENCE * 120)
    server.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.send_signal(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_train_watch_chat_evaluate_and_see_the_history(chromium, panels, tmp_path):
    visit = Visit(chromium, panels.url)
    visit.tab("Train")
    visit.waits("#headline", r"a step, [\d,]+ tokens/s", 60)  # the forecast came by itself
    choose_a_folder(visit, tmp_path)
    train_stop_and_resume(visit)
    export(visit, tmp_path)
    chat(visit, panels)
    evaluate(visit, panels)
    visit.tab("Machine")
    visit.waits("#machine_graphs", r"RAM in use", 60)
    assert not visit.outside
    photograph(chromium, panels.url, PICTURES if os.environ.get("OUTCORE_PICTURES") else tmp_path)
    delete(visit, tmp_path)


def choose_a_folder(visit: Visit, folder: Path) -> None:
    """The folder chooser fills the path in, and says what the drive is and what is needed; then infinity is left."""
    (folder / "drive" / "offload").mkdir(parents=True)
    visit.open("Engine and offload")
    visit.page.get_by_role("radio", name=re.compile("^infinity")).check()
    visit.waits("#nvme", r"Infinity needs a folder", 30)
    visit.field("nvme_offload_path").fill(str(folder / "drive"))
    visit.waits("#nvme", rf"{re.escape(str(folder / 'drive'))}: .* It is writable", 30)
    visit.pick("#choose_folder", str(folder / "drive" / "offload"))
    visit.waits("#nvme", rf"{re.escape(str(folder / 'drive' / 'offload'))}: .* It is writable", 30)
    assert visit.field("nvme_offload_path").input_value() == str(folder / "drive" / "offload")
    visit.waits("#nvme_space", r"Space needed, with reserve: [\d.]+ \w?B; free", 30)
    visit.field("nvme_offload_path").fill("")
    visit.page.get_by_role("radio", name="as configured").check()


def train_stop_and_resume(visit: Visit) -> None:
    """A run that is stopped in its steps saves, and goes on from there."""
    page = visit.page
    visit.open("Optimization")
    visit.field("max_steps").fill("40")
    visit.field("per_device_train_batch_size").fill("1")
    visit.field("gradient_accumulation_steps").fill("1")
    visit.open("The same as a command line and as YAML")
    visit.waits("#command", r"--max_steps 40", 30)
    page.locator("#start_training").click()
    visit.waits("#run_state", r"tiny-embedded: (running|starting)", 60)
    visit.waits("#run_state", r"step [1-9]\d* of 40", 240)
    page.locator("#stop_run").click()
    visit.waits("#run_state", r"tiny-embedded: stopped", 90)
    page.locator("#resume_run").click()
    visit.waits("#run_state", r"tiny-embedded: finished", 240)
    visit.waits("#run_state", r"step 40 of 40.*Loss.*A step's work", 20)


def export(visit: Visit, folder: Path) -> None:
    """The last checkpoint becomes a model beside the finished one."""
    visit.open("Forecast, checkpoints")
    visit.page.locator("#export_run").click()
    visit.waits("body", r"Export: finished", 120)
    assert list((folder / "final_model" / "tiny-embedded-step-40").glob("*.safetensors"))


def chat(visit: Visit, panels: Panels) -> None:
    """An answer, one that is stopped, a question that is changed, and the conversation as a file."""
    page = visit.page
    page.get_by_role("tab", name="Runs", exact=True).first.focus()  # from here without the mouse
    page.keyboard.press("Tab")
    page.get_by_role("tab", name="Chat", exact=True).first.focus()
    page.keyboard.press("Enter")
    visit.pick("#model", "final_model/tiny-embedded")
    visit.open("How the model is loaded")
    page.get_by_label("Draft tokens").first.fill("0")  # guesses would end an answer before it can be stopped
    page.locator("#load_model").click()
    visit.waits("#model_state", r"tiny-embedded is loaded", 180)
    visit.waits("#launch", r"tensor parallel 1.*ZeRO stage 0", 30)
    visit.open("How the model is loaded")
    visit.open("System prompt, sampling, files")
    page.get_by_label("Longest answer, tokens").first.fill("1900")
    page.get_by_label("Temperature").first.fill("0")
    page.locator("#message textarea").fill("def add(a, b):")
    page.keyboard.press("Enter")
    with held_once(panels, page.locator("#chat .assistant .md > :not(.dim)").count):  # it has begun
        page.locator("#stop_answer").click()
    visit.waits("#timings", r"stopped", 60)
    page.get_by_label("Longest answer, tokens").first.fill("24")
    page.locator("#again").click()
    visit.waits("#timings", r"24 tokens.*weights [\d.]+ MiB in RAM", 120)
    page.get_by_role("button", name="Edit").first.click()
    page.locator("#chat .text").first.fill("class Stack:")
    page.keyboard.press("Enter")
    visit.waits("#chat", r"class Stack:", 60)
    kept = list((panels.folder / "logs" / ".ui" / "conversations").glob("chat-*.json"))
    until(lambda: roles_of(kept[0], "class Stack:") == ["user", "assistant"], 180)
    assert len(kept) == 1 and "def add" not in visit.download(page.get_by_role("link", name="Markdown"))
    messages = json.loads(visit.download(page.get_by_role("link", name="JSON", exact=True)))["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] and messages[0]["content"] == "class Stack:"


def roles_of(conversation: Path, question: str) -> list[str]:
    """Who speaks in a conversation that begins with this question; [] while it begins otherwise or is under way."""
    messages = json.loads(conversation.read_text(encoding="utf-8"))["messages"]
    is_whole = messages[0]["content"] == question and "timings" in messages[-1]
    return [message["role"] for message in messages] if is_whole else []


def evaluate(visit: Visit, panels: Panels) -> None:
    """An evaluation is cancelled, goes on, and is kept as files."""
    page = visit.page
    visit.tab("Evaluate")
    visit.pick("#tasks", "outcore_endings")
    page.keyboard.press("Escape")
    page.locator("#limit input, #limit textarea").first.fill("300")
    page.locator("#start_evaluation").click()
    progress = panels.folder / "logs" / "evaluations"
    with held_once(
        panels, lambda: [one for one in progress.glob("*/progress.json") if '"documents": 300' in one.read_text()]
    ):
        visit.waits("#evaluation_progress", r"\d+ of 300", 60)
        page.locator("#cancel_evaluation").click()
    visit.waits("#history", r"outcore_endings.*cancelled", 60)
    visit.pick("#evaluations", "outcore_endings")
    page.keyboard.press("Escape")
    page.locator("#resume_evaluation").click()
    visit.waits("#history", r"outcore_endings.*acc", 240)
    page.locator("#evaluations input").first.press("Backspace")  # chosen anew, it is shown as it is now
    visit.pick("#evaluations", "outcore_endings")
    assert '"tensor_parallel": 1' in visit.download(page.get_by_role("link", name="JSON with samples"))
    assert "outcore_endings" in visit.download(page.get_by_role("link", name="CSV"))


def delete(visit: Visit, folder: Path) -> None:
    """Deleting asks; "Keep it" keeps."""
    visit.tab("Runs")
    visit.page.locator("#delete_run").click()
    visit.page.locator("#delete_no").click()
    assert (folder / "logs" / "tiny-embedded").is_dir()
    visit.page.locator("#delete_run").click()
    visit.page.locator("#delete_yes").click()
    visit.waits("body", r"tiny-embedded is deleted", 30)
    assert not (folder / "logs" / "tiny-embedded").exists()


def photograph(browser, url: str, folder: Path) -> None:
    """Every panel at both widths, and two in the dark; none is wider than the screen."""
    for width in WIDTHS:
        visit = Visit(browser, url, width)
        for name in ("Start", "Train", "Runs", "Chat", "Evaluate", "Machine"):
            visit.tab(name)
            visit.page.wait_for_timeout(2500)
            visit.picture(f"{name.lower()}_{width}", folder)
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} at {width}"
        visit.context.close()
    dark = Visit(browser, url, 1280, "dark")
    dark.tab("Runs")
    dark.page.wait_for_timeout(2500)
    dark.picture("runs_dark", folder)
    dark.context.close()
