"""Rivals' adapters on a base beyond VRAM, beside `stream_lora.py` with the same flags: seconds a step, memory.

The same preset, adapters on all linear layers, random tokens, cap of the allocator; random weights. Each as its own
documentation says it is used for a model beyond the card, its loss in chunks:

    trainstream   wrap(): its planner decides which layers stay; a headroom of 0.1 runs out under 6.5 GiB (8 B, nf4)
    unsloth       from_pretrained and get_peft_model with offload_layers="auto", planned for these rows
    soup          its own trainer with stream_layers

Unsloth and Soup ask the driver what is free and are answered as by a card of the cap's size. They read a folder:
`--write` makes it first, alone, so that its RAM is not theirs; Soup writes its own copy beside it. Prints one JSON line
with the names of `stream_lora.py`'s; where a rival fails, "failed" says how far it came and why.

    python benchmarks/race/rival_lora.py --write --folder /tmp/bases --preset llama-8b
    python benchmarks/race/rival_lora.py --rival unsloth --folder /tmp/bases --rows 4 --seq_length 1024 --vram_gib 6.5
    python benchmarks/race/rival_lora.py --preset llama-8b --quantize nf4 --rows 8 --seq_length 1024 --vram_gib 6.5
    python benchmarks/race/stream_lora.py --preset llama-8b --quantize nf4 --rows 8 --seq_length 1024 --vram_gib 6.5 \
        --micro_batches 1

Needs a GPU and the rival's package. TrainStream compiles itself when it is imported first, for minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import race_rivals
import torch
from race_common import DeviceWatch, cap_allocator, rss_bytes, synchronize

from outcore.common.quantities import GIB

ALPHA, RATE = 32.0, 1e-4
SOUP_CHUNK_TOKENS = 256
PACKAGES = {"trainstream": "trainstream", "unsloth": "unsloth", "soup": "soup-cli"}


class Steps:
    """The seconds of every step, and those before the first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.loaded_s = 0.0
        self._began_s = self._made_s = time.perf_counter()

    def begin(self) -> None:
        """A step's work begins now."""
        synchronize()
        self._began_s = time.perf_counter()
        self.loaded_s = self.loaded_s or self._began_s - self._made_s

    def end(self, loss: float | None = None) -> None:
        """The step's work is done when the device is idle."""
        synchronize()
        self.seconds.append(time.perf_counter() - self._began_s)
        told = "" if loss is None else f", loss {loss:.3f}"
        print(f"step {len(self.seconds) - 1}: {self.seconds[-1]:.2f} s{told}", flush=True)


def device_name() -> str:
    """The GPU, or the CPU for a dry run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def answer_as_small_card(cap_gib: float) -> None:
    """Let the driver's answer of free memory stop at the cap. Whoever plans by it plans for a card of that size."""
    ask = torch.cuda.mem_get_info

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        free_bytes, total_bytes = ask(device)
        return max(0, min(free_bytes, int(cap_gib * GIB) - torch.cuda.memory_reserved(device))), total_bytes

    torch.cuda.mem_get_info = mem_get_info


def random_base(preset: str, device: str) -> Any:
    """The preset with random bf16 weights in RAM."""
    from race_ours import fill
    from transformers import AutoModelForCausalLM

    from outcore.model.presets import preset_config

    config = preset_config(preset)
    config.use_cache = False
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to_empty(device="cpu")
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    fill(model, device)
    return model


def write_folder(preset: str, folder: Path) -> None:
    """The base as a published one lies on a drive, and a tokenizer with a word for each id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = random_base(preset, device_name())
    model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id = 0, 1, 1
    model.save_pretrained(folder, max_shard_size="2GB")
    words = {"<pad>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, model.config.vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="</s>", eos_token="</s>", unk_token="<pad>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)


def random_ids(args: argparse.Namespace, vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    """Tokens of one micro-batch [rows, length]."""
    return torch.randint(2, vocab_size, (args.rows, args.seq_length), generator=generator)


def train(
    args: argparse.Namespace,
    vocab_size: int,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    optimizer: Any,
    steps: Steps,
) -> None:
    """Steps of `micro_batches` each, on tokens that no step before had."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.warm + args.steps):
        ids = [random_ids(args, vocab_size, generator).to(device_name()) for _ in range(args.micro_batches)]
        steps.begin()
        for row in ids:
            loss = loss_of(row)
            (loss / len(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.end(float(loss.detach()))


def trainstream(args: argparse.Namespace, steps: Steps) -> None:
    """Its wrap around the model and AdamW; its planner measures in the first steps."""
    import trainstream as package

    from outcore.model import LoraSettings
    from outcore.model.adapters.lora import apply_lora

    race_rivals.CHUNK_TOKENS = args.chunk_tokens
    model = random_base(args.preset, device_name())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapted: Any = apply_lora(model, LoraSettings(r=args.lora_r, alpha=ALPHA, dropout=0.0), seed=0).train()
    base = adapted.get_base_model()
    adapted, optimizer = package.wrap(
        adapted,
        torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=RATE),
        device=device_name(),
        offload=True,
        param_offload="auto",
        activation_offload="auto",
        accumulation_steps=args.micro_batches,
        blocks=base.model.layers,
        quantize=args.quantize,
        vram_headroom=args.headroom,
    )
    loss = race_rivals.Loss(base, chunked=True)
    train(args, base.config.vocab_size, lambda ids: loss(ids, ids), optimizer, steps)


def unsloth(args: argparse.Namespace, steps: Steps) -> None:
    """Its loader, adapters and fused loss, under autocast as its trainer runs them."""
    os.environ["UNSLOTH_COMPILE_LOCATION"] = f"{args.folder}-unsloth"
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        str(args.folder),
        max_seq_length=args.seq_length,
        dtype=torch.bfloat16,
        load_in_4bit=args.quantize == "nf4",
        load_in_8bit=args.quantize == "int8",
        offload_layers=args.offload_layers,
        device_map_planner_kwargs={"batch_size": args.rows, "lora_rank": args.lora_r},
        local_files_only=True,
    )
    print(f"loaded: {rss_bytes()['VmRSS'] / GIB:.1f} GiB of RAM", flush=True)
    model = FastLanguageModel.get_peft_model(
        model,
        r=args.lora_r,
        lora_alpha=ALPHA,
        lora_dropout=0,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        use_gradient_checkpointing="unsloth",
        offload_layers=args.offload_layers,
    )
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    autocast = torch.autocast("cuda", torch.bfloat16) if torch.cuda.is_available() else contextlib.nullcontext()

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        with autocast:
            return model(input_ids=ids, labels=ids).loss

    train(args, model.config.vocab_size, loss_of, optimizer, steps)


def soup(args: argparse.Namespace, steps: Steps) -> None:
    """Its configuration and trainer; every word of the texts is a token."""
    from soup_cli.config.schema import SoupConfig
    from soup_cli.trainer.sft import SFTTrainerWrapper
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            steps.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.end()

    os.environ["SOUP_LAYER_STREAM_CACHE_DIR"] = f"{args.folder}-soup"
    training = {
        "epochs": 1, "lr": RATE, "batch_size": args.rows, "gradient_accumulation_steps": args.micro_batches,
        "optimizer": "adamw_torch", "save_steps": 10_000, "logging_steps": 1, "rewind_log": False,
        "quantization": {"nf4": "4bit"}.get(args.quantize, args.quantize),
        "lora": {"r": args.lora_r, "alpha": int(ALPHA), "dropout": 0.0, "target_modules": "all-linear"},
        "stream_layers": True, "stream_source": "ram", "stream_loss_chunk": SOUP_CHUNK_TOKENS,
    }  # fmt: skip
    config = SoupConfig.model_validate(
        {
            "base": str(args.folder),
            "task": "sft",
            "data": {
                "train": "none.jsonl",  # rows are given to setup() instead
                "format": "chatml",
                "max_length": args.seq_length,
                "val_split": 0.0,
                "train_on_responses_only": False,
            },
            "training": training,
            "output": f"{args.folder}-out",
        }
    )
    vocab_size, generator = (
        json.loads((args.folder / "config.json").read_text())["vocab_size"],
        torch.Generator().manual_seed(0),
    )
    rows = torch.cat(
        [random_ids(args, vocab_size, generator) for _ in range((args.warm + args.steps) * args.micro_batches)]
    )
    wrapper = SFTTrainerWrapper(config, device=device_name())
    texts = [" ".join(f"w{token}" for token in row) for row in rows.tolist()]
    wrapper.setup({"train": [{"messages": [{"role": "user", "content": text}]} for text in texts]})
    trainer: Any = wrapper.trainer
    print(f"a row has {len(trainer.train_dataset[0]['input_ids'])} tokens", flush=True)
    trainer.add_callback(Clock())
    wrapper.train()


def main() -> None:
    """Load, warm up, time the rest; say what failed where something did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival", choices=tuple(PACKAGES), default="trainstream")
    parser.add_argument("--folder", type=Path, help="of bases, for Unsloth and Soup; --write makes one")
    parser.add_argument("--write", action="store_true", help="make the folder, train nothing")
    parser.add_argument("--preset", default="llama-8b")
    parser.add_argument("--quantize", choices=("none", "nf4", "int8"), default="none")
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--seq_length", type=int, default=1024)
    parser.add_argument("--lora_r", type=int, default=16)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--vram_gib", type=float, default=0.0, help="cap of the allocator")
    parser.add_argument(
        "--offload_layers", type=lambda word: word if word == "auto" else int(word), default="auto", help="Unsloth's"
    )
    parser.add_argument("--headroom", type=float, default=0.1, help="share of the cap that TrainStream leaves free")
    parser.add_argument("--chunk_tokens", type=int, default=race_rivals.CHUNK_TOKENS, help="of TrainStream's loss")
    args = parser.parse_args()
    if (args.write or args.rival != "trainstream") and args.folder is None:
        parser.error("--folder says where bases lie")
    args.folder = args.folder and args.folder / args.preset
    if args.write:
        write_folder(args.preset, args.folder)
        return
    watch = DeviceWatch() if torch.cuda.is_available() else None
    cap_allocator(args.vram_gib)
    if watch is not None and args.vram_gib and args.rival != "trainstream":
        answer_as_small_card(args.vram_gib)
    steps, found = Steps(), {"system": args.rival, **vars(args)}
    try:
        found["system"] += " " + version(PACKAGES[args.rival])
        {"trainstream": trainstream, "unsloth": unsloth, "soup": soup}[args.rival](args, steps)
    except (Exception, SystemExit) as error:  # a rival that does not start is a row of the table
        traceback.print_exc()
        came = f"stopped in step {len(steps.seconds)}" if steps.loaded_s else "did not start"
        found["failed"] = f"{came}: {type(error).__name__}: {str(error)[:400]}"
    found["load_s"], timed_s = round(steps.loaded_s, 1), steps.seconds[args.warm :]
    if timed_s:
        step_s = statistics.median(timed_s)
        tokens = args.rows * args.seq_length * args.micro_batches
        found |= {"step_s": round(step_s, 3), "tokens_per_s": round(tokens / step_s), "seconds": timed_s}
    found |= {
        "rss_training_gib": round(rss_bytes()["VmRSS"] / GIB, 2),
        "peak_rss_gib": round(rss_bytes()["VmHWM"] / GIB, 2),
    }
    if watch is not None:
        found |= {
            "peak_vram_gib": round(watch.stop() / GIB, 2),
            "peak_tensors_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        }
    print(json.dumps(found, default=str), flush=True)
    os._exit(0)  # threads of theirs have nothing left to do


if __name__ == "__main__":
    main()
