"""Do 8-bit moments train as well as fp32 ones? Thousands of steps on real text through the streaming engine.

    python benchmarks/exactness/moments8.py --format fp32 --out RESULTS      # one run: a GPU, some minutes
    python benchmarks/exactness/moments8.py --format split8 --out RESULTS    # may share the GPU with the other
    python benchmarks/exactness/moments8.py --compare --out RESULTS          # verdict and table from the results there
    python benchmarks/exactness/moments8.py --plot docs/pictures/moments8.png --table docs/exactness.md --out RESULTS
    python benchmarks/exactness/moments8.py --small --format split8 --out /tmp/m8     # a dry run on the CPU

A run trains a Llama shape of 107 M parameters from scratch in bf16 on the built-in text (this Python's own library,
packed rows), with states in RAM, exact clipping and a cosine schedule. Runs of one --seed start from the same weights
and see the same rows in the same order; only --format differs. Every --eval_every steps the loss on held-out files is
measured. The text is small, so the rows are seen a few times: epochs and the gap between training and validation loss
are part of the results.

--compare: relative difference of the last validation loss to fp32's of the same seed, at most --tolerance (0.5 %) for
each other format; exit code 1 otherwise. Two fp32 runs of one seed on a GPU need not be bit-identical, so run fp32
twice (--name fp32-again) to know how much of a difference is noise.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from real_text import SHAPES, Text, device_name, model, write_json

from outcore.common.quantities import MIB
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.settings import StreamSettings
from outcore.model.forward import MATMULS
from outcore.optim import FORMATS
from outcore.train.configure.schedule import LrSchedule

FORMAT_NAMES = tuple(f.name for f in FORMATS)
BETAS, EPS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0
MARKERS = ("<!-- moments8: begin -->", "<!-- moments8: end -->")
SAME = ("shape", "steps", "seq_length", "rows", "accumulation", "lr", "text", "eval_every")
"""What two results must agree in to be compared."""


def train(options: argparse.Namespace) -> dict[str, Any]:
    """One run from its first to its last step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = Text(options.seq_length, max_eval_rows=options.eval_rows, cache_dir=options.cache_dir)
    settings = StreamSettings(
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        states=options.format,
        compile=options.compile,
        matmul=options.matmul,
        staging_bytes=options.staging_mib * MIB,
        optimizer_threads=options.threads,
        seed=options.seed,
    )
    engine = build_stream_engine(model(options.shape, text, "bf16", options.seed), settings, device=device)
    try:
        print(engine.describe(), flush=True)
        stream = text.stream(options.rows, options.seed)
        schedule = LrSchedule("cosine", options.lr, min(100, max(1, options.steps // 10)), options.steps)
        losses: list[float] = []
        norms: list[float] = []
        validation: list[dict[str, float]] = []

        def evaluate() -> None:
            found = engine.evaluate(iter(text.validation(options.rows)))
            recent = losses[-options.eval_every :]
            validation.append({"step": len(losses), "loss": found.loss, "tokens": found.tokens, "train": mean(recent)})
            print(
                f"step {len(losses):5}  train {mean(recent):.4f}  validation {found.loss:.4f}  "
                f"epoch {stream.rows_seen / len(stream.dataset):.2f}  {time.perf_counter() - begin_s:.0f} s",
                flush=True,
            )

        begin_s = time.perf_counter()
        for step in range(options.steps):
            result = engine.train_step([next(stream) for _ in range(options.accumulation)], schedule.lr(step))
            losses.append(result.loss)
            norms.append(result.grad_norm)
            if len(losses) % options.eval_every == 0 or len(losses) == options.steps:
                evaluate()
        wall_s = time.perf_counter() - begin_s
        description = engine.describe().splitlines()
    finally:
        engine.close()
    return {
        "name": options.name,
        "format": options.format,
        "seed": options.seed,
        **{key: getattr(options, key) for key in SAME if key != "text"},
        "text": text.facts(),
        "epochs": stream.rows_seen / len(stream.dataset),
        "tokens_per_step": options.rows * options.accumulation * options.seq_length,
        "device": device_name(),
        "torch": torch.__version__,
        "engine": description,
        "wall_s": wall_s,
        "last_validation_loss": validation[-1]["loss"],
        "last_train_loss": validation[-1]["train"],
        "validation": validation,
        "losses": losses,
        "grad_norms": norms,
    }


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The runs in a folder, fp32 first. ValueError when there is no fp32 run or runs cannot be compared."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-seed*.json"))]
    results.sort(
        key=lambda r: (r["seed"], r["format"] != "fp32", FORMAT_NAMES.index(r["format"]), r["name"] != r["format"])
    )
    for result in results:
        reference_of(result, results)
    if not results:
        raise ValueError(f"no results in {folder}: run each --format with this --out first")
    return results


def reference_of(result: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """The fp32 run that a run is compared with."""
    for other in results:
        if other["name"] == "fp32" and other["seed"] == result["seed"]:
            for key in SAME:
                if other[key] != result[key]:
                    raise ValueError(
                        f"{result['name']} and fp32 of seed {result['seed']} cannot be compared: {key} is "
                        f"{result[key]!r} in one, {other[key]!r} in the other"
                    )
            return other
    raise ValueError(f"there is no fp32 run of seed {result['seed']} to compare {result['name']} with")


def difference(result: dict[str, Any], results: list[dict[str, Any]]) -> float:
    """Relative difference of the last validation loss to fp32's; positive: worse."""
    return result["last_validation_loss"] / reference_of(result, results)["last_validation_loss"] - 1


def table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table with what they were made with."""
    first = results[0]
    bytes_per_param = {f.name: f.bytes_per_param for f in FORMATS}
    lines = [
        f"Llama shape `{first['shape']}`, {first['steps']:,} steps of {first['tokens_per_step']:,} tokens of "
        f"{first['text']['source']} ({first['epochs']:.1f} epochs), {first['device']}.",
        "",
        "| states | bytes per parameter | seed | training loss | validation loss | to fp32 |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        to_fp32 = "" if r["name"] == "fp32" else f"{difference(r, results):+.2%}"
        lines.append(
            f"| {r['name']} | {bytes_per_param[r['format']]:.2f} | {r['seed']} | {r['last_train_loss']:.4f} | "
            f"{r['last_validation_loss']:.4f} | {to_fp32} |"
        )
    return "\n".join(lines) + "\n"


def fill(document: Path, text: str) -> None:
    """Replace what is between the markers of a document by `text` and the picture. ValueError without markers."""
    before, begin, rest = document.read_text(encoding="utf-8").partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not (begin and end):
        raise ValueError(f"{document} has no place for the table, between the lines {MARKERS[0]} and {MARKERS[1]}")
    picture = "![Validation loss by format of the optimizer states](pictures/moments8.png)"
    document.write_text(f"{before}{begin}\n{text}\n{picture}\n{end}{after}", encoding="utf-8")
    print(f"written: {document}")


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Validation loss over steps, and below it each format's relative difference to fp32."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for r in results:
        steps = [point["step"] for point in r["validation"]]
        label = r["name"] if r["seed"] == results[0]["seed"] else f"{r['name']}, seed {r['seed']}"
        above.plot(steps, [point["loss"] for point in r["validation"]], label=label, linewidth=1.5)
        reference = reference_of(r, results)["validation"]
        apart = [100 * (a["loss"] / b["loss"] - 1) for a, b in zip(r["validation"], reference, strict=True)]
        below.plot(steps, apart, linewidth=1.5)
    above.set_ylabel("validation loss (nats per token)")
    above.legend()
    first = results[0]
    above.set_title(f"Optimizer state formats, Llama {first['shape']}, {first['tokens_per_step']:,} tokens a step")
    below.axhspan(-0.5, 0.5, color="#e9ecef", zorder=0)
    below.set_ylabel("to fp32 (%)")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"written: {path}")


def report(options: argparse.Namespace) -> int:
    """Table, verdict, and what else was asked for, from the results of earlier runs."""
    try:
        results = read_results(options.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    text = table(results)
    print(text)
    if options.plot:
        plot(results, options.plot)
    if options.table:
        fill(options.table, text)
    failed = [r["name"] for r in results if not abs(difference(r, results)) <= options.tolerance]
    broken = [r["name"] for r in results if not math.isfinite(r["last_validation_loss"])]
    for name in dict.fromkeys([*broken, *failed]):
        print(f"{name}: not within {options.tolerance:.2%} of fp32")
    return 1 if failed or broken else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--format", choices=FORMAT_NAMES, help="train with these optimizer states")
    parser.add_argument("--matmul", choices=MATMULS, default=MATMULS[0], help="how layers multiply (docs/exactness.md)")
    parser.add_argument("--name", help="of the run, where it is not the format's")
    parser.add_argument("--compare", action="store_true", help="judge the results in --out")
    parser.add_argument("--plot", type=Path, help="judge, and draw the curves here")
    parser.add_argument("--table", type=Path, help="judge, and put table and picture between this document's markers")
    parser.add_argument("--small", action="store_true", help="a dry run on the CPU")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="100m")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seq_length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--eval_every", type=int, default=100)
    parser.add_argument("--eval_rows", type=int, default=256)
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--threads", type=int, help="of the CPU optimizer; give fewer when runs share the machine")
    parser.add_argument("--staging_mib", type=int, default=1024)
    parser.add_argument("--tolerance", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cache_dir", default=".cache/outcore")
    options = parser.parse_args(arguments)
    reporting = options.compare or options.plot or options.table
    if bool(options.format) == bool(reporting):
        parser.error("give either --format to train, or --compare, --plot, --table for results that are there")
    options.name = options.name or options.format
    if options.small:
        options.shape, options.steps, options.seq_length, options.rows = "small", 30, 64, 2
        options.eval_every, options.eval_rows, options.staging_mib, options.lr = 10, 8, 256, 6e-3
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not options.format:
        return report(options)
    if not torch.cuda.is_available() and not options.small:
        print("no GPU: this would take days on the CPU. Use --small for a dry run.", file=sys.stderr)
        return 1
    write_json(options.out / f"{options.name}-seed{options.seed}.json", train(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
