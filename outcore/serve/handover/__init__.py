"""A model that fits the GPUs together, handed over to vLLM: its own environment and process, our address, keys, limits,
records and metrics in front of it.

    client --> our address (proxy) --> vLLM on a free port of this machine, its key known to us alone
                    |
               records, metrics         process: started, looked after, started again

Where vLLM does not come up, or stops coming up, `run_handover` says why, and the caller serves on one GPU instead.
`start` has our own server in such a process, for as long as one client runs.
"""

from outcore.serve.handover.command import Handover, handover_of, refuse_ours
from outcore.serve.handover.run import run_handover
