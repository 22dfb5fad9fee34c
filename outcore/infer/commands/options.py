"""Flags that all commands which run a model share, and what they become."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outcore.common.diagnostics import DiagnosticLog
from outcore.formats import QUANTIZE_CHOICES
from outcore.infer.opening import AgainstPlan, InferSettings, OpenedModel
from outcore.infer.requests import Sampling, own_defaults, sampling_of
from outcore.sizing.inference import PRESETS

KV_HOMES = ("auto", "vram", "ram", "nvme")
_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0: the likeliest token each time (default: as the model's makers say, else 1)"),
    ("top_k", int, "draw among so many likeliest tokens"),
    ("top_p", float, "draw among the fewest tokens that reach this probability"),
    ("min_p", float, "draw among tokens at least this share as likely as the likeliest"),
    ("presence_penalty", float, "taken from the logit of each token said already"),
    ("frequency_penalty", float, "taken from it for each time"),
    ("repetition_penalty", float, "divides positive logits of tokens seen already"),
    ("max_tokens", int, "the answer ends after so many tokens"),
    ("seed", int, "key of the generator: same seed, same text"),
)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """MODEL and how it is run."""
    parser.add_argument("model", help="hub id, folder, run in final_model/, checkpoint, or folder of a LoRA adapter")
    group = parser.add_argument_group("how the model is run (what is left out follows from the machine)")
    group.add_argument("--preset", choices=sorted(PRESETS), default="balanced", help="what to aim at")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--precision", choices=("auto", "bf16", "fp16", "fp32"), default="auto")
    group.add_argument("--adapter", help="folder of a LoRA adapter, put beside the model unmerged")
    group.add_argument("--quantize", choices=QUANTIZE_CHOICES, help="pack 16-bit weights as they are loaded")
    group.add_argument("--context", type=int, help="tokens of prompt and answer together")
    group.add_argument("--max_sequences", type=int, help="answers written at the same time")
    group.add_argument("--pass_tokens", type=int, help="tokens of one pass over all layers")
    group.add_argument("--chunk_tokens", type=int, help="tokens of one call of a layer, and of a piece of a prompt")
    group.add_argument("--page_tokens", type=int, default=64, help="tokens of a page of keys and values")
    group.add_argument("--kv_format", choices=("same", "int8"), default="same", help="int8: half the bytes, close")
    group.add_argument("--kv_home", choices=KV_HOMES, default="auto", help="where keys and values live")
    group.add_argument("--kv_gib", type=float, help="room for keys and values")
    group.add_argument("--vram_gib", type=float, help="device memory to stay within")
    group.add_argument("--ram_gib", type=float, help="RAM for weights, keys and values")
    drive = ("--nvme_offload_path", "--nvme_path")
    group.add_argument(*drive, dest="nvme_path", action="append", default=[], help="folder for what RAM does not hold")
    group.add_argument("--pin_gib", type=float, help="page-locked memory at most")
    group.add_argument("--num_layer_buffers", type=int, default=3, help="travelling layers on the device at a time")
    group.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="layers through torch.compile")
    group.add_argument(
        "--cpu_tokens", type=int, help="tokens up to which the CPU multiplies packed weights as they are"
    )
    group.add_argument("--draft_model", help="small model with the same tokenizer that guesses tokens, whole in VRAM")
    group.add_argument("--draft_tokens", type=int, help="guessed tokens of a pass; 0: none")
    group.add_argument("--no_prefix_sharing", action="store_true", help="compute every prompt from its beginning")
    group.add_argument("--prefix_path", help="folder where beginnings of prompts are kept for the next start")
    group.add_argument("--prefix_gib", type=float, help="room there for each model (default 8)")
    group.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the model")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen."""
    group = parser.add_argument_group("how tokens are chosen")
    for name, kind, words in _SAMPLING:
        group.add_argument(f"--{name}", type=kind, help=words)
    group.add_argument("--stop", action="append", help="text that ends the answer (may be given several times)")


def settings_of(args: argparse.Namespace, *, deterministic: bool = False) -> InferSettings:
    """ValueError for what cannot be."""
    return InferSettings(
        preset=args.preset,
        device=args.device,
        precision=args.precision,
        adapter=args.adapter,
        quantize=args.quantize,
        context=args.context,
        max_sequences=args.max_sequences,
        pass_tokens=args.pass_tokens,
        chunk_tokens=args.chunk_tokens,
        page_tokens=args.page_tokens,
        kv_format=args.kv_format,
        kv_home=args.kv_home,
        kv_gib=args.kv_gib,
        vram_gib=args.vram_gib,
        ram_gib=args.ram_gib,
        nvme_path=tuple(Path(path) for path in args.nvme_path),
        pin_gib=args.pin_gib,
        num_layer_buffers=args.num_layer_buffers,
        compile=args.compile,
        cpu_tokens=args.cpu_tokens,
        draft_model=args.draft_model,
        draft_tokens=args.draft_tokens,
        share_prefixes=not args.no_prefix_sharing,
        prefix_path=None if args.prefix_path is None else Path(args.prefix_path),
        prefix_gib=args.prefix_gib,
        deterministic=deterministic,
        trust_remote_code=args.trust_remote_code,
    )


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What was said about sampling."""
    found = {name: getattr(args, name) for name, _, _ in _SAMPLING if getattr(args, name) is not None}
    if args.stop:
        found["stop"] = args.stop
    return found


def sampling_from(opened: OpenedModel, given: Mapping[str, Any], base: Sampling | None = None) -> Sampling:
    """The model's own defaults, `base`, then what was said."""
    return sampling_of(given, base or own_defaults(opened.found.loaded.model, Sampling()))


def tell_plan(told: AgainstPlan, command: str, say: Callable[[str], None]) -> None:
    """Compare what the passes took with the plan: in words, and as an event in logs/diagnostics."""
    if words := told.words():
        say(words)
    DiagnosticLog(Path("logs/diagnostics")).note(f"{command} ended", **told.facts())
