"""The whole way in a browser: train the tiny model, watch it, chat with it, evaluate it, see the history.

With OUTCORE_PICTURES=1 every panel is photographed at 1280 and 390 pixels into docs/pictures/.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.ui.conftest import ROOT

WIDTHS = {1280: 860, 390: 844}
PICTURES = ROOT / "docs" / "pictures"


class Visit:
    """A page of the panels; notes every address that it asks for."""

    def __init__(self, browser, url: str, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": WIDTHS[width]}, color_scheme=scheme, device_scale_factor=1
        )
        self.page = self.context.new_page()
        self.url, self.asked = url, []
        self.context.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)
        self.page.locator("#start_training").wait_for(timeout=60_000)

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name, exact=True).first.click()

    def waits(self, place: str, words: str, seconds: float) -> None:
        """Until a place says these words (a pattern)."""
        self.page.locator(place).filter(has_text=re.compile(words, re.S)).first.wait_for(timeout=seconds * 1000)

    def field(self, name: str):
        return self.page.locator(f"#field_{name} input, #field_{name} textarea").first

    def open(self, title: str) -> None:
        self.page.locator("button.label-wrap", has_text=re.compile(f"^\\s*{re.escape(title)}")).first.click()

    def picture(self, name: str, folder: Path) -> None:
        self.page.wait_for_timeout(700)
        self.page.screenshot(path=folder / f"panel_{name}.png")

    @property
    def outside(self) -> list[str]:
        return [one for one in self.asked if not one.startswith((self.url, "data:", "blob:"))]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_train_watch_chat_evaluate_and_see_the_history(chromium, panels, tmp_path):
    visit = Visit(chromium, panels.url)
    page = visit.page
    visit.waits("body", r"a step, [\d,]+ tokens/s", 60)  # the forecast came by itself
    visit.open("Optimization")
    visit.field("max_steps").fill("6")
    visit.field("per_device_train_batch_size").fill("1")
    visit.field("gradient_accumulation_steps").fill("1")
    visit.open("The same as a command line and as YAML")
    visit.waits("body", r"--max_steps 6", 30)
    page.locator("#start_training").click()
    visit.waits("#run_state", r"tiny-embedded: (running|starting)", 60)
    visit.waits("#run_state", r"step \d+ of 6", 240)
    visit.waits("#run_state", r"tiny-embedded: finished", 240)
    visit.waits("#run_state", r"Loss", 20)

    visit.tab("Chat")
    page.locator("#model input").first.click()
    page.get_by_role("option", name="final_model/tiny-embedded").click()
    page.locator("#load_model").click()
    visit.waits("#model_state", r"tiny-embedded is loaded", 180)
    visit.open("System prompt, sampling")
    page.get_by_label("max_tokens").first.fill("48")
    page.get_by_label("temperature").first.fill("0")
    visit.open("System prompt, sampling")
    page.locator("#message textarea").fill("def add(a, b):")
    page.locator("#send").click()
    visit.waits("#timings", r"\d+ tokens", 120)
    kept = list((tmp_path / "logs" / ".ui" / "conversations").glob("chat-*.json"))
    assert len(kept) == 1 and "def add(a, b):" in kept[0].read_text(encoding="utf-8")

    visit.tab("Evaluate")
    page.locator("#tasks input").first.click()
    page.get_by_role("option", name=re.compile("outcore_endings")).click()
    page.keyboard.press("Escape")
    page.locator("#limit input, #limit textarea").first.fill("8")
    page.locator("#start_evaluation").click()
    visit.waits("#history", r"outcore_endings.*acc", 240)

    visit.tab("Machine")
    visit.waits("#machine_graphs", r"RAM in use", 60)
    assert not visit.outside
    photograph(chromium, panels.url, PICTURES if os.environ.get("OUTCORE_PICTURES") else tmp_path)


def photograph(browser, url: str, folder: Path) -> None:
    """Every panel at both widths, and two in the dark; none is wider than the screen."""
    for width in WIDTHS:
        visit = Visit(browser, url, width)
        for name in ("Train", "Runs", "Chat", "Evaluate", "Machine"):
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
