"""What the cases of inference share: a shape with random values, requests, a pass's time, one JSON line a case.

Weights are random: their values do not change the speed of a dense model, but guesses from random text are never
right (guesses.py has a real model for them).
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where outcore is not installed

from outcore.common.quantities import GIB, MIB
from outcore.flow.experts import ExpertCounts
from outcore.formats import PackedSpec, PackedTensor, open_packed, packed_format
from outcore.infer import Request, Sampling
from outcore.infer.opening import FoundModel, HostShare, InferSettings, OpenedModel, open_found
from outcore.model import ModelSettings, load_model
from outcore.model.facts import checkpoint_name
from outcore.storage import TensorStore, aligned_bytes

BLOCK_NUMEL = 1 << 22


class Numbers:
    """A tokenizer that is not asked for words."""

    eos_token_id = None
    chat_template = "plain"

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "." * len(tokens)


class RandomFeed:
    """Values for every parameter but adapters', fast: one random block again and again, made and packed once.

    Experts of gpt-oss are in MXFP4, as they are published; `specs` are the parameters that are so, as a packed
    checkpoint's feed has them."""

    def __init__(self, model: Any, quantize: str | None = None) -> None:
        self._format = None if quantize is None else packed_format(quantize)
        named = {checkpoint_name(name): p for name, p in model.named_parameters() if "lora_" not in name}
        self._shapes = {name: tuple(p.shape) for name, p in named.items()}
        generator = torch.Generator().manual_seed(0)
        block = torch.randn(BLOCK_NUMEL, generator=generator).mul_(0.02)
        self._planes = () if self._format is None else self._format.pack_blocks(block.view(-1, self._format.block))
        # An odd length: else rows come again after 2^22 / hidden size, and the likeliest token has its equals.
        self._block = block[:-1].to(next(iter(named.values())).dtype)
        self.specs: dict[str, PackedSpec] = {}
        if model.config.model_type == "gpt_oss" and quantize is None:
            for name, shape in self._shapes.items():
                if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                    packed = (*shape[:-2], shape[-1], shape[-2])
                    self.specs[name] = PackedSpec(packed_format("mxfp4"), packed, is_transposed=True)
            codes = torch.randint(0, 256, (BLOCK_NUMEL // 32 - 1, 16), generator=generator, dtype=torch.uint8)
            self._planes = (codes, torch.full((len(codes), 1), 127 - 7, dtype=torch.uint8))  # values up to 6 / 128

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def groups(self) -> Iterator[dict[str, Any]]:
        made: dict[PackedSpec, PackedTensor] = {}
        plain = (shape for name, shape in self._shapes.items() if name not in self.specs)
        values = _repeated(self._block, max(torch.Size(shape).numel() for shape in plain))
        for name, shape in self._shapes.items():
            spec = self.specs.get(name)
            if spec is None and self._format is not None and len(shape) > 1 and ".layers." in name:
                spec = PackedSpec(self._format, shape) if shape[-1] % self._format.block == 0 else None
            if len(shape) < 2:
                yield {name: torch.ones(shape, dtype=self._block.dtype)}
            elif spec is not None:
                if spec not in made:
                    planes = [_repeated(plane, spec.num_blocks) for plane in self._planes]
                    made[spec] = PackedTensor(spec, spec.assemble(planes))
                yield {name: made[spec]}
            else:
                yield {name: values[: torch.Size(shape).numel()].view(shape)}


def _repeated(value: torch.Tensor, length: int) -> torch.Tensor:
    """[length, ...]: the rows of `value` again and again."""
    return value.repeat(-(-length // len(value)), *(1 for _ in value.shape[1:]))[:length]


def find(model: str, precision: str, quantize: str | None = None) -> FoundModel:
    """A preset's shape with random values, packed if asked for."""
    loaded = load_model(ModelSettings(preset=model, precision=precision, seq_length=2, quantize=quantize), lazy=True)
    feed = RandomFeed(loaded.model, quantize)
    loaded = replace(loaded, feed=feed, packed=feed.specs)
    loaded.model.eval()
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(False)
    return FoundModel(loaded, Numbers(), model, frozenset(), None)


def find_file(file: str, precision: str) -> FoundModel:
    """The model of a GGUF file without words."""
    settings = ModelSettings(model_name_or_path=file, precision=precision, seq_length=2)
    loaded = load_model(settings, lazy=True, packed_feed=open_packed)
    loaded.model.eval()
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(False)
    return FoundModel(loaded, Numbers(), file, frozenset(), None)


def opened_with(model: str, device: torch.device, share: HostShare | None = None, **settings: Any) -> OpenedModel:
    """Our engine with these settings, of one process of several with `share`; what it says goes to stderr."""
    found = find(model, "bf16" if device.type == "cuda" else "fp32", settings.get("quantize"))
    return open_found_with(found, device, share, **{"context": 1024, **settings})


def open_found_with(
    found: FoundModel, device: torch.device, share: HostShare | None = None, **settings: Any
) -> OpenedModel:
    """A model found before, opened with these settings."""

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    return open_found(found, InferSettings(**settings), device, say, share=share)


def prompts(count: int, length: int, vocab: int) -> list[tuple[int, ...]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocab, (count, length), generator=generator)
    return [tuple(row) for row in ids.tolist()]


def run_requests(
    opened: OpenedModel, asked: list[tuple[int, ...]], answer: int, temperature: float = 0.0
) -> dict[str, Any]:
    """Seconds and rates of answering all of them, and where the time went; at temperature 1 random weights write what
    nobody guesses."""
    engine, counts, small = opened.engine, opened.engine.counts, getattr(opened.engine.runner, "small", None)
    sampling = Sampling(temperature=temperature, seed=1, max_tokens=answer, ignore_eos=True)
    drafted, accepted, captured_s = counts.drafted, counts.accepted, 0.0 if small is None else small.capture_s
    passes: list[tuple[int, int, float]] = []
    """(number, tokens, seconds) of each."""
    heard = engine.on_pass

    def on_pass(works: Any, seconds: float) -> None:
        passes.append((len(passes), counts.last_pass_rows, seconds))
        heard(works, seconds)

    engine.on_pass, began = on_pass, time.perf_counter()
    answers = list(engine.generate(Request(f"{began}-{i}", ids, sampling) for i, ids in enumerate(asked)))
    synchronise()
    seconds, engine.on_pass = time.perf_counter() - began, heard
    written, in_passes_s = sum(len(a.tokens) for a in answers), sum(s for _, _, s in passes)
    first_s = [a.timings.first_token_s for a in answers]
    after_s = [(a.timings.total_s - a.timings.first_token_s) / max(1, len(a.tokens) - 1) for a in answers]
    return {
        "s": seconds,
        "tokens": written,
        "begins": [chosen.token for chosen in answers[0].tokens[:32]],
        "tokens_per_s": written / seconds,
        "passes": len(passes),
        "s_per_pass": seconds / max(1, len(passes)),
        "first_token_s": median(first_s),
        "s_per_token_after": median(after_s),
        "cached_tokens": sum(a.timings.cached_tokens for a in answers),
        "in_passes_s": in_passes_s,
        "between_passes_s": seconds - in_passes_s,
        "capture_s": None if small is None else small.capture_s - captured_s,
        "slowest_passes": sorted(passes, key=lambda one: -one[2])[:6],
        "guessed": counts.drafted - drafted,
        "guessed_right": counts.accepted - accepted,
    }


def decode_passes(
    opened: OpenedModel, batch: int, count: int, prompt: int, vocab: int, temperature: float = 0.0
) -> dict[str, Any]:
    """Passes that only write: median seconds, and the share of the link that they reach. At temperature 1 tokens are
    drawn, so that each chooses other experts; the likeliest of random weights repeat themselves."""
    engine, experts = opened.engine, opened.weights.experts
    counts = ExpertCounts() if experts is None else experts.counts
    sampling = Sampling(temperature=temperature, seed=1, max_tokens=count + 4, ignore_eos=True)
    small = getattr(engine.runner, "small", None)
    few = None if small is None else small.experts
    answered = (0, 0.0)
    speculates, engine.speculates = engine.speculates, False
    done: list[Any] = []
    for i, ids in enumerate(prompts(batch, prompt, vocab)):
        engine.submit(Request(f"d{batch}-{prompt}-{i}", ids, sampling), None, done.append)
    times: list[float] = []
    submitted, prompts_s, before = time.perf_counter(), 0.0, replace(counts)
    while len(done) < batch:
        began = time.perf_counter()
        engine.step()
        if engine.counts.last_pass_rows == batch and engine.num_running == batch:
            prompts_s = prompts_s or began - submitted
            times.append(time.perf_counter() - began)
            if len(times) == 3:
                before = replace(counts)
                answered = answered if few is None else few.answered()
    engine.speculates = speculates
    times = sorted(times[3:])  # the first ones compile and capture
    asked, hits = counts.asked - before.asked, counts.hits - before.hits
    expert_bytes = (counts.read_bytes - before.read_bytes) / max(1, len(times))
    middle = times[len(times) // 2] if times else float("nan")
    travelling = opened.placement.travelling_bytes
    questions, cpu_s = (0, 0.0) if few is None else (now - then for now, then in zip(few.answered(), answered))
    cache = engine.scheduler.cache
    stored_tokens = sum(ledger.num_pages for ledger in cache.ledgers) * cache.settings.page_tokens
    kv_bytes = 0 if opened.placement.kv_home == "vram" else batch * prompt * cache.size_bytes / stored_tokens
    return {
        "batch": batch,
        "context": prompt,
        "prompts_s": prompts_s,
        "s_per_pass": middle,
        "fastest_s": times[0] if times else None,
        "passes_s": times,
        "kv_gb": kv_bytes / 1e9,
        "expert_hit_rate": hits / asked if asked else None,
        "experts_gb": expert_bytes / 1e9,
        "cpu_questions": questions / max(1, len(times)),
        "cpu_s": cpu_s / max(1, len(times)),
        "streamed_gb_per_s": (travelling + expert_bytes + kv_bytes) / middle / 1e9,
        "tokens_per_s": batch / middle,
        "travelling_gb": travelling / 1e9,
        "weights_gb_per_s": travelling / middle / 1e9,
        "graphs": None if small is None else small.why_not or sorted(map(str, small._slots)),
        "capture_s": None if small is None else small.capture_s,
    }


def link_gb_per_s(device: torch.device) -> float:
    """Of pinned copies to the device, best of five."""
    if device.type != "cuda":
        return float("nan")
    host, there = (
        torch.empty(512 * MIB, dtype=torch.uint8, pin_memory=True),
        torch.empty(512 * MIB, dtype=torch.uint8, device=device),
    )
    best = 0.0
    for _ in range(5):
        synchronise()
        began = time.perf_counter()
        there.copy_(host, non_blocking=True)
        synchronise()
        best = max(best, host.nbytes / (time.perf_counter() - began) / 1e9)
    return best


def drive_gb_per_s(store: TensorStore | None, n_bytes: int = 4 * GIB) -> float:
    """Of reads of the weights on the drive, past the page cache, by the engine's own threads into page-aligned memory:
    eight pieces at a time, best of two."""
    assert store is not None, "no weights lie on a drive"
    piece = min(32 * MIB, max(store.spec(name).n_bytes for name in store.names) // 4096 * 4096)
    memory = torch.from_numpy(aligned_bytes(8 * piece))
    places = [(name, at) for name in store.names for at in range(0, store.spec(name).n_bytes - piece + 1, piece)]
    places, best = places[: max(1, n_bytes // piece)], 0.0
    for _ in range(2):
        under_way, began = [], time.perf_counter()
        for number, (name, at) in enumerate(places):
            if len(under_way) == 8:
                under_way.pop(0).wait(60)
            slot = number % 8 * piece
            under_way.append(store.submit_read(name, memory[slot : slot + piece], at))
        for transfer in under_way:
            transfer.wait(60)
        best = max(best, len(places) * piece / (time.perf_counter() - began) / 1e9)
    return best


def synchronise() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_of(cap_gib: float, *, dry_run: bool, index: int = 0) -> torch.device:
    """The GPU of that number, capped; the CPU for a dry run."""
    if dry_run or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", index)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * GIB / total), device)
    return device


class Cases:
    """Runs cases one after another; each prints its line, and all go to a file as they come."""

    def __init__(self, device: torch.device, out: Path | None) -> None:
        self.device, self._out = device, out
        self.link_gb_per_s = link_gb_per_s(device)
        self.results: list[dict[str, Any]] = []
        self._began = time.perf_counter()

    def note(self, case: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run one; what fails is a line, too, and the others go on."""
        began = time.perf_counter()
        try:
            found = run()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"}
        if self.device.type == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated(self.device) / GIB
            torch.cuda.reset_peak_memory_stats(self.device)
        if found.get("travelling_gb"):
            streamed = found.get("streamed_gb_per_s", found["weights_gb_per_s"])
            found["link_share"] = streamed / self.link_gb_per_s
        entry = {"case": case, "link_gb_per_s": self.link_gb_per_s, **found, "case_s": time.perf_counter() - began}
        entry["since_start_s"] = time.perf_counter() - self._began
        self.results.append(entry)
        print(json.dumps(entry), flush=True)
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(json.dumps(self.results, indent=1))
        return entry

    def free(self) -> None:
        """Give back what the case before held."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
