"""What `--nvme_checksums` costs a run that waits for its drive: the same steps with digests off, on, sampled in turn.

    python benchmarks/drives/checksums.py --nvme FOLDER --out checksums.json                # one GPU: about 4 minutes
    python benchmarks/drives/checksums.py --nvme FOLDER --shape tiny --out /tmp/c.json      # a dry run on the CPU

Every byte of weights and fp32 states lies on the drive. One process builds the engine anew for every turn (off, on,
sampled, sampled, on, off: a drive that drifts does so for all), so that no turn pays for imports or kernels. A turn is
one step to warm up, then `--steps` timed to the point at which nothing is pending. The cost is the median step's over
that with digests off; wanted: at most 1 % (`on`, which `auto` means where a core does 4 GB/s). The losses of all turns
must be the same numbers. Exit code 1 where they are not, or the cost is higher; turns that no longer fit into
`--limit_s` are left out and named. Attention is told to add in a fixed order (docs/exactness.md), else losses drift.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "race"))

import torch
from race_common import cap_allocator, drive_bytes, synchronize, token_batches
from race_ours import random_model

from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.weights import choose_verification

TURNS = ("off", "on", "sampled", "sampled", "on", "off")
WANTED = 1.01


def turn(mode: str, args: argparse.Namespace, device: str) -> dict[str, Any]:
    """One engine from its building to its end."""
    tokens = {"mb": 1, "gas": 2, "seq": 64} if args.shape == "tiny" else {"mb": 4, "gas": 1, "seq": 1024}
    options: dict[str, Any] = {"shape": args.shape, **tokens}
    batches = token_batches(options)
    rows = [batch["input_ids"] for batch in batches]
    settings = StreamSettings(
        step_tokens=tuple(row.numel() for row in rows), row_tokens=max(row.shape[1] for row in rows), states="fp32",
        nvme_path=str(args.nvme), state_ram_bytes=0, weight_ram_bytes=0, nvme_checksums=mode,
    )  # fmt: skip
    engine = build_stream_engine(random_model(options, device), settings, device=device)
    try:
        losses = [engine.train_step(batches, 1e-4).loss]
        _settle(engine)
        before, steps_s = drive_bytes(str(args.nvme)), []
        for _ in range(args.steps):
            start_s = time.perf_counter()
            losses.append(engine.train_step(batches, 1e-4).loss)
            _settle(engine)
            steps_s.append(time.perf_counter() - start_s)
        after = drive_bytes(str(args.nvme))
    finally:
        engine.close()
    moved = {name: (after[name] - before[name]) / args.steps for name in after} if before and after else None
    return {"mode": mode, "steps_s": steps_s, "losses": losses, "drive_bytes_per_step": moved}


def _settle(engine: Any) -> None:
    engine._parts.updates.drain()
    synchronize()


def main(argv: list[str] | None = None) -> int:
    """Measure, print a line a turn, write the JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--limit_s", type=float, default=95.0)
    args = parser.parse_args(argv)
    args.nvme.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cap_allocator(args.cap_gib)
    torch.use_deterministic_algorithms(True)
    began_s = time.perf_counter()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "shape": args.shape,
        "digest": choose_verification("on").words,
        "turns": [],
    }
    longest_s = 0.0
    for number, mode in enumerate(TURNS):
        turn_began_s = time.perf_counter()
        if turn_began_s - began_s + longest_s > args.limit_s:
            found["left_out"] = list(TURNS[number:])
            print(f"left out for time: {', '.join(TURNS[number:])}")
            break
        found["turns"].append(turn(mode, args, device))
        longest_s = max(longest_s, time.perf_counter() - turn_began_s)
        print(f"{mode:8} {', '.join(f'{s:.3f}' for s in found['turns'][-1]['steps_s'])} s", flush=True)
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    step_s = {
        mode: median(s for one in found["turns"] if one["mode"] == mode for s in one["steps_s"])
        for mode in dict.fromkeys(one["mode"] for one in found["turns"])
    }
    same = all(one["losses"] == found["turns"][0]["losses"] for one in found["turns"])
    found |= {"step_s": step_s, "cost": {mode: s / step_s["off"] for mode, s in step_s.items()}, "same_losses": same}
    args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(found["digest"])
    for mode, cost in found["cost"].items():
        print(f"{mode:8} {step_s[mode]:.3f} s a step, {cost:.3f} of off")
    print("the losses of all turns are the same" if same else "LOSSES DIFFER")
    return 0 if same and found["cost"].get("on", 1.0) <= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
