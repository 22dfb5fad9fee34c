"""The rule that places a model for answers, which the engine follows and the planner forecasts by.

Sizes follow from the machine. Order of claims on the device: what a pass needs to run at all, keys and values (an
answer without them is nothing), embedding and head (every pass waits for them), layers, spread evenly so that uploads
hide behind neighbours that stay. What the device does not hold lives in RAM, what RAM does not hold on NVMe. On a CPU
the device is RAM.

Whether a mixture's experts come with their layers or by themselves, as tokens choose them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from outcore.common.quantities import format_gib
from outcore.sizing.inference.needs import PRESETS, Home, InferenceLimits, InferenceNeeds
from outcore.sizing.inference.pass_bytes import PassSize, pass_bytes
from outcore.sizing.inference.placement import Placement, in_ram, spread

RAM_SHARE_OF_KV = 0.4
"""Share of RAM that keys and values may take; a quarter of it where weights would have to go to a drive for them."""
FREE_SHARE = 0.04
"""Share of the device that stays free: the allocator's rounding and what a desktop takes meanwhile."""
RAM_TOKENS = 1024
"""Tokens of every answer that RAM has room for, where its share allows: answers that find no page wait for another
round of all the weights (256 requests of 536 tokens ran in three rounds where there was room for 256 tokens each)."""
ROOMY_TOKENS = 2048
"""Tokens of each answer that VRAM must have room for before more answers are written at once."""
OPEN_TOKENS = 64
"""Tokens of each answer whose keys and values are in RAM until their page is full."""
SCORING_TOKENS = 256
"""Tokens that pages are kept for where texts are scored only: enough to try the engine out."""
SCORED_PASS_TOKENS, SCORED_CALL_TOKENS = 16384, 4096
"""Tokens that share a pass where texts are scored only, enough to hide the weights' way, and the longest text that is
counted on."""


class DoesNotFit(ValueError):
    """The wish exceeds the machine; the message has the numbers and ways out."""


def place_inference(needs: InferenceNeeds, limits: InferenceLimits, preset: str = "balanced") -> Placement:
    """Decide. DoesNotFit (a ValueError) in numbers when the machine cannot do it."""
    rule = PRESETS[preset]
    sequences = limits.max_sequences or rule.max_sequences
    chunk = limits.chunk_tokens or rule.chunk_tokens
    pass_tokens = limits.pass_tokens or max(rule.pass_tokens, chunk)
    context = limits.context_tokens or rule.context_tokens
    if limits.scores_only:
        kept = replace(
            limits,
            scores_only=False,
            context_tokens=min(context, SCORING_TOKENS),
            max_sequences=1,
            pass_tokens=limits.pass_tokens or max(SCORED_PASS_TOKENS, chunk),
            chunk_tokens=limits.chunk_tokens or max(chunk, min(context, SCORED_CALL_TOKENS)),
        )
        placed = place_inference(needs, kept, preset)
        reason = "texts are scored only: no room is made for keys and values of answers"
        return replace(placed, context_tokens=context, reasons=(*placed.reasons, reason))
    reasons: tuple[str, ...] = ()
    if needs.state_bytes:
        total = limits.ram_bytes if limits.vram_bytes is None else limits.vram_bytes
        fit = limits.max_sequences or max(1, int(total * rule.kv_share) // needs.state_bytes)
        of_each = f"recurrent states: {format_gib(needs.state_bytes)} of each answer"
        reasons = (of_each if fit >= sequences else f"{of_each}, so {fit} at once instead of {sequences}",)
        sequences = min(sequences, fit)
    # What is asked for; where everything lives is filled in.
    asked = Placement(
        rule, (), "ram", 0, context, sequences, pass_tokens, chunk, limits.num_buffers,
        experts=needs.experts, runs_few=limits.runs_few,
    )  # fmt: skip
    if limits.vram_bytes is None:
        placed = _on_cpu(needs, limits, asked)
    else:
        asked, placed = _with_more_answers(needs, limits, asked, _on_gpu(needs, limits, asked))
        placed = _with_long_calls(needs, limits, asked, placed)
    return replace(placed, reasons=(*placed.reasons, *reasons))


def _with_more_answers(
    needs: InferenceNeeds, limits: InferenceLimits, asked: Placement, placed: Placement
) -> tuple[Placement, Placement]:
    """Settings and placement, with more answers at once where all weights stay and keys and values have
    room for them: a pass that reads the weights anyway then writes more tokens. One answer's preset stays at few."""
    most = PRESETS["throughput"].max_sequences
    grows = limits.max_sequences is None and asked.preset.name == "balanced" and not needs.state_bytes
    while grows and not placed.travels and placed.kv_home == "vram" and 2 * asked.max_sequences <= most:
        more = replace(asked, max_sequences=2 * asked.max_sequences)
        try:
            found = _on_gpu(needs, limits, more)
        except DoesNotFit:
            break
        tokens = needs.kv.sequence_bytes(min(asked.context_tokens, ROOMY_TOKENS), asked.chunk_tokens)
        if found.travels or found.kv_home != "vram" or found.kv_bytes < more.max_sequences * tokens:
            break
        asked, placed = more, found
    return asked, placed


def _with_long_calls(needs: InferenceNeeds, limits: InferenceLimits, asked: Placement, placed: Placement) -> Placement:
    """The placement with more tokens in a call of a layer, as far as nothing has to leave the device for it, and no
    answer: a call takes the host about a millisecond, in which a large GPU computes several thousand tokens of a small
    layer."""

    def answers(found: Placement) -> int:
        one = needs.kv.sequence_bytes(found.context_tokens, found.chunk_tokens)
        return min(found.max_sequences, found.kv_bytes // max(1, one))

    while limits.chunk_tokens is None and not limits.pads_calls and not placed.travels:
        tokens = min(2 * placed.chunk_tokens, placed.pass_tokens)
        try:
            longer = _on_gpu(needs, limits, replace(asked, chunk_tokens=tokens))
        except DoesNotFit:
            break
        is_same = longer.kv_home == placed.kv_home and answers(longer) >= answers(placed) and not longer.travels
        if tokens == placed.chunk_tokens or not is_same:
            break
        placed = longer
    return placed


def kv_wanted_bytes(needs: InferenceNeeds, sequences: int, chunk: int, context: int, least_tokens: int = 256) -> int:
    """Keys and values of all sequences at a quarter of the longest context, and at least one at full length."""
    one = needs.kv.sequence_bytes(context, chunk)
    return max(one, sequences * needs.kv.sequence_bytes(min(context, max(least_tokens, context // 4)), chunk))


def open_kv_bytes(needs: InferenceNeeds, sequences: int, chunk: int) -> int:
    """RAM for pages that are being filled, where full ones lie on a drive."""
    return (sequences * OPEN_TOKENS + 2 * chunk) * needs.kv.token_bytes


def _needs_drive(one: int, ram_bytes: int, limits: InferenceLimits) -> bool:
    """Whether keys and values of one whole context exceed RAM, and a drive is there for them."""
    return limits.kv_home is None and limits.has_nvme and limits.kv_bytes is None and one > ram_bytes


def _on_drive_words(one: int) -> str:
    return f"keys and values live on NVMe: {format_gib(one)} of one context would not fit in RAM"


def work_bytes(needs: InferenceNeeds, size: PassSize, *, has_graphs: bool) -> int:
    """Bytes that a forward pass holds besides weights and cache: its own tensors, and buffers that packed layers, and
    packed embedding and head, are expanded in."""
    own = pass_bytes(
        needs.layer,
        needs.vocab_size,
        size,
        needs.itemsize,
        is_packed_kv=needs.is_packed_kv,
        has_graphs=has_graphs,
    )
    expanded = sum(
        max(
            (part.expanded_bytes for part in needs.parts if part.is_layer == is_layer and not part.is_experts),
            default=0,
        )
        for is_layer in (True, False)
    )
    of_experts = 0 if needs.experts is None else needs.experts.work_bytes()
    return own + size.sequences * needs.state_bytes + expanded + of_experts


def _no_room(one: int, context: int, room: int, limits: InferenceLimits) -> str:
    if one <= room:
        return (
            f"--kv_gib asks for {format_gib(limits.kv_bytes or 0)} of VRAM, {format_gib(room)} are left: lower it, or "
            "--kv_home ram."
        )
    return (
        f"keys and values of {context:,} tokens need {format_gib(one)} of VRAM, {format_gib(room)} are left: context "
        f"{context * room // one // 256 * 256:,} tokens instead of {context:,}, --kv_format int8, or --kv_home ram."
    )


def _slots(needs: InferenceNeeds, limits: InferenceLimits, room_bytes: int) -> int:
    """Experts that the room holds, as far as the user gives it. DoesNotFit where it is too small to be worth while."""
    if needs.experts is None:
        return 0
    one, least = needs.experts.slot_bytes, needs.experts.least_slots
    given = room_bytes if limits.expert_bytes is None else min(room_bytes, limits.expert_bytes)
    count = min(needs.experts.total, max(0, given) // one)
    if count < least:
        raise DoesNotFit(
            f"experts that come as they are chosen need room for {least}, {format_gib(least * one)}, and have "
            f"{format_gib(max(0, given))}: raise --expert_cache_gib or leave it out, or lower --context."
        )
    return count


def _on_cpu(needs: InferenceNeeds, limits: InferenceLimits, asked: Placement) -> Placement:
    sequences, chunk, context = asked.max_sequences, asked.chunk_tokens, asked.context_tokens
    weights = sum(part.size_bytes for part in needs.parts)
    work = work_bytes(needs, asked.pass_size(limits.guessed_tokens), has_graphs=False)
    reasons = []
    kv = limits.kv_bytes or kv_wanted_bytes(needs, sequences, chunk, context)
    one = needs.kv.sequence_bytes(context, chunk)
    most_kv = limits.ram_bytes - work - (weights if not limits.has_nvme else 0)
    kv_home: Home = "nvme" if limits.kv_home == "nvme" or _needs_drive(one, most_kv, limits) else "ram"
    if kv_home == "ram" and limits.kv_bytes is None and kv > most_kv // 2:
        kv = max(one, most_kv // 2)
        reasons.append(f"keys and values take {format_gib(kv)} instead of more: RAM is short")
    kv_ram = kv if kv_home == "ram" else open_kv_bytes(needs, sequences, chunk)
    if kv_home == "nvme" and limits.kv_home is None:
        reasons.append(_on_drive_words(one))
    ram = limits.ram_bytes - kv_ram - work
    slots = 0
    if needs.experts is not None:  # slots that follow the choices serve better than a fixed share of every layer
        dense = sum(part.size_bytes for part in needs.parts if not part.is_experts)
        slots = _slots(needs, limits, max(ram - dense, ram // 2))
        ram -= slots * needs.experts.slot_bytes
    if ram < weights and not limits.has_nvme:
        raise DoesNotFit(
            f"the weights take {format_gib(weights)}, keys and values {format_gib(kv_ram)}, and RAM has "
            f"{format_gib(limits.ram_bytes)} to give: give a folder on a drive (--nvme_offload_path), a shorter "
            "--context, or choose a smaller model."
        )
    if one > kv:
        raise DoesNotFit(
            f"a context of {context:,} tokens needs {format_gib(one)} of keys and values, --kv_gib gives "
            f"{format_gib(kv)}: raise it, or lower --context."
        )
    parts = in_ram(needs.parts, ram)
    return replace(asked, parts=parts, kv_home=kv_home, kv_bytes=kv, reasons=tuple(reasons), expert_slots=slots)


def _on_gpu(needs: InferenceNeeds, limits: InferenceLimits, asked: Placement) -> Placement:
    rule, sequences, chunk, context = asked.preset, asked.max_sequences, asked.chunk_tokens, asked.context_tokens
    assert limits.vram_bytes is not None
    total = int(limits.vram_bytes * (1 - FREE_SHARE))
    layers = [part.size_bytes for part in needs.parts if part.is_layer and not part.is_experts]
    ends = [part.size_bytes for part in needs.parts if not part.is_layer]
    weights = sum(part.size_bytes for part in needs.parts)
    work = work_bytes(needs, asked.pass_size(limits.guessed_tokens), has_graphs=limits.has_graphs)
    reasons: list[str] = []
    num_buffers = min(limits.num_buffers, len(layers))
    while num_buffers > 2 and work + num_buffers * max(layers) + max(ends) > total:
        num_buffers -= 1
        reasons = [f"{num_buffers} layers on the GPU at a time instead of {limits.num_buffers}: VRAM is short"]
    buffers = num_buffers * max(layers)
    experts = 0 if needs.experts is None else needs.experts.least_slots * needs.experts.slot_bytes
    least = work + buffers + max(ends) + experts
    if least > total:
        raise DoesNotFit(
            f"this needs {format_gib(least)} of VRAM beside keys and values ({format_gib(work)} for a pass of "
            f"{asked.pass_tokens:,} tokens, {format_gib(buffers)} for {num_buffers} layers, {format_gib(max(ends))} "
            f"for embedding or head), you have {format_gib(max(0, total))}: "
            "lower --chunk_tokens or --num_layer_buffers."
        )
    one = needs.kv.sequence_bytes(context, chunk)
    wanted = limits.kv_bytes or kv_wanted_bytes(needs, sequences, chunk, context)
    room, share = total - least, int(total * rule.kv_share)
    kv = limits.kv_bytes or min(wanted, max(one, share))
    # One answer is worth more beside its keys and values. Of many, none may have to wait for another's place.
    stays = kv if limits.kv_bytes else {"latency": one, "balanced": kv, "throughput": wanted}[rule.name]
    most = room if limits.kv_bytes else min(room, share)
    elsewhere: Home = "nvme" if _needs_drive(one, limits.ram_bytes, limits) else "ram"
    kv_home: Home = limits.kv_home or ("vram" if stays <= most else elsewhere)
    if kv_home == "vram":
        if max(one, limits.kv_bytes or 0) > room:
            raise DoesNotFit(_no_room(one, context, room, limits))
        kv = min(kv, room)
        if not limits.kv_bytes:  # where all weights stay, nothing else could use what is left
            kv = max(kv, min(sequences * one, share, total - work - weights))
    elif kv_home == "nvme":
        kv = max(one, limits.kv_bytes or wanted)
        if limits.kv_home is None:
            reasons.append(_on_drive_words(one))
    else:
        wanted = kv_wanted_bytes(needs, sequences, chunk, context, RAM_TOKENS)
        spills = weights - (total - least) > limits.ram_bytes - wanted
        share = RAM_SHARE_OF_KV if not spills or rule.name == "throughput" else RAM_SHARE_OF_KV / 4
        kv = limits.kv_bytes or min(wanted, max(one, int(limits.ram_bytes * share)))
        if limits.kv_home is None:
            reasons.append(
                f"keys and values live in RAM: {format_gib(stays)} would not fit beside the weights' buffers"
            )
    device_kv = kv if kv_home == "vram" else 0
    left = total - work - device_kv
    whole = [part for part in needs.parts if not part.is_experts]
    homes, streams = spread(whole, left - experts, buffers, max(ends), reads_ram=limits.reads_ram)
    resident_bytes = sum(home.size_bytes for home in homes.values() if not home.is_rows)
    slots = _slots(needs, limits, left - streams - resident_bytes)
    kv_ram = {"vram": 0, "ram": kv, "nvme": open_kv_bytes(needs, sequences, chunk)}[kv_home]
    ram = limits.ram_bytes - kv_ram - sum(home.ram_bytes for home in homes.values())
    travelling = [part for part in needs.parts if part.name not in homes]
    ram_homes = {home.part: home for home in in_ram(travelling, ram)}
    if any(home.is_experts and home.home == "nvme" for home in ram_homes.values()) and asked.few_tokens:
        assert needs.experts is not None
        ram_homes = {home.part: home for home in in_ram(travelling, ram - needs.experts.question_bytes)}
    missing = sum(home.size_bytes - home.ram_bytes for home in ram_homes.values())
    if missing and not limits.has_nvme:
        raise DoesNotFit(
            f"{format_gib(sum(part.size_bytes for part in travelling))} of weights do not fit on the GPU, and RAM has "
            f"{format_gib(max(0, ram))} to give: give a folder on a drive (--nvme_offload_path), or choose a smaller "
            "model."
        )
    parts = tuple(homes.get(part.name) or ram_homes[part.name] for part in needs.parts)
    held = {"weights": resident_bytes, "keys and values": device_kv, "pass": work}
    if needs.experts is not None:
        held["experts"] = slots * needs.experts.slot_bytes
    if streams:
        held["buffers"] = streams
    if any(home.is_rows for home in homes.values()):
        reasons.append("the embedding stays in RAM, where the GPU reads the rows of a pass's tokens")
    if all(home.home == "vram" for home in parts):
        reasons.append(f"all {format_gib(weights)} of weights stay on the GPU")
    return replace(
        asked,
        parts=parts,
        kv_home=kv_home,
        kv_bytes=kv,
        num_buffers=num_buffers,
        vram_bytes={name: size for name, size in held.items() if size},
        reasons=tuple(reasons),
        expert_slots=slots,
    )


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
