"""Rows of a data set with the tokens that bear loss."""

from outcore.data.look.rows import Look, look_at

__all__ = ["Look", "look_at"]
