"""How a model's sequences may share a pass: found out by doing it with a tiny copy, not by its name.

Tried are a row of several sequences whose keys and values lie in pages ("paged"), then sequences by themselves with the
model's own cache ("whole": recurrent states, position biases). What gives other logits than the model run plainly is
not used; a model that neither serves is refused. Cost: about a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import torch

from outcore.flow import Flow, Head, ModelParts, PartRunner, StreamUnsupported, discover_units
from outcore.flow.check import tiny_copy
from outcore.flow.parts import alike, with_memory
from outcore.flow.weights import WeightHomes
from outcore.infer.attention import PagedAttention, UnknownAttention
from outcore.infer.cache import CacheSettings, GroupPlan, KvCache, KvShape, PassTables, SequencePages, Span
from outcore.infer.opening.arrival import ResidentWeights
from outcore.infer.passes import PagedRunner, PassRunner, RunnerLimits, WholeRunner
from outcore.infer.requests import Request, Sampling, TextStream
from outcore.infer.schedule import Clock, Sequence, Work
from outcore.model import LoadedModel
from outcore.model.forward import unwrap
from outcore.sizing.inference import AttentionLimits, AttentionSize
from outcore.staging.pool import HostMemory, SmallCopies

Way = Literal["paged", "whole"]
TOLERANCE = 2e-4
"""Largest difference of a logit, relative to the largest one, in fp32."""
LENGTHS = (23, 9, 14)
"""Tokens of the tiny sequences: beyond the tiny copy's windows of 8."""
CHUNKS = {"paged": ((5, 1, 9, 8), (9,), (3, 3, 1, 1, 6)), "whole": ((20, 1, 1, 1), (9,), (12, 1, 1))}
CPU = torch.device("cpu")


def way_of(loaded: LoadedModel) -> tuple[Way, str]:
    """(how its sequences share a pass, why not in the better way). StreamUnsupported when it cannot be served."""
    tried: list[str] = []
    for way in ("paged", "whole"):
        why = _why_not(loaded, way)
        if not why:
            return way, "; ".join(tried)
        tried.append(f"{way}: {why}")
    raise StreamUnsupported(f"it cannot be run with kept keys and values ({'; '.join(tried)})")


def use_attention(model: Any, name: str) -> None:
    """Have every attention of the model call the function registered under this name."""
    for module in unwrap(model).modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


def _why_not(loaded: LoadedModel, way: Way) -> str:
    try:
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            tiny = tiny_copy(loaded)
        model = unwrap(tiny.model).eval()
        vocab = tiny.facts.vocab_size
        texts = [torch.randint(2, vocab, (length,), generator=generator).tolist() for length in LENGTHS]
        with torch.no_grad():
            expected = [model(input_ids=torch.tensor([text])).logits[0].float() for text in texts]
        found = _run_in_chunks(tiny, way, texts)
    except UnknownAttention as error:
        return str(error)
    except StreamUnsupported:
        raise
    except Exception as error:  # any model's own code may fail in any way on a tiny copy
        return f"a tiny copy failed ({type(error).__name__}: {str(error).strip().splitlines()[:1]})"
    off = max(
        float((logits - whole[at]).abs().max() / whole.abs().max())
        for whole, of_text in zip(expected, found, strict=True)
        for at, logits in of_text
    )
    return "" if off <= TOLERANCE else f"a tiny copy gives other logits (off by {off:.0e} of the largest)"


@torch.no_grad()
def _run_in_chunks(tiny: LoadedModel, way: Way, texts: list[list[int]]) -> list[list[tuple[int, torch.Tensor]]]:
    """(place, logits there) at the end of every chunk of every text."""
    with ExitStack() as undo:
        units = discover_units(tiny)
        runner, cache = tiny_runner(tiny, units, way, undo)
        running = [_sequence(number, text, cache) for number, text in enumerate(texts)]
        found: list[list[tuple[int, torch.Tensor]]] = [[] for _ in texts]
        for step in range(max(len(chunks) for chunks in CHUNKS[way])):
            works = []
            for sequence, chunks in zip(running, CHUNKS[way], strict=True):
                if step < len(chunks):
                    start, count = sum(chunks[:step]), chunks[step]
                    assert sequence.pages is not None
                    cache.extend(sequence.pages, start + count)
                    works.append(Work(sequence, start, tuple(sequence.tokens[start : start + count])))
            for work, logits in runner.run(works):
                found[int(work.sequence.request.name)].append((work.start + work.count - 1, logits[-1].float()))
            for work in works:
                assert work.sequence.pages is not None
                cache.settle(work.sequence.pages, work.sequence.tokens, work.start + work.count)
        return found


def _sequence(number: int, text: list[int], cache: KvCache) -> Sequence:
    request = Request(str(number), tuple(text), Sampling(temperature=0))
    sequence = Sequence(request, 0, 0, TextStream(None), None, Clock(0.0), frozenset())
    sequence.pages = cache.open(text)
    return sequence


def tiny_runner(
    tiny: LoadedModel,
    units: ModelParts,
    way: Way,
    undo: ExitStack,
    *,
    page_tokens: int = 4,
    num_pages: int = 64,
    call_tokens: int = 64,
    limits: AttentionLimits | None = None,
) -> tuple[PassRunner, KvCache]:
    """A runner of a model that is whole in RAM, as it is; also for tests."""
    homes = WeightHomes(units.all, HostMemory(), {part.index: part.layout.home_numel for part in units.all}, None)
    homes.adopt()
    arrival = ResidentWeights(units.all, homes, None, CPU)
    runner = PartRunner(units)
    flow = Flow(runner, Head(runner, vocab_size=tiny.facts.vocab_size), arrival, CPU)
    if way == "whole":
        cache = KvCache(CacheSettings((GroupPlan(None, 64),), page_tokens, torch.float32, shares_prefixes=False))
        return WholeRunner(flow, tiny, RunnerLimits(call_tokens=call_tokens), CPU), cache
    windows = kv_of(attentions_of(tiny, units))
    groups = tuple(GroupPlan(window, num_pages) for window in windows)
    cache = KvCache(CacheSettings(groups, page_tokens, torch.float32))
    attention = PagedAttention(cache, limits=limits)
    undo.callback(attention.close)
    use_attention(tiny.model, attention.name)
    units.isolation = "position_ids"
    return PagedRunner(flow, attention, RunnerLimits(call_tokens=call_tokens), CPU), cache


class _Seen(Exception):
    """Ends a layer once its attention has been called."""


def attentions_of(loaded: LoadedModel, units: ModelParts) -> dict[int, AttentionSize]:
    """The attention of each layer: each kind of layer is run up to it, on two tokens. UnknownAttention or
    StreamUnsupported where it is not seen."""
    seen: list[AttentionSize] = []

    class Watch(PagedAttention):
        def seen(self, size: AttentionSize) -> None:
            seen.append(size)
            raise _Seen

    watch = Watch(None)
    before, isolation = _implementations(loaded.model), units.isolation
    use_attention(loaded.model, watch.name)
    units.isolation = "position_ids"
    try:
        batch = {"input_ids": torch.zeros((1, 2), dtype=torch.long), "position_ids": torch.arange(2)[None]}
        with torch.no_grad():
            log = units.record(batch)
            kinds: dict[int, AttentionSize] = {}
            found: dict[int, AttentionSize] = {}
            for index, kind in enumerate(alike(units.layers)):
                if kind not in kinds:
                    kinds[kind] = _first_call(units, index, log, watch, seen)
                found[index] = kinds[kind]
    finally:
        units.isolation = isolation
        for put_back in before:
            put_back()
        watch.close()
    return found


def kv_of(attentions: Mapping[int, AttentionSize]) -> dict[int | None, dict[int, KvShape]]:
    """Widths by window of each layer's keys and values."""
    found: dict[int | None, dict[int, KvShape]] = {}
    for layer, size in attentions.items():
        shape = KvShape(size.kv_heads, size.key_width, size.value_width)
        found.setdefault(size.window, {})[layer] = shape
    return found


def _first_call(
    units: ModelParts, index: int, log: Any, watch: PagedAttention, seen: list[AttentionSize]
) -> AttentionSize:
    watch.begin([PassTables([Span(SequencePages([]), 0, 2, 0)], 1, SmallCopies(CPU))])
    seen.clear()
    call = log.call(index)
    try:
        with with_memory(units.layers[index]) as layer:
            layer(log.hidden, *call.args, **call.kwargs)
    except _Seen:
        return seen[0]
    raise UnknownAttention(f"layer {index} has no attention of the usual form")


def _implementations(model: Any) -> list[Callable[[], None]]:
    """Functions that put back each config's attention as it is now."""
    found: dict[int, Callable[[], None]] = {}
    for module in unwrap(model).modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            name = config._attn_implementation
            found.setdefault(id(config), lambda c=config, n=name: setattr(c, "_attn_implementation", n))
    return list(found.values())
