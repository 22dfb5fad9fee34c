"""Needs of a model that answers, the room for them, and the presets: limits and an objective each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from outcore.sizing.inference.experts import ExpertSize
from outcore.sizing.inference.pass_bytes import GUESSED_TOKENS, LayerSize

PresetName = Literal["balanced", "latency", "throughput"]
Home = Literal["vram", "ram", "nvme"]

MOST_SNAPSHOTS, RAM_SHARE_OF_SNAPSHOTS = 256, 0.05
"""Copies of recurrent states at most, and the share of RAM that they may take."""


@dataclass(frozen=True)
class PresetRule:
    """Limits and objective of one preset."""

    name: PresetName
    max_sequences: int
    """Answers written at the same time."""
    pass_tokens: int
    chunk_tokens: int
    kv_share: float
    """Share of the device's memory that keys and values may take; what they need beyond lives in RAM."""
    context_tokens: int
    """Tokens of one sequence, unless told."""
    objective: str

    def usual_context(self, asked: int | None, positions: int | None, short_positions: int | None) -> int | None:
        """Tokens of one sequence: as asked, else this preset's or what the model knows (its positions, those of its
        short rotary factors); None where neither is known."""
        known = [limit for limit in (positions, short_positions) if limit is not None]
        return asked or (min(self.context_tokens, *known) if known else None)


PRESETS: dict[str, PresetRule] = {
    rule.name: rule
    for rule in (
        PresetRule(
            "balanced", 32, 4096, 1024, 0.25, 8192, "many answers at once without long waits for the first word"
        ),
        PresetRule("latency", 4, 2048, 1024, 0.2, 8192, "one answer as fast as it goes: weights stay, few sequences"),
        PresetRule(
            "throughput", 256, 16384, 2048, 0.5, 4096, "most tokens an hour: weights travel once for many answers"
        ),
    )
}


@dataclass(frozen=True)
class PartSize:
    """One part of the model."""

    name: str
    size_bytes: int
    """Bytes as it lives at home and travels."""
    is_layer: bool
    expanded_bytes: int = 0
    """Bytes of a packed part, as it is used: one at a time on the device that computes."""
    is_experts: bool = False
    """Whether these are a layer's experts, which come to the device one by one as they are chosen."""
    is_rows: bool = False
    """Whether it is an embedding and nothing else: a pass needs the rows of its tokens, not all of it."""


@dataclass(frozen=True)
class KvSize:
    """Bytes of keys and values a token, by windows."""

    bytes_by_window: tuple[tuple[int | None, int], ...]
    """(window, bytes of a token in all layers with it); None: no window."""

    @property
    def token_bytes(self) -> int:
        return sum(size for _, size in self.bytes_by_window)

    def sequence_bytes(self, tokens: int, chunk_tokens: int) -> int:
        """A sequence of so many tokens; layers with a window keep that and the chunk that comes in."""
        return sum(
            size * (tokens if window is None else min(tokens, window + chunk_tokens))
            for window, size in self.bytes_by_window
        )

    def read_bytes(self, tokens: float, sequences: float, rows: float) -> float:
        """Bytes that a pass of so many rows reads, where sequences have so many tokens together."""
        return sum(
            size * (tokens if window is None else min(tokens, max(1, sequences) * window + rows))
            for window, size in self.bytes_by_window
        )

    def most_tokens(self, n_bytes: int, chunk_tokens: int) -> int | None:
        """The longest sequence that so many bytes hold; None: windows alone set no limit."""
        whole = sum(size for window, size in self.bytes_by_window if window is None)
        kept = sum(size * (window + chunk_tokens) for window, size in self.bytes_by_window if window is not None)
        if not whole:
            return None
        return n_bytes // self.token_bytes if n_bytes < kept else (n_bytes - kept) // whole


@dataclass(frozen=True)
class InferenceNeeds:
    """Bytes that are to be placed: weights, keys and values, states, experts."""

    COPIES_WITH_GUESSES: ClassVar = 2
    """Copies of an answer's recurrent states where tokens are guessed: those before a guess stay until it is judged."""

    parts: tuple[PartSize, ...]
    kv: KvSize
    layer: LayerSize
    vocab_size: int
    itemsize: int
    """Bytes of a number in the weights' type."""
    is_packed_kv: bool = False
    """Whether keys and values are stored in 8 bits."""
    state_bytes: int = 0
    """Recurrent states of one answer, where the model has such."""
    num_snapshots: int = 0
    """Copies of states in RAM, for prompts that begin alike."""
    experts: ExpertSize | None = None
    """Experts, where they come as they are chosen."""

    def with_experts(self, layers: Sequence[tuple[int, int, int]]) -> InferenceNeeds:
        """Make the needs with experts that come as they are chosen: of each layer (bytes of one on the device, their
        number, bytes of one as it is used where it is packed)."""
        if not layers:
            return self
        slot_bytes, num_experts, expanded_bytes = (max(sizes) for sizes in zip(*layers, strict=True))
        experts = ExpertSize(slot_bytes, num_experts, len(layers), self.layer.experts_per_token, expanded_bytes)
        return replace(self, experts=experts)

    def with_snapshots(
        self, of_one: int, limits: InferenceLimits, processes: int = 1
    ) -> tuple[InferenceNeeds, InferenceLimits]:
        """Make room in RAM for copies of states, `of_one` bytes each, that later prompts may begin from. Each of the
        `processes` that share the RAM keeps its own."""
        of_all = of_one * processes
        count = min(MOST_SNAPSHOTS, int(limits.ram_bytes * RAM_SHARE_OF_SNAPSHOTS) // max(1, of_all))
        return replace(self, num_snapshots=count), replace(limits, ram_bytes=limits.ram_bytes - count * of_all)


@dataclass(frozen=True)
class InferenceLimits:
    """The machine's room and what the user fixed; None: the rule decides."""

    RAM_LEFT_BYTES: ClassVar[int] = 2 << 30
    """RAM that stays free for everything else, unless told."""

    vram_bytes: int | None
    """Bytes of VRAM; None: there is no GPU."""
    ram_bytes: int
    has_nvme: bool = False
    context_tokens: int | None = None
    max_sequences: int | None = None
    pass_tokens: int | None = None
    chunk_tokens: int | None = None
    kv_home: Home | None = None
    kv_bytes: int | None = None
    num_buffers: int = 3
    scores_only: bool = False
    """Texts are scored, which keeps no keys and values."""
    guessed_tokens: int = GUESSED_TOKENS
    has_graphs: bool = True
    """Whether a GPU runs passes of few tokens as CUDA graphs."""
    expert_bytes: int | None = None
    """Memory for experts as they are chosen; None: what is left on the device."""
    reads_ram: bool = False
    """Whether the device reads page-locked RAM, rows of an embedding that need not come whole then."""
    runs_few: bool = True
    """Whether a CPU may compute experts for a GPU."""
    pads_calls: bool = False
    """Whether a call of a layer is filled up to `chunk_tokens`, however short the prompt is."""
