"""The streaming engine beside plain PyTorch on real text: is it the same training?

    python benchmarks/exactness/stream_exact.py --out results/exact          # needs a GPU; all cases, 50 steps each
    python benchmarks/exactness/stream_exact.py --small --out /tmp/exact     # a dry run on the CPU
    python benchmarks/exactness/stream_exact.py --cases bf16-eager,lora-compiled --out results/exact

Plain PyTorch is written out below: the whole model on the device, autograd, gradients of micro-batches added up in
fp32, torch.nn.utils.clip_grad_norm_, torch.optim.AdamW on fp32 masters, weights rounded from them; fp16 with dynamic
loss scaling by the engine's rule. Both see the same rows of the built-in text in the same order from the same weights.

Cases are {bf16, fp16, lora} x {eager, compiled}. fp16 starts with a loss scale that overflows and doubles it every few
steps, so that it overflows again and again: steps must be skipped, the scale must fall and rise again, and both must
skip the same steps. LoRA adapts (through peft) the model that the plain bf16 run has made.

Verdict of a case: relative difference of the loss at every step at most --tolerance (0.5 %), the loss on held-out rows
has fallen, and for fp16 the above. One JSON per case and `summary.json` in --out. Exit code 1 when a case fails.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from real_text import Batch, Text, device_name, model, num_targets, write_json

from outcore.common.quantities import MIB
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.settings import StreamSettings
from outcore.engine.stream.state import LossScaler
from outcore.model import LoadedModel, LoraSettings
from outcore.train.configure.schedule import LrSchedule

KINDS = ("bf16", "fp16", "lora")
CASES = tuple(f"{kind}-{way}" for kind in KINDS for way in ("eager", "compiled"))
PEAK_LR = {"bf16": 3e-4, "fp16": 3e-4, "lora": 1e-3}
SMALL_PEAK_LR = {"bf16": 3e-3, "fp16": 3e-3, "lora": 3e-3}  # narrow models want larger ones
BETAS, EPS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0
LORA = LoraSettings(r=16, alpha=32)
FIRST_SCALE, SCALE_WINDOW = 2.0**22, 4
"""Far above what fp16 gradients of a mean loss bear; doubled after so many good steps."""


@dataclass
class Step:
    """What is compared."""

    loss: float
    grad_norm: float
    skipped: bool
    scale: float


def scaler_of(kind: str) -> LossScaler:
    return LossScaler(kind == "fp16", FIRST_SCALE, SCALE_WINDOW, hysteresis=1)


class PlainPyTorch:
    """See the module docstring."""

    def __init__(self, loaded: LoadedModel, kind: str, device: str) -> None:
        self.loaded, self.device = loaded, device
        self.model = loaded.model.to(device)
        self.weights = [p for p in self.model.parameters() if p.requires_grad]
        self.masters = [torch.nn.Parameter(p.detach().float().clone()) for p in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
        self.scaler = scaler_of(kind)
        self.loss = loaded.token_loss()

    def step(self, batches: list[Batch], lr: float) -> Step:
        total, scale = num_targets(batches), self.scaler.cur_scale
        sums = [torch.zeros_like(master) for master in self.masters]
        summed = 0.0
        for batch in batches:
            self.model.zero_grad(set_to_none=True)
            result = self.loss(self.model, batch)
            summed += float(result.loss_sum.detach())
            (result.objective(total) * scale).backward()
            for sum_, weight in zip(sums, self.weights, strict=True):
                if weight.grad is not None:
                    sum_ += weight.grad.float()
        for master, sum_, weight in zip(self.masters, sums, self.weights, strict=True):
            master.grad = sum_.to(weight.dtype).float() / scale  # a gradient has the type of its weight, as autograd's
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, CLIP))
        skipped = not math.isfinite(norm)
        self.scaler.update(overflow=skipped)
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            with torch.no_grad():
                for master, weight in zip(self.masters, self.weights, strict=True):
                    weight.copy_(master)
        return Step(summed / total, norm, skipped, scale)


class Streaming:
    """Our engine with fp32 states in RAM."""

    def __init__(self, loaded: LoadedModel, kind: str, device: str, settings: StreamSettings) -> None:
        scaler = scaler_of(kind)
        settings = replace(
            settings,
            initial_loss_scale=scaler.cur_scale if scaler.enabled else settings.initial_loss_scale,
            loss_scale_window=SCALE_WINDOW,
            loss_scale_hysteresis=1,
        )
        self.engine = build_stream_engine(loaded, settings, device=device)
        self.description = self.engine.describe()
        print(self.description, flush=True)

    def step(self, batches: list[Batch], lr: float) -> Step:
        scale = self.engine._scaler.cur_scale
        result = self.engine.train_step(batches, lr)
        return Step(result.loss, result.grad_norm, result.skipped, scale)

    def held_out_loss(self, text: Text) -> float:
        """Mean loss of rows that are not trained on."""
        return self.engine.evaluate(iter(text.validation(4))).loss


class Comparison:
    """Runs plain PyTorch once per kind and the engine for every case; `options` are the command line's."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.text = Text(
            options.seq_length,
            max_eval_rows=32,
            max_train_rows=options.max_train_rows,
            cache_dir=options.cache_dir,
        )
        self.plain: dict[str, list[Step]] = {}
        self.trained: dict[str, torch.Tensor] = {}
        """Weights after the plain bf16 run, by name; LoRA adapts them."""

    def load(self, kind: str) -> LoadedModel:
        """The model that a run of this kind starts from, on the CPU."""
        options = self.options
        precision = "fp16" if kind == "fp16" else "bf16"
        loaded = model(options.shape, self.text, precision, options.seed, LORA if kind == "lora" else None)
        if kind == "lora":
            self.plain_steps("bf16")
            with torch.no_grad():
                for name, p in loaded.model.named_parameters():
                    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
                    if "lora_" not in name:
                        p.copy_(self.trained[name])
        return loaded

    def run(self, kind: str, trainer: PlainPyTorch | Streaming) -> list[Step]:
        options = self.options
        stream = self.text.stream(options.rows, options.seed)
        peak_lr = (SMALL_PEAK_LR if options.small else PEAK_LR)[kind]
        schedule = LrSchedule("constant", peak_lr, min(5, options.steps), options.steps)
        found: list[Step] = []
        for _ in range(options.steps):
            batches = [next(stream) for _ in range(options.accumulation)]
            done = sum(not step.skipped for step in found)  # a skipped step's learning rate is not used up
            found.append(trainer.step(batches, schedule.lr(done)))
        return found

    def plain_steps(self, kind: str) -> list[Step]:
        if kind not in self.plain:
            print(f"plain PyTorch, {kind}", flush=True)
            trainer = PlainPyTorch(self.load(kind), kind, self.device)
            self.plain[kind] = self.run(kind, trainer)
            if kind == "bf16":
                self.trained = {n: p.detach().cpu().clone() for n, p in trainer.model.named_parameters()}
            del trainer
            if self.device == "cuda":
                torch.cuda.empty_cache()
        return self.plain[kind]

    def case(self, case: str) -> dict[str, Any]:
        """Run one case and judge it."""
        kind, _, way = case.partition("-")
        expected = self.plain_steps(kind)
        print(f"streaming, {case}", flush=True)
        settings = StreamSettings(
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=CLIP,
            compile="on" if way == "compiled" else "off",
            staging_bytes=self.options.staging_mib * MIB,
            seed=self.options.seed,
        )
        begin_s = time.perf_counter()
        streaming = Streaming(self.load(kind), kind, self.device, settings)
        try:
            before = streaming.held_out_loss(self.text)
            steps = self.run(kind, streaming)
            after = streaming.held_out_loss(self.text)
        finally:
            streaming.engine.close()
        result = judge(kind, expected, steps, (before, after), self.options.tolerance)
        torch._dynamo.reset()
        return {
            "case": case,
            "verdict": not result["failures"],
            **result,
            "wall_s": time.perf_counter() - begin_s,
            "engine": streaming.description.splitlines(),
            "plain": [vars(step) for step in expected],
            "stream": [vars(step) for step in steps],
        }


def judge(
    kind: str, plain: list[Step], stream: list[Step], held_out: tuple[float, float], tolerance: float
) -> dict[str, Any]:
    """Largest difference of the loss, and in words what is not as it should be. `held_out`: loss before and after."""
    failures = []
    differences = [abs(b.loss - a.loss) / abs(a.loss) for a, b in zip(plain, stream, strict=True)]
    worst = max(differences) if all(math.isfinite(d) for d in differences) else math.inf
    if worst > tolerance:
        failures.append(f"the loss differs by {worst:.3%} at step {differences.index(max(differences))}")
    if not held_out[1] < held_out[0]:
        failures.append("the loss on held-out rows has not fallen")
    if [step.skipped for step in plain] != [step.skipped for step in stream]:
        failures.append("other steps were skipped")
    skipped = [index for index, step in enumerate(stream) if step.skipped]
    scales = [step.scale for step in stream]
    if kind == "fp16":
        later = [index for index in skipped if index > 0 and not stream[index - 1].skipped]
        if not skipped:
            failures.append("no gradient overflowed, so nothing was tried")
        elif not any(after < before for before, after in pairwise(scales)):
            failures.append("the scale never fell")
        if not any(after > before for before, after in pairwise(scales)):
            failures.append("the scale never rose again")
        if not later:
            failures.append("no overflow came after good steps: give more --steps")
    elif skipped:
        failures.append(f"steps {skipped} were skipped")
    return {
        "largest_relative_difference": worst,
        "relative_differences": differences,
        "skipped_steps": skipped,
        "held_out_loss": held_out,
        "failures": failures,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--small", action="store_true", help="a dry run in a minute on the CPU; eager unless --cases")
    parser.add_argument("--shape", choices=("small", "100m", "300m"), default="100m")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seq_length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--max_train_rows", type=int)
    parser.add_argument("--staging_mib", type=int, default=1024)
    parser.add_argument("--tolerance", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cache_dir", default=".cache/outcore")
    options = parser.parse_args(arguments)
    if options.small:
        options.shape, options.steps, options.seq_length, options.rows = "small", 30, 64, 2
        options.max_train_rows, options.staging_mib = 400, 256
        if options.cases == ",".join(CASES):
            options.cases = ",".join(case for case in CASES if case.endswith("eager"))
    unknown = set(options.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available() and not options.small:
        print("no GPU: results on the CPU say nothing about it. Use --small for a dry run.", file=sys.stderr)
        return 1
    comparison = Comparison(options)
    results = []
    for case in options.cases.split(","):
        results.append(comparison.case(case))
        write_json(options.out / f"{case}.json", results[-1])
    about = {
        "device": device_name(),
        "torch": torch.__version__,
        "shape": options.shape,
        "tokens_per_step": options.rows * options.accumulation * options.seq_length,
        "steps": options.steps,
        "tolerance": options.tolerance,
        "text": comparison.text.facts(),
    }
    short = ("case", "verdict", "largest_relative_difference", "skipped_steps", "held_out_loss", "failures")
    write_json(options.out / "summary.json", {**about, "cases": [{k: r[k] for k in short} for r in results]})
    for result in results:
        words = "; ".join(result["failures"]) or "the same training"
        print(
            f"{result['case']:14} largest difference of the loss {result['largest_relative_difference']:.3%}, held-out "
            f"loss {result['held_out_loss'][0]:.3f} -> {result['held_out_loss'][1]:.3f}, "
            f"{len(result['skipped_steps'])} steps skipped: {words}"
        )
    return 0 if all(result["verdict"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
