"""Tables of a pass at addresses that stay, for CUDA graphs: of single tokens, and of prompts' chunks beside them."""

from outcore.infer.cache.tables.mixed import MixedSize, MixedTables
from outcore.infer.cache.tables.rows import RowMasks, RowTables, first_page
