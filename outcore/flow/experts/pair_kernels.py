"""Triton kernels that multiply pairs of a token and an expert, and sum their results. Imported on a GPU only;
`few_tokens.py` says the same in torch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def share_out(numbers, where, every, told, slots, links, count, BLOCK: tl.constexpr):
    """For `count` pairs, whose experts are `numbers`: slot of each (-1: none), and its number where the GPU reads it in
    RAM (-1: it does not), which is every so many of those without a slot. `told`: in the CPU's RAM."""
    at = tl.arange(0, BLOCK)
    is_pair = at < count
    number = tl.load(numbers + at, is_pair, 0).to(tl.int32)
    tl.store(told + at, number, is_pair)
    slot = tl.load(where + number, is_pair, 0)
    misses = (is_pair & (slot < 0)).to(tl.int32)
    each = tl.load(every)
    is_linked = (misses > 0) & (each > 0) & (tl.cumsum(misses, 0) % tl.maximum(each, 1) == 0)
    tl.store(slots + at, slot, is_pair)
    tl.store(links + at, tl.where(is_linked, number, -1), is_pair)


@triton.jit(do_not_specialize=["width"])
def collect(slots, links, in_slots, linked, of_cpu, out, width, BLOCK: tl.constexpr):
    """Copy each pair's result from where it was computed into `out`. Programs: (pieces of the width, pairs)."""
    pair = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = pair.to(tl.int64) * width + at
    is_own = at < width
    has_slot, is_linked = tl.load(slots + pair) >= 0, tl.load(links + pair) >= 0
    found = tl.load(in_slots + place, is_own & has_slot, 0.0).to(tl.float32)
    found += tl.load(linked + place, is_own & is_linked, 0.0).to(tl.float32)
    found += tl.load(of_cpu + place, is_own & (has_slot == 0) & (is_linked == 0), 0.0)
    tl.store(out + place, found.to(out.dtype.element_ty), is_own)
