"""The streaming engine on one, two and more ranks of one host, the same global batch: speed, RAM, losses.

    python benchmarks/race/race_ranks.py --case 1.2b --ranks 1 2 --rival --cap_gib 6.5 --out ranks.json   (two GPUs)
    python benchmarks/race/race_ranks.py --case tiny-nvme --nvme /tmp --ranks 1 2 4 --steps 2           (dry run, CPU)

`--case`: a shape, and after it `-nvme` (states on the drive --nvme), `-lora` or `-split8` (states of 8-bit moments).
`--rival`: DeepSpeed's ZeRO-3 with parameters and states offloaded to RAM, on the largest number of ranks, each rank's
tokens in one micro-batch with our loss in chunks: what makes it fastest (needs the package deepspeed).

A rank is a process on the GPU of its number; where there are fewer GPUs, ranks share them (a rehearsal: the shared
homes are pinned and read by every rank as on several GPUs, and only the speed means nothing). Seconds are from step to
step, with the update of the one before under way. With --out, a trace of rank 0's next step lies beside it. RAM is the
sum of the processes' PSS, in which shared pages count once. Exit code 1 when a rank failed, when a loss is not within
--tolerance of one rank's, or when RAM is above 1.1 times that of one rank (of models that take more than libraries).
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from race_common import (
    SHAPES,
    cap_allocator,
    free_port,
    synchronize,
    token_batches,
)
from race_ours import random_model
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from outcore.engine.base import TracePlan
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.ranks import RankPlace
from outcore.engine.stream.settings import StreamSettings
from outcore.model.adapters import apply_lora
from outcore.model.facts import model_facts
from outcore.model.settings import LoraSettings

ROOT = Path(__file__).resolve().parents[2]
LEAST_RAM_BYTES = 8e9
"""Of one rank, from which its RAM is homes and states rather than libraries."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="1.2b")
    parser.add_argument("--nvme", help="folder on the drive of cases with -nvme")
    parser.add_argument("--rival", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--micro_batches", type=int, default=4, help="of a step, over all ranks")
    parser.add_argument("--mb", type=int, default=4, help="rows of one")
    parser.add_argument("--seq", type=int, help="tokens of a row (default: 1,024; tiny: 16)")
    parser.add_argument("--cap_gib", type=float, default=0.0, help="of each GPU")
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--settings", type=json.loads, default={}, help="of StreamSettings, as JSON")
    parser.add_argument("--tolerance", type=float, default=5e-3)
    parser.add_argument("--timeout_s", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", help="RANK/RANKS/FOLDER: one of the processes")
    options = parser.parse_args()
    options.shape, *ways = options.case.split("-")
    if unknown := set(ways) - {"nvme", "lora", "split8"} or {options.shape} - set(SHAPES):
        parser.error(f"no such case: {options.case} ({', '.join(sorted(unknown))})")
    if "nvme" in ways and not options.nvme:
        parser.error("a case with -nvme needs --nvme DIR")
    options.seq = options.seq or (16 if options.shape == "tiny" else 1024)
    options.lora = "lora" in ways
    homes = {"states": "split8"} if "split8" in ways else {}
    homes |= {"nvme_path": options.nvme, "state_ram_bytes": 0} if "nvme" in ways else {}
    tokens = options.micro_batches * options.mb * options.seq
    options.settings = {"staging_bytes": staging_bytes(options.shape, tokens), **homes, **options.settings}
    return options


def staging_bytes(shape: str, tokens: int) -> int:
    """Pinned memory for parameters, gradients, slots and checkpoints of so many tokens' activations, as a run takes it
    where the machine has it."""
    hidden, layers, intermediate, heads, kv_heads, vocabulary = SHAPES[shape]
    head = hidden // heads
    layer = hidden * (2 * hidden + 2 * kv_heads * head + 3 * intermediate)
    ends = 2 * vocabulary * hidden
    return 4 * (layers * layer + ends) + 8 * ends + 2 * layers * hidden * tokens + (2 << 30)


def pss_bytes() -> int:
    """RAM of this process; a page that n processes share counts 1/n."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def run_rank(options: argparse.Namespace) -> None:
    """One process; its result goes to a file of its own."""
    rank, world_size, folder = options.rank.split("/", 2)
    rank, world_size = int(rank), int(world_size)
    store = FileStore(f"{folder}/store", world_size)
    calls = iter(range(1 << 30))

    def exchange(mine: Any) -> list[Any]:
        call = next(calls)
        store.set(f"{call}/{rank}", pickle.dumps(mine).hex())
        return [pickle.loads(bytes.fromhex(store.get(f"{call}/{other}").decode())) for other in range(world_size)]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    cap_allocator(options.cap_gib)
    told: dict[str, Any] = {"shape": options.shape, "seq": options.seq, "mb": options.mb, "gas": options.micro_batches}
    libraries_bytes = pss_bytes()
    loaded = random_model(told, device, with_values=rank == 0)  # rank 0 fills the homes of all
    if options.lora:
        model = apply_lora(loaded.model, LoraSettings(r=16, alpha=32.0, dropout=0.0), seed=0)
        loaded = replace(loaded, model=model, facts=model_facts(model))
    if device == "cuda":
        torch.cuda.empty_cache()
    batches = token_batches(told)[rank::world_size]
    tokens = tuple(batch["input_ids"].numel() for batch in batches)
    settings = StreamSettings(**{"step_tokens": tokens, "row_tokens": options.seq, **options.settings})
    engine = build_stream_engine(loaded, settings, device=device, place=RankPlace(rank, world_size, exchange))
    try:
        losses = [engine.train_step(batches, 1e-4).loss for _ in range(options.warm)]
        synchronize()
        begin_s, phases = time.perf_counter(), {}
        for _ in range(options.steps):
            step = engine.train_step(batches, 1e-4)
            losses.append(step.loss)
            for name, seconds in step.phase_s.items():
                phases[name] = phases.get(name, 0.0) + seconds / options.steps
        synchronize()
        step_s = (time.perf_counter() - begin_s) / options.steps
        if options.out:
            path = options.out.with_name(f"{options.out.stem}-trace-{world_size}.json").absolute()
            engine.trace(TracePlan(path, skip_steps=0, num_steps=1, first_step=options.warm + options.steps), print)
            engine.train_step(batches, 1e-4)
        exchange(None)  # all are there when RAM is looked at
        found = {"step_s": step_s, "losses": losses, "phases": phases, "ram_bytes": pss_bytes() - libraries_bytes}
        if device == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info()  # of the whole device: context and libraries, too
            found["vram_bytes"] = total_bytes - free_bytes
            found["torch_peak_bytes"] = torch.cuda.max_memory_allocated()
        exchange(None)
        Path(folder, f"{rank}.json").write_text(json.dumps({**found, "words": engine.describe()}))
    finally:
        engine.close()


def run_ranks(world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Every rank's process; RuntimeError with the output of one that failed."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        logs = [Path(folder, f"{rank}.log") for rank in range(world_size)]
        children = []
        for rank, log in enumerate(logs):
            with open(log, "wb") as output:
                command = [sys.executable, __file__, *sys.argv[1:], "--rank", f"{rank}/{world_size}/{folder}"]
                children.append(subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT))
        deadline_s = time.monotonic() + options.timeout_s
        try:
            for child in children:
                child.wait(max(1.0, deadline_s - time.monotonic()))
        finally:
            for child in children:
                child.kill()
        results = []
        for rank, log in enumerate(logs):
            if not (found := Path(folder, f"{rank}.json")).exists():
                raise RuntimeError(f"rank {rank} of {world_size} failed:\n{log.read_text()[-3000:]}")
            results.append(json.loads(found.read_text()))
    return {
        "ranks": world_size,
        "step_s": max(result["step_s"] for result in results),
        "ram_bytes": sum(result["ram_bytes"] for result in results),
        "losses": results[0]["losses"],
        "phases": [result["phases"] for result in results],
        "vram_bytes": [result.get("vram_bytes") for result in results],
        "torch_peak_bytes": [result.get("torch_peak_bytes") for result in results],
        "words": results[0]["words"],
    }


def run_rival(world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's processes, one a GPU; RuntimeError with the output of one that failed."""
    told = {
        "shape": options.shape,
        "seq": options.seq,
        "mb": options.mb * options.micro_batches // world_size,
        "gas": 1,
    }
    told |= {"where": "cpu", "clip": 1.0, "chunked_loss": True, "cap_gib": options.cap_gib}
    told |= {"warm": options.warm, "repeats": 1, "steps": options.steps}
    child = Path(__file__).with_name("race_stock.py")
    children, tails, port = [], [], free_port()
    for rank in range(world_size):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            **{k: str(v) for k, v in names.items()},
            "MASTER_PORT": port,
        }
        children.append(
            subprocess.Popen(
                [sys.executable, str(child), json.dumps(told)],
                env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    with ThreadPoolExecutor(world_size) as readers:
        try:
            tails = list(readers.map(lambda child: child.communicate(timeout=options.timeout_s)[0], children))
        finally:
            for child in children:
                child.kill()
    results = []
    for rank, tail in enumerate(tails):
        found = [line[7:] for line in tail.splitlines() if line.startswith("RESULT ")]
        if not found:
            raise RuntimeError(f"rank {rank} of DeepSpeed's failed:\n{tail[-3000:]}")
        results.append(json.loads(found[-1]))
    return {"step_s": max(r["step_s"] for r in results), "ranks": results}


def main() -> int:
    options = arguments()
    if options.rank:
        run_rank(options)
        return 0
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    table: dict[str, Any] = {"device": name, "gpus": torch.cuda.device_count(), "case": options.case}
    table |= {"tokens": options.micro_batches * options.mb * options.seq, "runs": []}
    problems = []
    for world_size in options.ranks:
        found = run_ranks(world_size, options)
        one = table["runs"][0] if table["runs"] else found
        found["speed_up"] = one["step_s"] / found["step_s"]
        found["ram_share"] = found["ram_bytes"] / one["ram_bytes"]
        pairs = zip(found["losses"], one["losses"], strict=True)
        found["loss_difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
        table["runs"].append(found)
        print(
            f"{world_size} rank(s): {found['step_s']:.3f} s/step, {found['speed_up']:.2f}x; RAM "
            f"{found['ram_bytes'] / 1e9:.2f} GB, {found['ram_share']:.2f} of one rank's; losses within "
            f"{found['loss_difference']:.1e}",
            flush=True,
        )
        if found["loss_difference"] > options.tolerance:
            problems.append(f"{world_size} ranks: losses differ by {found['loss_difference']:.1e}")
        if found["ram_share"] > 1.1 and one["ram_bytes"] > LEAST_RAM_BYTES:
            problems.append(f"{world_size} ranks: RAM is {found['ram_share']:.2f} of one rank's")
        if options.out:
            options.out.write_text(json.dumps(table, indent=1))
    if options.rival:
        ours = table["runs"][-1]
        rival = table["rival"] = run_rival(ours["ranks"], options)
        print(
            f"DeepSpeed's ZeRO-3: {rival['step_s']:.3f} s/step, {rival['step_s'] / ours['step_s']:.2f}x ours",
            flush=True,
        )
        if options.out:
            options.out.write_text(json.dumps(table, indent=1))
    print("\n".join(problems) or "ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
