"""Running one part on one batch: embedding and layers (compiled, as graphs, or eagerly) and the head."""

from outcore.flow.layers.compiled import (
    CompileChoice,
    CompiledLayers,
    Role,
    compiler_errors,
    draws_random_numbers,
    keep_compiled_code,
)
from outcore.flow.layers.graphs import GraphPool, LayerGraphs
from outcore.flow.layers.head import Head, HeadRow, TiledHead
from outcore.flow.layers.long_rows import Attending, LongRows
from outcore.flow.layers.packed_linear import with_packed_linears
from outcore.flow.layers.row_homes import RowHomes
from outcore.flow.layers.runner import Batch, HeadInput, PartRunner, RouterTaps
from outcore.flow.layers.unit_weights import in_place
