"""A model opened for answers: how sequences share a pass, where every byte lives, then weights, cache and engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from outcore.common.quantities import GIB, MIB, format_gib
from outcore.common.words import own_command
from outcore.data.chat import end_tokens_of
from outcore.flow import (
    CompiledLayers,
    Flow,
    Head,
    ModelParts,
    PartRunner,
    let_segments_grow,
)
from outcore.flow.experts import ExpertCache, FewTokens
from outcore.flow.weights import InPlaceProducts, Scratch
from outcore.infer.attention import PagedAttention
from outcore.infer.cache import CacheSettings, GroupPlan, KvCache, open_memory
from outcore.infer.engine import InferenceEngine, Speech
from outcore.infer.labels import labels_of
from outcore.infer.opening.arrival import ResidentWeights
from outcore.infer.opening.check import IN_ONE_PIECE, Way, use_attention
from outcore.infer.opening.few_tokens import open_few_tokens, try_few_tokens
from outcore.infer.opening.in_place import open_in_place, try_in_place
from outcore.infer.opening.limits import fixed_rows_of, guessed_tokens_of, runs_graphs, schedule_limits
from outcore.infer.opening.model import FoundModel, ModelPlace, find_place, open_model
from outcore.infer.opening.pages import cache_of, kept_of
from outcore.infer.opening.place import PlacedModel, place_found
from outcore.infer.opening.rotary import fix_factors
from outcore.infer.opening.settings import InferSettings
from outcore.infer.opening.weights import (
    HostShare,
    OpenedWeights,
    StagingSettings,
    open_rows,
    open_weights,
)
from outcore.infer.passes import (
    DraftModel,
    PagedRunner,
    PassRunner,
    RunnerLimits,
    SeeingRunner,
    SmallPasses,
    StatesRunner,
    WholeRunner,
)
from outcore.infer.schedule import ScheduleLimits, Scheduler
from outcore.model import LoadedModel, max_positions
from outcore.model.facts import model_facts
from outcore.model.trial import Abilities
from outcore.sizing.inference import PRESETS, PartSize, PassSize, Placement
from outcore.sizing.streaming import SLOT_BYTES
from outcore.staging.lanes import UploadLane

DRAFT_ANSWERS = 4
"""Answers at a time that a draft model guesses for."""
DRAFT_SHARES = ("device", "precision", "context", "page_tokens", "vram_gib", "ram_gib", "compile", "deterministic")
"""Settings that a draft model has from the large one."""
MAX_KINDS = 8
"""Kinds of layers that are compiled, two functions each: about 10 s a function where nothing is cached."""
WARM_TOKENS = 8
"""Tokens of the shortest prompt that is read before the first request comes."""
SEEING_READS = frozenset((
    "pictures", "adapter", "quantize", "context", "vram_gib", "ram_gib", "nvme_path", "trust_remote_code",
    "page_tokens", "deterministic",
))  # fmt: skip
"""Settings that a model that sees reads, and some that change nothing here."""
SEEN_BYTES = 256 * MIB
"""RAM for what a tower made of the latest prompts' pictures: each turn of a chat shows them again."""
MOST_CONTEXT = 32_768
"""Tokens of prompt and answer where nobody says, of models that know more positions."""


@dataclass
class OpenedModel:
    """A model that answers. Close it."""

    engine: InferenceEngine
    found: FoundModel
    placement: Placement
    way: Way
    weights: OpenedWeights | None
    """Weights that flow brings; None: transformers' own model, streamed by `outcore.hf`."""
    device: torch.device
    _undo: ExitStack

    @property
    def experts(self) -> ExpertCache | None:
        """Experts that come as they are chosen, if any do."""
        return None if self.weights is None else self.weights.experts

    @property
    def lanes(self) -> Mapping[str, UploadLane]:
        """Ways of weights to the device, by name."""
        return {} if self.weights is None else self.weights.lanes

    def waited_s(self) -> Mapping[str, float]:
        """Seconds that the device waited in the last pass, for copies ("pcie") and for the drive ("nvme")."""
        return {} if self.weights is None else self.weights.arrival.waited_s()

    def also(self, undo: ExitStack) -> None:
        """Close these, too, behind everything else."""
        behind = self._undo.pop_all()
        self._undo.push(undo)
        self._undo.push(behind)

    def close(self) -> None:
        """Let model, memory and drives go."""
        self.engine.close()
        self._undo.close()


def open_engine(
    name: str,
    settings: InferSettings | None = None,
    progress: Callable[[str], None] = lambda line: None,
    share: HostShare | None = None,
) -> OpenedModel:
    """Open the model called `name`; on every process of `share` at once. ValueError (StreamUnsupported, DoesNotFit) or
    RuntimeError, in words."""
    settings = settings or InferSettings()
    device = device_of(settings)
    settings.check_device(device.type)
    place = find_place(name, settings.adapter)
    if (place.sees or settings.pictures) and not settings.scores_only:
        return _open_seeing(place, settings, device, progress)
    found = open_model(
        name,
        precision=precision_of(settings, device),
        adapter=settings.adapter,
        adapters=settings.adapters,
        quantize=settings.quantize,
        trust_remote_code=settings.trust_remote_code,
    )
    progress(f"model: {found.words}")
    if settings.draft_model is None:
        return open_found(found, settings, device, progress, share=share)
    with ExitStack() as undo:
        draft = _open_draft(settings, device, progress)
        undo.callback(draft.close)
        used = draft.placement.bytes_at("vram" if device.type == "cuda" else "ram") + draft.placement.kv_bytes
        opened = open_found(found, _less(settings, used), device, progress, draft, share)
        opened.also(undo.pop_all())
        return opened


def _open_seeing(
    place: ModelPlace, settings: InferSettings, device: torch.device, progress: Callable[[str], None]
) -> OpenedModel:
    """Open the image-text model at this place. ValueError or RuntimeError, in words."""
    from outcore import hf

    _check_seeing(place, settings)
    trust, nvme = settings.trust_remote_code, [str(path) for path in settings.nvme_path] or None
    model = hf.load_image_text(place.weights, trust_remote_code=trust)
    encoder = hf.encoder_of(place.weights, model, trust_remote_code=trust)
    if place.adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, place.adapter).merge_and_unload()
    model.eval().requires_grad_(False)
    facts, dtype, size = model_facts(model), model.dtype, sum(p.nbytes for p in model.parameters())
    seen = sum(p.nbytes for p in hf.vision_parameters(model).values())
    ram_gib = settings.ram_gib if nvme else None
    hf.stream(model, vram_gib=settings.vram_gib, ram_gib=ram_gib, nvme=nvme, quantize=settings.quantize)
    hf.TowerOutputs(SEEN_BYTES, evicts=True).keep_of(model)
    why = "its sequences are answered one by one"
    loaded = LoadedModel(
        model, model.config, facts, Abilities(False, why, None, why), place.words, quantize=settings.quantize
    )
    known = max_positions(model.config)
    context = settings.context or min(known or MOST_CONTEXT, MOST_CONTEXT)
    ends = end_tokens_of(model, encoder.tokenizer)
    folders = (place.weights, *([] if place.adapter is None else [str(place.adapter)]))
    found = FoundModel(loaded, encoder.tokenizer, place.words, ends, known, folders, pictures=encoder)
    parts = PartSize("text", size - seen, True), PartSize("vision", seen, True)
    in_ram_bytes = int((settings.ram_gib or 0) * GIB) if nvme else size
    kv_home = "ram" if device.type == "cpu" else "vram"
    placement = Placement.of_one_answer(PRESETS["latency"], parts, in_ram_bytes, kv_home, context)
    for line in placement.lines():
        progress(line)
    groups = (GroupPlan(None, -(-context // settings.page_tokens)),)
    # `generate` reads every prompt from its start: what another answer has read is no beginning for it
    pages = CacheSettings(groups, settings.page_tokens, dtype, shares_prefixes=False)
    limits = ScheduleLimits(1, context, context, 0)
    engine = InferenceEngine(
        SeeingRunner(model, device),
        Scheduler(KvCache(pages), limits),  # its pages only count
        Speech(encoder.tokenizer, ends, facts.vocab_size, context, scores=False),
        speculates=False,
    )
    return OpenedModel(engine, found, placement, "whole", None, device, ExitStack())


def _check_seeing(place: ModelPlace, settings: InferSettings) -> None:
    if place.checkpoint is not None:
        raise ValueError(f"{place.checkpoint} is a checkpoint of a text model, which takes no pictures.")
    plain, names = InferSettings(), {field.name for field in fields(settings)} - SEEING_READS
    others = sorted(name for name in names if getattr(settings, name) != getattr(plain, name))
    others = ["aim" if name == "preset" else name for name in others]
    if others:
        raise ValueError(f"models that see do not read --{', --'.join(others)}; leave it out.")


def _open_draft(settings: InferSettings, device: torch.device, progress: Callable[[str], None]) -> OpenedModel:
    """The small model, whole on the device that computes. ValueError where it does not fit there."""
    assert settings.draft_model is not None
    answers = None if settings.max_sequences is None else min(settings.max_sequences, DRAFT_ANSWERS)
    shared: dict[str, Any] = {name: getattr(settings, name) for name in (*DRAFT_SHARES, "trust_remote_code")}
    own = InferSettings("latency", max_sequences=answers, draft_tokens=0, **shared)
    draft = open_engine(settings.draft_model, own, lambda line: progress(f"draft model: {line}"))
    if device.type == "cuda" and draft.placement.travelling_bytes:
        draft.close()
        raise ValueError(
            f"draft_model {settings.draft_model}: {format_gib(draft.placement.travelling_bytes)} of its weights do not "
            "fit in VRAM, and guesses that wait for weights do not pay. Choose a smaller one, or leave it out."
        )
    return draft


def _less(settings: InferSettings, used_bytes: int) -> InferSettings:
    """Take what the draft model uses off the memory that the user gave."""
    name = "ram_gib" if settings.vram_gib is None else "vram_gib"
    given = getattr(settings, name)
    return settings if given is None else replace(settings, **{name: max(given - used_bytes / GIB, 1e-3)})


def _draft_model(draft: OpenedModel, found: FoundModel, settings: InferSettings, way: Way) -> DraftModel:
    """Guesses for `found`. ValueError where the two models cannot go together."""
    for cannot, name in ((way in IN_ONE_PIECE, found.words), (draft.way != "paged", draft.found.words)):
        if cannot:
            raise ValueError(f"draft_model: {name} keeps states that cannot step back from a guess. Leave it out.")
    large, small = (model.tokenizer for model in (found, draft.found))
    theirs = small.get_vocab()
    other = next((text for text, token in large.get_vocab().items() if theirs.get(text) != token), None)
    if other is not None:
        raise ValueError(
            f"draft_model {settings.draft_model}: it knows token {other!r} by another number, or not at all: the two "
            "models must share one tokenizer."
        )
    sizes = draft.placement.pass_tokens, found.loaded.facts.vocab_size
    engine = draft.engine
    return DraftModel(engine.runner, engine.scheduler.cache, *sizes, is_deterministic=settings.deterministic)


def open_found(
    found: FoundModel,
    settings: InferSettings,
    device: torch.device,
    progress: Callable[[str], None],
    draft: OpenedModel | None = None,
    share: HostShare | None = None,
) -> OpenedModel:
    """Open a model that is found already; `draft`: who guesses for it; `share`: with whom its weights are shared."""
    labels = labels_of(found.loaded.config) if found.loaded.has_labels else None
    if labels is not None:  # nothing is written
        settings = settings.for_scoring()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    let_segments_grow(device)
    placed = place_found(found, settings, device, progress, share)
    with ExitStack() as undo:
        placed, rows, in_place = _try_kernels(placed, undo)
        placement = placed.placement
        for line in placement.lines():
            progress(line)
        settings.check_placement(placement)
        placed.units.buffers_to(device)
        uses_drive = placement.kv_home == "nvme" or any(home.home == "nvme" for home in placement.parts)
        scratch = undo.enter_context(Scratch(settings.nvme_path)) if uses_drive else None
        weights = _open_weights(placed, scratch, share, in_place, rows, undo)
        flow = _open_flow(placed, weights, in_place, progress)
        cache = _open_cache(placed, scratch, progress, undo)
        few, placement = open_few_tokens(placed, weights, in_place, undo)
        placed = replace(placed, placement=placement)
        passes = _runner(found, flow, cache, placement, settings, placed.way, weights.arrival, few)
        limits = schedule_limits(placement, settings, placed.way, placed.row_cost, device)
        fix_factors(found.loaded, placed.context, progress)
        engine = InferenceEngine(
            passes,
            Scheduler(cache, limits),
            Speech(
                found.tokenizer, found.end_tokens, found.loaded.facts.vocab_size, placed.context, labels, found.pooling
            ),
            speculates=settings.draft_tokens != 0,
            drafts=None if draft is None else _draft_model(draft, found, settings, placed.way),
            verify=lambda: None if few is None else few.check(),
            waited_s=weights.arrival.waited_s,
        )
        _warm_up(engine, flow.runner, placement, progress)
        placement = _try_passes(engine, weights, placed, few, progress)
        return OpenedModel(engine, found, placement, placed.way, weights, device, undo.pop_all())


def _try_kernels(
    placed: PlacedModel, undo: ExitStack
) -> tuple[PlacedModel, dict[str, torch.Tensor], InPlaceProducts | None]:
    """(the model as the machine bears it out, page-locked RAM of an embedding, what computes with weights where they
    are)."""
    rows = open_rows(placed.units, placed.placement, placed.device, undo)
    if rows is None:
        rows, placed = {}, placed.without_rows_in_ram()
    in_place, placement = open_in_place(placed.units, placed.settings, placed.placement, placed.device, undo)
    return replace(placed, placement=placement), rows, in_place


def _open_weights(
    placed: PlacedModel,
    scratch: Scratch | None,
    share: HostShare | None,
    in_place: InPlaceProducts | None,
    rows: dict[str, torch.Tensor],
    undo: ExitStack,
) -> OpenedWeights:
    settings, feed = placed.settings, placed.found.loaded.feed
    staging = StagingSettings(
        settings.staging_bytes,
        SLOT_BYTES if settings.buffer_mib is None else int(settings.buffer_mib * MIB) // 4096 * 4096,
        placed.placement.num_buffers,
    )
    units, placement = placed.units, placed.placement
    weights = open_weights(units, placement, placed.device, staging, feed, undo, scratch, share, in_place, rows)
    undo.callback(weights.arrival.abort)
    return weights


def _open_flow(
    placed: PlacedModel, weights: OpenedWeights, in_place: InPlaceProducts | None, progress: Callable[[str], None]
) -> Flow:
    units, device = placed.units, placed.device
    compiled = layers_of(units, placed.settings, placed.way, device, progress)
    entering = None if weights.chosen is None else weights.chosen.enter
    runner = PartRunner(units, compiled=compiled, in_place=in_place, entering=entering)
    head = Head(runner, vocab_size=placed.found.loaded.facts.vocab_size)
    return Flow(runner, head, weights.arrival, device)


def _open_cache(
    placed: PlacedModel, scratch: Scratch | None, progress: Callable[[str], None], undo: ExitStack
) -> KvCache:
    settings, placement = placed.settings, placed.placement
    open_pages = placement.max_sequences + 2 * -(-placement.chunk_tokens // settings.page_tokens)
    sizes = placement.kv_home, placement.kv_bytes, scratch, open_pages
    memory = open_memory(placed.device, *sizes, pins=settings.pin_memory)
    undo.callback(memory.close)
    if memory.note:
        progress(memory.note)
    cache = cache_of(placed, memory, kept_of(placed, progress))
    undo.callback(cache.close_kept)  # its folder is locked from now on, though there be no memory for the stores
    cache.make_stores(placed.kept.shapes)
    return cache


def _try_passes(
    engine: InferenceEngine,
    weights: OpenedWeights,
    placed: PlacedModel,
    few: FewTokens | None,
    progress: Callable[[str], None],
) -> Placement:
    """The placement as trials with whole passes leave it."""
    placement, small = placed.placement, engine.runner.small if isinstance(engine.runner, PagedRunner) else None
    if placement.cpu_parts and placed.settings.cpu_tokens is None:
        placement = try_in_place(engine, weights.arrival, placed.units, placement, small)
        progress(placement.reasons[-1])
    if few is not None and small is not None:
        placement = try_few_tokens(engine, few, small, placement)
    if placement.experts is not None and placed.device.type == "cuda":
        progress(placement.reasons[-1])
    return placement


def layers_of(
    units: ModelParts, settings: InferSettings, way: Way, device: torch.device, progress: Callable[[str], None]
) -> CompiledLayers:
    """Choose whether layers are compiled; why not is told on a GPU. EngineError where it is asked for and cannot be."""
    layers = CompiledLayers(units, settings.compile, training=False, any_shape=True)
    if settings.compile == "auto" and device.type != "cuda":
        layers.why_not = "compile: auto compiles on a GPU only"
    elif way != "paged":
        layers.cannot("its layers keep states of their own between passes.")
    elif layers.num_kinds > MAX_KINDS:
        layers.cannot(f"its layers are of {layers.num_kinds} kinds, each of which would be compiled twice.")
    if layers.why_not and device.type == "cuda":
        progress(f"layers run eagerly: {layers.why_not}")
    return layers


def _warm_up(
    engine: InferenceEngine, runner: PartRunner, placement: Placement, progress: Callable[[str], None]
) -> None:
    """Have layers compiled before the first request comes: two functions for each kind of layer. Where no weights
    travel, a first prompt would also feel its kernels being loaded, which are others for every few tokens more."""
    layers = runner.compiled
    if layers is None or layers.why_not:
        return
    lengths = [WARM_TOKENS]
    while not placement.travels and lengths[-1] < placement.chunk_tokens:
        lengths.append(2 * lengths[-1])
    answer = 2 if placement.bytes_at("nvme") else 4  # passes that read a drive are dear: graphs wait for a request then
    seconds, small = engine.warm_up(lengths, answer), getattr(engine.runner, "small", None)
    graphs = "" if small is None else f", CUDA graphs: {small.why_not or 'yes'}"
    ways = f"eagerly: {layers.why_not}" if layers.why_not else f"compiled, {layers.num_kinds} kind(s)"
    progress(f"layers run {ways}{graphs}; making them took {seconds:.0f} s")


def device_of(settings: InferSettings) -> torch.device:
    """The device to run on. ValueError when it is not there."""
    has_gpu = torch.cuda.is_available()
    if settings.device == "auto":
        return torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    device = torch.device(settings.device)
    if device.type == "cuda" and not has_gpu:
        raise ValueError(
            f"device is cuda, but torch sees no GPU here. Use --device cpu, or see `{own_command('setup')}`."
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def precision_of(settings: InferSettings, device: torch.device) -> str:
    """bf16 on a GPU; on a CPU fp32, which its matrix products are fastest in, unless told."""
    if settings.precision != "auto":
        return settings.precision
    return "bf16" if device.type == "cuda" else "fp32"


def _runner(
    found: FoundModel,
    flow: Flow,
    cache: KvCache,
    placement: Placement,
    settings: InferSettings,
    way: Way,
    arrival: ResidentWeights,
    few: FewTokens | None,
) -> PassRunner:
    sizes, device = (placement.pass_tokens, placement.chunk_tokens), flow.device
    fixed_rows = fixed_rows_of(placement, settings, way, device)
    limits = RunnerLimits(sizes[1], sizes[0], is_deterministic=settings.deterministic, fixed_rows=fixed_rows)
    if way == "whole":
        if found.choice is not None:
            raise ValueError("adapters side by side: this model's sequences share no calls. Serve one by --adapter.")
        return WholeRunner(flow, found.loaded, limits, device)
    attention = PagedAttention(cache, is_deterministic=settings.deterministic)
    if found.choice is not None:
        found.choice.source = attention.adapters
    use_attention(found.loaded.model, attention.name)
    flow.units.isolation = "position_ids"
    if way != "paged":
        return StatesRunner(flow, found.loaded, attention, limits, device, can_step_back=way == "states")
    small = None
    has_graphs = runs_graphs(settings, way, device) and (arrival.experts is None or few is not None)
    if device.type == "cuda" and has_graphs and (fixed_rows is not None or not settings.deterministic):
        size = PassSize(*sizes, placement.context_tokens, placement.max_sequences, guessed_tokens_of(settings, way))
        rows = size.graph_rows if few is None else min(few.most_tokens, size.graph_rows)
        small = SmallPasses(
            flow, attention, cache, device,
            most_rows=rows, most_mixed=placement.chunk_tokens, is_on_cpu=arrival.is_on_cpu, experts=few,
            fixed_rows=fixed_rows,
        )  # fmt: skip
    return PagedRunner(flow, attention, limits, device, small=small, expect=arrival.expect)
