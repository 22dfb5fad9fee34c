// Moments without loss in 28 bits instead of 32; see compressed.py for the format. One block of kBlock elements at a time,
// between its planes in the chunk and two arrays of floats that stay in L1.
#pragma once
#include "abi.h"
#include "lanes.h"

namespace outcore {
namespace {

constexpr int64_t kHalf = kBlock / 2;
constexpr int kFewEscapes = 128, kWide = 255;

// kBits: of an exponent's code. 4 beside a sign, 5 where there is none.
template <int kBits>
constexpr int32_t kZeroCode = (1 << kBits) - 1;
template <int kBits>
constexpr int32_t kEscapeCode = (1 << kBits) - 2;

INLINE Ints exponents(Words x) { return (Ints)(x >> 23 & 0xffu); }
INLINE Words bits_at(const float* x, int64_t i) { return load((const uint32_t*)(const void*)(x + i)); }

// Codes of the elements i.. as they lie in the planes, from their bits; the fifth bit is the top one of `high`.
template <int kBits>
INLINE Ints store_element(uint8_t* planes, int64_t i, Words x, Ints code) {
  Ints high = (Ints)(x >> 16 & 0x7fu);
  high |= kBits == 4 ? (Ints)(x >> 24 & 0x80u) : (code & 16) << 3;
  store_narrow((uint16_t*)(void*)planes + i, (Ints)x);
  store_narrow(planes + 2 * kBlock + i, high);
  return code & 15;
}

// x into 896 bytes of planes; what does not fit there into `extra` (128 bytes), whose length is returned.
template <int kBits>
INLINE int encode(const float* x, uint8_t* planes, uint8_t* top_out, uint8_t* count_out, uint8_t* extra) {
  Words top_lanes{};
  for (int64_t i = 0; i < kBlock; i += kLanes) top_lanes = larger(top_lanes, (Words)exponents(bits_at(x, i)));
  const Ints top = all((int32_t)largest_of(top_lanes));
  const Ints zero = all(kZeroCode<kBits>), escape = all(kEscapeCode<kBits>);
  Ints escapes{};
  const auto code_of = [&](Words bits) __attribute__((always_inline)) {
    const Ints e = exponents(bits), below = top - e;
    const Ints code = below < escape ? below : escape;
    return e == 0 ? zero : code;
  };
  uint8_t* const nibbles = planes + 3 * kBlock;
  for (int64_t j = 0; j < kHalf; j += kLanes) {
    const Words first = bits_at(x, j), second = bits_at(x, j + kHalf);
    const Ints a = code_of(first), b = code_of(second);
    escapes += (a == escape) + (b == escape);  // -1 for each
    const Ints low = store_element<kBits>(planes, j, first, a), high = store_element<kBits>(planes, j + kHalf, second, b);
    store_narrow(nibbles + j, low | high << 4);
  }
  *top_out = (uint8_t)top[0];
  int count = 0;
  for (int lane = 0; lane < kLanes; lane++) count -= escapes[lane];
  *count_out = (uint8_t)count;
  if (count == 0) return 0;
  if (count <= kFewEscapes) {
    int found = 0;
    for (int64_t i = 0; i < kBlock; i++) {
      uint32_t bits;
      __builtin_memcpy(&bits, x + i, 4);
      const int32_t e = (int32_t)(bits >> 23 & 0xff);
      if (e != 0 && top[0] - e >= kEscapeCode<kBits>) extra[found++] = (uint8_t)e;
    }
    return found;
  }
  *count_out = kWide;  // whole exponents: the low bits where codes are, the others here
  for (int64_t j = 0; j < kHalf; j += kLanes) {
    const Words first = bits_at(x, j), second = bits_at(x, j + kHalf);
    const Ints a = exponents(first), b = exponents(second);
    const Ints low = store_element<kBits>(planes, j, first, a), high = store_element<kBits>(planes, j + kHalf, second, b);
    store_narrow(nibbles + j, low | high << 4);
    store_narrow(extra + j, a >> kBits | b >> kBits << 4);
  }
  return (int)kHalf;
}

// At most kHalf, whatever a drive brought.
INLINE int extra_bytes(uint8_t count) { return count <= kFewEscapes ? count : (int)kHalf; }

template <int kBits>
INLINE void decode(float* x, const uint8_t* planes, uint8_t top_in, uint8_t count, const uint8_t* extra) {
  const uint8_t* const nibbles = planes + 3 * kBlock;
  const Ints top = all((int32_t)top_in), zero = all(kZeroCode<kBits>);
  const bool is_wide = count == kWide;
  const auto join_element = [&](int64_t i, Ints nibble, Ints more) __attribute__((always_inline)) {
    fetch_ahead(planes, i, 2);
    const Ints low = load_wide((const uint16_t*)(const void*)planes + i), high = load_wide(planes + 2 * kBlock + i);
    const Ints code = kBits == 4 ? nibble : nibble | (high & 0x80) >> 3;
    const Ints narrow = code == zero ? Ints{} : top - code;
    const Words e = (Words)(is_wide ? code | more << kBits : narrow);
    const Words sign = kBits == 4 ? (Words)(high & 0x80) << 24 : Words{};
    store((uint32_t*)(void*)(x + i), sign | e << 23 | (Words)(high & 0x7f) << 16 | (Words)low);
  };
  for (int64_t j = 0; j < kHalf; j += kLanes) {
    const Ints both = load_wide(nibbles + j), more = is_wide ? load_wide(extra + j) : Ints{};
    join_element(j, both & 15, more & 15);
    join_element(j + kHalf, both >> 4, more >> 4);
  }
  if (count == 0 || is_wide) return;
  int found = 0;
  for (int64_t i = 0; i < kBlock && found < extra_bytes(count); i++) {
    int32_t code = i < kHalf ? nibbles[i] & 15 : nibbles[i - kHalf] >> 4;
    if (kBits == 5) code |= (planes[2 * kBlock + i] & 0x80) >> 3;
    if (code != kEscapeCode<kBits>) continue;
    uint32_t bits;
    __builtin_memcpy(&bits, x + i, 4);
    bits = (bits & 0x807fffffu) | (uint32_t)extra[found++] << 23;
    __builtin_memcpy(x + i, &bits, 4);
  }
}

// The moments of one block of a chunk.
struct CompressedBlock {
  uint8_t *exp_avg, *exp_avg_sq;
  BlockHead* head;
  ChunkHead* chunk;
  const uint8_t* tail;  // what `head` points into
  uint8_t* next;        // where a new one goes
  // Of a block with the most: its 256 bytes end where the tail does. Whatever a drive brought, nothing beyond is touched.
  uint32_t last_offset;

  CompressedBlock(void* state, const Layout& at, int64_t block) {
    uint8_t* const bytes = (uint8_t*)state;
    exp_avg = bytes + at.exp_avg + block * kPlanesBytes;
    exp_avg_sq = bytes + at.exp_avg_sq + block * kPlanesBytes;
    head = (BlockHead*)(void*)(bytes + at.block_heads) + block;
    chunk = (ChunkHead*)(void*)(bytes + at.chunk_head);
    const int64_t valid = chunk->tail_index & 1;
    tail = bytes + at.tails + valid * at.tail_bytes;
    next = bytes + at.tails + (1 - valid) * at.tail_bytes;
    last_offset = (uint32_t)(at.tail_bytes - 2 * kHalf);
  }

  INLINE_MEMBER void read(float* m, float* v, bool wants_m, bool wants_v) const {
    const uint8_t* extra = tail + (head->tail_offset < last_offset ? head->tail_offset : last_offset);
    if (wants_m) decode<4>(m, exp_avg, head->top[0], head->count[0], extra);
    if (wants_v) decode<5>(v, exp_avg_sq, head->top[1], head->count[1], extra + extra_bytes(head->count[0]));
  }

  INLINE_MEMBER void write(const float* m, const float* v) const {
    alignas(64) uint8_t extra[2 * kHalf];
    BlockHead made{};
    int bytes = encode<4>(m, exp_avg, &made.top[0], &made.count[0], extra);
    bytes += encode<5>(v, exp_avg_sq, &made.top[1], &made.count[1], extra + bytes);
    if (bytes > 0) {
      const uint64_t offset = __atomic_fetch_add(&chunk->next_bytes, (uint64_t)bytes, __ATOMIC_RELAXED);
      made.tail_offset = offset < last_offset ? (uint32_t)offset : last_offset;
      __builtin_memcpy(next + made.tail_offset, extra, (size_t)bytes);
    }
    *head = made;
  }
};

}  // namespace
}  // namespace outcore
