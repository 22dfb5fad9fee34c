"""train_model.py that ends itself with SIGKILL at a chosen moment.

Usage: python kill_child.py MOMENT COUNT FLAGS...: dies at the COUNT-th time that MOMENT comes by; "never" trains
to the end. Moments: update (a parameter's states on NVMe are up to date), gradient (a gradient is on its way to the
drive), save (a file of a checkpoint begins).
"""

import os
import signal
import sys
from typing import Any

import outcore.engine.deepspeed.engine as engine_room
import outcore.engine.deepspeed.staged.gradients as gradients_room
from outcore.states.ring.ring import StateRing
from outcore.train.run import main

MOMENTS: dict[str, tuple[Any, str, bool]] = {
    "update": (StateRing, "wait", True), "gradient": (gradients_room.StagedGradients, "add", True),
    "save": (engine_room, "write_shard", False),
}  # fmt: skip
"""Where each comes by: owner, name, and whether the blow falls after the call."""


def arm(moment: str, count: int) -> None:
    owner, name, after = MOMENTS[moment]
    original = getattr(owner, name)
    left = count

    def armed(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, armed)


if __name__ == "__main__":
    gradients_room.MIN_BYTES = 1024  # the model is tiny
    if sys.argv[1] != "never":
        arm(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
