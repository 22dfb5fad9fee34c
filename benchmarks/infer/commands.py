"""What the commands give as a user types them: `outcore generate` and `outcore serve`, beside transformers.

    python benchmarks/infer/commands.py --out results/commands.json
    python benchmarks/infer/commands.py --cases generate,serve-64 --requests 64 --small      (a dry run on a CPU)

A model of Qwen3-1.7B's shape with random weights is written to a folder, and every command is started on it in a
process of its own. 256 prompts of about 520 tokens get 128 new ones each. The bound: weights once a pass and keys and
values once a token at the device's memory rate, prompts at 40 % of its matrix rate, both measured here.
`--cases prefix`: 64 streams of prompts of 1,000 to 8,000 tokens, and beside them, once a second, one that begins with
20,000 tokens which were read before: how long its first token takes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch

ROOT = Path(__file__).resolve().parents[2]
PROMPT_TOKENS, ANSWER_TOKENS = 520, 128
PORT = 8971
PREFIX_TOKENS, PREFIX_NEW_TOKENS, PREFIX_STREAMS, PREFIX_S = 20000, 200, 64, 25.0
PREFIX_LENGTHS = (1000, 8000)


def make_model(folder: Path, *, small: bool) -> None:
    """Random weights under a tokenizer that knows every byte and has a word for each further number."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    vocab = 2048 if small else 151936
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"Ġw{number}" for number in range(len(letters), vocab))]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    hidden, layers, ffn, heads = (64, 2, 128, 4) if small else (2048, 28, 6144, 16)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=2 if small else 8,
        head_dim=16 if small else 128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def prompts(count: int, least: int = PROMPT_TOKENS - 20, most: int = PROMPT_TOKENS + 20) -> list[str]:
    """Texts of so many tokens (a letter is a token)."""
    generator = random.Random(most)
    words = [line.strip() for line in (ROOT / "README.md").read_text().split() if line.isascii()]
    texts = []
    for _ in range(count):
        length, text = generator.randint(least, most), ""
        while len(text) < length:
            text += generator.choice(words) + " "
        texts.append(text[:length])
    return texts


def command(*words: str) -> list[str]:
    """`outcore ...` of this checkout."""
    return [sys.executable, "-c", "from outcore.cli import main; raise SystemExit(main())", *words]


def generate(model: Path, folder: Path, texts: list[str], flags: list[str]) -> dict[str, Any]:
    """`outcore generate --input`: its own rate, and that of the whole process."""
    source, output = folder / "prompts.jsonl", folder / "answers.jsonl"
    lines = ({"prompt": text, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True} for text in texts)
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ["generate", str(model), "--input", str(source), "--output", str(output), "--overwrite", *flags]
    began = time.perf_counter()
    ran = subprocess.run(command(*asked), cwd=ROOT, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    print(ran.stdout[-3000:], ran.stderr[-3000:], flush=True)
    found = re.search(r"([\d,]+) tokens? at ([\d.]+) tokens/s", ran.stdout + ran.stderr)
    if ran.returncode or found is None:
        return {"error": (ran.stderr or ran.stdout)[-500:]}
    return {"tokens_per_s": float(found[2]), "process_s": seconds, "tokens": int(found[1].replace(",", ""))}


async def _stream(text: str, tally: dict[str, list[float]]) -> None:
    body = {"model": "m", "prompt": text, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"Host: 127.0.0.1:{PORT}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode() + data)
    first, usage = 0.0, 0
    async for line in reader:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - began
            if b'"usage"' in line and (said := json.loads(line[6:]).get("usage")):
                usage = said["completion_tokens"]
    writer.close()
    tally["first_s"].append(first)
    tally["tokens"].append(usage)


async def _streams(texts: list[str], count: int) -> dict[str, Any]:
    tally: dict[str, list[float]] = {"first_s": [], "tokens": []}
    left = iter(texts)

    async def one() -> None:
        for text in left:
            await _stream(text, tally)

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    seconds = time.perf_counter() - began
    return {
        "tokens_per_s": sum(tally["tokens"]) / seconds,
        "tokens": sum(tally["tokens"]),
        "first_median_s": statistics.median(tally["first_s"]),
        "first_worst_s": max(tally["first_s"]),
    }


def _is_up() -> bool:
    try:
        return urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5).status == 200
    except OSError:
        return False


@contextmanager
def _server(model: Path, folder: Path, flags: list[str]) -> Iterator[float]:
    """`outcore serve`, and how long its first answer took from its start."""
    log = (folder / "serve.log").open("w")
    began = time.perf_counter()
    asked = ["serve", str(model), "--served_name", "m", "--port", str(PORT), "--log_dir", str(folder / "logs"), *flags]
    process = subprocess.Popen(command(*asked), cwd=ROOT, stdout=log, stderr=log)
    try:
        while not _is_up():
            if process.poll() is not None or time.perf_counter() - began > 300:
                raise RuntimeError((folder / "serve.log").read_text()[-1000:])
            time.sleep(0.1)
        asyncio.run(_streams(prompts(1), 1))
        yield time.perf_counter() - began
    finally:
        process.terminate()
        process.wait(30)
        print((folder / "serve.log").read_text()[-2500:], flush=True)


def serve(model: Path, folder: Path, texts: list[str], counts: list[int], flags: list[str]) -> dict[str, Any]:
    """Every number of streams in turn, against one server."""
    with _server(model, folder, flags) as up_s:
        found: dict[str, Any] = {"up_s": up_s}
        more = iter(prompts((len(counts) + 1) * len(texts)))  # none twice: what was read before would be found again
        for count in [max(counts), *counts]:  # the first time makes graphs
            own = list(itertools.islice(more, len(texts) if count > 1 else 4))
            found[f"streams-{count}"] = asyncio.run(_streams(own, count))
    return found


async def _prefix(seconds: float) -> dict[str, Any]:
    (prefix,) = prompts(1, PREFIX_TOKENS, PREFIX_TOKENS)
    asked = [prefix + text for text in prompts(int(seconds) + 4, PREFIX_NEW_TOKENS, PREFIX_NEW_TOKENS)]
    cold: dict[str, list[float]] = {"first_s": [], "tokens": []}
    alone: dict[str, list[float]] = {"first_s": [], "tokens": []}
    beside: dict[str, list[float]] = {"first_s": [], "tokens": []}
    streams: dict[str, list[float]] = {"first_s": [], "tokens": []}
    await _stream(asked.pop(), cold)
    for _ in range(3):
        await _stream(asked.pop(), alone)
    left, until_s = iter(prompts(4096, *PREFIX_LENGTHS)), time.perf_counter() + seconds

    async def one() -> None:
        while time.perf_counter() < until_s:
            await _stream(next(left), streams)

    async def probe() -> None:
        waits = []
        while time.perf_counter() < until_s:
            await asyncio.sleep(1)
            waits.append(asyncio.create_task(_stream(asked.pop(), beside)))
        await asyncio.gather(*waits)

    began = time.perf_counter()
    await asyncio.gather(probe(), *(one() for _ in range(PREFIX_STREAMS)))
    return {
        "cold_first_s": cold["first_s"][0],
        "alone_first_s": sorted(alone["first_s"]),
        "first_median_s": statistics.median(beside["first_s"]),
        "first_worst_s": max(beside["first_s"]),
        "first_s": beside["first_s"],
        "streams_first_median_s": statistics.median(streams["first_s"]),
        "streams_first_worst_s": max(streams["first_s"]),
        "streams_tokens_per_s": sum(streams["tokens"]) / (time.perf_counter() - began),
        "streams": len(streams["tokens"]),
    }


def prefix(model: Path, folder: Path, flags: list[str], seconds: float) -> dict[str, Any]:
    """First tokens of prompts whose beginning is cached, beside streams of prompts that are new."""
    context = PREFIX_TOKENS + PREFIX_NEW_TOKENS + ANSWER_TOKENS
    with _server(model, folder, ["--context", str(-(-context // 1024) * 1024), *flags]) as up_s:
        found = {"up_s": up_s, **asyncio.run(_prefix(seconds))}
        with urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5) as page:
            lines = [line.rsplit(" ", 1) for line in page.read().decode().splitlines() if "prompt_tokens" in line]
        return found | {name: float(value) for name, value in lines if not name.startswith("#")}


def transformers_batch(model: Path, texts: list[str]) -> dict[str, Any]:
    """transformers' continuous batching."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, device_map="cuda", attn_implementation="sdpa"
    )
    ids = [tokenizer(text)["input_ids"] for text in texts]
    config = GenerationConfig(max_new_tokens=ANSWER_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    loaded.generate_batch(ids[:16], generation_config=config)
    began = time.perf_counter()
    answers = loaded.generate_batch(ids, generation_config=config)
    seconds = time.perf_counter() - began
    tokens = sum(len(answer.generated_tokens) for answer in answers.values())
    return {"tokens_per_s": tokens / seconds, "tokens": tokens}


def bound(requests: int) -> dict[str, float]:
    """Tokens/s that the device's own rates would give the work of 256 requests, all of them at once."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def rate(work: Any, amount: float) -> float:
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            work()
        torch.cuda.synchronize()
        return 10 * amount / (time.perf_counter() - began)

    target = torch.empty_like(source)
    bytes_per_s = rate(lambda: target.copy_(source), 2 * source.numel())
    flop_per_s = rate(lambda: a @ b, 2 * 8192**3)
    layers, weights, kv_token = 1.409e9, 1.72e9 * 2, 28 * 2 * 8 * 128 * 2
    prompt_s = requests * PROMPT_TOKENS * 2 * layers / (0.4 * flop_per_s)
    kv = requests * kv_token * (PROMPT_TOKENS + ANSWER_TOKENS / 2)
    decode_s = ANSWER_TOKENS * (weights + kv) / bytes_per_s
    return {
        "bytes_per_s": bytes_per_s,
        "flop_per_s": flop_per_s,
        "tokens_per_s": requests * ANSWER_TOKENS / (prompt_s + decode_s),
    }


def main() -> int:
    """Run the cases, print one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", default="bound,generate,generate-deterministic,serve,serve-deterministic,transformers"
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=PREFIX_S, help="of the case prefix")
    parser.add_argument("--small", action="store_true", help="a tiny shape, to try the benchmark itself")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/outcore-commands"))
    parser.add_argument("--flags", default="", help="more flags for every command of ours")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    model, texts, flags = args.folder / "model", prompts(args.requests), args.flags.split()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.cases != "model" and not (model / "config.json").exists():
        subprocess.run(
            [sys.executable, __file__, "--folder", str(args.folder), "--cases", "model", *["--small"] * args.small],
            check=True,
        )
    found: dict[str, Any] = {}
    for case in args.cases.split(","):
        deterministic = ["--deterministic"] if case.endswith("-deterministic") else []
        try:
            if case == "model":
                make_model(model, small=args.small)
            elif case == "bound":
                found[case] = bound(args.requests)
            elif case.startswith("generate"):
                found[case] = generate(model, args.folder, texts, [*flags, *deterministic])
            elif case.startswith("serve"):
                counts = [64, 8] if deterministic else [64, 8, 1]
                found[case] = serve(model, args.folder, texts, counts, [*flags, *deterministic])
            elif case == "prefix":
                found[case] = prefix(model, args.folder, flags, args.seconds)
            else:
                found[case] = transformers_batch(model, texts)
        except Exception as error:
            found[case] = {"error": f"{type(error).__name__}: {error}"}
        if case in found:
            print(json.dumps({case: found[case]}), flush=True)
        if args.out is not None and found:
            args.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
