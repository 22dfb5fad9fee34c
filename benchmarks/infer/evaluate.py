"""Evaluation in bf16: ours and the harness's own backend, each against the same weights in fp32, and their seconds.

    python benchmarks/infer/evaluate.py --model llama-8b --cap_gib 6.5 --out evaluate.json
    python benchmarks/infer/evaluate.py --model SmolLM2-135M-Instruct.Q4_1.gguf --cases fp32,harness,ours
    python benchmarks/infer/evaluate.py --dry_run            (tiny model, CPU, seconds)

Cases: fp32 (the harness's backend on the bf16 weights widened to fp32, all on the device: what the others are measured
against), harness (its backend in bf16, all on the device, attention eager and sdpa: what bf16 in two orders makes of
the same weights), ours (under the cap, layers compiled or not), device_map (the harness's backend over accelerate's
device_map under the cap: the rival in seconds). Each prints one JSON line as it ends: seconds in the model for all
requests of `outcore_endings` (four a document), how far one ending's log-likelihood is from fp32 and from the harness's
own (sdpa), and how many answers change. A preset has random weights: its scores mean nothing, its differences and
seconds do. A GGUF file is unpacked to bf16 for everyone.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from common import Cases, device_of, find
from lm_eval.models.huggingface import HFLM
from offload import filled, spread

from outcore.data import train_byte_bpe
from outcore.evaluate import EvaluationSettings, compare
from outcore.evaluate.harness import OutcoreLM
from outcore.evaluate.parity import Answers, softmax_of, timed_suite
from outcore.evaluate.tasks import endings
from outcore.infer.opening import InferSettings, open_engine, open_found

CONTEXT = 512
CASES = ("fp32", "harness", "ours", "device_map")


class Subject:
    """The model that everyone is given: a preset's shape with random values, or a folder."""

    def __init__(self, name: str) -> None:
        self.folder: str | None = None
        if Path(name).exists():
            self.folder = _unpacked(Path(name)) if name.endswith(".gguf") else name
        self.name = name

    def tokenizer(self) -> Any:
        """Its own, or a small one of the task's words."""
        from transformers import AutoTokenizer

        if self.folder is not None:
            return AutoTokenizer.from_pretrained(self.folder)
        return train_byte_bpe([" ".join(one["endings"]) for one in endings()], 1024)

    def plain(self, device: torch.device, dtype: torch.dtype, attention: str) -> Any:
        """All of it on the device. Values are those of bf16 also in fp32."""
        from transformers import AutoModelForCausalLM

        how: dict[str, Any] = {"attn_implementation": attention, "dtype": torch.bfloat16}
        if self.folder is not None:
            return AutoModelForCausalLM.from_pretrained(self.folder, **how).to(device).to(dtype).eval()
        loaded = find(self.name, "bf16").loaded.model
        loaded.set_attn_implementation(attention)
        return filled(loaded, str(device), dtype).to(device)

    def open(self, settings: InferSettings, tokenizer: Any, device: torch.device) -> Any:
        """Our engine on it."""
        if self.folder is not None:
            return open_engine(self.folder, replace(settings, device=device.type, precision="bf16"), print)
        return open_found(replace(find(self.name, "bf16"), tokenizer=tokenizer), settings, device, print)


def _unpacked(file: Path) -> str:
    """A folder with the weights of a GGUF file in bf16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def gaps(ours: Answers, theirs: Answers) -> list[float]:
    """Difference of each ending's log-likelihood, nat."""
    pairs = zip(ours[1], theirs[1], strict=True)
    return [a[0] - b[0] for x, y in pairs for a, b in zip(x["answers"], y["answers"], strict=True)]


def against(result: Answers, other: Answers, words: str) -> dict[str, Any]:
    """How far one backend is from another, an ending."""
    found = gaps(result, other)
    return {
        f"rms_from_{words}": fmean(one**2 for one in found) ** 0.5,
        f"median_from_{words}": median(map(abs, found)),
        f"max_from_{words}": max(map(abs, found)),
        f"changed_from_{words}": compare(other[0], other[1], result[0], result[1])[0].changed,
    }


class Bench:
    """Backends one after another, each compared with those before it."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.subject = Subject(args.model)
        self.tokenizer = self.subject.tokenizer()
        self.settings = EvaluationSettings(("outcore_endings",), limit=args.limit)
        self.cases = Cases(device, args.out)
        self.kept: dict[str, Answers] = {}

    def note(self, name: str, result: Answers, **more: Any) -> None:
        """Print how a backend did, and keep it for the next ones."""

        def figures() -> dict[str, Any]:
            found = {"s": result[2], "endings": len(gaps(result, result)), **more}
            for words in ("fp32", "harness sdpa"):
                if words in self.kept:
                    found |= against(result, self.kept[words], words.replace(" ", "_"))
            if "ours, compile on" in self.kept:
                found["times_ours"] = result[2] / self.kept["ours, compile on"][2]
            answers = (abs(one[0]) for sample in result[1] for one in sample["answers"])
            return found | {"median_logprob": median(answers)}

        self.kept[name] = result
        self.cases.note(name, figures)
        self.cases.free()

    def plain(self, name: str, dtype: torch.dtype, attention: str) -> None:
        """The harness's backend with all weights on the device."""
        model = self.subject.plain(self.device, dtype, attention)
        self.note(name, self._harness(model, self.args.rows[0]))

    def ours(self, compiled: str) -> None:
        """Our engine; the second of two runs, the first of which compiles."""
        settings = InferSettings(
            context=CONTEXT, preset="throughput", max_sequences=4, deterministic=True, compile=compiled
        )
        opened = self.subject.open(settings, self.tokenizer, self.device)
        try:
            first = timed_suite(OutcoreLM(opened=opened), self.settings)
            result = timed_suite(OutcoreLM(opened=opened), self.settings)
            lines = opened.placement.lines()
        finally:
            opened.close()
        del opened
        self.note(f"ours, compile {compiled}", result, first_s=first[2], placement=lines)

    def device_map(self) -> None:
        """The harness's backend over device_map, for each number of rows."""
        for rows, layers, result in self._spread():
            self.note(f"harness over device_map, {rows} rows", result, layers_on_gpu=layers)

    def _spread(self) -> Iterator[tuple[int, int, Answers]]:
        model, layers_on_gpu = spread(self.args.model, self.args.cap_gib, self.device)
        for rows in self.args.rows:
            yield rows, layers_on_gpu, self._harness(model, rows)

    def _harness(self, model: Any, rows: int) -> Answers:
        backend: Any = HFLM  # its decorator hides the class's own parameters
        lm = backend(
            pretrained=model, tokenizer=self.tokenizer, batch_size=rows, max_length=CONTEXT - 1, backend="causal",
            **softmax_of(self.device.type),
        )  # fmt: skip
        return timed_suite(lm, self.settings)


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", help="a preset of outcore.model.presets, a folder, a GGUF file")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--compile", default="on,off", help="layers of ours")
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--limit", type=int, default=64, help="documents, of four requests each")
    parser.add_argument("--rows", type=int, nargs="+", default=[32], help="of the harness's batches")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry_run", action="store_true")
    args = parser.parse_args()
    wanted = args.cases.split(",")
    if unknown := set(wanted) - set(CASES):
        parser.error(f"unknown case {sorted(unknown)[0]}; there are {', '.join(CASES)}")
    if args.dry_run:
        args.model, args.limit, wanted = ("tiny" if args.model == "llama-8b" else args.model), 3, wanted[:3]
    uncapped = torch.device("cuda" if torch.cuda.is_available() and not args.dry_run else "cpu")
    bench = Bench(args, uncapped)
    if "fp32" in wanted:
        bench.plain("fp32", torch.float32, "eager")
    if "harness" in wanted:
        for attention in ("sdpa", "eager"):
            bench.plain(f"harness {attention}", torch.bfloat16, attention)
    bench.device = device_of(args.cap_gib, dry_run=args.dry_run)
    if "ours" in wanted:
        for compiled in args.compile.split(","):
            bench.ours(compiled)
    if "device_map" in wanted:
        bench.device_map()


if __name__ == "__main__":
    main()
