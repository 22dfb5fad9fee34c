"""DeepSpeed's collectives on the CPU leave their buffer in shared memory: 66 MB of RAM a rank and run, until a reboot.

0.19.8 creates /dev/shm/deepspeed_allreduce_buffer_<user>_<address>_<port>_<rank> (csrc/cpu/comm/shm.cpp) and never
removes it. A name that is gone takes nothing from ranks that map the buffer, so it goes as soon as all of them do: not
even a killed run leaves it behind."""

from __future__ import annotations

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def remove_own_buffer(rank: int, folder: Path = SHARED_MEMORY) -> None:
    """Remove the name of this rank's buffer, where there is one; once every rank has opened it: they wait for it."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address and port and hasattr(os, "getuid"):
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}"
        (folder / name).unlink(missing_ok=True)
