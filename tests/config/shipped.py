"""The DeepSpeed files under `config/`: `deepspeed_config.json` with another zero_optimization block each.

python -m tests.config.shipped --write      makes them again; a test compares them
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMUNICATION = ("overlap_comm", "contiguous_gradients", "reduce_bucket_size")


def shipped() -> dict[str, dict[str, Any]]:
    """Name -> content of each file that is made."""
    base = json.loads((ROOT / "deepspeed_config.json").read_text())
    made = {}
    for stage in (1, 2, 3):
        found = copy.deepcopy(base)
        found.pop("aio")
        if stage < 3:
            zero = {key: found["zero_optimization"][key] for key in COMMUNICATION}
            found["zero_optimization"] = {"stage": stage, "offload_optimizer": {"device": "none"}, **zero}
        found["outcore"]["engine"] = "deepspeed"
        made[f"deepspeed_zero{stage}.json"] = found
    return made


def text(content: dict[str, Any]) -> str:
    """The file as it lies there."""
    return json.dumps(content, indent=2) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("python -m tests.config.shipped --write")
    for name, content in shipped().items():
        (ROOT / "config" / name).write_text(text(content))
