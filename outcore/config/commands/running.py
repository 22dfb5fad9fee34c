"""Flags of the commands that run a model: generate, chat, score; `add_model_flags` are also the server's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from outcore.config.commands.parser import CommandParser, Once
from outcore.config.fields import FIELDS
from outcore.sizing.inference import PRESETS

KV_HOMES = ("auto", "vram", "ram", "nvme")
SAMPLING_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0: the likeliest token each time (default: as the model's makers say, else 1)"),
    ("top_k", int, "draw among the N likeliest tokens"),
    ("top_p", float, "draw among the fewest tokens that reach this probability"),
    ("min_p", float, "draw among tokens at least this share as likely as the likeliest"),
    ("presence_penalty", float, "taken from the logit of each token said already"),
    ("frequency_penalty", float, "taken from it for each time"),
    ("repetition_penalty", float, "divides positive logits of tokens seen already"),
    ("max_tokens", int, "the answer ends after N tokens"),
    ("seed", int, "key of the generator: same seed, same text"),
)
"""Name, type and help of each flag about sampling."""


MODEL_COMMON = ("preset", "adapter", "quantize", "context", "vram_gib", "ram_gib", "nvme_path", "trust_remote_code")
"""Flags about a model that its short help lists."""
ASKED_COMMON = (*MODEL_COMMON, "temperature", "max_tokens", "seed", "stop")
"""Flags that the short help of a command lists which also chooses tokens."""


def add_model_flags(parser: argparse.ArgumentParser, *, aim: str = "balanced") -> None:
    """MODEL and how it is run; `aim` where none is given."""
    parser.add_argument("model", help="hub id, folder, run in final_model/, checkpoint, or folder of a LoRA adapter")
    group = parser.add_argument_group("how the model is run (what is left out follows from the machine)")
    aims = {"dest": "preset", "choices": sorted(PRESETS)}
    group.add_argument("--aim", default=aim, help=f"what the placement aims at (default: {aim})", **aims)
    group.add_argument("--preset", default=argparse.SUPPRESS, help=argparse.SUPPRESS, **aims)  # its name until 2026
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="auto: bf16 on a GPU, fp32 on a CPU",
    )
    group.add_argument("--adapter", action=Once, help="folder of a LoRA adapter, put beside the model unmerged")
    group.add_argument(
        "--quantize",
        choices=[kind for kind in FIELDS["quantize"].choices if kind != "none"],
        help="pack 16-bit weights as they are loaded",
    )
    group.add_argument("--context", type=int, help="tokens of prompt and answer together")
    group.add_argument("--max_sequences", type=int, help="answers written at the same time")
    group.add_argument("--pass_tokens", type=int, help="tokens of one pass over all layers")
    group.add_argument("--chunk_tokens", type=int, help="tokens of one call of a layer, and of a piece of a prompt")
    group.add_argument("--page_tokens", type=int, default=64, help="tokens of a page of keys and values")
    group.add_argument("--kv_format", choices=("same", "int8"), default="same", help="int8: half the bytes, close")
    homes = {"none": "vram", "cpu": "ram"}
    group.add_argument(
        *("--kv_home", "--kv_offload"),
        type=lambda home: homes.get(home, home),
        choices=KV_HOMES,
        default="auto",
        help="where keys and values live (DeepSpeed's none and cpu: vram and ram)",
    )
    group.add_argument("--kv_gib", type=float, help="room for keys and values")
    group.add_argument("--vram_gib", type=float, help="device memory to stay within")
    group.add_argument("--ram_gib", type=float, help="RAM for weights, keys and values")
    drive: dict[str, Any] = {"dest": "nvme_path", "action": "append", "metavar": "DIR"}
    group.add_argument("--nvme_offload_path", default=[], help="folder for what RAM does not hold", **drive)
    group.add_argument("--nvme_path", default=argparse.SUPPRESS, help=argparse.SUPPRESS, **drive)  # its former name
    group.add_argument("--pin_gib", type=float, help="page-locked memory at most")
    group.add_argument(
        "--pin_memory",
        nargs="?",
        const="true",
        choices=("true", "false"),
        default="true",
        help="page-lock RAM that a GPU reads (--no_pin_memory: do not)",
    )
    group.add_argument(
        "--no_pin_memory", dest="pin_memory", action="store_const", const="false", help=argparse.SUPPRESS
    )
    group.add_argument("--buffer_mib", type=float, help="page-locked slots that other RAM and drives are read through")
    buffers = ("--num_layer_buffers", "--buffer_count")
    group.add_argument(*buffers, type=int, help="travelling layers on the device at a time (default 3)")
    group.add_argument("--prefetch", type=int, help="layers brought ahead of the one that computes: buffers less one")
    group.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="layers through torch.compile")
    group.add_argument(
        "--cpu_tokens", type=int, help="tokens up to which the CPU multiplies weights in RAM as they are"
    )
    group.add_argument(
        "--expert_cache_gib",
        type=float,
        help="device memory for a mixture's experts, which are read as they are chosen; 0: with their layers",
    )
    group.add_argument("--draft_model", help="small model with the same tokenizer that guesses tokens, whole in VRAM")
    group.add_argument("--draft_tokens", type=int, help="guessed tokens of a pass; 0: none")
    group.add_argument("--no_prefix_sharing", action="store_true", help="compute every prompt from its beginning")
    group.add_argument("--prefix_path", help="folder where beginnings of prompts are kept for the next start")
    group.add_argument("--prefix_gib", type=float, help="room there for each model (default 8)")
    group.add_argument(
        "--pictures",
        action="store_true",
        help="see: open an image-text model with its tower, one answer at a time, also where its text model goes alone",
    )
    group.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the model")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags by which tokens are chosen."""
    group = parser.add_argument_group("how tokens are chosen")
    for name, kind, words in SAMPLING_FLAGS:
        group.add_argument(f"--{name}", type=kind, help=words)
    group.add_argument("--stop", action="append", help="text that ends the answer (may be given several times)")


def _add_image(parser: argparse.ArgumentParser) -> None:
    words = "picture to answer about, for an image-text model (may be given several times)"
    parser.add_argument("--image", action="append", help=words)


def generate_flags() -> argparse.ArgumentParser:
    """All flags."""
    found = CommandParser(
        prog="outcore generate",
        common=(*ASKED_COMMON, "prompt", "image", "chat", "input", "output", "overwrite", "num_gpus"),
        description="Text by a model of any size. A job (--input, --output) that was killed goes on when the same "
        "command is given again: nothing is lost, nothing answered twice.",
    )
    add_model_flags(found)
    found.add_argument("--prompt", action=Once, help="text to go on from")
    _add_image(found)
    found.add_argument("--chat", action="store_true", help="put --prompt through the chat template as a user's message")
    found.add_argument("--input", type=Path, help="JSON lines: prompt or messages, or OpenAI's batch shape")
    found.add_argument("--output", type=Path, help="file for the answers, in the input's order")
    found.add_argument("--overwrite", action="store_true", help="answer again although --output is there")
    found.add_argument(
        "--num_gpus", type=int, default=1, help="GPUs that share a job's lines; weights in RAM are there once"
    )
    found.add_argument(
        "--deterministic",
        action="store_true",
        help="each line's answer the same bytes, whatever else runs and also after a kill; slower",
    )
    add_sampling_flags(found)
    return found


def chat_flags() -> argparse.ArgumentParser:
    """All flags."""
    found = CommandParser(
        prog="outcore chat",
        common=(*ASKED_COMMON, "system", "image"),
        description="Talk with a model of any size. Ctrl-C stops an answer; /help lists commands.",
    )
    add_model_flags(found, aim="latency")  # one reader
    found.add_argument("--system", help="who the model is told to be")
    _add_image(found)
    add_sampling_flags(found)
    return found


def score_flags() -> argparse.ArgumentParser:
    """All flags."""
    found = CommandParser(
        prog="outcore score",
        common=(*MODEL_COMMON, "input", "output", "token_logprobs", "top_k"),
        description="Log-probabilities of texts, and perplexity, by a model of any size.",
    )
    add_model_flags(found)
    found.add_argument("--input", type=Path, required=True, help="JSON lines as training takes them, or plain lines")
    found.add_argument("--output", type=Path, help="a JSON line for each text (default: only the summary)")
    found.add_argument("--token_logprobs", action="store_true", help="with each token's log-probability in --output")
    found.add_argument(
        "--top_k",
        type=int,
        help="of each place the K likeliest tokens, for --teacher of training; rows as training takes them; goes with "
        "--output FILE.parquet, and the same command goes on after a stop",
    )
    return found
