"""Ranks of one host as processes on the CPU, each with an engine of its own over the homes that they share."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from outcore.common import FileError
from outcore.engine.stream import build as build_module
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.ranks import RankPlace, reduce
from outcore.model import LoraSettings
from outcore.model.adapters import apply_lora
from outcore.model.facts import model_facts
from outcore.sizing import streaming
from outcore.sizing.streaming import RANK_SLOTS_BYTES, SUM_GROUP_BYTES
from outcore.staging.shared import board
from outcore.storage import StorageError
from tests.engine.inside import parts_of
from tests.flow.models import TINY_SETTINGS, packed_batch, padded_batch, plain_batch, set_dropout, tiny_loaded
from tests.forked import fork_server

LR = 3e-3
KINDS = [plain_batch, padded_batch, packed_batch]
SETTINGS = replace(TINY_SETTINGS, max_grad_norm=0.5, logits_chunk_bytes=1 << 20)
"""The head takes a micro-batch as one piece, so its gradient, too, is rounded where it is shipped only."""


def exchange_of(folder: Path, rank: int, world_size: int):
    """An all-gather of plain values over a file."""
    store = FileStore(str(folder / "store"), world_size)
    calls = iter(range(10**9))

    def exchange(mine: Any) -> list[Any]:
        call = next(calls)
        store.set(f"{call}/{rank}", pickle.dumps(mine).hex())
        return [pickle.loads(bytes.fromhex(store.get(f"{call}/{r}").decode())) for r in range(world_size)]

    return exchange


def run_ranks(world_size: int, folder: Path, job: Callable[..., Any], timeout_s: float = 600.0, **kwargs) -> list[Any]:
    """What `job(place, **kwargs)` returned on each rank; the exception or the exit code of one that did not."""
    folder.mkdir(parents=True, exist_ok=True)
    children = [
        fork_server().Process(target=_rank, args=(rank, world_size, str(folder), job, kwargs))
        for rank in range(world_size)
    ]
    for child in children:
        child.start()
    found = []
    for rank, child in enumerate(children):
        child.join(timeout_s)
        if child.exitcode is None:
            child.kill()
        path = folder / f"{rank}.pickle"
        found.append(pickle.loads(path.read_bytes()) if path.exists() else child.exitcode)
    return found


def _rank(rank: int, world_size: int, folder: str, job: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    place = RankPlace(rank, world_size, exchange_of(Path(folder), rank, world_size))
    try:
        found = job(place, **kwargs)
    except Exception as error:
        traceback.print_exc()
        found = error
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(found))


def global_batches(step: int, count: int) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of a step, of all ranks."""
    return [KINDS[(step + m) % 3](2 - m % 2, 12 + 3 * m, seed=100 * step + m) for m in range(count)]


def open_engine(
    place: RankPlace, model: str, settings, *, device="cpu", dtype="float32", dropout=0.0, lora=0, **fields
):
    """A tiny model's engine on this rank; `device` cuda: the GPU of its number."""
    if device == "cuda":
        torch.cuda.set_device(place.rank)
    loaded = tiny_loaded(model, seed=0, dtype=getattr(torch, dtype), **fields)
    set_dropout(loaded.model, dropout)
    if lora:
        loaded = with_lora(loaded, lora)
    return build_stream_engine(loaded, settings, device=device, pinned_grant=False, trial=False, place=place)


def build_that_breaks(place: RankPlace) -> set[str]:
    """Threads of ours that are left when the last step of building an engine fails."""

    def broken(*_args):
        raise ZeroDivisionError

    build_module.StreamEngine = broken
    before = set(threading.enumerate())
    with contextlib.suppress(ZeroDivisionError):
        open_engine(place, "llama", SETTINGS)
    deadline_s = time.monotonic() + 60.0
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return {thread.name for thread in left}


def with_lora(loaded, r: int):
    model = apply_lora(loaded.model, LoraSettings(r=r, alpha=2.0 * r, dropout=0.0), seed=3)
    return replace(loaded, model=model, facts=model_facts(model))


def train(
    place: RankPlace,
    model: str = "llama",
    settings=SETTINGS,
    *,
    steps: int = 4,
    micro: int = 2,
    load: str = "",
    save: str = "",
    first: int = 0,
    sums: tuple[int, int] = (SUM_GROUP_BYTES, RANK_SLOTS_BYTES),
    **build,
) -> dict[str, Any]:
    """Losses, norms, an evaluation's loss and every weight after training on this rank's share of `micro`
    micro-batches a step. `sums`: bytes of gradients that are added up together, and of a rank's slots."""
    reduce.SUM_GROUP_BYTES, streaming.RANK_SLOTS_BYTES = sums
    with closing(open_engine(place, model, settings, **build)) as engine:
        if load:
            engine.load(Path(load), json.loads((Path(load) / "engine.json").read_text()))
        results = []
        for step in range(first, first + steps):
            own = global_batches(step, micro)[place.rank :: place.world_size]
            results.append(engine.train_step(own, LR))
        evaluated = engine.evaluate(global_batches(77, 4)[place.rank :: place.world_size])
        weights = {n: parts_of(engine).homes.weights.read(n).clone() for n in parts_of(engine).homes.weights.names()}
        if save:
            files: list[str] = []
            Path(save).mkdir(exist_ok=True)
            state = engine.save(Path(save), lambda path, crc: files.append(path.name))
            if place.rank == 0:
                (Path(save) / "engine.json").write_text(json.dumps(state))
        return {
            "losses": [r.loss for r in results], "aux": [r.aux_loss for r in results],
            "norms": [r.grad_norm for r in results], "tokens": [r.tokens for r in results],
            "evaluated": (evaluated.loss, evaluated.tokens), "weights": weights, "words": engine.describe(),
        }  # fmt: skip


def train_each(place: RankPlace, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Several trainings by the same processes."""
    return {name: train(place, **case) for name, case in cases.items()}


def train_alone(**kwargs) -> dict[str, Any]:
    """The same on one rank with all micro-batches, in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(RankPlace(), **kwargs)
    finally:
        torch.set_num_threads(before)


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of weights whose bits differ."""
    return [n for n, w in one["weights"].items() if not torch.equal(w, other["weights"][n])]


def train_with_fault(place: RankPlace, fault: str, drive: str) -> str:
    """Two steps and a save; on one rank something goes wrong after the first step. The error's words."""
    if fault == "no room" and place.rank == 1:
        _patch_store()
    try:
        settings = SETTINGS
        if fault == "no room":
            settings = replace(SETTINGS, nvme_path=drive, state_ram_bytes=0)
        with closing(open_engine(place, "llama", settings)) as engine:
            engine.train_step(global_batches(0, 2)[place.rank :: 2], LR)
            if place.rank == 1:
                _arm(engine, fault)
            if fault == "full drive" and place.rank == 0:
                _fill_drive()
            engine.train_step(global_batches(1, 2)[place.rank :: 2], LR)
            Path(drive, "save").mkdir(exist_ok=True)
            engine.save(Path(drive, "save"), lambda path, crc: None)
            return "no error"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _arm(engine, fault: str) -> None:
    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    def sleep_first(function):
        def slow(*args, **kwargs):
            time.sleep(1.5)
            return function(*args, **kwargs)

        return slow

    parts = parts_of(engine)
    if fault == "killed in forward":
        parts.flow.runner.layer = die
    elif fault == "killed in the optimizer":
        parts.updates._begin = die
    elif fault == "killed in save":
        parts.homes.read_state = die
    elif fault == "slow":
        parts.flow.runner.embed = sleep_first(parts.flow.runner.embed)
    elif fault == "short of memory":
        graphs, backward, left = SimpleNamespace(num_graphs=1), parts.schedule.backward, [1]
        graphs.give_up = lambda why: setattr(graphs, "num_graphs", 0)
        original, parts.flow.runner.compiled.graphs = backward.layer, graphs

        def refuses(*args, **kwargs):
            if left:
                left.clear()
                raise torch.OutOfMemoryError("CUDA out of memory")
            return original(*args, **kwargs)

        backward.layer = refuses
    elif fault == "raises":
        parts.flow.runner.layer = lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("out of luck"))


def _fill_drive() -> None:
    from outcore.engine.stream import state

    def full(path, *args):
        raise FileError("writing weights", path, errno.ENOSPC, "the drive is full")

    state.write_shard = full


def _patch_store() -> None:
    from outcore.flow.weights import scratch

    def create(*args, **kwargs):
        raise StorageError("12 GB are missing")

    scratch.TensorStore.create = create


def slow_then_named(place: RankPlace, drive: str) -> tuple[str, list[str]]:
    """What rank 0 hears of a slow rank 1: a warning, or (with little patience) an error."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # pyright: ignore[reportAttributeAccessIssue]
    logging.getLogger("outcore.staging.shared.board").addHandler(handler)
    board.SLOW_S = 0.3
    return train_with_fault(place, "slow", drive), said
