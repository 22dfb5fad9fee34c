"""What benchmarks of inference share: random values, prompts, the seconds of a pass, rates of the link and the drive.

Weights are random: their values do not change the speed of a dense model.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
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


def find_file(file: str, precision: str) -> FoundModel:
    """The model of a GGUF file without words."""
    settings = ModelSettings(model_name_or_path=file, precision=precision, seq_length=2)
    loaded = load_model(settings, lazy=True, packed_feed=open_packed)
    loaded.model.eval()
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(False)
    return FoundModel(loaded, Numbers(), file, frozenset(), None)


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


def first_token_s(opened: OpenedModel, ids: tuple[int, ...]) -> float:
    """Seconds from a prompt to the first token of its answer."""
    sampling = Sampling(temperature=0.0, seed=1, max_tokens=1, ignore_eos=True)
    (answer,) = opened.engine.generate([Request(f"{time.perf_counter()}", ids, sampling)])
    synchronise()
    return answer.timings.first_token_s


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
