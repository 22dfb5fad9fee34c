"""Evaluation beyond VRAM: ours beside the harness's own backend over accelerate's device_map, the same weights.

    python benchmarks/infer/evaluate.py --model llama-8b --cap_gib 6.5 --out evaluate.json
    python benchmarks/infer/evaluate.py --dry_run            (tiny model, CPU, seconds)

Each case prints one JSON line as it ends: seconds in the model for all requests of `outcore_endings` (four a document);
for the rival also the ratio of the seconds, and the differences of one ending's log-likelihood from ours and from the
rival's own at the first number of rows: what bf16 in another order makes of the same weights. Weights are random:
scores mean nothing, differences and seconds do.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import Cases, device_of, find
from offload import filled, spread

from outcore.data import train_byte_bpe
from outcore.evaluate import EvaluationSettings, compare
from outcore.evaluate.harness import OutcoreLM
from outcore.evaluate.parity import softmax_of, timed_suite
from outcore.evaluate.tasks import endings
from outcore.infer.opening import InferSettings, open_found

CONTEXT = 512


def ours(args: argparse.Namespace, settings: EvaluationSettings, tokenizer: Any, device: torch.device) -> Any:
    """(scores, documents, seconds) of our engine; the second of two runs, the first of which compiles."""
    found = replace(find(args.model, args.precision), tokenizer=tokenizer)
    opened = open_found(found, InferSettings(context=CONTEXT, preset="throughput", deterministic=True), device, print)
    try:
        first = timed_suite(OutcoreLM(opened=opened), settings)
        result = timed_suite(OutcoreLM(opened=opened), settings)
        return result, {"first_s": first[2], "placement": opened.placement.lines()}
    finally:
        opened.close()


def theirs(args: argparse.Namespace, settings: EvaluationSettings, tokenizer: Any, device: torch.device) -> Any:
    """The same of the harness's own backend, for each number of rows a batch."""
    from lm_eval.models.huggingface import HFLM

    if device.type == "cuda":
        model, layers_on_gpu = spread(args.model, args.cap_gib, device)
    else:
        model, layers_on_gpu = filled(find(args.model, args.precision).loaded.model, "cpu", torch.float32), 0
    for rows in args.rows:
        backend: Any = HFLM
        lm = backend(
            pretrained=model, tokenizer=tokenizer, batch_size=rows, max_length=CONTEXT - 1, backend="causal",
            **softmax_of(device.type),
        )  # fmt: skip
        yield rows, layers_on_gpu, timed_suite(lm, settings)


def median_gap(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> float:
    """Median over all endings of the difference between two backends' log-likelihoods, nat."""
    pairs = zip(theirs, ours, strict=True)
    return median(abs(a[0] - b[0]) for x, y in pairs for a, b in zip(x["answers"], y["answers"], strict=True))


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", help="a preset of outcore.model.presets")
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--limit", type=int, default=64, help="documents, of four requests each")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32], help="of the rival's batches")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry_run", action="store_true")
    args = parser.parse_args()
    device = device_of(args.cap_gib, dry_run=args.dry_run)
    if args.dry_run:
        args.model, args.limit = "tiny", 3
    args.precision = "bf16" if device.type == "cuda" else "fp32"
    tokenizer = train_byte_bpe([" ".join(one["endings"]) for one in endings()], 1024)
    settings = EvaluationSettings(("outcore_endings",), limit=args.limit)
    cases, kept = Cases(device, args.out), {}

    def our_case() -> dict[str, Any]:
        kept["ours"], more = ours(args, settings, tokenizer, device)
        return {"s": kept["ours"][2], "requests": 4 * args.limit, **more}

    def rival_case(rows: int, layers_on_gpu: int, result: Any) -> dict[str, Any]:
        first = compare(result[0], result[1], kept["ours"][0], kept["ours"][1])[0]
        itself = compare(result[0], result[1], *kept.setdefault("theirs", result)[:2])[0]
        return {
            "rows": rows,
            "s": result[2],
            "layers_on_gpu": layers_on_gpu,
            "times_ours": result[2] / kept["ours"][2],
            "changed": first.changed,
            "max_logprob_difference": first.max_logprob_difference,
            "median_logprob_difference": median_gap(result[1], kept["ours"][1]),
            "max_logprob_difference_from_itself": itself.max_logprob_difference,
            "median_logprob": median(abs(one[0]) for sample in result[1] for one in sample["answers"]),
        }

    cases.note("ours", our_case)
    cases.free()
    for found in theirs(args, settings, tokenizer, device):
        cases.note("harness over device_map", lambda f=found: rival_case(*f))


if __name__ == "__main__":
    main()
