"""Results that back claims: each is cited, and each that a page cites is there."""

import re

import pytest

from tests.docs.pages import PAGES
from tests.forked import ROOT

RESULTS = ROOT / "benchmarks/results"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    named = set(re.findall(r"benchmarks/[\w./-]*\w", page.read_text(encoding="utf-8")))
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_every_result_is_cited_and_they_are_few():
    folders = ("docs", "tests", "outcore", "benchmarks")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.suffix in (".py", ".md")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    results = [file.name for file in RESULTS.iterdir()]
    assert len(results) <= 45 and not [name for name in results if name not in text]
