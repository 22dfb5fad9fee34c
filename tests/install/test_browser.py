"""Chromium is installed for tests where it is missing and apt may; otherwise one line says what is skipped."""

import subprocess

from outcore.install import browser


def run(monkeypatch, there: set[str], root: bool = True, fails: bool = False) -> tuple[list[str], list[list[str]]]:
    said, called = [], []

    def call(command, **more):
        called.append(command[1:])
        if fails:
            raise subprocess.CalledProcessError(100, command)

    monkeypatch.setattr(browser.shutil, "which", lambda name: f"/usr/bin/{name}" if name in there else None)
    monkeypatch.setattr(browser.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(browser.subprocess, "run", call)
    browser.install_chromium(said.append)
    return said, called


def test_it_is_installed_only_where_it_is_missing_and_apt_may(monkeypatch):
    assert run(monkeypatch, {"chromium", "apt-get"}) == ([], [])
    said, called = run(monkeypatch, {"apt-get"})
    assert [one[0] for one in called] == ["update", "install"] and "chromium" in called[1]
    said, called = run(monkeypatch, {"apt-get"}, root=False)
    assert not called and "sudo apt-get install -y chromium" in said[0]
    said, called = run(monkeypatch, {"apt-get"}, fails=True)
    assert len(called) == 1 and "not tested in a browser" in said[-1]
