"""This checkout's streaming engine against another commit's, side by side on one machine, to find what a change costs.

    git archive e9a12d0 outcore benchmarks/race_ours.py benchmarks/race_common.py | tar -x -C old   (a folder `old`)
    python benchmarks/race/against.py --old old --only ours-fp32-clip,ours-fp32 --out against.json
    python benchmarks/race/against.py --old old --group nvme --nvme FOLDER --only ours-split-nvme --eager --rounds 2
    python benchmarks/race/against.py --old old --shape tiny --only ours-fp32 --steps 1 --repeats 1   (dry run, CPU)

Variants are those of `stream_race.py`. Each runs as a process of its own, old and new in turn (new, old, old, new), so
that a machine that warms up or slows down does so for both. A ratio is of the medians over all windows. With states on
a drive one process more runs first and does not count, because it may pay for a fresh drive, and the bytes moved a step
are told as well: they do not depend on how fast the drive is just then. Exit code 1 when one failed, or is more
than --limit (1.03) times as long as before.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import stream_race
from race_variants import variants

ORDER = ("new", "old", "old", "new")


def run_in(tree: Path, name: str, variant: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """One child of the checkout at `tree`."""
    stream_race.ROOT, stream_race.HERE = tree, next(tree.rglob("benchmarks/**/race_ours.py")).parent
    return stream_race.run(name, variant, args)


def drive_gb(runs: list[dict[str, Any]]) -> str:
    """GB a step that the drive read and wrote, median of the runs; empty where nothing lies on a drive."""
    moved = [sum(one["drive_bytes_per_step"].values()) for one in runs if one.get("drive_bytes_per_step")]
    return f" ({median(moved) / 1e9:.2f} GB of the drive)" if moved else ""


def main() -> int:
    """Run the variants in both trees and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="folder with the other commit's files")
    parser.add_argument("--group", default="ram")
    parser.add_argument("--only", default="ours-fp32-clip,ours-fp32,ours-split8-clip")
    parser.add_argument("--shape", default="1.2b")
    parser.add_argument("--rounds", type=int, default=4, help="processes of each variant, both trees together")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--nvme_steps", type=int, default=2)
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--half_bytes", type=int, default=7_300_000_000)
    parser.add_argument("--nvme", type=Path)
    parser.add_argument("--eager", action="store_true", help="compile nothing: a start takes seconds, not a minute")
    parser.add_argument("--limit_s", type=float, default=240)
    parser.add_argument("--limit", type=float, default=1.03)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trees = {"new": Path(__file__).resolve().parents[2], "old": args.old.resolve()}
    tokens = "tiny" if args.shape == "tiny" else None
    chosen = variants(args.shape, tokens)[args.group]
    if args.nvme:
        args.nvme.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    is_fine = True
    for name in args.only.split(","):
        found = results[name] = {"new": [], "old": []}
        if args.eager:
            chosen[name]["settings"]["compile"] = "off"
        if args.nvme:
            run_in(trees["new"], name, chosen[name], args)
        for number in range(args.rounds):
            tree = ORDER[number % len(ORDER)]
            found[tree].append(run_in(trees[tree], name, chosen[name], args))
        if errors := [one["error"] for runs in found.values() for one in runs if "error" in one]:
            print(f"{name:24} FAILED {errors[0][-1500:]}", flush=True)
            is_fine = False
            continue
        step_s = {tree: median(s for one in runs for s in one["repeats_s"]) for tree, runs in found.items()}
        ratio = step_s["new"] / step_s["old"]
        same = found["new"][0]["losses"] == found["old"][0]["losses"]
        print(
            f"{name:24} new {step_s['new']:.3f} s{drive_gb(found['new'])}  old {step_s['old']:.3f} s"
            f"{drive_gb(found['old'])}  ratio {ratio:.3f}  losses {'the same' if same else 'differ'}",
            flush=True,
        )
        is_fine &= ratio <= args.limit
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
