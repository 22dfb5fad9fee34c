"""Parts that do not fit on the device whole: large weights come in blocks of rows."""

from outcore.flow.tiles.chunks import RowSink, TileSink
from outcore.flow.tiles.matrix import TiledMatrix, TiledPart, TilePlan, free_device_bytes, plan_tiles
from outcore.flow.tiles.units import TiledParts, Tiles, open_tiles
