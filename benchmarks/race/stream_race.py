"""The streaming engine against DeepSpeed's offload and other rivals: seconds a step, RAM, VRAM.

    python benchmarks/race/stream_race.py --group rivals --out race.json [--nvme FOLDER] [--repeats 3]
    python benchmarks/race/stream_race.py --group deepspeed --shape tiny --only ours-fp32-clip     (dry run, CPU)

Each variant is a child process of its own on an otherwise idle GPU, with torch's allocator capped at --cap_gib (6.5, as
on an 8 GB card). Random tokens and weights. Timed from a moment with nothing pending to the next such moment; the
median of `repeats`. Peak VRAM is the driver's figure for the device less what was used before. Ratios are to the best
exact rival so far in the run with the same clipping. TFLOPS are 6 operations for each parameter and token,
recomputation not counted. Exit code 1 when a variant failed.

Variants with something on NVMe come with the drive's mixed rate right before and right after (`drive_rate.py`), and
with the share of the step that their drive bytes would take at the mean of the two. Windows of ours with something on
NVMe have `--nvme_steps`: at the beginning of one the drive is idle until the first updates.

Groups: rivals and rivals4k (16,384 and 4,096 tokens, --shape 1.2b, 1.75b or 2.8b: ours and the systems of
`race_rivals.py`), deepspeed (its offload to RAM, in four micro-batches and in one), nvme (every byte of optimizer
states on the drive), 8b (full training), tiles (10 B under 2 GB; a layer of hidden size 65,536), mfu (Qwen2.5 7B's
shape, 158 rows of 1,024 tokens, --cap_gib 0: how much arithmetic a large GPU gives), long (one row of 262,144 tokens,
--limit_s 400).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from drive_rate import RatesAround, drive_seconds
from race_variants import TOKENS, is_base, variants

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def run(name: str, variant: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """One child; its result, or {"error": ...}."""
    options = {name: getattr(args, name) for name in ("warm", "steps", "repeats", "cap_gib", "limit_s")} | variant
    if variant.get("uses_nvme"):
        options["nvme"] = str(args.nvme)
        if variant["child"] == "race_stock.py":  # half a minute a step
            options |= {"warm": 1, "steps": 1, "repeats": 2}
        else:
            options |= {"warm": 1, "steps": args.nvme_steps, "repeats": 2}
    text = json.dumps(options).replace('"@nvme"', json.dumps(str(args.nvme)))
    begin_s = time.perf_counter()
    command = [sys.executable, str(HERE / variant["child"]), text]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    env |= {"PYTORCH_CUDA_ALLOC_CONF": variant["allocator"]} if "allocator" in variant else {}
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=args.limit_s)
        text_out = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        said = b"".join(part for part in (error.stdout, error.stderr) if part).decode(errors="replace")
        return {"error": f"no end within {args.limit_s} s: {said[-3000:]}"}
    lines = [line for line in text_out.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"error": text_out[-2500:]}
    result = json.loads(lines[-1].split(" ", 1)[1])
    if "params" in result:
        tokens = variant["mb"] * variant["seq"] * variant["gas"]
        result["tflops_6n"] = 6 * result["params"] * tokens / result["step_s"] / 1e12
    result["child_s"] = time.perf_counter() - begin_s
    result["said"] = text_out[:1500] if variant["child"] == "race_ours.py" else ""
    return result


def row(name: str, result: dict[str, Any], best: float | None) -> str:
    """A line of the table."""
    if "error" in result:
        return f"{name:24} FAILED {result['error'][-1500:]}"

    def gib(n_bytes: float | None) -> str:
        return f"{n_bytes / 2**30:8.2f}" if n_bytes else f"{'-':>8}"

    rss = result.get("rss_training") or result["rss"]
    ratio = f"{best / result['step_s']:6.2f}x" if best else "      -"
    drive = result.get("drive_bytes_per_step")
    traffic = f" drive {drive['read'] / 1e9:.1f}+{drive['written'] / 1e9:.1f} GB" if drive else ""
    if drive and "drive_rates_bytes_per_s" in result:
        rates = result["drive_rates_bytes_per_s"]
        share = drive_seconds(drive, rates) / result["step_s"]
        traffic += f" = {share:.2f} of the step at {rates[0] / 1e9:.2f}, {rates[1] / 1e9:.2f} GB/s;"
        traffic += f" {sum(drive.values()) / result['params']:.1f} B/param" if "params" in result else ""
    traffic += f" {result['tflops_6n']:.0f} TFLOPS" if result.get("tflops_6n") else ""
    phases = " ".join(f"{k} {v:.3f}" for k, v in result.get("phases", {}).items())
    return (
        f"{name:24}{result['step_s']:8.3f} s {ratio} VRAM{gib(result.get('peak_vram_bytes'))} torch"
        f"{gib(result.get('torch_peak_bytes'))} RSS{gib(rss.get('VmRSS'))} child {result['child_s']:5.0f} s"
        f"{traffic} {phases}"
    )


def main() -> int:
    """Run a group's variants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", default="rivals")
    parser.add_argument("--only", help="comma-separated variants of the group")
    parser.add_argument("--skip", default="", help="comma-separated variants of the group")
    parser.add_argument("--shape", default="1.2b")
    parser.add_argument("--tokens", choices=list(TOKENS))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm", type=int, default=5, help="after two steps ours decides what stays on the GPU")
    parser.add_argument("--nvme_steps", type=int, default=2, help="of a window of ours with something on NVMe")
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--nvme", type=Path)
    parser.add_argument("--limit_s", type=float, default=240)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chosen = variants(args.shape, args.tokens or ("tiny" if args.shape == "tiny" else None))[args.group]
    if args.only:
        chosen = {name: chosen[name] for name in args.only.split(",")}
    chosen = {name: variant for name, variant in chosen.items() if name not in args.skip.split(",")}
    if args.nvme is None and any(variant.get("uses_nvme") for variant in chosen.values()):
        parser.error("these variants keep something on a drive: --nvme FOLDER says where")
    if args.nvme:
        args.nvme.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    rates = RatesAround(args.nvme) if args.nvme else None
    for name, variant in chosen.items():
        on_nvme = bool(variant.get("uses_nvme"))
        if rates is not None:
            rates.before() if on_nvme else rates.forget()
        results[name] = run(name, variant, args)
        if rates is not None and on_nvme:
            results[name]["drive_rates_bytes_per_s"] = rates.after()
        bases = [r["step_s"] for n, r in results.items() if is_base(n, name) and "error" not in r]
        print(row(name, results[name], min(bases) if bases else None), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            record = {"arguments": {k: str(v) for k, v in vars(args).items()}, "variants": chosen, "results": results}
            args.out.write_text(json.dumps(record, indent=1))
    return 1 if any("error" in result for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
