"""A job over several GPUs of one host: a process for each, which answers a share of the lines over its own link.
Weights in RAM are one copy for all; the output is that of one process, byte by byte (seen on the CPU).

Each process writes a journal of its own beside the job's. The starting process gathers them, before and after, so a
job that was killed goes on with any number of GPUs."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from outcore.common.output import say
from outcore.infer.commands.job import JobCounts, run_job
from outcore.infer.commands.journal import Journal
from outcore.infer.commands.lines import numbered
from outcore.infer.commands.options import sampling_fields, sampling_from
from outcore.infer.opening import HostShare, InferSettings, open_engine
from outcore.machine import usable_cores


def check_gpus(count: int, settings: InferSettings) -> None:
    """ValueError where so many processes cannot share this machine."""
    if count < 1:
        raise ValueError(f"num_gpus is {count}, but must be at least 1.")
    if count > 1 and settings.device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"num_gpus {count} takes the first GPUs, and device is {settings.device}: leave out one.")
    if count > 1 and settings.nvme_path:
        raise ValueError(
            "num_gpus shares weights in RAM, nvme_offload_path takes what RAM does not hold: leave out one."
        )
    found = torch.cuda.device_count()
    if settings.device != "cpu" and count > 1 and found < count:
        raise ValueError(f"num_gpus is {count}, and torch sees {found} here. Give no more than that.")


def run_over_gpus(
    args: argparse.Namespace, settings: InferSettings, job: dict[str, Any], journal: Journal
) -> JobCounts:
    """Answer all lines and write the output. RuntimeError naming the process that failed, and why."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

    num_lines = sum(1 for _ in numbered(args.input))
    counts = JobCounts(num_lines, from_journal=len(journal.done))
    told: Any = get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as meeting:
        work = (args, settings, job, frozenset(journal.done), f"file://{meeting}/ranks", told)
        try:
            spawn(_answer, (work,), nprocs=args.num_gpus, join=True)
        except (ProcessExitedException, ProcessRaisedException) as ended:
            words = [] if told.empty() else [told.get()]
            why = next((w for w in words if isinstance(w, str)), None) or str(ended).strip().splitlines()[-1]
            gather(journal, job)
            raise RuntimeError(f"the process of GPU {ended.error_index} ended: {why}") from ended
    gather(journal, job)
    while not told.empty():
        found = told.get()
        counts.answer_tokens += found.answer_tokens
        counts.seconds = max(counts.seconds, found.seconds)
    journal.finish(num_lines)
    return counts


def _part_of(output: Path, rank: int) -> Path:
    return output.with_name(f"{output.name}.gpu{rank}")


def gather(journal: Journal, job: dict[str, Any]) -> None:
    """Take over what processes of a killed job had answered."""
    for path in sorted(journal.output.parent.glob(f"{journal.output.name}.gpu*.journal")):
        journal.absorb(Journal(path.with_suffix(""), job))


def _answer(rank: int, work: tuple[Any, ...]) -> None:
    """One process: of N, it answers every N-th line."""
    args, settings, job, done, meeting, told = work
    count = args.num_gpus

    tell = say if rank == 0 else lambda line: None
    if settings.device != "cpu" and torch.cuda.is_available():
        settings = replace(settings, device=f"cuda:{rank}")
    else:
        torch.set_num_threads(max(1, usable_cores() // count))
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)

    def exchange(mine: Any) -> list[Any]:
        found: list[Any] = [None] * count
        torch.distributed.all_gather_object(found, mine)
        return found

    try:
        journal = Journal(_part_of(args.output, rank), job)
        opened = open_engine(args.model, settings, tell, HostShare(rank, count, exchange))
        try:
            defaults = sampling_from(opened, sampling_fields(args))
            told.put(
                run_job(
                    opened, args.input, journal, defaults, args.model, tell,
                    lambda number: number % count == rank and number not in done,
                )
            )  # fmt: skip
            exchange(None)  # memory and its maker stay until the last has read
        finally:
            opened.close()
            journal.close()
    except (ValueError, RuntimeError, OSError) as error:
        told.put(str(error))
        raise
    finally:
        torch.distributed.destroy_process_group()
