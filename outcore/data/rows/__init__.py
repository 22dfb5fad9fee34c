"""Shapes of rows, told apart by their columns, and what each row becomes: a text or a conversation."""

from __future__ import annotations

from outcore.data.rows.shapes import ChatExample, Shape, TextExample, detect_shape

__all__ = ["ChatExample", "Shape", "TextExample", "detect_shape"]
