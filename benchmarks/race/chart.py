"""Bar chart and Markdown table of a race against rivals, from the raw results of `stream_race.py --group rivals`.

    python benchmarks/race/chart.py benchmarks/results/train-1.2b-16k.json --picture docs/pictures/race.png
    python benchmarks/race/chart.py benchmarks/results/train-1.2b-16k.json --table

One group of bars a file (a model and a number of tokens): ours, by itself and where steps clip and their updates wait,
the best exact rival that fits the card, and the rival as most users run it. Exact: AdamW with fp32 masters and moments,
gradients clipped by their global norm, each step waiting for its update. The table has every row, those that lost or
failed too.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

NOT_EXACT = {
    "zero2-bf16": "masters and moments in bf16",
    "torchao": "no masters, no clipping",
    "roundpipe-stale": "one step stale",
    "ours-split8": "8-bit moments",
}
NAMES = {
    "ours-fp32": "outcore",
    "ours-split": "outcore, split masters",
    "ours-split-ahead": "outcore, split masters, updates ahead of the norm",
    "ours-fp32-streamed": "outcore, no layer stays on the GPU",
    "ours-split8": "outcore, 8-bit moments",
    "zero2": "ZeRO-2, optimizer in RAM",
    "zero2-bf16": "ZeRO-2, bf16 states",
    "zero3": "ZeRO-3, optimizer in RAM",
    "fsdp2": "FSDP2, CPU offload",
    "trainstream": "TrainStream",
    "roundpipe": "RoundPipe",
    "roundpipe-stale": "RoundPipe as it comes",
    "torchao": "torchao CPUOffloadOptimizer",
}
CLIPS = {"-far-clip": ", no step clips", "-half-clip": ", every other step clips"}
CUTS = {"-one": ", one micro-batch", "-two": ", two micro-batches", "-four": ", four micro-batches"}
COLORS = {"ours": "#1f77b4", "clips": "#9ecae1", "best": "#ff7f0e", "used": "#c7c7c7"}


def system_of(variant: str) -> str:
    """Variant's name without its cut and clipping: 'zero2-one-clip' -> 'zero2'."""
    for ending in (*CLIPS, "-clip", *CUTS, "-as-used"):
        variant = variant.removesuffix(ending)
    return variant


def words_of(variant: str) -> str:
    """System and cut for people."""
    clips = next((words for ending, words in CLIPS.items() if variant.endswith(ending)), "")
    bare = variant.removesuffix("-clip").removesuffix("-far").removesuffix("-half")
    cut = next((words for ending, words in CUTS.items() if bare.endswith(ending)), "")
    used = ", as users run it" if "-as-used" in variant else ""
    return NAMES.get(system_of(variant), system_of(variant)) + cut + used + clips


def is_exact(variant: str) -> bool:
    """Whether it trains the mathematics that the chart compares."""
    return system_of(variant) not in NOT_EXACT and variant.endswith("-clip")


def title_of(record: dict[str, Any]) -> str:
    """Model and tokens of a file."""
    first = next(iter(record["variants"].values()))
    return f"{first['shape'].replace('b', ' B')}, {first['mb'] * first['seq'] * first['gas']:,} tokens a step"


def figures(result: dict[str, Any]) -> tuple[float, float, float] | None:
    """(seconds a step, GiB of RAM, GiB of VRAM by torch), or None for what failed."""
    if "error" in result:
        return None
    rss = (result.get("rss_training") or result["rss"])["VmRSS"]
    return result["step_s"], rss / 2**30, (result.get("torch_peak_bytes") or 0) / 2**30


def chosen(record: dict[str, Any]) -> dict[str, tuple[str, tuple[float, float, float]]]:
    """ours, clips, best, used -> (variant, figures): the bars."""
    rows = {name: found for name, result in record["results"].items() if (found := figures(result))}
    exact = {name: row for name, row in rows.items() if is_exact(name)}
    ours = {name: row for name, row in exact.items() if name.startswith("ours")}
    others = {name: row for name, row in exact.items() if not name.startswith("ours")}
    bars = {"ours": min(ours.items(), key=lambda pair: pair[1][0])} if ours else {}
    if ours and "-ahead-" in bars["ours"][0] and (late := {n: row for n, row in ours.items() if "-ahead-" not in n}):
        bars["clips"] = min(late.items(), key=lambda pair: pair[1][0])
    if tuned := {name: row for name, row in others.items() if "-as-used" not in name}:
        bars["best"] = min(tuned.items(), key=lambda pair: pair[1][0])
    if used := {name: row for name, row in others.items() if "-as-used" in name}:
        bars["used"] = min(used.items(), key=lambda pair: pair[1][0])
    return bars


def table(record: dict[str, Any]) -> str:
    """Markdown of one file: every variant, exact ones first by their time."""
    best = chosen(record).get("best")
    lines = [
        f"**{title_of(record)}**",
        "",
        "| system | exact? | s/step | RAM GiB | VRAM GiB | best exact rival takes |",
        "|---|---|---:|---:|---:|---:|",
    ]
    rows = {name: figures(result) for name, result in record["results"].items()}
    for name in sorted(rows, key=lambda n: (not is_exact(n), (rows[n] or (1e9,))[0])):
        why = NOT_EXACT.get(system_of(name)) or ("" if name.endswith("-clip") else "no clipping")
        exact = f"no: {why}" if why else "yes"
        row = rows[name]
        if row is None:
            error = record["results"][name]["error"].strip().splitlines() or ["no result"]
            says = error[0].split(":")[0] if error[0].startswith("no end") else error[-1]
            lines.append(f"| {words_of(name)} | {exact} | failed: {says[:90].replace('|', '/')} | | | |")
        else:
            ratio = f"{best[1][0] / row[0]:.2f}x" if best and is_exact(name) else ""
            lines.append(f"| {words_of(name)} | {exact} | {row[0]:.3f} | {row[1]:.1f} | {row[2]:.1f} | {ratio} |")
    return "\n".join(lines)


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Three panels: seconds a step, RAM, VRAM."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    labels = {
        "ours": "outcore", "clips": "outcore in steps that clip", "best": "best exact rival that fits",
        "used": "that kind of rival as most run it",
    }  # fmt: skip
    for panel, (axis, title) in enumerate(zip(axes, ("seconds a step", "RAM, GiB", "VRAM, GiB"), strict=True)):
        for group, record in enumerate(records):
            bars = chosen(record)
            for place, (kind, (_, row)) in enumerate(bars.items()):
                at = group + (place - (len(bars) - 1) / 2) * 0.25
                axis.bar(at, row[panel], width=0.23, color=COLORS[kind], label=labels[kind] if group == 0 else None)
                axis.text(at, row[panel], f"{row[panel]:.2f}" if panel == 0 else f"{row[panel]:.0f}",
                          ha="center", va="bottom", fontsize=8)  # fmt: skip
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(records)), [title_of(r).replace(", ", ",\n") for r in records], fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Draw, or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    records = [json.loads(path.read_text()) for path in args.results]
    if args.table:
        print("\n\n".join(table(record) for record in records))
    if args.picture:
        draw(records, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
