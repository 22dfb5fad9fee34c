"""The pages as a site: every link leads somewhere, every page is on a shelf, and what is generated is up to date."""

import re
from pathlib import Path

import pytest
import yaml

from tests.docs import settings
from tests.docs.pages import PAGES
from tests.forked import ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """What a heading of the page is linked by."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            lost.append(link)
    assert not lost


def shelves() -> dict[str, list[str]]:
    """Pages of each shelf, as mkdocs.yml has them."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return {name: [next(iter(page.values())) for page in pages] for one in nav for name, pages in one.items()}


def test_every_page_is_on_one_of_three_shelves() -> None:
    found = shelves()
    assert list(found) == ["Start", "Use", "Inside"]
    shelved = [page for pages in found.values() for page in pages]
    assert sorted(shelved) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))
    start = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert [page for page in shelved if f"]({page})" not in start and page != "index.md"] == []


def test_the_page_of_settings_is_that_of_the_table() -> None:
    assert settings.PAGE.read_text(encoding="utf-8") == settings.page(), "python -m tests.docs.settings"


def test_the_site_builds(tmp_path: Path) -> None:
    config = pytest.importorskip("mkdocs.config")
    from mkdocs.commands.build import build

    made = config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    build(made)
    assert (tmp_path / "settings/index.html").is_file()
