"""Panels on a free port of this machine, in a folder of their own; and Debian's Chromium to look at them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
START_S = 360
"""Seconds that a machine with much else to do may take to import everything."""


class Panels:
    """`outcore ui` in a process."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.log = folder, folder / "ui.log"
        environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "outcore.cli", "ui", "--port", "0", *flags],
                cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.url = self._url()

    def _url(self) -> str:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s and self.process.poll() is None:
            for line in self.log.read_text(encoding="utf-8").splitlines()[::-1]:
                if line.startswith("panels: http"):
                    url = line.split()[1].partition("/?")[0]
                    if _answers(url):
                        return url
            time.sleep(0.1)
        raise AssertionError(f"the panels did not start: {self.log.read_text(encoding='utf-8')}")

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(number)
        self.process.wait(300)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def panels(tmp_path: Path) -> Iterator[Panels]:
    running = Panels(tmp_path)
    yield running
    if running.process.poll() is None:
        running.stop()


@pytest.fixture(scope="session")
def chromium():
    """A browser; skips with the reason where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (requirements/test.txt)")
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium (python setup.py --test does where it may)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
