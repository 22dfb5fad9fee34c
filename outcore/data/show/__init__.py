"""Data as people see it: rows with the tokens that bear loss marked, in the terminal and as a page."""

from __future__ import annotations

from outcore.data.show.page import pieces_of, write_page
from outcore.data.show.render import render_sample
