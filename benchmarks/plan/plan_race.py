"""What the planner says of the race's runs, beside what they took: seconds a step, RAM, GPU memory.

    python benchmarks/plan/plan_race.py benchmarks/results/rivals-h100-*.json benchmarks/results/lora-*.json
    python benchmarks/plan/plan_race.py --ram_gb_per_s 117 ours.json         (other jobs leave no more of the RAM)
    python benchmarks/plan/plan_race.py --machine logs/machine_profile.json ours.json

Reads results of `stream_race.py` (ours) and `stream_lora.py`. The machine is the server whose rates
`plan_vs_measured.py` measured on another day, or --machine, with the cap of GPU memory of the run and, where it used a
drive, the rate that it saw. Aims: 20 % of the seconds, 10 % of memory. Left out: runs that failed, products in float8,
whose rates no profile has, and turns of one engine, whose graphs keep the memory of the turn before.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "race"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from race_common import SHAPES
from race_variants import FAR

from outcore.common.quantities import GIB
from outcore.engine.stream.decision.decision import stream_layout
from outcore.engine.stream.settings import StreamSettings
from outcore.model import PRESETS, resolve_shape
from outcore.plan import constants as k
from outcore.plan.hardware import Hardware
from outcore.plan.profile import load_hardware
from outcore.plan.record import AHEAD, Plan
from outcore.plan.request import RunRequest
from outcore.plan.run.forecast import plan_layout
from outcore.sizing.shape import ModelShape, shape_from_fields

RESULTS = Path(__file__).resolve().parents[1] / "results"
STAYS = "--resident_gib"
"""In what an engine says where layers may stay on the GPU; before it was the default, none did."""


class Run(NamedTuple):
    """One of ours: what was asked, and what it took."""

    name: str
    shape: ModelShape
    cut: tuple[int, int, int]
    """Rows of a micro-batch, micro-batches, tokens of a row."""
    told: StreamSettings
    cap_gib: float
    drive_gb_per_s: float | None
    took: tuple[float, float, float]
    """Seconds a step, GiB of RAM, GiB of GPU memory."""


def race_shape(name: str, seq_length: int) -> ModelShape:
    """A shape of the race, as `race_common.config_of` makes it."""
    hidden, layers, intermediate, heads, kv_heads, vocabulary = SHAPES[name]
    fields = {
        "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "max_position_embeddings": max(seq_length, 2048), "tie_word_embeddings": False,
    }  # fmt: skip
    return shape_from_fields(name, "llama", fields)


def adapters_of(result: dict[str, Any]) -> Run:
    """A run of `stream_lora.py`."""
    preset, layers = PRESETS[result["preset"]], result["layers"]
    shape = resolve_shape(preset.name, lora_target_modules=result["lora_target_modules"])
    if layers:
        shape = shape_from_fields(preset.name, preset.model_type, {**preset.fields, "num_hidden_layers": layers})
    published = "mxfp4" if preset.model_type == "gpt_oss" and not result["quantize"] else None  # as the race fills it
    shape = shape.with_lora(result["lora_r"]).packed(result["quantize"], published=published)
    on_drive, staging_gib = result["weights_nvme_gib"] > 0, result["staging_gib"]
    told = StreamSettings(
        activations=result["activations"],
        nvme_path="drive" if on_drive else None,
        weight_ram_bytes=int(result["weights_ram_gib"] * GIB) if on_drive else None,
        step_tokens=(result["rows"] * result["seq_length"],) * result["micro_batches"],
        **({"staging_bytes": int(staging_gib * GIB)} if staging_gib else {}),
    )
    name = f"{preset.name} {shape.quantize or 'bf16'}{f', {layers} layers' if layers else ''}"
    took = (result["step_s"], result["rss_training_gib"], result["peak_vram_gib"])
    cut = (result["rows"], result["micro_batches"], result["seq_length"])
    return Run(name, shape, cut, told, result["vram_gib"] or 0, result["raw_gb_per_s"], took)


def full_of(name: str, variant: dict[str, Any], result: dict[str, Any], cap_gib: float) -> Run:
    """A run of `race_ours.py`."""
    residents = {} if STAYS in result.get("said", "") else {"resident_bytes": 0}
    drive = {"nvme_path": "drive"} if variant["uses_nvme"] else {}
    told = StreamSettings(**{"max_grad_norm": 0.0, **residents, **variant["settings"], **drive})
    rates = result.get("drive_rates_bytes_per_s")
    rss = result.get("rss_training") or result["rss"]
    took = (result["step_s"], rss["VmRSS"] / GIB, result["peak_vram_bytes"] / GIB)
    cut, shape = (variant["mb"], variant["gas"], variant["seq"]), race_shape(variant["shape"], variant["seq"])
    return Run(
        f"{variant['shape']} {name}",
        shape,
        cut,
        told,
        variant.get("cap_gib", cap_gib),
        rates and sum(rates) / 2e9,
        took,
    )


def runs_of(path: Path) -> Iterator[Run]:
    """Those of ours in a file."""
    found = json.loads(path.read_text("utf-8"))
    if "variants" in found:
        arguments = found["arguments"].get("ours", found["arguments"])
        for name, variant in found["variants"].items():
            result = found["results"].get(name, {"error": "not run"})
            is_ours = variant["child"] == "race_ours.py" and "error" not in result
            if is_ours and variant["settings"].get("matmul", "same") == "same":
                yield full_of(name, variant, result, float(arguments["cap_gib"]))
        return
    for result in found if isinstance(found, list) else [found]:
        if "step_s" in result and "system" not in result and result.get("matmul", "same") == "same":
            yield adapters_of(result)


def forecast(run: Run, server: Hardware) -> Plan:
    """Today's, as if the card had what the allocator was let have."""
    reserve_bytes = k.VRAM_RESERVE_BYTES + server.gpu_context_bytes
    room_bytes = int(run.cap_gib * GIB) or server.vram_bytes - reserve_bytes
    hardware = dataclasses.replace(
        server, vram_bytes=room_bytes + reserve_bytes, ram_bytes=512 * GIB, pinned_bytes=256 * GIB
    )
    if run.drive_gb_per_s:
        drive = ("drive_read_gb_per_s", "drive_write_gb_per_s", "drive_mixed_gb_per_s")
        hardware = dataclasses.replace(hardware, **dict.fromkeys(drive, run.drive_gb_per_s))
    (rows, times, seq_length), told = run.cut, run.told
    layout = dataclasses.replace(stream_layout(told, rows, times, "cuda"), device_bytes=room_bytes)
    if run.shape.lora_r:  # pinned as the race says
        layout = dataclasses.replace(layout, staging_bytes=None)
    request = RunRequest(
        seq_length=seq_length, micro_batch=rows, accumulation=times, state_format=told.states, optimizer=told.optimizer,
        max_grad_norm=told.max_grad_norm,
    )  # fmt: skip
    return plan_layout(run.shape, request, hardware, layout)


def server_of(path: Path) -> Hardware:
    """The machine of results of `plan_vs_measured.py`, or of a profile that `gds_optimizer.py` wrote."""
    found = json.loads(path.read_text("utf-8"))
    if "runs" not in found:
        return load_hardware(str(path), allow_nominal=True)
    return Hardware(**found["runs"][0]["forecast"]["asked"]["hardware"])


def row(run: Run, plan: Plan) -> str:
    """A line of the table; where no step clips, of such steps."""
    time, ram_bytes = plan.time, plan.expected_bytes("ram", "pinned")
    if plan.time_whole and run.told.max_grad_norm == FAR:
        time = plan.time_whole
    else:
        ram_bytes -= plan.part_bytes("ram", AHEAD)
    said = (time.step_s, ram_bytes / GIB, plan.expected_bytes("vram") / GIB)
    cells = [f"{one:.3g} / {took:.3g} ({one / took:.2f})" for one, took in zip(said, run.took, strict=True)]
    rows, times, seq_length = run.cut
    return f"| {run.name} | {times} x {rows * seq_length:,} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--machine", type=Path, default=RESULTS / "plan_vs_measured-h100-second.json")
    parser.add_argument("--ram_gb_per_s", type=float, help="what updates and copies get of the RAM, else as measured")
    args = parser.parse_args()
    server = server_of(args.machine)
    if args.ram_gb_per_s:
        server = dataclasses.replace(server, ram_gb_per_s=args.ram_gb_per_s / k.DRAM_SHARE, optimizer_gparams_per_s={})
    print("| run | tokens a step | s/step | RAM, GiB | GPU memory, GiB |\n|---|---:|---:|---:|---:|")
    for path in args.results:
        for run in runs_of(path):
            print(row(run, forecast(run, server)))
    print("\nforecast / measured (their ratio)")


if __name__ == "__main__":
    main()
