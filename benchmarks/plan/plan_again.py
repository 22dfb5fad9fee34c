"""The forecast of a run that was measured already, made again by today's planner: same model, settings and machine.

A run's plan.json says under `asked` what its planner was asked. Results from before that was kept are asked again from
what their forecast says: where things live, how much each tier has, which rates were measured.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from plan_runs import RUNS, config_of

from outcore.common.quantities import GIB
from outcore.config import DeepSpeedFile, ProcessFacts, TrainConfig, resolve
from outcore.engine.deepspeed.decision import STAGE_NAMES, deepspeed_layout
from outcore.engine.deepspeed.settings import ChosenOffload
from outcore.engine.stream.decision.decision import stream_layout
from outcore.engine.stream.settings import StreamSettings
from outcore.machine.offload import FREE_RESERVE
from outcore.plan import constants as k
from outcore.plan.hardware import Hardware
from outcore.plan.request import RunRequest
from outcore.plan.run.forecast import Layout, plan_layout, run_request
from outcore.sizing.layouts import DeepSpeedLayout, Residency, Staged, StreamLayout
from outcore.sizing.shape import ModelShape, shape_from_fields

OLDER_RING = {"state_ring_slots": 24, "compress_on_nvme": False}
"""How states on NVMe passed through RAM before a run kept what it was asked."""
AGAIN_NOTE = (
    "Forecast recomputed after calibration on these very runs: it shows how well the formulas can describe them, not "
    "how well they foresee others."
)


def planned_again(result: dict[str, Any], links: dict[str, Any] | None) -> dict[str, Any]:
    """The result with today's forecast in place of its own. `links`: the machine's, as the results have them."""
    asked = result["forecast"].get("asked") or _asked(result, links or {})
    shape = _shape(asked["shape"]) if "tensors" in asked["shape"] else _run_shape(result["name"])
    request, layout = (_kept if "layout" in asked else _older)(asked)
    plan = plan_layout(shape, request, Hardware(**asked["hardware"]), layout)
    return {**result, "forecast": {**plan.to_dict(), "asked": asked}}


def _kept(asked: dict[str, Any]) -> tuple[RunRequest, Layout]:
    fields = {name: value for name, value in asked["layout"].items() if name != "saved_bytes"}  # 0 in all of them
    if "checkpoints_home" in fields:
        fields["residency"] = Residency(**fields["residency"])
        return RunRequest(**asked["request"]), StreamLayout(**fields)
    fields["staged"] = Staged(**fields["staged"]) if fields["staged"] else None
    return RunRequest(**asked["request"]), DeepSpeedLayout(**fields)


def _older(asked: dict[str, Any]) -> tuple[RunRequest, Layout]:
    """What runs kept until November 2026: the figures of the run and its engine's own settings."""
    figures, told = asked["figures"], asked["stream"]
    offload = ChosenOffload(**asked["offload"]) if asked["offload"] else None
    stream = StreamSettings(**{**OLDER_RING, **told}) if told else None
    if stream is not None and stream.compile == "off" and "stays_eager" not in asked["shape"]:
        stream = dataclasses.replace(stream, cuda_graphs="off")  # only compiled layers were captured then
    states: Any = stream.states if stream is not None else "auto"
    settings = resolve(
        TrainConfig(
            per_device_train_batch_size=figures["micro_batch"],
            gradient_accumulation_steps=figures["accumulation"],
            activation_checkpointing=figures["activation_checkpointing"],
            max_grad_norm=figures["max_grad_norm"],
            # All packed rows were attended to through masks before what was asked was kept.
            attn_implementation="auto" if figures.get("packed_attention", "masks") == "auto" else "sdpa",
            state_format=states,
            staging_gib=figures["staging_bytes"] / GIB if "staging_bytes" in figures else None,
        ),
        DeepSpeedFile(),
        ProcessFacts(figures["precision"]),
    )
    layout: Layout
    if stream is not None:
        device = "cpu" if asked["hardware"].get("is_cpu") else "cuda"
        stream = dataclasses.replace(stream, resident_bytes=0)  # no layers stayed when these runs were made
        layout = stream_layout(stream, figures["micro_batch"], figures["accumulation"], device)
    else:
        assert offload is not None
        layout = deepspeed_layout(offload, settings, asked["hardware"].get("num_gpus", 1))
    return run_request(settings, layout, figures["seq_length"], figures["save_total_limit"]), layout


def _shape(fields: dict[str, Any]) -> ModelShape:
    def frozen(value: Any) -> Any:
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    return ModelShape(**{name: frozen(value) for name, value in fields.items()})


def _run_shape(run: str) -> ModelShape:
    """Of a run that was asked before shapes had every tensor."""
    name = RUNS[run].shape
    return shape_from_fields(name, "llama", config_of(name))


def _flag(argv: list[str], name: str) -> str | None:
    return argv[len(argv) - argv[::-1].index(name)] if name in argv else None


def _asked(result: dict[str, Any], links: dict[str, Any]) -> dict[str, Any]:
    f, argv = result["forecast"], result["argv"]
    parts, tiers = f["parts_bytes"], f["tiers"]
    pool = sum(parts["pinned"].values())
    figures = {
        "seq_length": f["seq_length"],
        "micro_batch": f["micro_batch"],
        "accumulation": f["accumulation"],
        "precision": f["precision"],
        "max_grad_norm": float(_flag(argv, "--max_grad_norm") or 1.0),
        "activation_checkpointing": True,
        "save_total_limit": parts["nvme"]["checkpoints"] // f["checkpoint_bytes"] - 1,
    }
    hardware = {
        "name": f["machine"],
        "vram_bytes": tiers["vram"]["capacity_bytes"],
        "ram_bytes": tiers["ram"]["capacity_bytes"],
        "pinned_bytes": tiers["pinned"]["capacity_bytes"],
        "nvme_free_bytes": round(tiers["nvme"]["capacity_bytes"] / (1 - FREE_RESERVE)),
        "nvme_total_bytes": 0,
        "compute_tflops": round(links["matmul_tflops"] * k.MATMUL_SHARE, 3),
        **{name: links[name] for name in _RATES},
        "is_cpu": tiers["vram"]["capacity_bytes"] == 0,
    }
    shape = dataclasses.asdict(_run_shape(result["name"]))
    asked: dict[str, Any] = {"shape": shape, "figures": figures, "hardware": hardware, "stream": None, "offload": None}
    if f["engine"] == "stream":
        in_ram = parts["ram"].get("master", 0) + parts["ram"].get("moments", 0)
        on_drive = parts["nvme"].get("master", 0) > 0
        homes = {"VRAM": "device", "RAM": "ram", "NVMe": "nvme"}
        asked["stream"] = {
            "max_grad_norm": figures["max_grad_norm"],
            "states": f["state_format"],
            "activations": homes[f["homes"]["activation checkpoints"]],
            "nvme_path": "nvme" if on_drive else None,
            "state_ram_bytes": in_ram if on_drive else None,
            "compile": _flag(argv, "--compile") or "auto",
            "staging_bytes": pool,
            "packed_attention": "masks",  # as all were before plan.json kept what was asked
        }
    else:
        home = {"VRAM": "none", "RAM": "cpu", "NVMe": "nvme"}
        infinity = f["zero_stage"] == "infinity"
        stage = 3 if infinity else STAGE_NAMES.index(f["zero_stage"])
        asked["offload"] = {
            "stage": stage,
            "optimizer": home[f["homes"]["optimizer states"]],
            "params": "nvme" if infinity else home[f["homes"]["parameters"]],  # sent there; a little may stay in RAM
            "nvme_path": None,
            "locked_bytes": 0,
            "staged": f["staged"],
            "states": f["state_format"],
            "ram_budget_bytes": f["ram_budget_bytes"],
        }
    return asked


_RATES = (
    "h2d_gb_per_s",
    "d2h_gb_per_s",
    "drive_read_gb_per_s",
    "drive_write_gb_per_s",
    "drive_mixed_gb_per_s",
    "ram_gb_per_s",
    "device_memory_gb_per_s",
    "optimizer_gparams_per_s",
)
