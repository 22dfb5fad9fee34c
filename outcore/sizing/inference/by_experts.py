"""Whether a mixture's experts come with their layers or by themselves, as tokens choose them."""

from __future__ import annotations

from collections.abc import Callable

from outcore.sizing.inference.needs import InferenceNeeds
from outcore.sizing.inference.placement import Placement
from outcore.sizing.inference.rule import DoesNotFit


def place_by_experts(
    place: Callable[[InferenceNeeds], Placement],
    needs: InferenceNeeds,
    apart: Callable[[], InferenceNeeds | None],
    *,
    is_asked: bool | None,
    on_gpu: bool,
    runs_few: bool = False,
    max_sequences: int | None = None,
) -> tuple[Placement, InferenceNeeds]:
    """Place the needs of whole layers, or those of `apart`, in which experts come as tokens choose them; says whose.
    The second where weights travel and it is asked for; where nothing is said of it (`is_asked` None) also if weights
    for a GPU (`on_gpu`) lie on a drive, or (`runs_few`: a CPU can compute them for the GPU) if all passes that write
    answers are of few tokens, which are worth more than long prompts; and where a whole layer does not fit on the GPU.
    `max_sequences`: answers at once that the user asked for; by default the preset for many writes as many as such a
    pass takes. `apart` gives None for a model without such experts. DoesNotFit."""

    def of_few(found: InferenceNeeds) -> Placement:
        """Place by experts, with fewer answers at once: a CPU reads RAM more than twice as fast as a link brings it, so
        half as many answers are written no slower in all, and one many times faster."""
        placed = place(found)
        few = placed.few_tokens
        if placed.preset.name != "balanced" or max_sequences is not None or not 0 < few < placed.max_sequences:
            return placed
        reason = f"up to {few} answers at once: the experts of so many tokens are computed where they lie"
        return placed.because(reason, max_sequences=few)

    try:
        placed = place(needs)
    except DoesNotFit:
        found = apart() if on_gpu else None
        if found is None:
            raise
        reason = "experts come as tokens choose them, because whole layers do not fit the GPU"
        return of_few(found).because(reason), found
    spills = on_gpu and is_asked is None and placed.bytes_at("nvme") > 0
    found = apart() if placed.travels and (is_asked or runs_few or spills) else None
    if found is None:
        return placed, needs
    try:
        placed_apart = of_few(found)
    except DoesNotFit:
        if is_asked:
            raise
        return placed, needs
    if is_asked:
        return placed_apart, found
    if spills:
        reason = "experts come as tokens choose them: of those on the drive no more is read than that"
        return placed_apart.because(reason), found
    if placed.preset.name == "throughput":
        return placed, needs
    if placed_apart.max_sequences > placed_apart.few_tokens:
        reason = (
            f"whole layers travel, with all their experts, because up to {placed.max_sequences} answers are asked for "
            "at once; for one reader that is many times slower than --aim latency, which reads the experts chosen"
        )
        return placed.because(reason), needs
    reason = (
        f"experts come as tokens choose them, because passes of up to {placed_apart.few_tokens} tokens are "
        "computed where they lie (--expert_cache_gib 0: they come with their layers)"
    )
    return placed_apart.because(reason), found
