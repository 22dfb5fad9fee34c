"""What results of `infinity_staged.py` say: a row per variant, ratios to stock and to the drive's floor, equal losses.

A variant's name is WHO-WHERE[-MORE]: ours or stock, then the residency (ram, opt, all).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from drive_rate import drive_seconds

Result = dict[str, Any]
TITLES = (
    "s/step",
    "optimizer s",
    "B/param",
    "read GB",
    "write GB",
    "drive GB/s",
    "RSS GB",
    "torch GiB",
    "GPU GiB",
    "loss",
)


def header() -> str:
    """Above the rows."""
    return f"{'variant':18}" + "".join(f"{title:>12}" for title in TITLES)


def row(name: str, result: Result) -> str:
    """One variant's figures; drive bytes are of a step, `GPU GiB` is what the driver sees, `torch GiB` its reserve."""
    if "error" in result:
        return f"{name:18}{'failed':>12}"
    moved = result.get("drive_bytes") or {"read": 0, "written": 0}
    cells = [result["step_s"], result["phase_s"].get("optimizer", 0.0), result.get("drive_bytes_per_param", 0.0)]
    cells += [moved["read"] / 1e9, moved["written"] / 1e9, result.get("drive_bytes_per_s", 0.0) / 1e9]
    cells += [result["rss"]["VmHWM"] / 1e9, result.get("gpu_peak_bytes", 0) / 2**30]
    cells += [result.get("gpu_driver_bytes", 0) / 2**30, result["losses"][-1]]
    return f"{name:18}" + "".join(f"{cell:12.3f}" for cell in cells)


def times_stock(name: str, good: dict[str, Result]) -> float | None:
    """How many times as fast as the fastest stock of the same residency."""
    where = name.split("-")[1]
    stocks = [r["step_s"] for other, r in good.items() if other.split("-")[:2] == ["stock", where]]
    return min(stocks) / good[name]["step_s"] if stocks else None


def floor(name: str, good: dict[str, Result]) -> tuple[float, float] | None:
    """(step over max(seconds of the drive bytes at the mixed rate, compute), those seconds); None without the drive.

    Compute: a step of ours with everything in RAM where there is one, else this variant's forward and backward.
    """
    result = good[name]
    if "drive_rates_bytes_per_s" not in result or "drive_bytes" not in result:
        return None
    drive_s = drive_seconds(result["drive_bytes"], result["drive_rates_bytes_per_s"])
    compute_s = result["phase_s"].get("forward", 0.0) + result["phase_s"].get("backward", 0.0)
    in_ram = good.get("ours-ram")
    return result["step_s"] / max(drive_s, in_ram["step_s"] if in_ram else compute_s), drive_s


def relative_gap(runs: list[list[float]]) -> float:
    """Largest difference of a step's losses among runs, relative to the smallest; infinite when one is not finite."""
    steps = list(zip(*runs, strict=True))
    if not all(math.isfinite(loss) for step in steps for loss in step):
        return math.inf
    return max((max(step) - min(step)) / min(step) for step in steps)


def compare_ours(ours: dict[str, Result]) -> bool:
    """Say how far losses of ours differ; False when they must be the same bits and are not."""
    if len(ours) < 2:
        return True
    runs = [r["losses"] for r in ours.values()]
    if not all(r.get("deterministic") for r in ours.values()):
        words = f"{relative_gap(runs):.2e} (kernels are not deterministic; --deterministic compares bits)"
        print(f"largest relative difference of a loss among ours: {words}")
        return True
    same = all(losses == runs[0] for losses in runs)
    print(f"losses of ours bit-identical among {', '.join(ours)}: {same}")
    return same


def report(results: dict[str, Result]) -> bool:
    """Print the table and the acceptance figures; False when bits of ours differ that must not."""
    print(f"\n{header()}")
    for name, result in results.items():
        print(row(name, result))
    good = {name: r for name, r in results.items() if "error" not in r}
    ours = {name: r for name, r in good.items() if name.startswith("ours-")}
    for name, result in ours.items():
        words, ratio, above = [], times_stock(name, good), floor(name, good)
        if ratio is not None:
            words.append(f"{ratio:.2f}x stock")
        if above is not None:
            before, after = (rate / 1e9 for rate in result["drive_rates_bytes_per_s"])
            words.append(f"{above[0]:.2f} x max(drive bytes / mixed rate {above[1]:.2f} s, compute)")
            words.append(f"mixed rate before and after {before:.2f}, {after:.2f} GB/s")
        if words:
            print(f"{name}: {'; '.join(words)}")
    for name, result in good.items():
        if name.startswith("stock-") and ours:
            worst = relative_gap([next(iter(ours.values()))["losses"], result["losses"]])
            print(f"{name}: largest relative difference of a loss to ours {worst:.3%}")
    same = compare_ours(ours)
    for name, result in results.items():
        if "error" in result:
            print(f"--- {name} failed:\n{result['error']}")
    return same


COLUMNS = ("file", "variant", "s/step", "x stock", "B/param", "RSS, GB", "VRAM, GiB", "x floor")


def markdown(files: list[Path]) -> str:
    """The table for docs: a row per variant per file. Stock and `ours-ram` of a ratio are of the same file."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
    for file in files:
        results: dict[str, Result] = json.loads(file.read_text())["results"]
        good = {name: r for name, r in results.items() if "error" not in r}
        for name in results:
            cells = _cells(name, good) if name in good else ["failed", *["-"] * 5]
            lines.append(f"| {file.name} | {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "x stock: how many times as fast as the fastest stock DeepSpeed of the same residency; B/param: drive bytes of "
        "a step; RSS: the highest; VRAM: as the driver sees it, in brackets what torch reserved and what tensors took; "
        "x floor: step over the larger of the drive bytes at the drive's mixed rate and compute (the step of "
        "`ours-ram`; in files without one the variant's own forward and backward)",
    ]
    return "\n".join(lines)


def _cells(name: str, good: dict[str, Result]) -> list[str]:
    result, ratio, above = good[name], times_stock(name, good), floor(name, good)
    driver = result.get("gpu_driver_bytes")
    of_torch = [result[name] for name in ("gpu_peak_bytes", "gpu_tensor_bytes") if name in result]
    vram = [f"{driver / 2**30:.2f}"] if driver else []
    vram += [f"({', '.join(f'{n_bytes / 2**30:.2f}' for n_bytes in of_torch)})"] if of_torch else []
    return [
        f"{result['step_s']:.2f}",
        f"{ratio:.2f}" if ratio is not None else "-",
        f"{result['drive_bytes_per_param']:.1f}" if "drive_bytes_per_param" in result else "-",
        f"{result['rss']['VmHWM'] / 1e9:.1f}",
        " ".join(vram) or "-",
        f"{above[0]:.2f}" if above else "-",
    ]
