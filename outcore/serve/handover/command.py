"""From our flags to vLLM's command line and environment variables, with groups of GPUs laid on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.infer.opening import find_place
from outcore.machine import detect_machine
from outcore.machine.topology import ParallelLayout, Topology, balanced_stages, detect_topology, lay_out, read_cluster
from outcore.plan import resolve_shape
from outcore.serve.settings import ServeSettings

OURS = (
    *("preset", "device", "quantize", "pass_tokens", "chunk_tokens", "page_tokens", "kv_format", "kv_home", "kv_gib"),
    *(
        "vram_gib",
        "ram_gib",
        "nvme_path",
        "pin_gib",
        "pin_memory",
        "buffer_mib",
        "num_layer_buffers",
        "prefetch",
        "compile",
        "draft_model",
        "draft_tokens",
        "cpu_tokens",
        "expert_cache_gib",
    ),
    *("no_prefix_sharing", "prefix_path", "prefix_gib", "deterministic"),
)
"""Flags that only our own engine knows."""
DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ENVIRONMENT = Path(".venv-vllm")


@dataclass(frozen=True)
class Handover:
    """Settings with which vLLM is started: model, layout over GPUs, arguments."""

    model: str
    layout: ParallelLayout
    stage_layers: tuple[int, ...]
    """Layers of each pipeline stage; () with one stage, or where vLLM shall split them evenly."""
    arguments: tuple[str, ...]
    executable: Path | None
    """An installed vLLM; None: in the environment that we make."""
    start_timeout_s: float
    lines: tuple[str, ...]
    """Lines for people: what was chosen."""
    precision: str = "auto"

    def launch(self) -> dict[str, Any]:
        """The launch descriptor, in the terms of our own engine's: vLLM keeps everything in VRAM, without ZeRO."""
        layers = self.stage_layers or (None,) * self.layout.pipeline_parallel
        return {
            "engine": "vllm",
            "world_size": len(self.layout.gpus),
            "tensor_parallel": self.layout.tensor_parallel,
            "pipeline_parallel": self.layout.pipeline_parallel,
            "stages": [
                {"gpus": [gpu.index for gpu in gpus], "layers": count}
                for gpus, count in zip(self.layout.stages, layers, strict=True)
            ],
            "zero": {"stage": 0, "offload_param": "none", "num_buffers": 0},
            "device": ", ".join(f"cuda:{gpu.index}" for gpu in self.layout.gpus),
            "device_name": "",
            "precision": self.precision,
            "kv_home": "vram",
            "kv_format": "same",
            "placement": list(self.lines),
        }

    def command(self, executable: Path, port: int) -> list[str]:
        """The process to start."""
        return [str(executable), "serve", self.model, "--host", "127.0.0.1", "--port", str(port), *self.arguments]

    def variables(self, key: str) -> dict[str, str]:
        """Environment variables of that process."""
        found = {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # numbers as nvidia-smi has them, which the layout goes by
            "CUDA_VISIBLE_DEVICES": ",".join(str(gpu.index) for gpu in self.layout.gpus),
            "TP_SIZE": str(self.layout.tensor_parallel),
            "VLLM_API_KEY": key,
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        if self.layout.tensor_parallel > 1:
            # Kernels of a layer and its sums are launched in one order on every GPU.
            found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        if self.stage_layers:
            found["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, self.stage_layers))
        return found


def handover_of(args: argparse.Namespace, defaults: argparse.Namespace, settings: ServeSettings) -> Handover:
    """Choose vLLM's layout and arguments. `defaults`: the flags when nothing is said. ValueError for what cannot be."""
    if sys.platform != "linux":
        raise ValueError("engine vllm runs on Linux only (on Windows: in WSL2). Leave --engine out.")
    refuse_ours(name for name in OURS if getattr(args, name) != getattr(defaults, name))
    place = find_place(args.model, args.adapter)
    if (
        not place.weights
        or place.checkpoint is not None
        or (place.adapter and (place.adapter / "manifest.json").is_file())
    ):
        raise ValueError(f"{args.model} is a checkpoint, which vLLM cannot read: outcore export it first.")
    topology = detect_topology(detect_machine().gpus) if args.cluster is None else read_cluster(args.cluster)
    layout = lay_out(topology, args.tensor_parallel, args.pipeline_parallel)
    if len(layout.hosts) > 1:
        raise ValueError(
            f"these groups lie on {', '.join(layout.hosts)}: over several hosts start vLLM by its own means "
            "(docs/several_gpus.md), or take fewer GPUs."
        )
    stages, why = _stages(args, place.weights)
    arguments = [
        *("--served-model-name", settings.name),
        *("--tensor-parallel-size", str(layout.tensor_parallel)),
        *("--pipeline-parallel-size", str(layout.pipeline_parallel)),
        *("--dtype", DTYPES[args.precision]),
        *("--override-generation-config", json.dumps({"max_new_tokens": settings.max_answer_tokens})),
    ]
    if place.adapter is not None:  # the adapter answers under the model's name, the base under another
        arguments[1] = f"{settings.name}-base"
        arguments += ["--enable-lora", "--lora-modules", f"{settings.name}={place.adapter}"]
    arguments += ["--max-model-len", str(args.context)] * (args.context is not None)
    arguments += ["--max-num-seqs", str(args.max_sequences)] * (args.max_sequences is not None)
    arguments += ["--trust-remote-code"] * args.trust_remote_code
    return Handover(
        place.weights, layout, stages, tuple(arguments), args.vllm_executable, args.start_timeout,
        _lines(topology, layout, stages, why), args.precision,
    )  # fmt: skip


def refuse_ours(said: Iterable[str]) -> None:
    """ValueError where one of these settings is our own engine's alone."""
    if name := next((name for name in said if name in OURS), None):
        raise ValueError(
            f"{name} belongs to our own engine, which has one GPU; vLLM does not know it. Leave it out, or the other "
            "GPUs (--engine vllm)."
        )


def _stages(args: argparse.Namespace, model: str) -> tuple[tuple[int, ...], str]:
    """(layers of each stage, why so)."""
    count = args.pipeline_parallel
    if args.stage_layers:
        try:
            stages = tuple(int(part) for part in args.stage_layers.split(","))
        except ValueError:
            stages = ()
        if len(stages) != count or min(stages, default=0) < 1:
            raise ValueError(
                f"stage_layers is {args.stage_layers!r}, but must be {count} numbers above 0, as in 20,20."
            )
        return stages, "as told"
    if count == 1:
        return (), ""
    if args.layer_costs is not None:
        costs = json.loads(args.layer_costs.read_text(encoding="utf-8"))
        return balanced_stages(costs["layers"], count, costs.get("first", 0), costs.get("last", 0)), "by measured costs"
    try:
        shape = resolve_shape(model, trust_remote_code=args.trust_remote_code)
    except (ValueError, RuntimeError, OSError) as error:
        return (), f"evenly, because the layers' sizes are not known: {error}"
    stages = balanced_stages(shape.layer_params, count, shape.embedding_params, shape.head_weight_numel)
    return stages, "balanced by the layers' sizes"


def _lines(topology: Topology, layout: ParallelLayout, stages: Sequence[int], why: str) -> tuple[str, ...]:
    found = list(topology.lines())
    for number, gpus in enumerate(layout.stages):
        layers = f", {stages[number]} layers" if stages else ""
        found.append(f"stage {number}: GPU {', '.join(str(gpu.index) for gpu in gpus)}{layers}")
    return (*found, *([f"layers are shared out {why}"] if why else []))
