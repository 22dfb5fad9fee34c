"""Ways in which sequences may share a pass: found out for a model by doing it with a tiny copy, not by its name.

Tried are a row of several sequences whose keys and values lie in pages ("paged"), sequences with recurrent states
beside such pages, cut into chunks anywhere ("states") or prompts in one piece and then token by token ("steps": Mamba 1
begins anew with every chunk, Nemotron-H computes single tokens by another formula), then sequences by themselves with
the model's own cache ("whole": position biases). What gives other logits than the model by itself is not used; a model
that none serves is refused. Cost: about a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import DynamicCache

from outcore.flow import Flow, Head, ModelParts, PartRunner, StreamUnsupported, discover_units
from outcore.flow.check import tiny_copy
from outcore.flow.parts import alike, with_memory
from outcore.flow.weights import WeightHomes
from outcore.infer.attention import PagedAttention, UnknownAttention
from outcore.infer.cache import (
    CacheSettings,
    GroupPlan,
    KvCache,
    KvShape,
    PassTables,
    SequencePages,
    SequenceStates,
    Span,
)
from outcore.infer.opening.arrival import ResidentWeights
from outcore.infer.passes import (
    PagedRunner,
    PassRunner,
    RunnerLimits,
    StatesOfCall,
    StatesRunner,
    WholeRunner,
    cache_argument,
    fresh_layers,
)
from outcore.infer.requests import Request, Sampling, TextStream
from outcore.infer.schedule import Clock, Work
from outcore.infer.schedule import Sequence as Running
from outcore.model import LoadedModel
from outcore.model.forward import accepted_names, unwrap
from outcore.sizing.inference import AttentionLimits, AttentionSize
from outcore.staging.pool import HostMemory, SmallCopies

Way = Literal["paged", "states", "steps", "whole"]
IN_ONE_PIECE: tuple[Way, ...] = ("steps", "whole")
"""Ways in which prompts are not cut, no token is taken back and no beginning is shared."""
TOLERANCE = 2e-4
"""Largest difference of a logit, relative to the largest one, in fp32."""
LENGTHS = (23, 9, 14)
"""Tokens of the tiny sequences: beyond the tiny copy's windows of 8."""
IN_CHUNKS = ((5, 1, 9, 8), (9,), (3, 1, 1, 3, 6))
IN_STEPS = ((20, 1, 1, 1), (9,), (12, 1, 1))
CHUNKS: dict[Way, tuple[tuple[int, ...], ...]] = {
    "paged": IN_CHUNKS,
    "states": IN_CHUNKS,
    "steps": IN_STEPS,
    "whole": IN_STEPS,
}
CPU = torch.device("cpu")


def way_of(loaded: LoadedModel) -> tuple[Way, str]:
    """(how its sequences share a pass, why not in the better way). StreamUnsupported when it cannot be served."""
    tried: list[str] = []
    for way in CHUNKS:
        why = _why_not(loaded, way)
        if not why:
            return way, "; ".join(tried)
        tried.append(f"{way}: {why}")
    raise StreamUnsupported(
        f"it cannot be run with kept keys and values ({'; '.join(tried)}). transformers' own generate runs it where it "
        "fits; a model of another family can be streamed."
    )


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
        before = _held_in_modules(model)
        vocab = tiny.facts.vocab_size
        texts = [torch.randint(2, vocab, (length,), generator=generator).tolist() for length in LENGTHS]
        with torch.no_grad():
            expected = [_expected(model, text, chunks) for text, chunks in zip(texts, CHUNKS[way], strict=True)]
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
    if off <= TOLERANCE:
        return ""
    if held := sorted(_held_in_modules(model) - before):
        return f"its {held[0]} within itself, where there is room for one sequence's"
    return f"a tiny copy gives other logits (off by {off:.0e} of the largest)"


def _held_in_modules(model: Any) -> set[str]:
    """Tensors that modules hold beside parameters and buffers: states, where they come with a run."""
    return {
        f"{type(module).__name__} keeps {name}"
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def _expected(model: Any, text: list[int], chunks: tuple[int, ...]) -> torch.Tensor:
    """[T, V] of the model by itself: its tokens at once; in steps behind a prompt as its own `generate` has them, where
    it can."""
    if chunks not in IN_STEPS or len(chunks) == 1:
        return model(input_ids=torch.tensor([text])).logits[0].float()
    name = cache_argument(model)
    try:
        cache, found = DynamicCache(config=model.config), []
        for start, count in zip(itertools.accumulate(chunks, initial=0), chunks, strict=False):
            ids = torch.tensor([text[start : start + count]])
            found.append(model(input_ids=ids, use_cache=True, **{name: cache}).logits[0].float())
        return torch.cat(found)
    except Exception:  # its own code wants another cache
        return _expected(model, text, (len(text),))


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


def _sequence(number: int, text: list[int], cache: KvCache) -> Running:
    request = Request(str(number), tuple(text), Sampling(temperature=0))
    sequence = Running(request, 0, 0, TextStream(None), None, Clock(0.0), frozenset())
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
    kept = kept_of_layers(tiny, units, way)
    groups = tuple(GroupPlan(window, num_pages) for window in kept.shapes or (None,))
    most, shares = (64 if way == "states" else None), way != "steps"
    cache = KvCache(CacheSettings(groups, page_tokens, torch.float32, "same", shares, most))
    attention = PagedAttention(cache, limits=limits)
    undo.callback(attention.close)
    use_attention(tiny.model, attention.name)
    units.isolation = "position_ids"
    sizes = RunnerLimits(call_tokens=call_tokens)
    if way != "paged":
        return StatesRunner(flow, tiny, attention, sizes, CPU, can_step_back=way == "states"), cache
    return PagedRunner(flow, attention, sizes, CPU), cache


class _Seen(Exception):
    """Ends a layer once its attention has been called."""


@dataclass
class KeptOfLayers:
    """Attentions and states that layers keep of the tokens before."""

    attentions: dict[int, AttentionSize] = field(default_factory=dict)
    """Attention by layer; absent where a layer has none."""
    state_bytes: int = 0
    """States of one sequence, all layers together."""

    @property
    def shapes(self) -> dict[int | None, dict[int, KvShape]]:
        """Widths of keys and values by window and layer."""
        found: dict[int | None, dict[int, KvShape]] = {}
        for layer, size in self.attentions.items():
            shape = KvShape(size.kv_heads, size.key_width, size.value_width)
            found.setdefault(size.window, {})[layer] = shape
        return found


@dataclass(frozen=True)
class PagedLayers:
    """Layers of a model whose sequences share rows, and the keys and values that they keep."""

    layers: Sequence[Any]
    kept: KeptOfLayers

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values in all layers."""
        shapes = [shape for of_layers in self.kept.shapes.values() for shape in of_layers.values()]
        return sum(shape.token_bytes(dtype, "same") for shape in shapes)


def paged_layers(loaded: LoadedModel) -> PagedLayers:
    """Find them in a plain model in RAM, before it gets adapters. StreamUnsupported where sequences share no rows."""
    way, why = way_of(loaded)
    if way != "paged":
        raise StreamUnsupported(f"its sequences share no passes ({why})")
    units = discover_units(loaded)
    return PagedLayers(units.layers, kept_of_layers(loaded, units))


def kept_of_layers(loaded: LoadedModel, units: ModelParts, way: Way = "paged") -> KeptOfLayers:
    """Find what each layer keeps: each kind is run on two tokens; where it keeps no states, up to its attention.
    UnknownAttention or StreamUnsupported where a layer of a model without states shows no attention."""
    seen: list[AttentionSize] = []

    class Watch(PagedAttention):
        def seen(self, size: AttentionSize) -> None:
            seen.append(size)
            if way == "paged":
                raise _Seen

    watch = Watch(None)
    before, isolation = implementations_of(loaded.model), units.isolation
    use_attention(loaded.model, watch.name)
    units.isolation = "position_ids"
    decoder, found = units.parts.decoder, KeptOfLayers()
    states = SequenceStates({} if way == "paged" else fresh_layers(loaded.config))
    try:
        batch = {"input_ids": torch.zeros((1, 2), dtype=torch.long)}
        if "position_ids" in accepted_names(decoder)[0] or accepted_names(decoder)[1]:
            batch["position_ids"] = torch.arange(2)[None]
        inputs: dict[str, Any] = {}
        if states.layers:
            inputs = {cache_argument(decoder): StatesOfCall([states], 0, len(units.layers)), "use_cache": True}
        with torch.no_grad():
            log = units.record(batch, inputs=inputs)
            kinds: dict[int, tuple[AttentionSize | None, int]] = {}
            for index, kind in enumerate(alike(units.layers)):
                if kind not in kinds:
                    held = states.size_bytes
                    attention = _first_call(units, index, log, watch, seen)
                    kinds[kind] = attention, states.size_bytes - held
                attention, of_states = kinds[kind]
                found.state_bytes += of_states
                if attention is not None:
                    found.attentions[index] = attention
                elif way == "paged":
                    raise UnknownAttention(f"layer {index} has no attention of the usual form")
    finally:
        units.isolation = isolation
        for put_back in before:
            put_back()
        watch.close()
    if way != "paged" and not found.state_bytes:
        raise UnknownAttention("its layers keep no states that could be handed to them")
    return found


def _first_call(
    units: ModelParts, index: int, log: Any, watch: PagedAttention, seen: list[AttentionSize]
) -> AttentionSize | None:
    """The layer's attention; None where it calls none."""
    watch.begin([PassTables([Span(SequencePages([]), 0, 2, 0)], 1, SmallCopies(CPU))])
    seen.clear()
    call = log.call(index)
    with suppress(_Seen), with_memory(units.layers[index]) as layer:
        layer(log.hidden, *call.args, **call.kwargs)
    return seen[0] if seen else None


def implementations_of(model: Any) -> list[Callable[[], None]]:
    """Functions that put back each config's attention as it is now."""
    found: dict[int, Callable[[], None]] = {}
    for module in unwrap(model).modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            name = config._attn_implementation
            found.setdefault(id(config), lambda c=config, n=name: setattr(c, "_attn_implementation", n))
    return list(found.values())
