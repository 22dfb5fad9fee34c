"""uv, which resolves and installs several times faster than pip, told what pip is told on this machine.

uv reads none of pip's settings: where packages lie, what may be taken and how the registry is reached come from `pip
config list` (files and PIP_ variables). A setting that uv has no equal for makes pip install instead: a mirror or a cap
on versions is never passed over."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

UV = "uv==0.13.9"
FLAGS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
    "only-binary": "--only-binary",
    "no-binary": "--no-binary",
}
"""Settings with values, several of them with spaces between."""
SWITCHES = {"no-index": ("--no-index",), "pre": ("--prerelease", "allow"), "no-cache-dir": ("--no-cache",)}
VARIABLES = {
    "cert": ("SSL_CERT_FILE",),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "retries": ("UV_HTTP_RETRIES",),
    "proxy": ("HTTPS_PROXY", "HTTP_PROXY"),
}
NO_MATTER = {
    "disable-pip-version-check", "no-input", "progress-bar", "quiet", "verbose", "no-color", "cache-dir", "log",
    "root-user-action", "no-warn-script-location", "no-warn-conflicts", "require-virtualenv", "break-system-packages",
    "user", "prefer-binary", "compile", "no-compile", "exists-action", "use-pep517", "src", "editable-mode",
}  # fmt: skip
"""Settings of how pip talks and where it works, not of what it takes."""


@dataclass(frozen=True)
class UvSettings:
    """Settings that uv is given besides the packages."""

    flags: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    """pip's settings without an equal: pip must install."""


def uv_settings(listed: Iterable[str]) -> UvSettings:
    """The lines of `pip config list` in uv's words. A variable wins over pip's files, its section over the general."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed:
        place, _, value = line.partition("=")
        section, _, name = place.partition(".")
        if section in sections:
            sections[section][name.replace("_", "-")] = str(ast.literal_eval(value))
    told = sections["global"] | sections["install"] | sections[":env:"]
    flags: list[str] = []
    variables: dict[str, str] = {}
    unknown = [name for name in told if name not in (*FLAGS, *SWITCHES, *VARIABLES, *NO_MATTER)]
    for name, value in told.items():
        for word in value.split() if name in FLAGS else ():
            flags += [FLAGS[name], word]
        if name in SWITCHES and value.lower() in ("1", "true", "yes", "on"):
            flags += SWITCHES[name]
        variables |= dict.fromkeys(VARIABLES.get(name, ()), value)
    # pip takes the best version of all indexes together; uv by itself stops at the first that has the name.
    return UvSettings(("--index-strategy", "unsafe-best-match", *flags), variables, tuple(unknown))
