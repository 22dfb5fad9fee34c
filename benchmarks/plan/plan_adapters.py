"""What the planner says of runs of `stream_lora.py`, beside what they took: seconds a step, RAM, GPU memory.

    python benchmarks/plan/plan_adapters.py benchmarks/results/lora-*.json

The machine is the server whose rates `plan_vs_measured.py` measured on another day (--machine), with the race's cap of
GPU memory: nothing of the runs told here is in the planner's constants. Aims: 20 % of the seconds, 10 % of memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from outcore.common.quantities import GIB
from outcore.model import resolve_shape
from outcore.plan import constants as k
from outcore.plan.hardware import Hardware
from outcore.plan.request import RunRequest
from outcore.plan.run.forecast import plan_layout
from outcore.sizing.layouts import Residency, StreamLayout

RESULTS = Path(__file__).resolve().parents[1] / "results"
HOMES = {"device": "vram", "ram": "ram", "nvme": "nvme"}


def forecast(run: dict[str, Any], server: Hardware) -> tuple[float, float, float]:
    """Seconds a step, GiB of RAM, GiB of GPU memory of one run of `stream_lora.py`."""
    reserve_bytes = k.VRAM_RESERVE_BYTES + server.gpu_context_bytes
    room_bytes = int((run["vram_gib"] or server.vram_bytes / GIB) * GIB)
    hardware = dataclasses.replace(
        server, vram_bytes=room_bytes + reserve_bytes, ram_bytes=512 * GIB, pinned_bytes=256 * GIB
    )
    shape = resolve_shape(run["preset"], lora_target_modules=run["lora_target_modules"])
    shape = dataclasses.replace(shape, lora_r=run["lora_r"], quantize=run["quantize"] or "")
    request = RunRequest(
        seq_length=run["seq_length"], micro_batch=run["rows"], accumulation=run["micro_batches"],
        state_format="fp32", staging_bytes=None,
    )  # fmt: skip
    layout = StreamLayout(
        run["rows"],
        run["micro_batches"],
        HOMES[run["activations"]],
        tiling="off",
        device_bytes=room_bytes,
        residency=Residency(),
    )
    plan = plan_layout(shape, request, hardware, layout)
    return plan.time.step_s, plan.expected_bytes("ram", "pinned") / GIB, plan.expected_bytes("vram") / GIB


def runs_of(path: Path) -> list[dict[str, Any]]:
    """Those of ours that ended, with the base in RAM."""
    text = path.read_text("utf-8")
    found = json.loads(text)
    runs = found if isinstance(found, list) else [found]
    return [run for run in runs if "step_s" in run and "system" not in run and not run["weights_nvme_gib"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--machine", type=Path, default=RESULTS / "plan_vs_measured-h100-second.json")
    args = parser.parse_args()
    asked = json.loads(args.machine.read_text("utf-8"))["runs"][0]["forecast"]["asked"]
    server = Hardware(**asked["hardware"])
    print("| run | tokens a step | s/step | RAM, GiB | GPU memory, GiB |\n|---|---:|---:|---:|---:|")
    for run in (run for path in args.results for run in runs_of(path)):
        pairs = zip(forecast(run, server), (run["step_s"], run["rss_training_gib"], run["peak_vram_gib"]), strict=True)
        cells = [f"{said:.3g} / {took:.3g} ({100 * (said / took - 1):+.0f} %)" for said, took in pairs]
        tokens = run["rows"] * run["micro_batches"] * run["seq_length"]
        print(f"| {run['preset']} {run['quantize'] or 'bf16'} | {tokens:,} | {' | '.join(cells)} |")
    print("\nforecast / measured (forecast's error)")


if __name__ == "__main__":
    main()
