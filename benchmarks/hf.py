"""Trainers of Hugging Face over streamed models beside our own loop, under the memory of an 8 GB card.

    python benchmarks/hf.py --out hf.json
    python benchmarks/hf.py --small --tokens 64                   (a dry run on a CPU; its ratios mean nothing)

Each case is a process of its own with torch's allocator capped at --cap_gib. Random tokens and weights.
  dpo      Llama 3 8B's shape, NF4, LoRA: TRL's DPOTrainer on pairs of 4,096 and 4,096 tokens, its reference the same
           model with the adapter switched off
  sft      the same model under TRL's SFTTrainer, two rows of 4,096 tokens: what two passes of training take
  own      the same work by our own loop's engine (`race/stream_lora.py`)
  full     1.2 B trained in full, 16 rows of 1,024 tokens, clipped, by HF's trainer (as TRL's SFTTrainer, which computes
           the head in pieces)
  own-full the same work by our own loop's engine (`race/race_ours.py`)
Prints a line a case and the ratios: dpo to sft in time and memory, sft to own, full to own-full.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "race")]
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

RATIOS = {
    "DPO's time, of two SFT passes": ("dpo", "sft", "step_s"),
    "DPO's memory, of SFT's": ("dpo", "sft", "peak_gib"),
    "SFT in HF's trainer, of our own loop": ("sft", "own", "step_s"),
    "full training in HF's trainer, of our own loop": ("full", "own-full", "step_s"),
}


def packed_model(args: argparse.Namespace) -> Any:
    """The 8 B shape whose layers' matrices are one random block again and again, packed once a shape."""
    import torch
    from race_common import config_of
    from transformers import AutoModelForCausalLM

    from outcore.formats import PackedTensor
    from outcore.hf import stream
    from outcore.hf.homes import Elsewhere
    from outcore.hf.stream import packed_on_arrival

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = config_of("tiny" if args.small else "8b", args.tokens)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    specs, packed = packed_on_arrival(model, "nf4"), dict[Any, Any]()
    torch.manual_seed(0)
    for name, parameter in list(model.named_parameters()):
        module, attribute = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        spec = specs.get(name)
        if spec is None:
            values = torch.ones(parameter.shape, dtype=torch.bfloat16)
            if parameter.ndim > 1:
                values = torch.randn(parameter.shape, dtype=torch.bfloat16, device=device).mul_(0.02).cpu()
            module._parameters[attribute] = torch.nn.Parameter(values, requires_grad=False)
            continue
        if spec not in packed:
            values = torch.randn(parameter.shape, dtype=torch.bfloat16, device=device).mul_(0.02)
            packed[spec] = spec.pack(values).cpu()
        module._parameters[attribute] = Elsewhere.of(PackedTensor(spec, packed[spec]), torch.bfloat16)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return stream(model, vram_gib=args.cap_gib, quantize="nf4")


def full_model(args: argparse.Namespace) -> Any:
    """The 1.2 B shape in bf16."""
    import torch
    from race_ours import random_model

    from outcore.hf import stream

    options = {"shape": "tiny" if args.small else "1.2b", "seq": args.tokens // 4}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return stream(random_model(options, device).model, vram_gib=args.cap_gib)


def tokenizer(size: int) -> Any:
    """A word for each number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *(f"w{n}" for n in range(2, size))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def trained(args: argparse.Namespace) -> dict[str, Any]:
    """One case that is a foreign trainer's: seconds of its steps, and what the allocator held at most."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from race_common import cap_allocator
    from transformers import TrainerCallback

    import outcore.hf

    has_gpu = torch.cuda.is_available()
    cap_allocator(args.cap_gib)
    begin_s = time.perf_counter()
    model = full_model(args) if args.case == "full" else packed_model(args)
    made_s, vocab = time.perf_counter() - begin_s, model.config.vocab_size
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(2, vocab, (count,), generator=draw).tolist()

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began_s = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if has_gpu:
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self.began_s)

    rows = 16 if args.case == "full" else 1 if args.case == "dpo" else 2
    steps = args.steps + 1
    usual: dict[str, Any] = {
        "output_dir": "/tmp/outcore_hf_benchmark", "max_steps": steps, "per_device_train_batch_size": rows,
        "report_to": [], "save_strategy": "no", "logging_steps": 1, "bf16": has_gpu, "use_cpu": not has_gpu,
        "disable_tqdm": True, "max_length": args.tokens, "gradient_checkpointing": False, "dataset_num_proc": 1,
    }  # fmt: skip
    words, clock = tokenizer(vocab), Clock()
    lora: Any = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    if args.case == "dpo":
        half = args.tokens // 2
        lengths = {"prompt": half, "chosen": half - 1, "rejected": half - 1}  # an answer gets <eos>
        text = [
            {key: "".join(f" w{n}" for n in ids(count)) for key, count in lengths.items()} for _ in range(rows * steps)
        ]
        trainer: Any = trl.DPOTrainer(
            model, args=trl.DPOConfig(**usual), train_dataset=Dataset.from_list(text), processing_class=words,
            peft_config=lora, callbacks=[clock],
        )  # fmt: skip
    else:
        given: dict[str, Any] = {"peft_config": lora}
        length = args.tokens
        if args.case == "full":
            length, usual["max_grad_norm"] = args.tokens // 4, 0.0
            given = {"optimizers": (outcore.hf.optimizer(model, 1e-4, max_grad_norm=1.0), None)}
        data = Dataset.from_list([{"input_ids": ids(length)} for _ in range(rows * steps)])
        trainer = trl.SFTTrainer(
            model, args=trl.SFTConfig(**usual), train_dataset=data, processing_class=words, callbacks=[clock], **given
        )
    if has_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "step_s": round(statistics.median(clock.seconds[1:]), 3),
        "steps_s": [round(second, 3) for second in clock.seconds],
        "step_tokens": 2 * args.tokens if args.case != "full" else 4 * args.tokens,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if has_gpu else None,
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if has_gpu else None,
        "made_s": round(made_s, 1),
        "losses": [round(loss, 3) for loss in losses],
    }


def command_of(case: str, args: argparse.Namespace) -> list[str]:
    """The process of a case."""
    shared = ["--cap_gib", str(args.cap_gib), "--steps", str(args.steps), "--tokens", str(args.tokens)]
    if case == "own":
        preset = "tiny" if args.small else "llama-8b"
        return [
            sys.executable, str(HERE / "race/stream_lora.py"), "--preset", preset, "--quantize", "nf4", "--rows", "1",
            "--micro_batches", "2", "--seq_length", str(args.tokens), "--vram_gib", str(args.cap_gib),
            "--steps", str(args.steps), "--ram_budget_gib", "60",
        ]  # fmt: skip
    if case == "own-full":
        options = {
            "shape": "tiny" if args.small else "1.2b", "mb": 8, "seq": args.tokens // 4, "gas": 2, "warm": 5,
            "steps": args.steps, "repeats": 1, "cap_gib": args.cap_gib, "limit_s": args.limit_s,
            "settings": {"max_grad_norm": 1, "states": "split"},
        }  # fmt: skip
        return [sys.executable, str(HERE / "race/race_ours.py"), json.dumps(options)]
    return [sys.executable, __file__, "--case", case, *shared, *["--small"] * args.small]


def run(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """One case; what it found, or {"error": ...}."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(command_of(case, args), env=env, capture_output=True, text=True, timeout=args.limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"no end within {args.limit_s:g} s"}
    found = [line for line in done.stdout.splitlines() if line.lstrip().startswith(("{", "RESULT "))]
    if done.returncode or not found:
        return {"error": (done.stdout + done.stderr)[-3000:]}
    return json.loads(found[-1].removeprefix("RESULT "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="sft,dpo,own,full,own-full")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=4096, help="of a row of the 8 B cases; full: a quarter of it")
    parser.add_argument("--steps", type=int, default=4, help="timed, after one that is not")
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--limit_s", type=float, default=100, help="of a case")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.case:
        print("\n" + json.dumps(trained(args)), flush=True)
        return
    found: dict[str, Any] = {}
    for case in args.cases.split(","):
        begin_s = time.perf_counter()
        found[case] = run(case, args)
        found[case]["wall_s"] = round(time.perf_counter() - begin_s, 1)
        print(case, json.dumps(found[case]), flush=True)
    ratios = {}
    for words, (ours, theirs, key) in RATIOS.items():
        pair = [found.get(name, {}).get(key) for name in (ours, theirs)]
        if all(pair):
            ratios[words] = round(pair[0] / pair[1], 3)
            print(f"{words}: {ratios[words]}", flush=True)
    if args.out:
        told = {"arguments": vars(args), "cases": found, "ratios": ratios}
        args.out.write_text(json.dumps(told, default=str, indent=1))
    sys.exit(any("error" in one for one in found.values()))


if __name__ == "__main__":
    main()
