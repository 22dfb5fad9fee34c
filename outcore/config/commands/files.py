"""Flags of the commands about files: data, runs, export, verify, models."""

from __future__ import annotations

import argparse
from pathlib import Path

from outcore.config.commands.parser import CommandParser
from outcore.config.fields import FIELDS

GGUF_KINDS = ("f16", "q8_0", "q4_k")
"""Weight types of files for llama.cpp."""
ABOUT_DATA = """How rows are read, and which of their tokens bear loss, before a run is spent on them.

    outcore data rows.jsonl --model ./Qwen3-4B
    outcore data rows.jsonl --model ./Qwen3-4B --rows 20 --html rows.html

Tokens between brackets (green in a terminal) bear loss. The same page of rows is written as HTML. Settings have the
names that training gives them. Exit code: 0 shown, 2 wrong usage or data that cannot be read."""


def data_flags() -> argparse.ArgumentParser:
    """The subcommand's arguments; names are train_model.py's where it has them."""
    p = CommandParser(
        prog="outcore data",
        common=("model", "rows", "html", "seq_length", "data_format", "as_chat", "chat_template", "max_rows"),
        description=ABOUT_DATA,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("dataset", metavar="PATH", help="a file, a folder, a hub id, or `embedded`")
    p.add_argument("--model", help="folder or hub id of the model (its tokenizer and chat template only)")
    p.add_argument("--chat_template", help="file of a chat template to use instead of the tokenizer's")
    p.add_argument("--rows", type=int, default=5, help="how many rows to show, one of each shape first (5)")
    p.add_argument("--html", default="outcore_data.html", help="page to write, or none (outcore_data.html)")
    p.add_argument(
        "--seq_length", type=int, help="tokens of a row (as in training: 1024, or fewer where the model can take fewer)"
    )
    p.add_argument(
        "--data_format", choices=FIELDS["data_format"].choices, default="auto", help=FIELDS["data_format"].help
    )
    for column in ("text_column", "prompt_column", "completion_column", "messages_column"):
        p.add_argument(f"--{column}", help=FIELDS[column].help)
    p.add_argument("--dataset_config", help="configuration of a hub data set")
    p.add_argument("--dataset_split", default="train", help="its split (train)")
    p.add_argument(
        "--long_rows", choices=FIELDS["long_rows"].choices, default="keep_start", help=FIELDS["long_rows"].help
    )
    p.add_argument(
        "--packing",
        choices=FIELDS["packing"].choices,
        default="auto",
        help="auto packs, as training does where the model can",
    )
    p.add_argument("--on_bad_row", choices=("error", "skip"), default="skip", help="skip counts them (skip)")
    for name in ("as_chat", "train_on_prompt", "train_on_last_turn"):
        p.add_argument(
            f"--{name}", nargs="?", const="true", choices=("true", "false"), default="false", help=FIELDS[name].help
        )
    p.add_argument("--max_rows", type=int, help="read no more than about this many rows")
    p.add_argument("--data_cache_dir", default=".cache/data", help=FIELDS["data_cache_dir"].help)
    p.add_argument("--trust_remote_code", action="store_true", help=FIELDS["trust_remote_code"].help)
    return p


def runs_flags() -> argparse.ArgumentParser:
    """All flags of `outcore runs`."""
    parser = CommandParser(prog="outcore runs", description="Runs with their state, step, loss and size.")
    parser.add_argument(
        "what", nargs="?", choices=("list", "delete"), default="list", help="list them (the default), or delete some"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs to delete")
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    for name, default in (("checkpoint", "checkpoints"), ("log", "logs"), ("export", "final_model")):
        parser.add_argument(
            f"--{name}_dir", type=Path, default=Path(default), metavar="DIR", help=f"default: {default}"
        )
    return parser


def export_flags() -> argparse.ArgumentParser:
    """All flags of `outcore export`."""
    parser = CommandParser(
        prog="outcore export", description="Write a run's 16-bit model (of LoRA its adapter) for from_pretrained."
    )
    parser.add_argument("run", type=Path, help="name or folder of a run, or one of its checkpoints")
    parser.add_argument("--checkpoint_dir", type=Path, help="where runs are looked for (default: checkpoints)")
    parser.add_argument("--last", action="store_true", help="the newest checkpoint, though another was better")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--merge", action="store_true", help="LoRA: the base model with the adapter merged in")
    how.add_argument("--adapter", action="store_true", help="LoRA: the adapter alone (what is done anyway)")
    parser.add_argument("--out", type=Path, help="new folder (default: final_model/RUN-STEP); with --gguf the file")
    parser.add_argument(
        "--gguf",
        choices=GGUF_KINDS,
        help="instead: final_model/RUN, or the folder of a whole model, as one file for llama.cpp",
    )
    parser.add_argument("--overwrite", action="store_true", help="with --gguf: replace the file that is there already")
    return parser


def verify_flags() -> argparse.ArgumentParser:
    """All flags of `outcore verify`."""
    parser = CommandParser(
        prog="outcore verify", description="Take steps of a run again from a checkpoint: are the bits the same?"
    )
    parser.add_argument("run", type=Path, help="name of a run, or its folder of checkpoints")
    parser.add_argument("--step", type=int, help="the step to arrive at (default: the run's last)")
    for name, default in (("checkpoint", "checkpoints"), ("log", "logs")):
        parser.add_argument(f"--{name}_dir", type=Path, default=Path(default), help=f"default: {default}")
    return parser


def watch_flags() -> argparse.ArgumentParser:
    """All flags of `outcore watch`."""
    parser = CommandParser(prog="outcore watch", description="Watch a running or finished run.")
    parser.add_argument("run", nargs="?", help="name or log folder of the run (default: the latest)")
    parser.add_argument("--log_dir", "--logs", default="logs", help="folder of all runs' logs (default: logs)")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    return parser


def models_flags() -> argparse.ArgumentParser:
    """All flags of `outcore models`."""
    parser = CommandParser(
        prog="outcore models", description="What each architecture can do, as it was tried; with --try it is tried now."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="model_type, as in a model's config.json")
    parser.add_argument("--try", action="store_true", dest="try_now", help="try a tiny copy now, some seconds each")
    return parser
