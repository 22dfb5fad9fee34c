"""Data as people see it: rows with the tokens that bear loss marked, in the terminal and as a page."""

from outcore.data.show.page import pieces_of, render_sample, write_page
