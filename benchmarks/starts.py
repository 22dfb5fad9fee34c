"""How long `outcore serve` takes to its first answer and `outcore train` to its first step, cold and warm.

    python benchmarks/starts.py --out results/starts.json
    python benchmarks/starts.py --small --cases serve            (a dry run on a CPU)

Both are started as a user types them, on random weights: a model of Qwen3-1.7B's shape, and the preset llama-1b on the
pages of docs/, whose tokens the first start keeps. A cold start finds none of what the compiler and Triton keep; a warm
one finds what the start before it left. Seconds are told by the lines that the command prints, each behind the time
since the process began; of training also by the parts that its first record in metrics.jsonl has. `--samples` has every
thread's stack written five times a second, beside the log.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
PORT = 8972
LIMIT_S = 300
KEPT = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
"""What a compiler keeps, by the variable that says where: folders of the benchmark's own."""
SAMPLER = """
import sys, threading, time
def sample(path=sys.argv.pop(1), began=time.perf_counter()):
    with open(path, "w", buffering=1) as file:
        while not time.sleep(0.2):
            for thread, frame in sys._current_frames().items():
                stack = []
                while frame is not None:
                    stack.append(f"{frame.f_code.co_filename.split('site-packages/')[-1]}:{frame.f_code.co_name}")
                    frame = frame.f_back
                if thread != threading.get_ident():
                    file.write(f"{time.perf_counter() - began:.1f} {thread} {';'.join(stack[::-1])}\\n")
threading.Thread(target=sample, daemon=True).start()
"""
PHASES = {
    "serve": {
        "imports, model found": r"model: ",
        "taken apart, tried, placed": r"(weights|keys and values): ",
        "weights read": r"layers run ",
        "listening": r"listening on ",
    },
    "train": {
        "imports": r"device: ",
        "decided": r"engine: ",
        "data": r"rows: ",
        "built": r"model: ",
        "ready": r"start: ",
        "first step": r"step 1/",
    },
}
"""Phase -> the line that ends it."""


class Started:
    """A command under way; its lines, each with the seconds since its process began."""

    def __init__(self, words: list[str], folder: Path, name: str, samples: bool) -> None:
        caches = {key: str(folder / "caches" / at) for key, at in KEPT.items()}
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        code = "from outcore.cli import main; raise SystemExit(main())"
        start = [code, *words] if not samples else [SAMPLER + code, str(folder / f"{name}.stacks"), *words]
        self.began_s, self.lines = time.perf_counter(), list[tuple[float, str]]()
        self.process = subprocess.Popen(
            [sys.executable, "-c", *start],
            cwd=folder,
            env={**os.environ, **caches, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def passed_s(self) -> float:
        return time.perf_counter() - self.began_s

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((self.passed_s, line.rstrip()))

    def end(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it as Ctrl-C does, or otherwise, unless it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._reader.join(60)

    def phases(self, of: str) -> dict[str, float]:
        """Seconds of each phase, from the end of the one before; phases whose line did not come are left out."""
        found, before = {}, 0.0
        for phase, pattern in PHASES[of].items():
            at = next((at for at, line in self.lines if re.match(pattern, line)), None)
            if at is not None:
                found[phase], before = round(at - before, 2), at
        return found


def answer(text: str) -> None:
    """Have the server answer one prompt."""
    body = {"model": "m", "prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    asked = Request(f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode())
    asked.add_header("Content-Type", "application/json")
    with urlopen(asked, timeout=LIMIT_S) as came:
        json.load(came)


def serve(folder: Path, name: str, flags: list[str], samples: bool) -> dict[str, Any]:
    """`outcore serve` until it has answered twice."""
    words = [
        "serve",
        str(folder / "model"),
        "--served_name",
        "m",
        "--port",
        str(PORT),
        "--log_dir",
        str(folder / "logs"),
    ]
    started = Started([*words, *flags], folder, name, samples)
    try:
        while True:
            if started.process.poll() is not None or started.passed_s > LIMIT_S:
                raise RuntimeError("\n".join(line for _, line in started.lines[-20:]))
            try:
                with urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.05)
        found = {"up_s": started.passed_s}
        answer("The first question")
        found["first_answer_s"] = started.passed_s
        answer("The second question")
        return {**found, "second_answer_s": started.passed_s, "phases_s": started.phases("serve")}
    finally:
        started.end()
        tell(folder, name, started)


def train(folder: Path, name: str, flags: list[str], samples: bool, small: bool) -> dict[str, Any]:
    """`outcore train --max_steps 1`, 16,384 tokens, until its first step has been taken."""
    for left in ("logs", "checkpoints", "final_model"):
        shutil.rmtree(folder / left / name, ignore_errors=True)
    data = folder / "docs.jsonl"
    texts = (json.dumps({"text": page.read_text()}) + "\n" for page in sorted((ROOT / "docs").glob("*.md")))
    data.write_text("".join(texts))
    size = ["--preset", "tiny"] if small else ["--preset", "llama-1b", "--seq_length", "2048"]
    size += [] if small else ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4"]
    words = [
        "train",
        *size,
        "--dataset",
        str(data),
        "--max_steps",
        "1",
        "--run_name",
        name,
        "--save_strategy",
        "no",
        "--eval_strategy",
        "no",
    ]
    words += ["--sample_tokens", "0", *flags]
    started = Started(words, folder, name, samples)
    try:
        while not any(line.startswith("step 1/") for _, line in started.lines):
            if started.process.poll() is not None or started.passed_s > LIMIT_S:
                raise RuntimeError("\n".join(line for _, line in started.lines[-20:]))
            time.sleep(0.05)
        found = {"first_step_done_s": started.passed_s, "phases_s": started.phases("train")}
        records = (json.loads(line) for line in (folder / "logs" / name / "metrics.jsonl").read_text().splitlines())
        parts = next((record["startup_s"] for record in records if "startup_s" in record), {})
        return {**found, "startup_s": {part: round(seconds, 2) for part, seconds in parts.items()}}
    finally:
        started.end(signal.SIGKILL)  # Ctrl-C would export the model first
        tell(folder, name, started)


def tell(folder: Path, name: str, started: Started) -> None:
    """Write the lines down, and print them."""
    text = "\n".join(f"{at:7.2f}  {line}" for at, line in started.lines)
    (folder / f"{name}.log").write_text(text + "\n")
    print(f"--- {name}\n{text}", flush=True)


def main() -> int:
    """Run the cases, each cold and then warm; print one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="serve,train")
    parser.add_argument("--starts", default="cold,warm,warm", help="in this order")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the benchmark itself")
    parser.add_argument("--samples", action="store_true", help="write stacks; they cost a little of what is measured")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/outcore-starts"))
    parser.add_argument("--flags", default="", help="more flags for every command")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder, flags, found = args.folder.resolve(), args.flags.split(), dict[str, Any]()
    folder.mkdir(parents=True, exist_ok=True)
    if "serve" in args.cases and not (folder / "model" / "config.json").exists():
        maker = [
            sys.executable,
            str(ROOT / "benchmarks/infer/commands.py"),
            "--folder",
            str(folder),
            "--cases",
            "model",
        ]
        subprocess.run([*maker, *["--small"] * args.small], check=True)
    for case in args.cases.split(","):
        for number, start in enumerate(args.starts.split(",")):
            name = f"{case}-{number}-{start}"
            if start == "cold":
                shutil.rmtree(folder / "caches", ignore_errors=True)
            try:
                if case == "serve":
                    found[name] = serve(folder, name, flags, args.samples)
                else:
                    found[name] = train(folder, name, flags, args.samples, args.small)
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({name: found[name]}), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
