"""Commands, flags and snippets as README and docs print them."""

import re
import shlex
from pathlib import Path

from tests.forked import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
PROGRAMS = ("outcore", "python", "python3", "deepspeed", "pytest", "make", "lm_eval")
FILES = re.compile(r"\S+\.(json|md|yaml|bak|py)(\.\w+)?$")


def snippets(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands_of(page: Path) -> list[str]:
    """Command lines of a page: whole lines of code blocks, and spans of code in sentences."""
    text = page.read_text(encoding="utf-8")
    outside = re.sub(r"```\w*\n(.*?)```", "", text, flags=re.DOTALL)
    blocks = re.findall(r"```(?:bash|sh|console)?\n(.*?)```", text, re.DOTALL)
    found = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found += re.findall(r"^    (\S.*)$", outside, re.MULTILINE)
    found += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside)]
    return list(dict.fromkeys(line.strip() for line in found if _is_command(line)))


def _is_command(line: str) -> bool:
    """Whether a line runs one of our programs; the bare name of a program is only a name."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return False
    return len(words) > 1 and words[0] in PROGRAMS and not FILES.match(words[0])


def flags_of(page: Path) -> set[str]:
    """Long flags that sentences and tables name as code (`--name`); a family (`--name_*`) is none."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    spans = re.findall(r"`([^`]+)`", text)
    return {flag for span in spans for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+(?![\w*-])", span)}
