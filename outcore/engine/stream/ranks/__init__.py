"""The streaming engine over several ranks of one host: each runs its share of a step's micro-batches on its own GPU.

Homes of weights and gradients are in memory that all ranks share (`outcore.staging.shared`). A rank's gradient of a
part goes down into a slot of its own; when all have come, each rank adds up its share of them, in fp32 and in order of
rank, into the part's home (`reduce`). Optimizer states belong to ranks chunk by chunk, in RAM or on NVMe: each updates
its own and says so (`published`), and a part may be read again when all have. `host` makes what is shared.

    rank 0: download --> slot 0 --+            +--> update of its chunks --+
                                  +--> sum ----+                           +--> weights, shared
    rank 1: download --> slot 1 --+  (halves)  +--> update of its chunks --+
"""

from outcore.engine.stream.ranks.host import ALONE, RankHost, RankPlace, agreed, open_host
