"""Memory-centric tiling: one layer too large for the device, untiled and in tiles.

    python benchmarks/race/tiling.py --out tiling.json          (a GPU, about 75 GiB of RAM)
    python benchmarks/race/tiling.py --small                    (dry run of the same path, CPU or GPU, no cap)

The layer is one of Llama 3.1 405B's: hidden size 16,384, 3.2 B parameters, 5.9 GiB in bf16; with a vocabulary of 32,000
the model has 4.2 B. torch's allocator is capped at --cap_gib (6.5, as on an 8 GB card). Untiled must run out of memory;
in tiles (chosen by itself, `tiling: auto`) three steps are trained after one to warm up. Printed: peak memory of
the device by torch and by the driver, seconds per step, the losses, that of the warm-up first. With --small nothing is
capped: both train, and their losses must agree. Each variant is a child process. Exit code 1 when one does not end as
it should.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GIB = 2**30
TIMEOUT_S = 540
OUT_OF_MEMORY = "OutOfMemoryError"
LOSS_TOLERANCE = 5e-3
LEARNING_RATE = 1e-6
"""Every step has the same rows: at 1e-4 so wide a layer knows them by heart after one."""


def variants(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name -> options for `race_ours.py`."""
    common = {
        "shape": "tiny-layer" if args.small else "16k-layer",
        "mb": 2 if args.small else 1,
        "seq": 32 if args.small else args.seq_length,
        "gas": args.micro_batches,
        "warm": 1,
        "repeats": 3,
        "steps": 1,
        "cap_gib": 0 if args.small else args.cap_gib,
        "learning_rate": LEARNING_RATE,
    }
    settings = {"states": args.states, "max_grad_norm": 1.0}
    settings |= {"staging_bytes": GIB // 4} if args.small else {"staging_bytes": int(args.staging_gib * GIB)}
    tiled = {"tiling": "on", "tile_bytes": 2**16} if args.small else {"tiling": "auto"}
    return {
        "untiled": common | {"settings": settings | {"tiling": "off"}},
        "tiled": common | {"settings": settings | tiled},
    }


def run(options: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """(result, all output) of one child; no result when it failed."""
    command = [sys.executable, str(HERE / "race_ours.py"), json.dumps(options)]
    path = {"PYTHONPATH": f"{ROOT}:{HERE}"}
    try:
        child = subprocess.run(
            command, env=os.environ | path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        return None, f"{error.stdout or ''}{error.stderr or ''}\nnot over after {TIMEOUT_S} s"
    output = child.stdout + child.stderr
    lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    return (json.loads(lines[-1][7:]) if lines and child.returncode == 0 else None), output


def show(name: str, result: dict[str, Any]) -> str:
    """One line for people."""
    peaks = [
        f"{label} {result[key] / GIB:.2f} GiB"
        for key, label in (("torch_peak_bytes", "torch"), ("peak_vram_bytes", "driver"))
        if result.get(key)
    ]
    steps = ", ".join(f"{seconds:.2f}" for seconds in result["repeats_s"])
    losses = ", ".join(f"{loss:.4f}" for loss in result["warm_losses"] + result["losses"])
    ram = result["rss"]["VmHWM"] / GIB
    return (
        f"{name}: {result['params'] / 1e6:.1f} M parameters, {steps} s/step, peak on the device "
        f"{' / '.join(peaks) or '-'}, RAM {ram:.1f} GiB, losses {losses}"
    )


def main() -> int:
    """Run both and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny layer, uncapped: a dry run")
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--seq_length", type=int, default=2048)
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--states", default="fp32", choices=["fp32", "split", "fp32_m8", "split8", "fp24_m8"])
    parser.add_argument("--staging_gib", type=float, default=20.0, help="pinned memory; homes beyond it are pageable")
    parser.add_argument("--only", choices=["untiled", "tiled"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    good = True
    for name, options in variants(args).items():
        if args.only not in (None, name):
            continue
        result, output = run(options)
        ran_out = result is None and OUT_OF_MEMORY in output
        found[name] = {"options": options, "result": result, "ran_out_of_memory": ran_out}
        if result is not None:
            print("\n".join(line for line in output.splitlines() if line.startswith(("stream:", "  "))))
            print(show(name, result), flush=True)
        else:
            reason = next((line for line in reversed(output.splitlines()) if "Error" in line), output[-500:])
            print(f"{name}: {'out of memory' if ran_out else 'FAILED'}: {reason.strip()[:300]}", flush=True)
        good &= ran_out if name == "untiled" and not args.small else result is not None
    if args.small and len(found) == 2 and good:
        whole, tiled = (found[name]["result"]["losses"] for name in ("untiled", "tiled"))
        good = all(abs(a - b) <= LOSS_TOLERANCE * abs(a) for a, b in zip(whole, tiled, strict=True))
        print(f"losses agree: {good}")
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
