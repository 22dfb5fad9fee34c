"""The browser in which the panels are tested: Debian's chromium, installed where it is missing and apt may."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

NAMES = ("chromium", "chromium-browser")
TIMEOUT_S = 300


def install_chromium(say: Callable[[str], None]) -> None:
    """Install it, or say why the tests in a browser will be skipped. Never an error: all other tests need none."""
    if any(shutil.which(name) for name in NAMES):
        return
    apt = shutil.which("apt-get")
    if apt is None or os.name == "nt" or os.geteuid() != 0:
        say("no chromium: the panels are not tested in a browser (sudo apt-get install -y chromium)")
        return
    say("chromium: apt-get install, for the tests of the panels")
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", "chromium"]):
        try:
            subprocess.run([apt, *arguments], env=environ, check=True, capture_output=True, timeout=TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            say(f"no chromium: apt-get {arguments[0]} failed ({error}); the panels are not tested in a browser")
            return
