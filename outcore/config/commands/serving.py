"""Flags of the commands that answer over HTTP: serve, ui."""

from __future__ import annotations

import argparse
from pathlib import Path

from outcore.config.commands.parser import CommandParser
from outcore.config.commands.running import MODEL_COMMON, add_model_flags

DEFAULT_UI_PORT = 7860
CLIENTS = ("claude", "codex", "opencode", "aider", "open-webui")


def serve_flags() -> argparse.ArgumentParser:
    """All flags."""
    found = CommandParser(
        prog="outcore serve",
        common=(*MODEL_COMMON, "host", "port", "api_key_file", "served_name", "max_answer_tokens", "engine"),
        description="Serve a model of any size under OpenAI's and Anthropic's API, on this machine's address.",
    )
    _add_serve_flags(found)
    found.add_argument(
        "more", nargs="*", metavar="NAME=MODEL",
        help="further models, and LoRA adapters beside those they were trained over; each is served under its name",
    )  # fmt: skip
    found.add_argument(
        "--unload_after",
        type=float,
        default=300.0,
        help="seconds without a request after which a further one is closed",
    )
    return found


def start_flags() -> argparse.ArgumentParser:
    """All flags: those of `outcore serve`, and which client is told of it."""
    found = CommandParser(
        prog="outcore start",
        common=(*MODEL_COMMON, "client", "port", "served_name", "max_answer_tokens"),
        description="Serve a model for one session of a client, which is told where it is; what comes behind -- are "
        "the client's own arguments. The model ends with the client.",
    )
    found.add_argument("client", choices=CLIENTS, help="who asks the model")
    _add_serve_flags(found)
    found.set_defaults(port=0, max_answer_tokens=32_768)
    return found


def _add_serve_flags(found: CommandParser) -> None:
    add_model_flags(found)
    _add_handover_flags(found)
    group = found.add_argument_group("how it is reached")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    group.add_argument("--port", type=int, default=8000, help="default: 8000; of outcore start: a free one")
    group.add_argument("--api_key_file", type=Path, help="file with keys, one a line; clients send one as bearer token")
    _add_gate_flags(group)
    group.add_argument("--insecure", action="store_true", help="listen on other addresses without a key")
    group.add_argument("--served_name", default="", help="what the model is called over HTTP (default: MODEL)")
    group.add_argument("--max_queue", type=int, default=512, help="requests under way; more get 429")
    group.add_argument("--max_body_mib", type=int, default=16, help="longest body of a request")
    longest = "longest answer (default: 4096; of outcore start: 32768)"
    group.add_argument("--max_answer_tokens", type=int, default=4096, help=longest)
    group.add_argument("--request_timeout", type=float, default=600.0, help="seconds after which an answer is given up")
    group.add_argument("--log_dir", type=Path, default=Path("logs/serve"), help="folder for a line for each request")
    group.add_argument("--record_text", action="store_true", help="with prompts and answers in those lines")
    group.add_argument("--deterministic", action="store_true", help="same seed, same text, whatever else runs; slower")


def _add_handover_flags(parser: argparse.ArgumentParser) -> None:
    """Which engine answers, and how vLLM is laid out."""
    group = parser.add_argument_group("several GPUs, for a model that fits them together (--engine vllm)")
    group.add_argument(
        "--engine", choices=("outcore", "vllm"), default="outcore", help="who answers (default: outcore)"
    )
    group.add_argument("--tensor_parallel", type=int, default=1, help="GPUs that share each layer, inside an island")
    group.add_argument("--pipeline_parallel", type=int, default=1, help="stages of layers, across islands")
    group.add_argument("--stage_layers", help="layers of each stage, as 20,20,24 (default: balanced by their sizes)")
    group.add_argument("--layer_costs", type=Path, help="JSON with measured costs to balance by: layers, first, last")
    group.add_argument("--cluster", type=Path, help="file of islands, where this machine's are not as NVML tells")
    group.add_argument("--vllm_executable", type=Path, help="an installed vllm (default: one is put into .venv-vllm)")
    group.add_argument("--start_timeout", type=float, default=1800.0, help="seconds until vLLM must answer")


def ui_flags() -> argparse.ArgumentParser:
    """All flags."""
    found = CommandParser(
        prog="outcore ui",
        description="Panels in the browser for the runs, models and data of this folder. Runs that were started from "
        "them go on when they end.",
    )
    found.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    found.add_argument("--port", type=int, default=DEFAULT_UI_PORT, help=f"default: {DEFAULT_UI_PORT}; 0: any free one")
    found.add_argument("--token_file", type=Path, help="file with tokens, one a line; needed for other addresses")
    _add_gate_flags(found)
    return found


def _add_gate_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags of the gate: names by which clients ask for the server, and folders that requests may name."""
    parser.add_argument(
        "--allowed_host", action="append", default=[], metavar="NAME",
        help="name by which clients ask for this server, beside its address (may be given several times)",
    )  # fmt: skip
    parser.add_argument(
        "--allowed_folder", action="append", default=[], type=Path, metavar="DIR",
        help="folder that requests may name, also one with code that is run (may be given several times)",
    )  # fmt: skip
