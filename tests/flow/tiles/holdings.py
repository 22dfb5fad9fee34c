"""Ways to hold units on the device that save memory: none of them may change a result."""

from dataclasses import replace

from outcore.sizing.tiles import Holding

PART = 1000
"""Elements: the vocabulary of 1,024 x 64 has many of them, a layer some."""
WHOLE = Holding(part_numel=PART)
LESS = [
    replace(WHOLE, ends_in_parts=True), replace(WHOLE, layer_buffers=2, ship_buffers=1),
    replace(WHOLE, layer_buffers=1, ship_buffers=1, ends_in_parts=True),
]  # fmt: skip
