"""Ours beside llama.cpp: the same GGUF file, one GPU, one cap of device memory, llama.cpp at the best of its flags.

    python benchmarks/infer/llama_cpp.py --bin DIR --model qwen3-32b --type q4_k --file /dev/shm/race.gguf --out r.json
    python benchmarks/infer/llama_cpp.py --bin DIR --dry_run         (tiny model, CPU, a minute)

DIR holds llama-bench, llama-batched-bench and llama-fit-params, built with CUDA. Cases: decode (one answer), prefill
(512 and 8,192 tokens), many (decoding --streams answers). llama.cpp's placements within the cap: `fit` as its own
`--fit` finds it, `cpu` with everything on the GPU but the feed-forward weights (or experts) of as many first layers as
do not fit; weights mapped, in pinned memory, or repacked for the CPU (`--no-host`); threads; sizes of a micro-batch.
Each side's device memory is read from the driver while it runs; a row beyond cap and context does not count. Every row
is written when it is over, so a time limit loses only what was to come.

`--ram_gib N`: the model does not fit N GiB. llama.cpp maps the file within a memory cgroup of that size, ours keeps
--ram_ours_gib of weights in RAM and the rest under --nvme_path, and its peak of RSS is in the row.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import GIB, MIB, decode_passes, device_of, find_file, first_token_s, open_found_with, prompts
from random_gguf import TYPES, write_random

CONTEXT_MIB = 500
"""Device memory of a CUDA context before anything is allocated, at least: llama.cpp's `--fit` counts it."""
CONTEXT_GIB = 0.9
"""What a process may take beyond the cap for its context and kernels."""
PROMPT = 128
"""Tokens before an answer in the cases decode and many."""
PREFILLS = (512, 8192)
WRITTEN = 16
"""Tokens that llama.cpp writes for each answer; ours makes as many passes."""
CGROUP = Path("/sys/fs/cgroup/outcore_race")


# --- ours, in a process of its own


def ours(args: argparse.Namespace) -> None:
    """Print a JSON row for each case; what the engine says goes to stderr."""
    device = device_of(args.cap_gib, dry_run=args.dry_run)
    found = find_file(str(args.file), "bf16" if device.type == "cuda" else "fp32")
    vocab, began = found.loaded.config.vocab_size, time.perf_counter()
    more: dict[str, Any] = {"share_prefixes": False}
    if args.expert_cache_gib != "auto":
        more["expert_cache_gib"] = float(args.expert_cache_gib)
    if args.ram_gib:
        more |= {"ram_gib": args.ram_ours_gib, "nvme_path": (args.nvme_path,)}
    streams, prefills = list(map(int, args.streams.split(","))), lengths(args)
    if args.part == "many":
        sizes = {"preset": "throughput", "max_sequences": max(streams), "context": PROMPT + 64}
    else:
        # A prompt in as few passes as it goes: weights that travel cross the link once for each.
        preset, longest = ("latency", PROMPT) if args.part == "decode" else ("throughput", max(prefills))
        sizes = {"preset": preset, "max_sequences": 1, "context": longest + 64}
    opened = open_found_with(found, device, **sizes, **more)
    opening_s = time.perf_counter() - began

    def row(case: str, rate: float, **facts: Any) -> None:
        rss_gib = int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024 / GIB
        facts |= {"opening_s": opening_s, "rss_gib": rss_gib, "travelling_gb": opened.placement.travelling_bytes / 1e9}
        facts["reasons"] = opened.placement.reasons  # how many layers the CPU computes, and what its trial found
        print(json.dumps({"case": case, "tokens_per_s": rate, **facts}), flush=True)

    if args.part == "many":
        for batch in streams:
            passes = decode_passes(opened, batch, WRITTEN, PROMPT, vocab)
            row(f"decode {batch}", passes["tokens_per_s"], s_per_pass=passes["s_per_pass"])
    if args.part == "decode":
        # llama-bench decodes tokens by chance, which choose other experts each time: ours draws them.
        is_mixture = getattr(found.loaded.config, "num_experts", 0) > 0
        for case, temperature in (("decode 1", float(is_mixture)), ("decode 1, likeliest", 0.0))[: 1 + is_mixture]:
            passes = decode_passes(opened, 1, WRITTEN, PROMPT, vocab, temperature)
            names = "s_per_pass", "fastest_s", "passes_s", "expert_hit_rate", "experts_gb", "cpu_questions", "cpu_s"
            row(case, passes["tokens_per_s"], **{name: passes[name] for name in (*names, "graphs", "capture_s")})
    for length in prefills if args.part == "prefill" else ():
        times = [first_token_s(opened, ids) for ids in prompts(3, length, vocab)]
        row(f"prefill {length}", length / min(times[1:]), times_s=times)
    opened.close()


# --- llama.cpp


class Device:
    """Memory of the GPU as the driver tells it; nothing where there is none."""

    def __init__(self, dry_run: bool) -> None:
        self._handle: Any = None
        if not dry_run:
            import pynvml

            pynvml.nvmlInit()
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(first))

    def used(self) -> int:
        return 0 if self._handle is None else int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def free(self) -> int:
        return 0 if self._handle is None else int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).free)


def run(command: list[str], device: Device, limit_s: float, cgroup: bool = False) -> tuple[str, dict[str, Any]]:
    """(stdout, facts): seconds, the peak of device memory, and why it ended if not well."""
    before, peak, over = device.used(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            peak[0] = max(peak[0], device.used() - before)

    def join_cgroup() -> None:
        (CGROUP / "cgroup.procs").write_text(str(os.getpid()))

    watcher, began = threading.Thread(target=watch, daemon=True), time.perf_counter()
    watcher.start()
    join = {"preexec_fn": join_cgroup} if cgroup else {}
    facts: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, errors="replace", **join)
        out = done.stdout
        if done.returncode:
            facts["error"] = f"exit {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"
    except subprocess.TimeoutExpired as error:
        out = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        facts["error"] = f"stopped after {limit_s:.0f} s"
    over.set()
    watcher.join()
    return out, {**facts, "device_gib": peak[0] / GIB, "process_s": time.perf_counter() - began}


class LlamaCpp:
    """llama.cpp's programs on one file, and its placements within the cap."""

    def __init__(self, args: argparse.Namespace, device: Device) -> None:
        self._args, self._device, self._fits = args, device, {}
        self._common = ["-m", str(args.file), "-fa", "on"]

    def placement(self, how: str, context: int, micro: int) -> list[str]:
        """Flags of `fit` or `cpu` for so many tokens of keys and values and micro-batches of that size."""
        if self._args.dry_run:
            return ["-ngl", "0"]
        if (how, context, micro) not in self._fits:
            find = self._fitted if how == "fit" else self._on_cpu
            self._fits[how, context, micro] = find(["-c", str(context), "-b", str(micro), "-ub", str(micro)])
        return self._fits[how, context, micro]

    def _ask(self, flags: list[str]) -> str:
        out, facts = run([self._program("fit-params"), *self._common, *flags], self._device, 60)
        if "error" in facts:
            raise RuntimeError(facts["error"])
        return out

    def _fitted(self, sizes: list[str]) -> list[str]:
        margin = self._device.free() // MIB - CONTEXT_MIB - int(self._args.cap_gib * 1024)
        lines = self._ask([*sizes, "-fitt", str(margin)]).splitlines()
        return shlex.split(next(line for line in lines if line.startswith("-c ")))[2:]  # without its -c

    def _on_cpu(self, sizes: list[str]) -> list[str]:
        """Feed-forward weights of the first n layers in RAM; memory is linear in n, and asked again at the end."""
        count, cap = self._args.layers, int(self._args.cap_gib * 1024)
        none, every = (self._mib(sizes, n) for n in (0, count))
        if none <= cap:
            return on_cpu(0)
        n = min(count, max(1, -int(-(none - cap) * count // max(1, none - every))))
        while n < count and self._mib(sizes, n) > cap:
            n += 1
        return on_cpu(n)

    def _mib(self, sizes: list[str], n: int) -> int:
        """Weights, keys and values and computing on the GPU with n layers' feed-forward weights in RAM."""
        lines = self._ask([*sizes, "-fitp", "on", *on_cpu(n)]).splitlines()
        return next(sum(map(int, line.split()[1:4])) for line in lines if line.startswith("CUDA"))

    def _program(self, name: str) -> str:
        return str(self._args.bin / f"llama-{name}")

    def bench(self, flags: list[str]) -> Iterator[dict[str, Any]]:
        """Rows of llama-bench."""
        out, facts = run(
            [self._program("bench"), "-m", str(self._args.file), "-fa", "on", "-o", "jsonl", *overrides(flags)],
            self._device, self._args.limit_s, bool(self._args.ram_gib),
        )  # fmt: skip
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        for found in rows:
            case = f"prefill {found['n_prompt']}" if found["n_prompt"] else "decode 1"
            done = {"case": case, "tokens_per_s": found["avg_ts"], "threads": found["n_threads"], **facts}
            yield {**done, "samples": found["samples_ts"], "cpu": found["cpu_info"], "backends": found["backends"]}
        if not rows:
            yield {"case": "none", **facts, "error": facts.get("error", "no row came")}

    def many(self, flags: list[str], streams: list[int]) -> Iterator[dict[str, Any]]:
        """Rows of llama-batched-bench."""
        # Its log is written by a thread of its own that may miss the last line at exit: one answer more comes last.
        sizes = ["-npp", str(PROMPT), "-ntg", str(WRITTEN), "-npl", ",".join(map(str, [*streams, 1]))]
        command = [self._program("batched-bench"), *self._common, *sizes, "--output-format", "jsonl", *flags]
        out, facts = run(command, self._device, self._args.limit_s, bool(self._args.ram_gib))
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        for found in rows:
            done = {"case": f"decode {found['pl']}", "tokens_per_s": found["speed_tg"], **facts}
            yield {**done, "prompts_tokens_per_s": found["speed_pp"], "threads": found["n_threads"]}
        if not rows:
            yield {"case": "none", **facts, "error": facts.get("error", "no row came")}


def on_cpu(n: int) -> list[str]:
    """Everything on the GPU but the feed-forward weights (experts) of the first n layers."""
    layers = "|".join(map(str, range(n)))
    return ["-ngl", "999", *(["-ot", rf"blk\.({layers})\.ffn_(up|down|gate)(_exps)?\.weight=CPU"] if n else [])]


def overrides(flags: list[str]) -> list[str]:
    """llama-bench parts patterns by semicolons, the other programs by commas."""
    return [flag.replace(",", ";") if at and flags[at - 1] == "-ot" else flag for at, flag in enumerate(flags)]


def flag_sets(part: str, args: argparse.Namespace) -> list[tuple[str, str, int, list[str]]]:
    """(placement, words, micro-batch, flags) that are tried for a part of the cases."""
    mapped, pinned, repacked = ["-lm", "mmap"], ["-lm", "none"], ["-lm", "none", "--no-host"]
    if args.ram_gib:
        return [("cpu", "mapped", 512, mapped)]
    if part == "prefill":
        return [("fit", "defaults", 512, mapped), ("fit", "pinned", 2048, pinned), ("fit", "pinned", 8192, pinned)]
    if part == "many":  # repacked weights are never lent to the GPU: prompts of 64 answers take minutes on the CPU
        return [("fit", "pinned", 512, pinned), ("cpu", "pinned", 512, pinned)]
    return [("fit", "defaults", 512, mapped), ("fit", "repacked", 512, repacked), ("cpu", "pinned", 512, pinned)]


def llama(part: str, args: argparse.Namespace, device: Device) -> Iterator[dict[str, Any]]:
    """A row for each flag set and case."""
    programs, streams = LlamaCpp(args, device), list(map(int, args.streams.split(",")))
    for how, words, micro, flags in flag_sets(part, args):
        context = {
            "decode": PROMPT + 64,
            "prefill": max(lengths(args)),
            "many": max(streams) * (PROMPT + WRITTEN),
        }[part]
        try:
            placed = [*programs.placement(how, context, micro), *flags]
        except RuntimeError as error:
            yield {"case": "none", "flags": f"{how}, {words}, -ub {micro}", "error": str(error)}
            continue
        told = {"flags": f"{how}, {words}, -ub {micro}", "placed": " ".join(placed)[:200]}
        placed += ["-b", str(max(2048, micro)), "-ub", str(micro)]
        if part == "many":
            context_flags = ["-c", str(context), "-t", args.threads.split(",")[-1]]
            rows = programs.many([*placed, *context_flags], streams)
        else:
            no_host = ["--no-host", "1"] if "--no-host" in placed else []
            placed = [flag for flag in placed if flag != "--no-host"] + no_host
            lens = ",".join(map(str, lengths(args)))
            asked = ["-p", "0", "-n", str(WRITTEN), "-t", args.threads, "-r", "2"]
            if part == "prefill":
                asked = ["-p", lens, "-n", "0", "-t", args.threads.split(",")[-1], "-r", "1"]
            rows = programs.bench([*placed, *asked])
        for row in rows:
            yield {**told, **row}


# --- both


def lengths(args: argparse.Namespace) -> tuple[int, ...]:
    """Tokens of the prompts that are read."""
    return (16, 64) if args.dry_run else PREFILLS[:1] if args.ram_gib else PREFILLS


def limit_ram(args: argparse.Namespace) -> None:
    """A memory cgroup, and nothing of the file in the page cache. OSError where this machine does not let us."""
    CGROUP.mkdir(exist_ok=True)
    (CGROUP / "memory.max").write_text(str(int(args.ram_gib * GIB)))
    forget(args.file)


def forget(file: Path) -> None:
    """Drop a file's pages: those that others brought into the cache are not charged to the cgroup."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Rows:
    """All rows so far, written as they come."""

    def __init__(self, out: Path | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._out, self._began = out, time.perf_counter()

    def add(self, **row: Any) -> None:
        self.rows.append({**row, "since_start_s": time.perf_counter() - self._began})
        print(json.dumps(self.rows[-1]), flush=True)
        self.write()

    def write(self) -> None:
        if self._out is not None:
            self._out.write_text(json.dumps(self.rows, indent=1))

    def judge(self, cap_gib: float) -> None:
        """Mark the best of each side and say our ratio to llama.cpp's best."""
        for case in sorted({row["case"] for row in self.rows if "tokens_per_s" in row}):
            best: dict[str, dict[str, Any]] = {}
            for row in self.rows:
                if row["case"] == case and row["device_gib"] <= cap_gib + CONTEXT_GIB:
                    side = row["side"]
                    if side not in best or row["tokens_per_s"] > best[side]["tokens_per_s"]:
                        best[side] = row
            for row in best.values():
                row["best"] = True
            if len(best) == 2:
                ratio = best["ours"]["tokens_per_s"] / best["llama.cpp"]["tokens_per_s"]
                print(f"{case}: ours {ratio:.2f} times llama.cpp's best ({best['llama.cpp'].get('flags')})", flush=True)
                best["ours"]["ratio"] = ratio
        self.write()


def main() -> None:
    """Run both sides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("--model", default="llama-8b", help="a preset of outcore.model.presets: llama or qwen3 shapes")
    parser.add_argument("--type", default="bf16", choices=TYPES)
    parser.add_argument("--file", type=Path, default=Path("/dev/shm/race.gguf"), help="made unless it is there")
    parser.add_argument("--spread", action="store_true", help="each token chooses experts of its own (random_gguf.py)")
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--parts", default="decode,prefill,many")
    parser.add_argument("--sides", default="ours,llama.cpp")
    parser.add_argument("--streams", default="8,64", help="answers at once, of the case many")
    parser.add_argument("--threads", default="8,16", help="llama.cpp's; the last one where only one is tried")
    parser.add_argument(
        "--expert_cache_gib",
        default="auto",
        help="ours in the case decode, each in turn: GiB, or auto (the rule)",
    )
    parser.add_argument("--ram_gib", type=float)
    parser.add_argument("--ram_ours_gib", type=float)
    parser.add_argument("--nvme_path", type=Path)
    parser.add_argument("--limit_s", type=float, default=150.0, help="of one process")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry_run", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dry_run:
        args.model = args.model if args.model.startswith("tiny") else "tiny"
        args.streams, args.threads = "2,4", "1,2"
    if args.part:
        ours(args)
        return
    device, rows = Device(args.dry_run), Rows(args.out)
    rows.add(side="file", case="none", **write_random(args.file, args.model, args.type, spreads=args.spread))
    args.layers = find_file(str(args.file), "bf16").loaded.config.num_hidden_layers
    for part in args.parts.split(","):
        if "ours" in args.sides:
            for cache_gib in args.expert_cache_gib.split(",") if part == "decode" else ["auto"]:
                one = [sys.executable, *sys.argv, "--part", part, "--expert_cache_gib", cache_gib]
                out, facts = run(one, device, args.limit_s)
                facts |= {"flags": f"expert cache {cache_gib} GiB"} if cache_gib != "auto" else {}
                for row in [json.loads(line) for line in out.splitlines() if line.startswith("{")] or [
                    {"case": "none"}
                ]:
                    rows.add(side="ours", part=part, **row, **facts)
        if "llama.cpp" in args.sides:
            try:
                if args.ram_gib:
                    limit_ram(args)
            except OSError as error:
                rows.add(side="llama.cpp", case="none", error=f"RAM cannot be limited here: {error}")
                continue
            for row in llama(part, args, device):
                rows.add(side="llama.cpp", part=part, **row)
    rows.judge(args.cap_gib)


if __name__ == "__main__":
    main()
