// Rows of packed weights times rounded activations, and the choice among all; compiled once per instruction set.
//
// A format says how 128 codes come out of its bytes as words of 16 bits, in which order, and which scales they have:
// weight = scale * code - minimum. Offsets of codes are in the words already, and so are the whole-numbered scales
// within a block of a K-quant, whose products of 256 columns are summed before one scale is applied.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "plain_products.h"
#include "product_vectors.h"
#include "products.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define INLINE __attribute__((always_inline)) inline
// Sums that are needed once a group leave the registers to those that are needed at each step.
#define IN_MEMORY(sums) __asm__ volatile("" : "+m"(sums))

namespace outcore {
namespace {

// bitsandbytes' NF4 times 8191, rounded: eight products with 32767 still fit a lane. Codes are 6e-5 of a block's
// largest value apart from the exact ones at most.
constexpr float kNf4Unit = 1.0f / 8191.0f;
alignas(64) const int16_t kNf4Words[16] = {-8191, -5703, -4301, -3235, -2330, -1513, -746, 0,
                                      652,   1318,  2016,  2768,  3610,  4608,  5922, 8191};
alignas(64) const int16_t kTwiceFp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
alignas(64) const int16_t kUnsigned4[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
alignas(64) const int16_t kAround8[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

// Patterns for `spread`: byte number kFirst + kStride * run to each word of a run of 32 / kRuns words, as its lower
// byte or as its upper one.
template <int kFirst, int kStride, int kRuns, bool kUpper>
struct Pattern {
  alignas(64) uint8_t at[64];
  constexpr Pattern() : at() {
    for (int i = 0; i < 64; i++)
      at[i] = (i % 2 == 1) == kUpper ? (uint8_t)(kFirst + kStride * (i * kRuns / 64)) : (uint8_t)0x80;
  }
};
template <int kFirst, int kStride, int kRuns, bool kUpper = false>
alignas(64) constexpr Pattern<kFirst, kStride, kRuns, kUpper> kPattern;

INLINE float scale_at(const Product& p, int32_t type, uint64_t index) {
  if (type == kScaleF32) return ((const float*)p.scale)[index];
  const uint16_t bits = ((const uint16_t*)p.scale)[index];
  return type == kScaleF16 ? half_to_float(bits) : bits_to_float((uint32_t)bits << 16);
}

// What formats have in common unless they say otherwise.
struct Plain {
  static constexpr int kChunks = 1;         // runs of 128 columns whose products are summed before they are scaled
  static constexpr bool kSeparate = false;  // each word of lanes has a scale of its own
  static constexpr bool kMinima = false;
  static constexpr bool kScales = false;    // an fp32 scale for 64 columns: enough bytes to ask for
  static constexpr int kColumns = 64, kBytes = 32, kScaleBytes = 4;  // codes of so many columns; one scale
  static constexpr float kUnit = 1.0f;
};

// Each format: `words` of the 128 columns from `at` on (counted through all rows), their `scale`, and `minima` of the
// runs of 32 columns within 256.
struct Nf4 : Plain {
  static constexpr bool kScales = true;
  static constexpr float kUnit = kNf4Unit;
  static inline void words(const Product& p, uint64_t at, Words* w) {
    Words found[4];
    nibbles(load(p.codes + at / 2), kNf4Words, found);  // the first column is in the upper half of a byte
    w[0] = found[1], w[1] = found[0], w[2] = found[3], w[3] = found[2];
  }
  static inline Floats scale(const Product& p, uint64_t at, int) {
    const float* s = (const float*)p.scale + at / 64;
    return of_two(s[0], s[1]);
  }
};

struct Int8 : Plain {
  static constexpr int kBytes = 64;
  static inline void words(const Product& p, uint64_t at, Words* w) {
    for (int i = 0; i < 4; i++) w[i] = signed_bytes(p.codes + at + 32 * i);
  }
  static inline Floats scale(const Product& p, uint64_t at, int) {
    return of_one(((const float*)p.scale)[at >> p.block_shift]);
  }
};

struct Int4 : Plain {  // of any kind
  static inline void words(const Product& p, uint64_t at, Words* w) {
    nibbles(load(p.codes + at / 2), kAround8, w);
    if (!p.zero) return;
    uint32_t zeros = 0;
    for (int i = 0; i < 4; i++) zeros |= (uint32_t)p.zero[(at + 32 * i) >> p.block_shift] << 8 * i;
    const Words zero = spread(sixteen(zeros, 0), kPattern<0, 1, 4>.at);
    for (int i = 0; i < 4; i++) w[i] = minus(minus(w[i], zero), -8);
  }
  static inline Floats scale(const Product& p, uint64_t at, int) {
    float s[4];
    for (int i = 0; i < 4; i++) s[i] = scale_at(p, p.scale_type, (at + 32 * i) >> p.block_shift);
    return of_four(four(s[0], s[1], s[2], s[3]));
  }
};

template <int32_t kType>
struct PlainInt4 : Plain {  // in blocks of 128 or more, around 8: without branches nearly twice as fast
  static inline void words(const Product& p, uint64_t at, Words* w) { nibbles(load(p.codes + at / 2), kAround8, w); }
  static inline Floats scale(const Product& p, uint64_t at, int) {
    return of_one(scale_at(p, kType, at >> p.block_shift));
  }
};

struct Mxfp4 : Plain {
  static constexpr int kScaleBytes = 1;
  static constexpr float kUnit = 0.5f;
  static inline void words(const Product& p, uint64_t at, Words* w) { nibbles(load(p.codes + at / 2), kTwiceFp4, w); }
  static inline Floats scale(const Product& p, uint64_t at, int) {
    return of_four(powers((const uint8_t*)p.scale + at / 32));
  }
};

struct Q4_0 : Plain {
  static constexpr int kColumns = 32, kBytes = 18;
  static inline void words(const Product& p, uint64_t at, Words* w) {
    nibbles(load_four(p.codes + at / 32 * kBytes + 2, kBytes), kAround8, w);
  }
  static inline Floats scale(const Product& p, uint64_t at, int) {
    const uint8_t* block = p.codes + at / 32 * kBytes;
    return of_four(four(read_half(block), read_half(block + kBytes), read_half(block + 2 * kBytes),
                        read_half(block + 3 * kBytes)));
  }
};

struct Q4_1 : Plain {
  static constexpr int kColumns = 32, kBytes = 20;
  static constexpr bool kMinima = true;
  static inline void words(const Product& p, uint64_t at, Words* w) {
    nibbles(load_four(p.codes + at / 32 * kBytes + 4, kBytes), kUnsigned4, w);
  }
  static inline Floats scale(const Product& p, uint64_t at, int) {
    const uint8_t* block = p.codes + at / 32 * kBytes;
    return of_four(four(read_half(block), read_half(block + kBytes), read_half(block + 2 * kBytes),
                        read_half(block + 3 * kBytes)));
  }
  static inline Eight minima(const Product& p, uint64_t at, int count) {
    float least[8] = {};
    for (int i = 0; i < count; i++) least[i] = -read_half(p.codes + (at / 32 + i) * kBytes + 2);
    return eight(least);
  }
};

struct Q8_0 : Plain {
  static constexpr int kColumns = 32, kBytes = 34;
  static constexpr bool kSeparate = true;
  static inline void words(const Product& p, uint64_t at, Words* w) {
    for (int i = 0; i < 4; i++) w[i] = signed_bytes(p.codes + (at / 32 + i) * kBytes + 2);
  }
  static inline Floats scale(const Product& p, uint64_t at, int i) {
    return of_one(read_half(p.codes + (at / 32 + i) * kBytes));
  }
};

template <bool kFive>
struct QK : Plain {
  static constexpr int kChunks = 2;
  static constexpr bool kMinima = true;
  static constexpr int kColumns = 256, kBytes = kFive ? 176 : 144;
  // 8 scales, then 8 minima, of 6 bits in 12 bytes.
  static inline void fields(const uint8_t* block, uint64_t* scales, uint64_t* minima) {
    uint32_t a, b, c;
    memcpy(&a, block + 4, 4);
    memcpy(&b, block + 8, 4);
    memcpy(&c, block + 12, 4);
    *scales = (a & 0x3f3f3f3fu) | (uint64_t)((c & 0x0f0f0f0fu) | ((a >> 2) & 0x30303030u)) << 32;
    *minima = (b & 0x3f3f3f3fu) | (uint64_t)(((c >> 4) & 0x0f0f0f0fu) | ((b >> 2) & 0x30303030u)) << 32;
  }
  static inline void words(const Product& p, uint64_t at, Words* w) {
    const uint8_t* block = p.codes + at / 256 * kBytes;
    const bool second = at % 256 != 0;
    uint64_t scales, minima;
    fields(block, &scales, &minima);
    const Words raw = load(block + 16 + (kFive ? 32 : 0) + (second ? 64 : 0));
    w[0] = masked(raw, 15);
    w[1] = masked(shift_right<4>(raw), 15);
    w[2] = masked(shift_right<8>(raw), 15);
    w[3] = shift_right<12>(raw);
    if (kFive) {  // a byte has the fifth bits of its column in all eight runs
      Words bits = shift_right_upper<2>(load_twice(block + 16));
      if (second) bits = shift_right<4>(bits);
      w[0] = either(w[0], masked(shift_left<4>(bits), 16));
      w[1] = either(w[1], masked(shift_left<3>(bits), 16));
      w[2] = either(w[2], masked(shift_right<4>(bits), 16));
      w[3] = either(w[3], masked(shift_right<5>(bits), 16));
    }
    const Sixteen all = sixteen(second ? scales >> 32 : scales, 0);
    const Words even = spread(all, kPattern<0, 2, 2>.at), odd = spread(all, kPattern<1, 2, 2>.at);
    w[0] = times(w[0], even), w[1] = times(w[1], odd), w[2] = times(w[2], even), w[3] = times(w[3], odd);
  }
  static inline Floats scale(const Product& p, uint64_t at, int) {
    return of_one(read_half(p.codes + at / 256 * kBytes));
  }
  static inline Eight minima(const Product& p, uint64_t at, int) {
    const uint8_t* block = p.codes + at / 256 * kBytes;
    uint64_t scales, minima;
    fields(block, &scales, &minima);
    return eight_bytes(minima, read_half(block + 2));
  }
};

struct Q6_K : Plain {
  static constexpr int kChunks = 2;
  static constexpr int kColumns = 256, kBytes = 210;
  static inline void words(const Product& p, uint64_t at, Words* w) {
    const uint8_t* block = p.codes + at / 256 * kBytes;
    const uint64_t half = at % 256 / 128;
    const Words raw = load(block + 64 * half);
    const Words bits = shift_right_upper<2>(load_twice(block + 128 + 32 * half));
    w[0] = either(masked(raw, 15), masked(shift_left<4>(bits), 48));
    w[1] = either(masked(shift_right<4>(raw), 15), masked(bits, 48));
    w[2] = either(masked(shift_right<8>(raw), 15), masked(shift_right<4>(bits), 48));
    w[3] = either(shift_right<12>(raw), masked(shift_right<8>(bits), 48));
    uint64_t scales;
    memcpy(&scales, block + 192 + 8 * half, 8);
    const Sixteen all = sixteen(scales, 0);
    const Words low = upper_byte(spread(all, kPattern<0, 1, 4, true>.at));
    const Words high = upper_byte(spread(all, kPattern<4, 1, 4, true>.at));
    w[0] = times(minus(w[0], 32), low), w[1] = times(minus(w[1], 32), high);
    w[2] = times(minus(w[2], 32), low), w[3] = times(minus(w[3], 32), high);
  }
  static inline Floats scale(const Product& p, uint64_t at, int) {
    return of_one(read_half(p.codes + at / 256 * kBytes + 208));
  }
};

// The last 64 columns of a row where it is not of whole 128, with nothing behind them.
template <class Format>
struct Tail {
  Product p;
  uint8_t codes[136] = {}, scale[16] = {}, zero[4] = {};
  Tail(const Product& whole, uint64_t at) : p(whole) {
    memcpy(codes, whole.codes + at / Format::kColumns * Format::kBytes, 64 / Format::kColumns * Format::kBytes);
    p.codes = codes;
    const uint64_t block = at >> whole.block_shift, count = 64 >> whole.block_shift;
    const uint64_t bytes = whole.scale_type == kScaleF32 ? Format::kScaleBytes : 2;
    if (whole.scale) memcpy(scale, (const uint8_t*)whole.scale + block * bytes, count * bytes);
    if (whole.zero) memcpy(zero, whole.zero + block, count);
    p.scale = scale;
    p.zero = whole.zero ? zero : nullptr;
  }
};

// Has the same columns of the rows that come next brought to the second cache: several rows at once are several
// streams, and the processor's own prefetching follows one of them to the end of a page.
template <class Format, int R>
inline void ask_ahead(const Product& p, uint64_t at) {
  const uint8_t* codes = p.codes + at / Format::kColumns * Format::kBytes;
  const int64_t next = R * (p.columns / Format::kColumns * Format::kBytes);
  for (int i = 0; i < 128 * Format::kChunks / Format::kColumns * Format::kBytes; i += 64)
    __builtin_prefetch(codes + next + i, 0, 2);
  if (Format::kScales)
    __builtin_prefetch((const uint8_t*)p.scale + R * (p.columns / 64 * 4) + at / 64 * 4, 0, 2);
}

// 128 columns (256 of a K-quant) of R rows of weights, which begin at `at` of their products, times M rows of
// activations.
template <class Format, int R, int M>
inline void add_chunk(const Product& p, const uint64_t (&at)[R], const int16_t* x, int64_t stride,
                      Floats (&parts)[R][M]) {
  Ints ints[R][M];
  for (int r = 0; r < R; r++) {
    ask_ahead<Format, R>(p, at[r]);
    for (int m = 0; m < M; m++) ints[r][m] = no_ints();
  }
  for (int chunk = 0; chunk < Format::kChunks; chunk++) {
    Words w[R][4];
    for (int r = 0; r < R; r++) Format::words(p, at[r] + 128 * chunk, w[r]);
    for (int i = 0; i < 4; i++) {
      for (int m = 0; m < M; m++) {
        const Words activations = load_once(x + m * stride + 128 * chunk + 32 * i);
        for (int r = 0; r < R; r++) {
          if (Format::kSeparate)
            parts[r][m] = add(parts[r][m], floats(dot(no_ints(), w[r][i], activations)), Format::scale(p, at[r], i));
          else
            ints[r][m] = dot(ints[r][m], w[r][i], activations);
        }
      }
    }
  }
  if (Format::kSeparate) return;
  for (int r = 0; r < R; r++) {
    const Floats scale = Format::scale(p, at[r], 0);
    for (int m = 0; m < M; m++) parts[r][m] = add(parts[r][m], floats(ints[r][m]), scale);
  }
}

// Minima of `count` runs of one group times the sums of their activations.
template <class Format, int M>
inline void add_minima(const Product& p, uint64_t at, int count, int from, int64_t group, Eight* taken) {
  const Eight least = Format::minima(p, at, count);
  for (int m = 0; m < M; m++)
    taken[m] = add(taken[m], least, eight(p.x_sum + ((from + m) * groups_of(p.columns) + group) * kRuns));
}

// What is left of a row behind its whole groups: 128 columns, 64, or both.
template <class Format, int M>
__attribute__((noinline)) void add_rest(const Product& p, int64_t row, int from, Floats* sums, Eight* taken) {
  const int64_t groups = groups_of(p.columns), stride = groups * kGroup;
  const int16_t* x = (const int16_t*)p.x + from * stride + (groups - 1) * kGroup;
  uint64_t at[1] = {(uint64_t)(row * p.columns + (groups - 1) * kGroup)};
  Floats parts[1][M];
  for (int m = 0; m < M; m++) parts[0][m] = no_floats();
  if constexpr (Format::kMinima)
    add_minima<Format, M>(p, at[0], (int)(p.columns % kGroup / 32), from, groups - 1, taken);
  if (p.columns % kGroup >= 128) {
    add_chunk<Format, 1, M>(p, at, x, stride, parts);
    at[0] += 128;
    x += 128;
  }
  if (p.columns % 128 != 0) {
    const Tail<Format> tail(p, at[0]);
    at[0] = 0;
    add_chunk<Format, 1, M>(tail.p, at, x, stride, parts);
  }
  for (int m = 0; m < M; m++) sums[m] = add(sums[m], parts[0][m], of_one(p.x_scale[(from + m) * groups + groups - 1]));
}

// R rows of weights from `first` on, but none from `stop` on, with M rows of activations from number `from` on. Where
// there is one row of weights less the last one is taken twice.
template <class Format, int R, int M>
void rows_product(const Product& p, int64_t first, int64_t stop, int from) {
  const int64_t groups = groups_of(p.columns), stride = groups * kGroup;
  const int16_t* x = (const int16_t*)p.x + from * stride;
  const float* x_scale = p.x_scale + from * groups;
  int64_t row[R];
  uint64_t at[R];
  Floats sums[R][M], parts[R][M];
  Eight taken[R][M] = {};  // by minima
  for (int r = 0; r < R; r++) {
    row[r] = first + r < stop ? first + r : stop - 1;
    at[r] = (uint64_t)(row[r] * p.columns);
    for (int m = 0; m < M; m++) sums[r][m] = parts[r][m] = no_floats();
  }
  for (int64_t group = 0; group < p.columns / kGroup; group++) {
    for (int64_t in = 0; in < kGroup; in += 128 * Format::kChunks) {
      add_chunk<Format, R, M>(p, at, x, stride, parts);
      for (int r = 0; r < R; r++) at[r] += 128 * Format::kChunks;
      x += 128 * Format::kChunks;
    }
    for (int m = 0; m < M; m++) {
      const Floats scale = of_one(x_scale[m * groups + group]);
      for (int r = 0; r < R; r++) {
        sums[r][m] = add(sums[r][m], parts[r][m], scale);
        parts[r][m] = no_floats();
      }
    }
    IN_MEMORY(sums);
    if constexpr (Format::kMinima) {
      for (int r = 0; r < R; r++) add_minima<Format, M>(p, at[r] - kGroup, kRuns, from, group, taken[r]);
      IN_MEMORY(taken);
    }
  }
  for (int r = 0; r < R; r++) {
    if (Format::kChunks == 1 && p.columns % kGroup != 0) add_rest<Format, M>(p, row[r], from, sums[r], taken[r]);
    for (int m = 0; m < M; m++) {
      const int64_t place = p.places ? p.places[from + m] : from + m;
      float& out = p.out[place * p.rows + row[r]];
      out = Format::kUnit * total(sums[r][m]);
      if (Format::kMinima) out -= total(taken[r][m]);
    }
  }
}

// The last rows of activations, fewer than M + 1.
template <class Format, int M>
inline void rest_product(const Product& p, int64_t row, int64_t stop, int from) {
  if (p.m - from == M) return rows_product<Format, kRowsAtOnce, M>(p, row, stop, from);
  if constexpr (M > 1) rest_product<Format, M - 1>(p, row, stop, from);
}

template <class Format>
void format_rows(const Product& p, int64_t start, int64_t stop) {
  for (int64_t row = start; row < stop; row += kRowsAtOnce) {
    int from = 0;
    for (; from + kShared <= p.m; from += kShared) rows_product<Format, kRowsAtOnce, kShared>(p, row, stop, from);
    rest_product<Format, kShared - 1>(p, row, stop, from);
  }
}

void product_rows(const Product& p, int64_t start, int64_t stop) {
  switch (p.format) {
    case kNf4: return format_rows<Nf4>(p, start, stop);
    case kInt8: return format_rows<Int8>(p, start, stop);
    case kInt4:
      if (p.block_shift < 7 || p.zero) return format_rows<Int4>(p, start, stop);
      if (p.scale_type == kScaleF32) return format_rows<PlainInt4<kScaleF32>>(p, start, stop);
      if (p.scale_type == kScaleF16) return format_rows<PlainInt4<kScaleF16>>(p, start, stop);
      return format_rows<PlainInt4<kScaleBf16>>(p, start, stop);
    case kMxfp4: return format_rows<Mxfp4>(p, start, stop);
    case kQ4_0: return format_rows<Q4_0>(p, start, stop);
    case kQ8_0: return format_rows<Q8_0>(p, start, stop);
    case kQ4_K: return format_rows<QK<false>>(p, start, stop);
    case kQ5_K: return format_rows<QK<true>>(p, start, stop);
    case kQ4_1: return format_rows<Q4_1>(p, start, stop);
    case kQ6_K: return format_rows<Q6_K>(p, start, stop);
    case kBf16: return plain_rows<Bf16>(p, start, stop);
    case kFp16: return plain_rows<Fp16>(p, start, stop);
    default: return;
  }
}

// Words in the order in which `words` of the format gives those of 128 columns.
template <int kHalf>
inline void by_halves(const int16_t* given, int16_t* out) {  // runs of kHalf bytes: lower halves first, then upper ones
  for (int block = 0; block < 64 / kHalf; block++)
    for (int pair = 0; pair < kHalf / 2; pair++) {
      const int word = block * kHalf / 2 + pair, column = 2 * kHalf * block + 2 * pair;
      out[word] = given[column];
      out[32 + word] = given[column + kHalf];
      out[64 + word] = given[column + 1];
      out[96 + word] = given[column + kHalf + 1];
    }
}

inline void in_order(int32_t format, const int16_t* given, int16_t* out) {
  switch (format) {
    case kNf4:
    case kInt4:
    case kMxfp4: {
      uint64_t fours[32];
      memcpy(fours, given, sizeof fours);
      for (int i = 0; i < 4; i++)
        for (int word = 0; word < 32; word++) out[32 * i + word] = (int16_t)(fours[word] >> 16 * i);
      return;
    }
    case kQ4_0:
    case kQ4_1: return by_halves<16>(given, out);
    case kQ4_K:
    case kQ5_K: return by_halves<32>(given, out);
    case kQ6_K: return by_halves<64>(given, out);
    default: memcpy(out, given, 256);
  }
}

// The largest magnitude: that of the bits, which the compiler may compare in any order.
inline int32_t largest_bits(const float* x) {
  int32_t bits[kGroup], largest = 0;
  memcpy(bits, x, sizeof bits);
  for (int i = 0; i < kGroup; i++) {
    const int32_t size = bits[i] & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  return largest;
}

// Loops of a length that the compiler knows and without branches, so that it makes vectors of them.
void round_row(const float* x, int64_t columns, int32_t format, int16_t* rounded, float* scale, float* sum) {
  for (int64_t at = 0; at < columns; at += kGroup) {
    float padded[kGroup] = {};
    const float* group = x + at;
    if (at + kGroup > columns) {
      memcpy(padded, group, (size_t)(columns - at) * sizeof(float));
      group = padded;
    }
    const float largest = bits_to_float((uint32_t)largest_bits(group));
    const float unit = largest / 32767.0f, by = largest > 0 ? 32767.0f / largest : 0.0f;
    scale[at / kGroup] = unit;
    int16_t codes[kGroup];
    for (int i = 0; i < kGroup; i++) codes[i] = (int16_t)(int32_t)rintf(group[i] * by);  // lrintf: one by one
    for (int run = 0; run < kRuns; run++) {
      int32_t whole = 0;
      for (int i = 0; i < 32; i++) whole += codes[32 * run + i];
      sum[at / 32 + run] = unit * (float)whole;
    }
    in_order(format, codes, rounded + at);
    in_order(format, codes + 128, rounded + at + 128);
  }
}

}  // namespace

extern const ProductKernels JOIN(product_, OUTCORE_VARIANT);
const ProductKernels JOIN(product_, OUTCORE_VARIANT) = {product_rows, round_row};

}  // namespace outcore
