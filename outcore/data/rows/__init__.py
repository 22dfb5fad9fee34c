"""Shapes of rows, told apart by their columns, and what each row becomes: text, a conversation, or tokens."""

from outcore.data.rows.examples import ChatExample, Example, TextExample, TokensExample
from outcore.data.rows.messages import REASONING_KEYS, as_text, read_messages, says_something
from outcore.data.rows.shapes import COMPLETION_COLUMNS, KINDS, NUMBERS, Kind, Shape, detect_shape, shaped_records
