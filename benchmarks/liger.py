"""Liger's kernels beside torch.compile and plain transformers: one layer, and the head with its loss.

    python benchmarks/liger.py [--shape 1.2b] [--tokens 4096] [--out liger.json]      (a GPU, liger-kernel)

A micro-batch's forward and backward with gradients of all weights, captured as a CUDA graph, so that only the device's
time counts; variants take turns, medians of `--rounds`. Liger's head waits for the device in its forward, so it cannot
be captured and is timed as it is called. Beside the time: the peak of tensors in a call, and the relative distance of
the gradient of the input from the same layer's in fp32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "race"))

import torch
import torch.nn.functional as F
from race_common import config_of
from torch import nn

from outcore.engine.stream.backward.head import CrossEntropy
from outcore.sizing.activations import EAGER_CHUNKS, LOGITS_CHUNK_BYTES, auto_num_chunks

Run = Callable[[], torch.Tensor]
"""Forward and backward; returns the gradient of the input."""


@dataclass
class Variant:
    """What is timed."""

    run: Run
    """Held as long as the graph: the graph reads the weights and inputs in it."""
    graph: torch.cuda.CUDAGraph | None
    grad: torch.Tensor
    peak_bytes: int

    def seconds(self, calls: int) -> float:
        """Of one call, on the device."""
        call = self.run if self.graph is None else self.graph.replay
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls


def warmed_up(run: Run, *, graph: bool = True) -> Variant:
    """Called three times first, on a stream of its own, as capturing wants it."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # its inputs come from another stream
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grad = run()
        torch.cuda.synchronize()
        peak_bytes = torch.cuda.max_memory_allocated() - before
        captured = torch.cuda.CUDAGraph() if graph else None
        if captured is not None:
            with torch.cuda.graph(captured, stream=stream):
                grad = run()
    return Variant(run, captured, grad, peak_bytes)


def layer_of(config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """One decoder layer, the same weights every time, with what the module has patched in now."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    torch.manual_seed(1)
    layer = LlamaDecoderLayer(config, 0)
    for weight in layer.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.02)
    return layer.to(device, dtype)


@contextmanager
def kernels(*, liger: bool) -> Iterator[None]:
    """Llama's norm, MLP and rotation are Liger's inside, where `liger` is set."""
    from liger_kernel.transformers.rms_norm import LigerRMSNorm
    from liger_kernel.transformers.rope import liger_rotary_pos_emb
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP
    from transformers.models.llama import modeling_llama

    own = {"LlamaRMSNorm": LigerRMSNorm, "LlamaMLP": LigerSwiGLUMLP, "apply_rotary_pos_emb": liger_rotary_pos_emb}
    before = {name: getattr(modeling_llama, name) for name in own}
    try:
        for name, value in own.items() if liger else ():
            setattr(modeling_llama, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(modeling_llama, name, value)


def layer_run(layer: nn.Module, config: Any, x: torch.Tensor, seed: torch.Tensor, *, compiled: bool = False) -> Run:
    """Of hidden states x [1, T, H], `seed` [1, T, H] the gradient of the result."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    dtype = next(layer.parameters()).dtype
    leaf, grad_out = x.to(dtype, copy=True).requires_grad_(), seed.to(dtype)
    positions = LlamaRotaryEmbedding(config).to(x.device)(leaf, torch.arange(x.shape[1], device=x.device)[None])
    call = torch.compile(layer, fullgraph=True) if compiled else layer

    def run() -> torch.Tensor:
        out = call(leaf, position_embeddings=positions)
        return torch.autograd.grad(out, [leaf, *layer.parameters()], grad_out)[0]

    return run


def captured_layers(
    config: Any, tokens: int, device: torch.device, refused: dict[str, str]
) -> tuple[dict[str, Variant], torch.Tensor]:
    """(variants of a layer, the gradient of its input [1, T, H] in fp32); errors of those that cannot be go to
    `refused`."""
    x, seed = (torch.randn(1, tokens, config.hidden_size, device=device).bfloat16() for _ in range(2))
    truth = layer_run(layer_of(config, torch.float32, device), config, x, seed)()
    found = {}
    for name, liger, compiled in (
        ("plain", False, False),
        ("torch.compile", False, True),
        ("Liger", True, False),
        ("Liger and torch.compile", True, True),
    ):
        with kernels(liger=liger):  # its rotation is looked up at every call
            layer = layer_of(config, torch.bfloat16, device)
            try:
                found[name] = warmed_up(layer_run(layer, config, x, seed, compiled=compiled))
            except Exception as error:  # a combination that the libraries do not offer is a finding, not an end
                refused[name] = f"{type(error).__name__}: {' '.join(str(error).split()[:30])}"
                print(f"{name}: {refused[name]}", flush=True)
    return found, truth


def head_run(weight: torch.Tensor, x: torch.Tensor, targets: torch.Tensor, *, compiled: bool) -> Run:
    """As the streaming engine's head: logits in chunks, the gradient of each with its loss
    (`StreamedHeadGradient.one`)."""
    cross_entropy = CrossEntropy(compiled=compiled)
    chunk_bytes = LOGITS_CHUNK_BYTES // (1 if compiled else EAGER_CHUNKS)
    num_chunks = auto_num_chunks(len(x), len(weight), chunk_bytes)

    def run() -> torch.Tensor:
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        start = 0
        for target in targets.tensor_split(num_chunks):
            rows = slice(start, start + len(target))
            _, grad = cross_entropy(x[rows] @ weight.t(), target, 1 / len(x))
            torch.mm(grad, weight, out=grad_x[rows])
            grad_weight.addmm_(grad.t(), x[rows])
            start += len(target)
        return grad_x

    return run


def liger_head_run(weight: torch.Tensor, x: torch.Tensor, targets: torch.Tensor) -> Run:
    """Liger's fused linear cross-entropy, its mean over tokens."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    leaves = [weight.detach().requires_grad_(), x.detach().requires_grad_()]

    def run() -> torch.Tensor:
        return torch.autograd.grad(loss(*leaves, targets), leaves)[1]

    return run


def captured_heads(config: Any, tokens: int, device: torch.device) -> tuple[dict[str, Variant], torch.Tensor]:
    """(variants of the head, the gradient of its input [T, H] in fp32)."""
    weight = (torch.randn(config.vocab_size, config.hidden_size, device=device) * 0.02).bfloat16()
    x = torch.randn(tokens, config.hidden_size, device=device).bfloat16()
    targets = torch.randint(0, config.vocab_size, (tokens,), device=device)
    exact = x.float().requires_grad_()
    truth = torch.autograd.grad(F.cross_entropy(exact @ weight.float().t(), targets), exact)[0]
    runs = {
        "chunks, eager": head_run(weight, x, targets, compiled=False),
        "chunks, torch.compile": head_run(weight, x, targets, compiled=True),
        "Liger, fused linear": liger_head_run(weight, x, targets),
    }
    return {name: warmed_up(run, graph=name != "Liger, fused linear") for name, run in runs.items()}, truth


def compare(what: str, variants: dict[str, Variant], truth: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    """Print and return a line for each variant; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            times[name].append(variant.seconds(20))
    lines = []
    for name, variant in variants.items():
        distance = float((variant.grad.float() - truth).norm() / truth.norm())
        lines.append(
            {
                "what": what,
                "variant": name,
                "median_ms": 1e3 * statistics.median(times[name]),
                "rounds_ms": [1e3 * seconds for seconds in times[name]],
                "peak_bytes": variant.peak_bytes,
                "distance_to_fp32": distance,
            }
        )
        print(
            f"{what:6} {name:24} {lines[-1]['median_ms']:8.3f} ms  {variant.peak_bytes / 1e6:8.0f} MB at its peak  "
            f"{distance:.2e} from fp32",
            flush=True,
        )
    return lines


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.2b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("Liger's kernels are Triton's: they need a GPU", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    torch.manual_seed(0)
    config = config_of(args.shape, args.tokens)
    refused: dict[str, str] = {}
    lines = compare("layer", *captured_layers(config, args.tokens, device, refused), args.rounds)
    lines += compare("head", *captured_heads(config, args.tokens, device), args.rounds)
    if args.out:
        found = {
            "gpu": torch.cuda.get_device_name(),
            "versions": {name: version(name) for name in ("torch", "transformers", "liger-kernel")},
            "shape": args.shape,
            "tokens": args.tokens,
            "lines": lines,
            "refused": refused,
        }
        args.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
