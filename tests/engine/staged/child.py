"""Runs in a child process: DeepSpeed's engine with outcore's staged offload on tiny models, on the CPU accelerator,
or on the GPU with STAGED_DEVICE=cuda in the environment.

Usage: python child.py FOLDER. Reads FOLDER/jobs.json, writes FOLDER/results-RANK.json. A job:
{"name", "model": ModelSettings fields, "zero": flags of offload, "config": deepspeed_config.json's content,
 "run": fields of RunFacts and further flags, "min_bytes": smallest share that goes to the drive, "chunk_numel":
 parameters per chunk of states, "flight_bytes", "slot_bytes": of gradients on their way, "num_chunks": of the head,
 "imitated_kernel": whether packed rows go to an imitation of the flash kernel, whose calls the result then counts,
 "do": [["train", steps], ["save", path], ["load", path], ["eval"], ["export", path], ["fault", ...],
        ["train codes", [[code of each micro-batch] of each step]]: of `branch_model`,
        ["loss scale", of the steps from here on]],
 "may_fail": whether an error is expected, which is then the result's "stopped": [type, message]}
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from contextlib import nullcontext
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch

from outcore.engine.deepspeed.build import build_engine, init_process_group, resolve
from outcore.engine.deepspeed.engine import DeepSpeedEngine
from outcore.engine.deepspeed.staged.states import Share
from outcore.flow.weights import scratch as scratch_room
from outcore.model import LoraSettings, ModelSettings
from outcore.storage import Transfer, open_engine
from outcore.train.process.random_state import fix_order
from tests.engine.deepspeed.config_cases import run_of
from tests.flow.models import packed_batch, plain_batch
from tests.model.branch_model import coded_batches
from tests.model.packed.varlen_kernel import imitated
from tests.storage.faulty import FaultyEngine

LR = 1e-3
ON_GPU = os.environ.get("STAGED_DEVICE") == "cuda"
SEQ_LENGTH = 16
CHUNKS = Share.chunks


def batches_of(step: int, rank: int, world_size: int, *, packed: bool = True, count: int = 2) -> list:
    """`count` micro-batches of this rank; one rank trains on the rows of all."""
    second = packed_batch if packed else plain_batch
    batches = [plain_batch(2, SEQ_LENGTH, seed=2 * step), second(2, SEQ_LENGTH, seed=2 * step + 1)]
    batches += [plain_batch(2, SEQ_LENGTH, seed=500 + 10 * step + more) for more in range(count - 2)]
    if world_size == 1:
        return batches[:count]
    return [{name: value[rank : rank + 1] for name, value in batch.items()} for batch in batches[:count]]


def train(engine: DeepSpeedEngine, steps: int) -> list[list[float]]:
    first = engine.updates
    done = []
    packed = not engine.loaded.facts.is_encoder_decoder
    count = engine.ds.gradient_accumulation_steps()
    for step in range(first, first + steps):
        batches = batches_of(step, engine.rank, engine.world_size, packed=packed, count=count)
        result = engine.train_step(batches, LR)
        done.append([result.loss, result.grad_norm])
    return done


def train_codes(engine: DeepSpeedEngine, steps: list[list[int]]) -> list[list[float]]:
    """Steps of `branch_model`, whose codes say which branches run; ranks share the rows."""
    done = []
    for step, codes in enumerate(steps):
        batches = coded_batches(codes, step)
        if engine.world_size > 1:
            batches = [{n: value[engine.rank : engine.rank + 1] for n, value in batch.items()} for batch in batches]
        result = engine.train_step(batches, LR)
        done.append([result.loss, result.grad_norm])
    return done


def fingerprint(engine: DeepSpeedEngine) -> str:
    """Of every weight and state, bit by bit."""
    digest = hashlib.sha256()
    for name, param in engine._trainable():
        for family in ("master", "exp_avg", "exp_avg_sq"):
            digest.update(name.encode() + engine.state.get(param, family).float().cpu().contiguous().numpy().tobytes())
        digest.update(engine.state.get_weight(param).float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class LateWrites:
    """A drive on which a write begins `delay_s` after it was asked for."""

    def __init__(self, inner: Any, delay_s: float) -> None:
        self.inner, self.delay_s = inner, delay_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit_write(self, file: Any, offset: int, buffer: Any, *, priority: int = 0) -> Transfer:
        outer = Transfer(buffer.nbytes, f"late write at {offset}")

        def begin() -> None:
            transfer = self.inner.submit_write(file, offset, buffer, priority=priority)
            transfer.add_done_callback(lambda done: outer.finish(done.error))

        threading.Timer(self.delay_s, begin).start()
        return outer


def make_fault(engine: DeepSpeedEngine, kind: str, *arguments: Any) -> None:
    """Break the drive from now on: every later transfer of that kind, or a file of the scratch stores."""
    scratch = engine.ds.optimizer.session.scratch
    if kind == "truncate":
        engine.ds.optimizer.settle()
        files = [file for folder in scratch.folders for file in (folder / arguments[0]).rglob("*")]
        large = [file for file in files if file.stat().st_size > 65536]
        assert large, f"no store is called {arguments[0]}"
        for file in large:
            os.truncate(file, 65536)
        return
    if kind == "late writes":
        scratch.engine.inner = LateWrites(scratch.engine.inner, arguments[0])
        return
    of, settings = arguments
    store = settings.pop("store", None)
    if store is not None:
        settings["matches"] = lambda file, offset, n_bytes: file.path.parent.name == store
    getattr(scratch.engine, kind)(of, times=None, **settings)


def perform(actions: list, engine: DeepSpeedEngine, result: dict[str, Any]) -> None:
    """Do what a job asks for, one after another."""
    for action, *arguments in actions:
        if action == "train":
            result["losses"] += train(engine, arguments[0])
        elif action == "train codes":
            result["losses"] += train_codes(engine, arguments[0])
        elif action == "loss scale":
            engine.ds.optimizer.loss_scaler.cur_scale = float(arguments[0])
        elif action == "fault":
            make_fault(engine, *arguments)
        elif action == "eval":
            batches = [plain_batch(2, SEQ_LENGTH, seed=1000)]
            result.setdefault("evals", []).append(engine.evaluate(batches).loss)
        elif action == "save":
            folder = Path(arguments[0])
            folder.mkdir(parents=True, exist_ok=True)
            state = engine.save(folder, lambda path, crc: None)
            if engine.rank == 0:
                (folder / "engine.json").write_text(json.dumps(state))
            torch.distributed.barrier()
        elif action == "load":
            folder = Path(arguments[0])
            engine.load(folder, json.loads((folder / "engine.json").read_text()))
        elif action == "export":
            engine.export(Path(arguments[0]))


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    import outcore.engine.deepspeed.staged.gradients as staged_gradients
    import outcore.engine.deepspeed.staged.params as staged_params
    import outcore.engine.deepspeed.staged.states as staged_shares

    staged_params.MIN_BYTES = staged_gradients.MIN_BYTES = job.get("min_bytes", 1 << 20)
    staged_gradients.GRADIENT_SLOT_BYTES = job.get("slot_bytes", 8192)  # several to a share
    staged_gradients.FLIGHT_BYTES = job.get("flight_bytes", 64 << 20)
    staged_shares.Share.chunks = partialmethod(CHUNKS, chunk_numel=job.get("chunk_numel", staged_shares.CHUNK_NUMEL))
    scratch_room._opened = lambda storage: FaultyEngine(open_engine("auto"))
    precision = job["run"].get("precision", "bf16")
    lora = LoraSettings(**job["model"].pop("lora")) if "lora" in job["model"] else None
    model = ModelSettings(precision=precision, seq_length=64, lora=lora, **job["model"])
    numbers = {
        "device": "cuda" if ON_GPU else "cpu", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": LR, "max_grad_norm": 1.0,
        "precision": precision, "world_size": torch.distributed.get_world_size(),
    }  # fmt: skip
    settings, run = run_of(job.get("config", {}), job["zero"], {**numbers, **job["run"]})
    resolved, _ = resolve(settings, model, run, None)
    said: list[str] = []
    engine = build_engine(resolved, model, None, say=said.append)
    engine.ds.module.token_loss.num_chunks = job.get("num_chunks")
    result: dict[str, Any] = {
        "losses": [], "said": said, "staged": resolved.built.offload.staged,
        "optimizer": type(engine.ds.optimizer).__name__, "warnings": resolved.built.warnings,
    }  # fmt: skip
    states = params = None
    if result["staged"]:
        states, params = engine.ds.optimizer.states, engine.ds.optimizer.session.params
        result["state_bytes"], result["nvme_state_bytes"] = states.total_bytes, states.nvme_bytes
    read_before = params.store.read_bytes if params is not None else 0
    try:
        try:
            with imitated() if job.get("imitated_kernel") else nullcontext([]) as kernel_calls:
                perform(job["do"], engine, result)
            result["kernel_calls"] = len(kernel_calls)
        except Exception as error:
            if not job.get("may_fail"):
                raise
            result["stopped"] = [type(error).__name__, str(error)]
            return result
        result["fingerprint"] = fingerprint(engine)
        if states is not None:
            moved = (
                {"state_read": states.ring.read_bytes, "state_written": states.ring.written_bytes}
                if states.ring
                else {}
            )
            gradients = engine.ds.optimizer.session.gradients
            if gradients is not None:
                moved |= {
                    "gradient_read": gradients.read_bytes, "gradient_written": gradients.written_bytes,
                    "gradient_bytes": gradients.nvme_bytes,
                }  # fmt: skip
            if params is not None:
                moved |= {
                    "param_read": params.store.read_bytes, "params_on_nvme": len(params.store),
                    "param_store": params.store.capacity_bytes, "param_read_before": read_before,
                }  # fmt: skip
            result["moved"] = moved
    finally:
        engine.close()
    return result


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    if ON_GPU:
        fix_order()
    init_process_group(ON_GPU, int(os.environ.get("LOCAL_RANK", "0")))
    rank = torch.distributed.get_rank()
    results: dict[str, Any] = {}
    for job in json.loads((folder / "jobs.json").read_text()):
        try:
            results[job["name"]] = run_job(job)
        except Exception as error:  # the test shows it
            import traceback

            results[job["name"]] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        torch.distributed.barrier()
    (folder / f"results-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
