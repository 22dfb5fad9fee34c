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
    for tensor_parallel in (2, 4):
        made |= parallel(tensor_parallel, 1)
    return made


def parallel(tensor_parallel: int, pipeline_parallel: int) -> dict[str, dict[str, Any]]:
    """ZeRO-3 with each layer shared by so many ranks, in RAM and on NVMe: for scripts that call DeepSpeed themselves.
    ValueError for pipeline stages."""
    if pipeline_parallel > 1:
        raise ValueError(
            f"pipeline_parallel is {pipeline_parallel}: DeepSpeed's pipeline takes ZeRO-1 at most. Take more tensor "
            "parallel ranks, or serve with `outcore serve --engine vllm --pipeline_parallel N`"
        )
    made = {}
    for suffix, file in (("", "deepspeed_config.json"), ("_nvme", "config/deepspeed_zero_infinity.json")):
        found = json.loads((ROOT / file).read_text()) | {"tensor_parallel": {"autotp_size": tensor_parallel}}
        del found["outcore"]
        made[f"deepspeed_zero3_tp{tensor_parallel}_pp1{suffix}.json"] = found
    return made


def text(content: dict[str, Any]) -> str:
    """The file as it lies there."""
    return json.dumps(content, indent=2) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("python -m tests.config.shipped --write")
    for name, content in shipped().items():
        (ROOT / "config" / name).write_text(text(content))
