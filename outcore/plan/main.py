"""`outcore plan`: will this model fit, how fast will it be, what limits it. Weights are never loaded.

    outcore plan --model llama-8b --machine rtx4070-laptop
    outcore plan --model Qwen/Qwen3-4B --lora_r 16 --json
    outcore plan --infer llama-70b --preset throughput
    outcore plan --guide            (writes the tables of docs/planning.md)

Exit code: 0 the plan fits, 1 it does not, 2 wrong usage or a missing, stale or damaged profile.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from outcore.common.quantities import GIB
from outcore.model.shape import resolve_shape
from outcore.plan.answer.advice import advise
from outcore.plan.answer.command import Said, command, notes
from outcore.plan.choose import choose_or_change
from outcore.plan.hardware import Hardware, Overrides
from outcore.plan.profile import load_hardware
from outcore.plan.request import ENGINES, PRECISIONS, STAGES, RunRequest
from outcore.sizing.shape import ModelShape

STAGE_WORDS = {"0": "none", "1": "zero1", "2": "zero2", "3": "zero3"}
SHORT_NAMES = {
    "1b": "llama-1b",
    "3b": "llama-3b",
    "8b": "llama-8b",
    "14b": "qwen3-14b",
    "30b": "qwen3-32b",
    "32b": "qwen3-32b",
    "llama-30b": "qwen3-32b",
    "70b": "llama-70b",
}
"""Sizes people ask for -> the preset that stands for them."""


def parser() -> argparse.ArgumentParser:
    """The subcommand's arguments; names are train_model.py's where it has them."""
    p = argparse.ArgumentParser(prog="outcore plan", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--model", help="preset, folder, config file or hub id (its config.json only)")
    p.add_argument("--machine", help="profile name or file; default: this machine as gds_optimizer.py measured it")
    p.add_argument("--nominal", action="store_true", help="data-sheet rates where nothing was measured")
    run = p.add_argument_group("the run (what is left out is chosen)")
    run.add_argument("--seq_length", type=int)
    run.add_argument("--per_device_train_batch_size", "--micro_batch_size", type=int, dest="micro_batch")
    run.add_argument("--gradient_accumulation_steps", type=int, dest="accumulation")
    run.add_argument("--engine", choices=ENGINES, default="auto")
    run.add_argument("--zero_stage", choices=(*STAGES, *STAGE_WORDS))
    run.add_argument("--state_format", help="fp32, split (lossless), or with 8-bit moments fp32_m8, split8, fp24_m8")
    run.add_argument("--precision", choices=PRECISIONS, default="bf16")
    run.add_argument("--activation_checkpointing", choices=("true", "false"), default="true")
    run.add_argument("--max_grad_norm", type=float, default=1.0)
    run.add_argument("--lora_r", type=int, default=0)
    run.add_argument("--lora_target_modules", default="auto", help="names with commas; auto: every linear layer")
    run.add_argument("--staging_gib", type=float)
    run.add_argument("--save_total_limit", type=int, default=2)
    run.add_argument("--checkpoints_elsewhere", action="store_true", help="checkpoints go to another drive")
    run.add_argument("--trust_remote_code", action="store_true")
    run.add_argument("--dataset", help="for the command that is printed; no plan depends on it")
    run.add_argument("--nvme_offload_path", metavar="DIR", help="likewise")
    hw = p.add_argument_group("the machine (instead of what its profile says)")
    hw.add_argument("--vram_gib", type=float)
    hw.add_argument("--ram_gib", type=float, help="RAM that the run may take")
    hw.add_argument("--pinned_gib", type=float)
    hw.add_argument("--nvme_free_gb", type=float)
    hw.add_argument("--tflops", type=float, help="that the GPU reaches with compiled layers")
    hw.add_argument("--num_gpus", type=int, default=1)
    infer = p.add_argument_group("answers instead of training")
    infer.add_argument("--infer", nargs="?", const="", metavar="MODEL", help="plan generating and serving")
    infer.add_argument("--preset", choices=("balanced", "latency", "throughput"), default="balanced")
    infer.add_argument("--context", type=int, help="tokens of prompt and answer together")
    infer.add_argument("--kv_format", choices=("same", "int8"), default="same")
    out = p.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="the answer as JSON on stdout")
    out.add_argument("--png", type=Path, metavar="FILE", help="stacked bars per tier against capacity")
    out.add_argument("--paper_png", type=Path, metavar="FILE", help="the ZeRO-Infinity paper's efficiency curves")
    out.add_argument("--guide", nargs="?", type=Path, const=Path("docs/planning.md"), metavar="FILE")
    out.add_argument("--check", action="store_true", help="with --guide: compare, write nothing")
    return p


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code."""
    cli = parser()
    args = cli.parse_args(argv)
    try:
        if args.guide is not None:
            return _guide(args.guide, args.check)
        if args.paper_png is not None:
            from outcore.plan.answer.figures import save_paper_curves

            save_paper_curves(args.paper_png)
            print(f"written: {args.paper_png}", file=sys.stderr)
            if args.model is None:
                return 0
        return _plan(args)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"outcore plan: {error}", file=sys.stderr)
        return 2


def _plan(args: argparse.Namespace) -> int:
    from outcore.plan.answer.show import show, to_json

    if args.infer:
        args.model = args.infer
    if args.model is None:
        from outcore.model.presets import PRESETS

        raise ValueError(
            f"Name a model: --model with a folder, a hub id, a config file or one of {', '.join(PRESETS)}."
        )
    if args.lora_r == 0 and args.lora_target_modules != "auto":
        raise ValueError("lora_target_modules is given but lora_r is 0: add --lora_r 16 to plan adapters.")
    overrides = Overrides(
        vram_gib=args.vram_gib,
        ram_gib=args.ram_gib,
        pinned_gib=args.pinned_gib,
        nvme_free_gb=args.nvme_free_gb,
        tflops=args.tflops,
        num_gpus=args.num_gpus,
    )
    hardware = load_hardware(args.machine, overrides, allow_nominal=args.nominal)
    shape = resolve_shape(
        _model(args),
        lora_target_modules=args.lora_target_modules,
        trust_remote_code=args.trust_remote_code,
    )
    if args.infer is not None:
        return _infer(args, shape, hardware)
    request = _request(args)
    if args.lora_r:
        shape = shape.with_lora(args.lora_r)
    answer = choose_or_change(shape, request, hardware)
    advice = advise(shape, request, hardware, answer.plan)
    if args.png is not None:
        from outcore.plan.answer.figures import save_bars

        save_bars(answer, hardware, args.png)
    said = Said(_model(args), args.dataset, args.nvme_offload_path, args.trust_remote_code)
    run_it = command(answer.plan, request, said)
    if args.json:
        print(json.dumps(to_json(answer, advice, hardware) | {"command": run_it}, indent=2))
    else:
        show(answer, advice, hardware, run_it=run_it)
        for line in notes(request):
            print(f"- {line}")
        if args.png is not None:
            print(f"picture: {args.png}")
    return 0 if answer.plan.fits else 1


def _infer(args: argparse.Namespace, shape: ModelShape, hardware: Hardware) -> int:
    from outcore.plan.inference import DoesNotFit, plan_inference, to_json, words_of

    asked = {
        "preset": args.preset,
        "precision": args.precision,
        "context": args.context,
        "kv_format": args.kv_format,
    }
    try:
        plan = plan_inference(shape, hardware, **asked)
    except DoesNotFit as error:
        print(f"{shape.name} on {hardware.name}: does not fit. {error}")
        return 1
    if args.json:
        print(json.dumps(to_json(plan), indent=2))
    else:
        print("\n".join(words_of(plan, **asked)))
    return 0


def _model(args: argparse.Namespace) -> str:
    return SHORT_NAMES.get(str(args.model).lower(), str(args.model))


def _request(args: argparse.Namespace) -> RunRequest:
    return RunRequest(
        seq_length=args.seq_length,
        micro_batch=args.micro_batch,
        accumulation=args.accumulation,
        engine=args.engine,
        zero_stage=STAGE_WORDS.get(args.zero_stage, args.zero_stage) if args.zero_stage else None,
        state_format=args.state_format,
        precision=args.precision,
        activation_checkpointing=args.activation_checkpointing == "true",
        max_grad_norm=args.max_grad_norm,
        staging_bytes=int(args.staging_gib * GIB) if args.staging_gib is not None else None,
        save_total_limit=args.save_total_limit,
        checkpoints_elsewhere=args.checkpoints_elsewhere,
    )


def _guide(path: Path, check: bool) -> int:
    from outcore.plan.answer.guide import guide_state

    state = guide_state(path)
    if check:
        if state.is_current:
            return 0
        print(f"{path} is not what the planner says now: run outcore plan --guide {path}", file=sys.stderr)
        return 1
    path.write_text(state.text, encoding="utf-8")
    print(f"written: {path}" if not state.is_current else f"already current: {path}")
    return 0
