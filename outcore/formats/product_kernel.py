"""Products of packed weights with a few rows of activations, in Triton. Imported on a GPU only.

A program takes `ROWS` rows of the weight and walks along them, a tile of `CHUNKS` times 16 bytes of codes at a time, so
that a thread has 16 bytes of one block at a time. Codes are decoded in registers. For one row of activations they are
multiplied as they are, and each 16 bytes' sum by its scale; for more they become 16-bit values, the same that expanding
the weight gives, for the tensor cores. Where rows of the weight are few, several programs share them (`SPLITS`); the
last one to end adds up their sums, in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def codes_of(at, inside, FORMAT: tl.constexpr, block, t, table):
    """(low, high) codes as fp32 [rows, chunks, 16] of the bytes `at`; 8-bit codes are both. `block`: addresses of the
    chunks' blocks, `t`: place of the chunk in its block."""
    raw = tl.load(at, inside, 0, eviction_policy="evict_first")
    if FORMAT == "int8" or FORMAT == "q8_0":
        low = raw.to(tl.int8, bitcast=True).to(tl.float32)
        high = low
    elif FORMAT == "fp8":
        bits = raw.to(tl.uint16)
        low = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32)
        high = low
    elif FORMAT == "mxfp4":
        bits = raw.to(tl.uint16)
        low = (((bits & 0x8) << 12) | ((bits & 0x7) << 9)).to(tl.float16, bitcast=True).to(tl.float32)
        high = (((bits & 0x80) << 8) | ((bits & 0x70) << 5)).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        first, second = raw.to(tl.int32) & 0xF, raw.to(tl.int32) >> 4
        j = tl.arange(0, 16)[None, None, :]
        if FORMAT == "q5_k":
            run = (t // 2)[None, :, None]
            more = tl.load(block[:, :, None] + (16 + t % 2 * 16)[None, :, None] + j, inside, 0).to(tl.int32)
            first |= ((more >> (2 * run)) & 1) << 4
            second |= ((more >> (2 * run + 1)) & 1) << 4
        if FORMAT == "q6_k":
            field = (t % 4 // 2 * 2)[None, :, None]
            place = (128 + t // 4 * 32 + t % 2 * 16)[None, :, None]
            more = tl.load(block[:, :, None] + place + j, inside, 0).to(tl.int32)
            first |= ((more >> field) & 3) << 4
            second |= ((more >> (field + 4)) & 3) << 4
        if FORMAT == "nf4":  # the first of two is in the high half
            low, high = tl.load(table + second), tl.load(table + first)
        else:
            low, high = first.to(tl.float32), second.to(tl.float32)
    return low, high


@triton.jit
def _sub_scale(block, half, inside, sub):
    """(scale, minimum) fp32 of a sub-block of Q4_K or Q5_K."""
    at = block + 4 + sub % 4
    low, high = tl.load(at, inside, 0).to(tl.int32), tl.load(at + 4, inside, 0).to(tl.int32)
    both = tl.load(at + 8, inside, 0).to(tl.int32)
    is_late = sub >= 4
    scale = tl.where(is_late, (both & 0xF) | ((low >> 2) & 0x30), low & 0x3F)
    minimum = tl.where(is_late, (both >> 4) | ((high >> 2) & 0x30), high & 0x3F)
    whole, whole_minimum = tl.load(half, inside, 0).to(tl.float32), tl.load(half + 1, inside, 0).to(tl.float32)
    return whole * scale.to(tl.float32), whole_minimum * minimum.to(tl.float32)


@triton.jit
def scales_of(
    block, number, t, scale, zero, inside, FORMAT: tl.constexpr, BLOCK_BYTES: tl.constexpr, HAS_ZERO: tl.constexpr
):
    """(scale, offset) of low and of high codes, fp32 [rows, chunks]: a value is scale * code - offset. `number`: of the
    block, `scale`: the plane, or for ggml's blocks the blocks themselves, as fp16."""
    half = scale + number * (BLOCK_BYTES // 2)
    if FORMAT == "q4_k" or FORMAT == "q5_k":
        sub = (t // 2 * 2)[None, :]
        low, low_offset = _sub_scale(block, half, inside, sub)
        high, high_offset = _sub_scale(block, half, inside, sub + 1)
    elif FORMAT == "q6_k":
        at = block + (192 + t // 4 * 8 + t % 4)[None, :]
        whole = tl.load(half + 104, inside, 0).to(tl.float32)
        low = whole * tl.load(at, inside, 0).to(tl.int8, bitcast=True).to(tl.float32)
        high = whole * tl.load(at + 4, inside, 0).to(tl.int8, bitcast=True).to(tl.float32)
        low_offset, high_offset = low * 32.0, high * 32.0
    else:
        if FORMAT == "mxfp4":  # a power of two; 2^14 is what its codes lack as fp16 numbers
            low = ((tl.load(scale + number, inside, 0).to(tl.int32) + 14) << 23).to(tl.float32, bitcast=True)
            low_offset = low * 0.0
        elif FORMAT == "q4_0" or FORMAT == "q8_0":
            low = tl.load(half, inside, 0).to(tl.float32)
            low_offset = low * 8.0
        elif FORMAT == "q4_1":
            low = tl.load(half, inside, 0).to(tl.float32)
            low_offset = -tl.load(half + 1, inside, 0).to(tl.float32)
        else:
            low = tl.load(scale + number, inside, 0).to(tl.float32)
            low_offset = low * (tl.load(zero + number, inside, 0).to(tl.float32) if HAS_ZERO else 8.0)
            if FORMAT == "fp8":  # 2^8 is what its codes lack as fp16 numbers
                low = low * 256.0
        high, high_offset = low, low_offset
    return low, low_offset, high, high_offset


@triton.jit
def _columns_of(x, lines, line_stride, first, limit, ORDER: tl.constexpr, CHUNKS: tl.constexpr, LINES: tl.constexpr):
    """Activations [LINES, CHUNKS, 16] that low and high codes of chunks from `first` on are multiplied with, zero from
    column `limit` on. `ORDER`: 0 codes of 8 bits; -1 two neighbours in a byte; else the low codes of so many chunks
    lie before their high ones."""
    chunk = first + tl.arange(0, CHUNKS)
    base = x + (lines * line_stride)[:, None, None]
    if ORDER == -1:
        at = (chunk * 32)[None, :, None] + tl.arange(0, 32)[None, None, :]
        both = tl.load(base + at, at < limit, 0).reshape(LINES, CHUNKS, 16, 2)
        low, high = tl.split(both)
    elif ORDER == 0:
        at = (chunk * 16)[None, :, None] + tl.arange(0, 16)[None, None, :]
        low = tl.load(base + at, at < limit, 0)
        high = low
    else:
        start = chunk // ORDER * (32 * ORDER) + chunk % ORDER * 16
        at = start[None, :, None] + tl.arange(0, 16)[None, None, :]
        low = tl.load(base + at, at < limit, 0)
        at += 16 * ORDER
        high = tl.load(base + at, at < limit, 0)
    return low, high


@triton.jit(do_not_specialize=["num_rows", "row_chunks", "num_lines", "per_x", "tiles_each"])
def packed_product(
    codes,
    scale,
    zero,
    table,
    x,
    ids,
    out,
    partial,
    arrived,
    num_rows,
    row_chunks,
    num_lines,
    per_x,
    tiles_each,
    codes_stride,
    scale_stride,
    zero_stride,
    FORMAT: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    CODES_AT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    IS_CHOSEN: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    LINES: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Lines of activations times the weight's rows. Programs: (tiles of rows, splits, groups of LINES lines). `ids`:
    the matrix of each line, where it is chosen; `per_x`: lines that share one line of x."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lines = tl.program_id(2) * LINES + tl.arange(0, LINES)
    columns: tl.constexpr = 16 if ORDER == 0 else 32
    limit = row_chunks * columns
    num_tiles = tl.cdiv(row_chunks, CHUNKS)
    begin = tl.program_id(1) * tiles_each
    end = tl.minimum(begin + tiles_each, num_tiles)
    if IS_CHOSEN:  # LINES is 1
        chosen = tl.load(ids + tl.program_id(2)).to(tl.int64)
        end = tl.where(chosen < 0, begin, end)
        codes += chosen * codes_stride
        scale += chosen * scale_stride
        if HAS_ZERO:
            zero += chosen * zero_stride
    row_blocks = row_chunks // BLOCK_CHUNKS
    first_block = tl.minimum(rows, num_rows - 1).to(tl.int64) * row_blocks
    x_lines = tl.minimum(lines, num_lines - 1) // per_x
    sums = tl.zeros((ROWS, CHUNKS if LINES == 1 else LINES), tl.float32)
    for tile in range(begin, end):
        chunk = tile * CHUNKS + tl.arange(0, CHUNKS)
        low_x, high_x = _columns_of(x, x_lines, limit, tile * CHUNKS, limit, ORDER, CHUNKS, LINES)
        inside = tl.full((1, CHUNKS), 1, tl.int1) if IS_EVEN else (chunk < row_chunks)[None, :]
        number = first_block[:, None] + (chunk // BLOCK_CHUNKS)[None, :]
        t = chunk % BLOCK_CHUNKS
        block = codes + first_block[:, None] * BLOCK_BYTES + (chunk // BLOCK_CHUNKS * BLOCK_BYTES)[None, :]
        at = block[:, :, None] + (CODES_AT + t * 16)[None, :, None] + tl.arange(0, 16)[None, None, :]
        low, high = codes_of(at, inside[:, :, None], FORMAT, block, t, table)
        low_scale, low_offset, high_scale, high_offset = scales_of(
            block, number, t, scale, zero, inside, FORMAT, BLOCK_BYTES, HAS_ZERO
        )
        if LINES == 1:
            low_line = low_x.reshape(1, CHUNKS, 16).to(tl.float32)
            sums += low_scale * tl.sum(low * low_line, 2)
            if HAS_OFFSET:
                sums -= low_offset * tl.sum(low_line, 2)
            if ORDER != 0:
                high_line = high_x.reshape(1, CHUNKS, 16).to(tl.float32)
                sums += high_scale * tl.sum(high * high_line, 2)
                if HAS_OFFSET:
                    sums -= high_offset * tl.sum(high_line, 2)
        else:
            low *= low_scale[:, :, None]
            if HAS_OFFSET:
                low -= low_offset[:, :, None]
            value = low.to(low_x.dtype).reshape(ROWS, CHUNKS * 16)
            sums = tl.dot(value, low_x.reshape(LINES, CHUNKS * 16).trans(), sums, input_precision=PRECISION)
            if ORDER != 0:
                high *= high_scale[:, :, None]
                if HAS_OFFSET:
                    high -= high_offset[:, :, None]
                value = high.to(high_x.dtype).reshape(ROWS, CHUNKS * 16)
                sums = tl.dot(value, high_x.reshape(LINES, CHUNKS * 16).trans(), sums, input_precision=PRECISION)
    if LINES == 1:
        sums = tl.sum(sums, 1)[:, None]
    place = lines[None, :] * num_rows.to(tl.int64) + rows[:, None]
    is_own = (rows < num_rows)[:, None] & (lines < num_lines)[None, :]
    if SPLITS == 1:
        tl.store(out + place, sums.to(out.dtype.element_ty), is_own)
    else:
        of_split = num_lines.to(tl.int64) * num_rows
        tl.store(partial + tl.program_id(1) * of_split + place, sums, is_own)
        tl.debug_barrier()  # all threads have stored before one tells so
        counter = arrived + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros_like(sums)
            for split in range(SPLITS):
                total += tl.load(partial + split * of_split + place, is_own, 0.0, cache_modifier=".cg")
            tl.store(out + place, total.to(out.dtype.element_ty), is_own)
            tl.store(counter, 0)  # for the next product
