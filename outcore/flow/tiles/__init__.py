"""Parts that do not fit on the device whole: large weights come in blocks of rows."""

from outcore.flow.tiles.matrix import TiledMatrix, TiledPart
from outcore.flow.tiles.plan import TilePlan, free_device_bytes, plan_tiles
from outcore.flow.tiles.sink import RowSink, TileSink
from outcore.flow.tiles.units import TiledParts, Tiles, open_tiles
