"""fp32 moments without loss in 28 bits instead of 32, for a drive: neighbours have nearly the same exponent.

A block of 256 elements takes two times 896 bytes of planes, exp_avg's and exp_avg_sq's, and a head of 8. A plane holds
of each element the low 16 bits, then 8 bits, then 4:

    exp_avg       sign, 23 bits of mantissa, a code of 4 bits
    exp_avg_sq    23 bits of mantissa, a code of 5 bits (its highest where the other has the sign: it has none)

`top` is the block's largest exponent (the 8 bits of an fp32 number). A code is `top - exponent`; the largest code says
that the exponent is 0 (zero itself, nearly always), the second largest that the distance is beyond the codes: then the
exponent itself is the next byte of the block's part of the tail. Were there more than 128 of those, codes are the low
bits of exponents and the tail has the others, two to a byte. So a block takes at most 256 bytes of tail for both
moments, in practice next to none: 13 octaves below the largest of 256 neighbours, 29 for their squares, are rare.

    planes of exp_avg [blocks, 896], of exp_avg_sq, heads [blocks, 8], head of the chunk [64], tail, tail

Head of a block: top of either, escapes of either (255: codes are whole exponents), offset into the tail in 4 bytes. An
update reads one tail and writes the other, in whatever order its threads come; the chunk's head says which one is
valid and how much of it is used, so that a drive moves no more than that.

All patterns of exp_avg come back, those of exp_avg_sq without a sign (-0 as 0). This module is the definition, in
torch; the extension's compressed.h gives the same bytes where one thread goes through the blocks in order."""

from __future__ import annotations

from typing import NamedTuple

import torch

from outcore.optim.formats.state_format import BLOCK_HEAD_BYTES, BLOCK_NUMEL, PLANES_BYTES, StateFormat, check_buffer

HALF = BLOCK_NUMEL // 2
FEW_ESCAPES, WIDE = 128, 255
CODE_BITS = (4, 5)
"""Bits of exp_avg and exp_avg_sq."""


class Tail(NamedTuple):
    """Place where the valid tail lies in a chunk's buffer, and how much of it is used."""

    offset_bytes: int
    size_bytes: int


def tail_of(state_format: StateFormat, state: torch.Tensor, numel: int) -> Tail:
    """Tail of the chunk in `state`, while no update of it runs. Raises ValueError if its head is impossible."""
    size_bytes, index, next_bytes = _chunk_head(state_format, state, numel)[:3].tolist()
    room_bytes = state_format.tail_bytes(numel)
    if index not in (0, 1) or not 0 <= size_bytes <= room_bytes or next_bytes:
        raise ValueError(
            f"not a chunk of compressed states, or damaged: tail {index} with {size_bytes} and {next_bytes} bytes of "
            f"{room_bytes}"
        )
    return Tail(state_format.fixed_bytes(numel) + index * room_bytes, size_bytes)


def check_moments(
    state_format: StateFormat, state: torch.Tensor, exp_avg: torch.Tensor | None, exp_avg_sq: torch.Tensor | None
) -> int:
    """Elements of the chunk. ValueError unless all fit together."""
    given = [moment for moment in (exp_avg, exp_avg_sq) if moment is not None]
    if not state_format.compressed or not given:
        raise ValueError(f"the format {state_format.name!r} has no compressed moments, or none is asked for")
    numel = given[0].numel()
    for moment in given:
        if moment.dtype != torch.float32 or not moment.is_contiguous() or moment.numel() != numel:
            raise ValueError(f"moments must be {numel} contiguous fp32 numbers, got {moment.numel()} of {moment.dtype}")
    check_buffer(state, state_format.chunk_bytes(numel))
    return numel


def check_unsigned(exp_avg_sq: torch.Tensor) -> None:
    """ValueError for second moments below zero: their sign would be lost."""
    if bool((exp_avg_sq < 0).any()):
        raise ValueError("second moments below zero cannot be: a mean of squares is not")


def expand_moments(
    state_format: StateFormat, state: torch.Tensor, exp_avg: torch.Tensor | None, exp_avg_sq: torch.Tensor | None
) -> None:
    """The chunk's moments as fp32 into `exp_avg` and `exp_avg_sq` ([numel] each; None: not this one)."""
    numel = check_moments(state_format, state, exp_avg, exp_avg_sq)
    views = state_format.views(state, numel)
    heads = views["block_heads"].view(-1, BLOCK_HEAD_BYTES)
    counts = heads[:, 2:4].to(torch.int64)
    offsets = heads[:, 4:].contiguous().view(torch.int32).view(-1).to(torch.int64)
    at = tail_of(state_format, state, numel)
    tail = state[at.offset_bytes : at.offset_bytes + state_format.tail_bytes(numel)]
    first_bytes = _extra_bytes(counts[:, 0])
    for index, (name, out) in enumerate((("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq))):
        if out is not None:
            starts = offsets + (first_bytes if index else 0)
            planes = views[name].view(-1, PLANES_BYTES)
            bits = _decode(planes, heads[:, index].to(torch.int64), counts[:, index], tail, starts, CODE_BITS[index])
            out.copy_(bits.to(torch.int32).view(torch.float32).view(-1)[:numel])


def compress_moments(
    state_format: StateFormat, state: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
) -> None:
    """Set the chunk's moments ([numel] each, fp32)."""
    numel = check_moments(state_format, state, exp_avg, exp_avg_sq)
    check_unsigned(exp_avg_sq)
    tail_of(state_format, state, numel)
    views = state_format.views(state, numel)
    heads = views["block_heads"].view(-1, BLOCK_HEAD_BYTES)
    head = _chunk_head(state_format, state, numel)
    index = 1 - int(head[1])
    start = state_format.fixed_bytes(numel) + index * state_format.tail_bytes(numel)
    tail = state[start : start + state_format.tail_bytes(numel)]
    parts: list[_Encoded] = []
    for name, values, bits in zip(("exp_avg", "exp_avg_sq"), (exp_avg, exp_avg_sq), CODE_BITS, strict=True):
        blocks = torch.zeros(len(heads) * BLOCK_NUMEL, dtype=torch.float32)
        blocks[:numel] = values
        parts.append(_encode(blocks.view(torch.int32).view(-1, BLOCK_NUMEL).to(torch.int64), bits))
        views[name].view(-1, PLANES_BYTES).copy_(parts[-1].planes)
        heads[:, len(parts) - 1], heads[:, len(parts) + 1] = parts[-1].top, parts[-1].num_escapes
    sizes = [_extra_bytes(part.num_escapes) for part in parts]
    ends = (sizes[0] + sizes[1]).cumsum(0)
    offsets = ends - sizes[0] - sizes[1]
    heads[:, 4:] = torch.where(sizes[0] + sizes[1] > 0, offsets, 0).to(torch.int32).view(-1, 1).view(torch.uint8)
    _fill(tail, parts[0], offsets)
    _fill(tail, parts[1], offsets + sizes[0])
    head.zero_()
    head[0], head[1] = ends[-1], index


class _Encoded(NamedTuple):
    """One moment of all blocks."""

    planes: torch.Tensor
    """uint8 [blocks, 896]."""
    top: torch.Tensor
    num_escapes: torch.Tensor
    escapes: torch.Tensor
    """bool [blocks, 256]: whose exponents go to the tail one by one."""
    exponents: torch.Tensor
    """int64 [blocks, 256]."""
    code_bits: int


def _chunk_head(state_format: StateFormat, state: torch.Tensor, numel: int) -> torch.Tensor:
    at = state_format.regions(numel)["chunk_head"]
    return state[at.offset_bytes : at.offset_bytes + at.size_bytes].view(torch.int64)


def _extra_bytes(count: torch.Tensor) -> torch.Tensor:
    return count.clamp(max=HALF)


def _nibbles(values: torch.Tensor) -> torch.Tensor:
    return values[:, :HALF] | values[:, HALF:] << 4


def _encode(bits: torch.Tensor, code_bits: int) -> _Encoded:
    """Encode int64 [blocks, 256], the bits of fp32 numbers."""
    zero = (1 << code_bits) - 1
    escape = zero - 1
    exponents = bits >> 23 & 255
    top = exponents.amax(1)
    codes = torch.where(exponents == 0, zero, (top[:, None] - exponents).clamp(max=escape))
    escapes = codes == escape
    count = escapes.sum(1)
    is_wide = count > FEW_ESCAPES
    codes = torch.where(is_wide[:, None], exponents & zero, codes)
    eighth = bits >> 24 & 128 if code_bits == 4 else (codes & 16) << 3
    planes = torch.cat(
        [
            bits.to(torch.int16).view(torch.uint8),
            (bits >> 16 & 127 | eighth).to(torch.uint8),
            _nibbles(codes & 15).to(torch.uint8),
        ],
        dim=1,
    )
    return _Encoded(planes, top, torch.where(is_wide, WIDE, count), escapes & ~is_wide[:, None], exponents, code_bits)


def _fill(tail: torch.Tensor, part: _Encoded, starts: torch.Tensor) -> None:
    """Bring what does not fit into the planes to its places in the tail."""
    places = starts[:, None] + part.escapes.cumsum(1) - 1
    tail[places[part.escapes]] = part.exponents[part.escapes].to(torch.uint8)
    is_wide = part.num_escapes == WIDE
    places = starts[is_wide, None] + torch.arange(HALF)
    tail[places] = _nibbles(part.exponents[is_wide] >> part.code_bits).to(torch.uint8)


def _decode(
    planes: torch.Tensor,
    top: torch.Tensor,
    count: torch.Tensor,
    tail: torch.Tensor,
    starts: torch.Tensor,
    code_bits: int,
) -> torch.Tensor:
    """int64 [blocks, 256], the bits of fp32 numbers (negative ones as unsigned)."""
    zero = (1 << code_bits) - 1
    low = planes[:, : 2 * BLOCK_NUMEL].contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    high = planes[:, 2 * BLOCK_NUMEL : 3 * BLOCK_NUMEL].to(torch.int64)
    nibbles = planes[:, 3 * BLOCK_NUMEL :].to(torch.int64)
    codes = torch.cat([nibbles & 15, nibbles >> 4], dim=1)
    if code_bits == 5:
        codes = codes | (high & 128) >> 3
    exponents = torch.where(codes == zero, 0, top[:, None] - codes)
    is_wide = count == WIDE
    escapes = (codes == zero - 1) & ~is_wide[:, None]
    places = starts[:, None] + escapes.cumsum(1) - 1
    exponents[escapes] = tail[places[escapes]].to(torch.int64)
    more = tail[starts[is_wide, None] + torch.arange(HALF)].to(torch.int64)
    exponents[is_wide] = codes[is_wide] | torch.cat([more & 15, more >> 4], dim=1) << code_bits
    sign = (high & 128) << 24 if code_bits == 4 else 0
    return sign | exponents << 23 | (high & 127) << 16 | low
