// Rows of packed weights times rounded activations; compiled once per instruction set.
//
// A format says how 64 codes come out of its bytes, and for a group of columns which scales they have and what is taken
// off: weight = scale * code - taken. The products of what is taken with the sums of activations are added at the end
// of a row, all at once.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "product_vectors.h"
#include "products.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace outcore {
namespace {

constexpr int kShared = 4;  // rows of activations that share the unpacking of a row of weights
constexpr int64_t kMaxGroups = 128;  // 32 Ki columns: what `taken` holds on the stack; longer rows come in parts

// bitsandbytes' NF4 times 127, rounded: codes are read as bytes here, 0.2 % of a block's largest value apart at most.
constexpr int8_t kNf4Bytes[16] = {-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127};
constexpr float kNf4Scale = 1.0f / 127.0f;
alignas(16) const uint8_t kTwiceFp4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};  // plus 12

struct Nf4Table {
  alignas(16) uint8_t at[16];
  constexpr Nf4Table() : at() {
    for (int i = 0; i < 16; i++) at[i] = (uint8_t)(kNf4Bytes[i] + kWideOffset);
  }
};
constexpr Nf4Table kNf4Table;

inline float scale_at(const Product& p, int64_t index) {
  if (p.scale_type == kScaleF32) return ((const float*)p.scale)[index];
  const uint16_t bits = ((const uint16_t*)p.scale)[index];
  return p.scale_type == kScaleF16 ? half_to_float(bits) : bits_to_float((uint32_t)bits << 16);
}

// Each format: `codes` of the 64 columns from `at` on (counted through all rows), `scales` and what is taken for each
// run of `steps` times 64 columns, and `spread` of a step's scales over the codes.
struct Nf4 {
  static constexpr bool kWide = true;
  static constexpr int kRuns = 1;
  static inline Codes codes(const Product& p, int64_t at) { return look_up(halves(p.codes + at / 2, true), kNf4Table.at); }
  static inline void scales(const Product& p, int64_t at, int steps, float* scale, float* taken) {
    const float* s = (const float*)p.scale + at / kStep;
    for (int i = 0; i < steps; i++) scale[i] = s[i] * kNf4Scale;
    for (int i = 0; i < steps; i++) taken[i] = s[i] * (kNf4Scale * kWideOffset);
  }
  static inline Scales spread(const float* scale) { return one_scale(scale[0]); }
};

struct Int8 {
  static constexpr bool kWide = true;
  static constexpr int kRuns = 1;
  static inline Codes codes(const Product& p, int64_t at) { return signed_bytes(p.codes + at, p.codes + at + 32); }
  static inline void scales(const Product& p, int64_t at, int steps, float* scale, float* taken) {
    for (int i = 0; i < steps; i++) {
      scale[i] = ((const float*)p.scale)[(at + i * kStep) >> p.block_shift];
      taken[i] = scale[i] * kWideOffset;
    }
  }
  static inline Scales spread(const float* scale) { return one_scale(scale[0]); }
};

struct Int4 {
  static constexpr bool kWide = false;
  static constexpr int kRuns = 2;
  static inline Codes codes(const Product& p, int64_t at) { return halves(p.codes + at / 2, false); }
  static inline void scales(const Product& p, int64_t at, int steps, float* scale, float* taken) {
    for (int i = 0; i < 2 * steps; i++) {
      const int64_t block = (at + i * (kStep / 2)) >> p.block_shift;
      scale[i] = scale_at(p, block);
      taken[i] = scale[i] * (p.zero ? (float)p.zero[block] : 8.0f);
    }
  }
  static inline Scales spread(const float* scale) { return inner_scales(scale[0], scale[1]); }
};

struct Mxfp4 {
  static constexpr bool kWide = false;
  static constexpr int kRuns = 2;
  static inline Codes codes(const Product& p, int64_t at) { return look_up(halves(p.codes + at / 2, false), kTwiceFp4); }
  static inline void scales(const Product& p, int64_t at, int steps, float* scale, float* taken) {
    const uint8_t* exponents = (const uint8_t*)p.scale + at / 32;
    for (int i = 0; i < 2 * steps; i++) {  // 2^(exponent - 128): codes are twice the values
      const uint32_t e = exponents[i], tiny = e ? 0x400000u : 0x200000u;
      scale[i] = bits_to_float(e > 1 ? (e - 1) << 23 : tiny);
      taken[i] = scale[i] * 12.0f;
    }
  }
  static inline Scales spread(const float* scale) { return inner_scales(scale[0], scale[1]); }
};

struct Q4_0 {
  static constexpr bool kWide = false;
  static constexpr int kRuns = 2;
  static inline Codes codes(const Product& p, int64_t at) {
    const uint8_t* block = p.codes + at / 32 * 18;
    return halves_of_two(block + 2, block + 20);
  }
  static inline void scales(const Product& p, int64_t at, int steps, float* scale, float* taken) {
    for (int i = 0; i < 2 * steps; i++) {
      scale[i] = read_half(p.codes + (at / 32 + i) * 18);
      taken[i] = scale[i] * 8.0f;
    }
  }
  static inline Scales spread(const float* scale) { return two_scales(scale[0], scale[1]); }
};

struct Q4_1 {
  static constexpr bool kWide = false;
  static constexpr int kRuns = 2;
  static inline Codes codes(const Product& p, int64_t at) {
    const uint8_t* block = p.codes + at / 32 * 20;
    return halves_of_two(block + 4, block + 24);
  }
  static inline void scales(const Product& p, int64_t at, int steps, float* scale, float* taken) {
    for (int i = 0; i < 2 * steps; i++) {
      scale[i] = read_half(p.codes + (at / 32 + i) * 20);
      taken[i] = -read_half(p.codes + (at / 32 + i) * 20 + 2);
    }
  }
  static inline Scales spread(const float* scale) { return two_scales(scale[0], scale[1]); }
};

struct Q8_0 {
  static constexpr bool kWide = true;
  static constexpr int kRuns = 2;
  static inline Codes codes(const Product& p, int64_t at) {
    const uint8_t* block = p.codes + at / 32 * 34;
    return signed_bytes(block + 2, block + 36);
  }
  static inline void scales(const Product& p, int64_t at, int steps, float* scale, float* taken) {
    for (int i = 0; i < 2 * steps; i++) {
      scale[i] = read_half(p.codes + (at / 32 + i) * 34);
      taken[i] = scale[i] * kWideOffset;
    }
  }
  static inline Scales spread(const float* scale) { return two_scales(scale[0], scale[1]); }
};

template <bool kFive>
struct QK {
  static constexpr bool kWide = false;
  static constexpr int kRuns = 2;
  static constexpr int64_t kBytes = kFive ? 176 : 144;
  static inline Codes codes(const Product& p, int64_t at) {
    const uint8_t* block = p.codes + at / 256 * kBytes;
    const int quarter = (int)(at % 256 / kStep);
    const Codes low = halves(block + 16 + (kFive ? 32 : 0) + 32 * quarter, false);
    return kFive ? upper_bits<1>(low, block + 16, 2 * quarter) : low;
  }
  // Of a whole block: 8 scales and 8 minima of 6 bits in 12 bytes, four at a time.
  static inline void scales(const Product& p, int64_t at, int, float* scale, float* taken) {
    const uint8_t* block = p.codes + at / 256 * kBytes;
    uint32_t a, b, c;
    memcpy(&a, block + 4, 4);
    memcpy(&b, block + 8, 4);
    memcpy(&c, block + 12, 4);
    const uint32_t words[4] = {a & 0x3f3f3f3fu, (c & 0x0f0f0f0fu) | ((a >> 2) & 0x30303030u), b & 0x3f3f3f3fu,
                               ((c >> 4) & 0x0f0f0f0fu) | ((b >> 2) & 0x30303030u)};
    uint8_t fields[16];
    memcpy(fields, words, 16);
    const float d = read_half(block), least = read_half(block + 2);
    for (int i = 0; i < 8; i++) scale[i] = d * (float)fields[i];
    for (int i = 0; i < 8; i++) taken[i] = least * (float)fields[8 + i];
  }
  static inline Scales spread(const float* scale) { return two_scales(scale[0], scale[1]); }
};

struct Q6_K {
  static constexpr bool kWide = false;
  static constexpr int kRuns = 4;
  static constexpr int64_t kBytes = 210;
  static inline Codes codes(const Product& p, int64_t at) {
    const uint8_t* block = p.codes + at / 256 * kBytes;
    const int64_t half = at % 256 / 128;
    const bool high = at % 128 != 0;
    return upper_bits<2>(half_of_each(block + 64 * half, high), block + 128 + 32 * half, high ? 4 : 0);
  }
  static inline void scales(const Product& p, int64_t at, int, float* scale, float* taken) {  // of a whole block: 16
    const uint8_t* block = p.codes + at / 256 * kBytes;
    const float unit = read_half(block + 208);
    for (int i = 0; i < 16; i++) scale[i] = unit * (float)(int8_t)block[192 + i];
    for (int i = 0; i < 16; i++) taken[i] = scale[i] * 32.0f;
  }
  static inline Scales spread(const float* scale) { return four_scales(scale); }
};

// Sixteen sums at a time: the compiler may not reorder one.
inline float dot(const float* a, const float* b, int64_t count) {
  float parts[16] = {};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16)
    for (int j = 0; j < 16; j++) parts[j] += a[i + j] * b[i + j];
  for (; i < count; i++) parts[0] += a[i] * b[i];
  float sum = 0;
  for (int j = 0; j < 16; j++) sum += parts[j];
  return sum;
}

// One row of weights with M rows of activations from number `from` on.
template <class Format, int M>
inline void row_product(const Product& p, int64_t row, int from) {
  constexpr int kPerGroup = (int)(kGroup / kStep);
  const int64_t steps = p.columns / kStep, groups = (steps + kPerGroup - 1) / kPerGroup;
  Sum sums[M];
  for (int m = 0; m < M; m++) sums[m] = no_sum();
  float results[M] = {};
  alignas(64) float taken[kMaxGroups * kPerGroup * Format::kRuns], scale[kPerGroup * Format::kRuns];
  for (int64_t first = 0; first < groups; first += kMaxGroups) {
    const int64_t last = first + kMaxGroups < groups ? first + kMaxGroups : groups;
    for (int64_t g = first; g < last; g++) {
      const int64_t step = g * kPerGroup, at = row * p.columns + step * kStep;
      const int count = (int)(steps - step < kPerGroup ? steps - step : kPerGroup);
      Format::scales(p, at, count, scale, taken + (g - first) * kPerGroup * Format::kRuns);
      Sum parts[M];
      for (int m = 0; m < M; m++) parts[m] = no_sum();
      for (int i = 0; i < count; i++) {
        const Codes codes = Format::codes(p, at + i * kStep);
        const Scales scales = Format::spread(scale + i * Format::kRuns);
        for (int m = 0; m < M; m++) {
          const int8_t* x = p.x + (from + m) * p.columns + (step + i) * kStep;
          parts[m] = add<Format::kWide>(parts[m], codes, x, scales);
        }
      }
      for (int m = 0; m < M; m++) sums[m] = add_times(sums[m], parts[m], p.x_scale[(from + m) * groups + g]);
    }
    const int64_t run = first * kPerGroup * Format::kRuns, end = last * kPerGroup < steps ? last * kPerGroup : steps;
    for (int m = 0; m < M; m++)
      results[m] -= dot(taken, p.x_sum + (from + m) * steps * Format::kRuns + run, end * Format::kRuns - run);
  }
  for (int m = 0; m < M; m++) p.out[(from + m) * p.rows + row] = results[m] + total(sums[m]);
}

template <class Format>
void format_rows(const Product& p, int64_t start, int64_t stop) {
  for (int64_t row = start; row < stop; row++) {
    int from = 0;
    for (; from + kShared <= p.m; from += kShared) row_product<Format, kShared>(p, row, from);
    switch (p.m - from) {
      case 3: row_product<Format, 3>(p, row, from); break;
      case 2: row_product<Format, 2>(p, row, from); break;
      case 1: row_product<Format, 1>(p, row, from); break;
      default: break;
    }
  }
}

void product_rows(const Product& p, int64_t start, int64_t stop) {
  switch (p.format) {
    case kNf4: return format_rows<Nf4>(p, start, stop);
    case kInt8: return format_rows<Int8>(p, start, stop);
    case kInt4: return format_rows<Int4>(p, start, stop);
    case kMxfp4: return format_rows<Mxfp4>(p, start, stop);
    case kQ4_0: return format_rows<Q4_0>(p, start, stop);
    case kQ8_0: return format_rows<Q8_0>(p, start, stop);
    case kQ4_K: return format_rows<QK<false>>(p, start, stop);
    case kQ5_K: return format_rows<QK<true>>(p, start, stop);
    case kQ4_1: return format_rows<Q4_1>(p, start, stop);
    case kQ6_K: return format_rows<Q6_K>(p, start, stop);
    default: return;
  }
}

// The largest magnitude of 64: that of the bits, which the compiler may compare in any order.
inline int32_t largest_bits(const float* x) {
  int32_t bits[kStep], largest = 0;
  memcpy(bits, x, sizeof bits);
  for (int i = 0; i < kStep; i++) {
    const int32_t size = bits[i] & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  return largest;
}

// Loops of a length that the compiler knows and without branches, so that it makes vectors of them.
void round_row(const float* x, int64_t columns, int32_t format, int8_t* rounded, float* scale, float* sum, float* rest) {
  const bool even_odd = order_of(format) == kEvenOdd;
  const int64_t runs = kStep / run_of(format);
  float unit = 0, by = 0;
  for (int64_t at = 0; at < columns; at += kStep) {
    if (at % kGroup == 0) {
      int32_t bits = 0;
      for (int64_t i = at; i < columns && i < at + kGroup; i += kStep) {
        const int32_t of_step = largest_bits(x + i);
        bits = of_step > bits ? of_step : bits;
      }
      const float largest = bits_to_float((uint32_t)bits);
      unit = largest / 127.0f;
      by = largest > 0 ? 127.0f / largest : 0.0f;
      scale[at / kGroup] = unit;
    }
    int32_t codes[kStep], sums[4] = {0, 0, 0, 0};
    for (int i = 0; i < kStep; i++) codes[i] = (int32_t)lrintf(x[at + i] * by);
    if (rest != nullptr)
      for (int i = 0; i < kStep; i++) rest[at + i] = x[at + i] - unit * (float)codes[i];
    for (int quarter = 0; quarter < 4; quarter++)
      for (int i = 0; i < kStep / 4; i++) sums[quarter] += codes[kStep / 4 * quarter + i];
    if (even_odd) {
      for (int i = 0; i < kStep / 2; i++) rounded[at + i] = (int8_t)codes[2 * i];
      for (int i = 0; i < kStep / 2; i++) rounded[at + kStep / 2 + i] = (int8_t)codes[2 * i + 1];
    } else {
      for (int i = 0; i < kStep; i++) rounded[at + i] = (int8_t)codes[i];
    }
    float* totals = sum + at / kStep * runs;
    if (runs == 4) {
      for (int i = 0; i < 4; i++) totals[i] = unit * (float)sums[i];
    } else if (runs == 2) {
      totals[0] = unit * (float)(sums[0] + sums[1]);
      totals[1] = unit * (float)(sums[2] + sums[3]);
    } else {
      totals[0] = unit * (float)(sums[0] + sums[1] + sums[2] + sums[3]);
    }
  }
}

}  // namespace

extern const ProductKernels JOIN(product_, OUTCORE_VARIANT);
const ProductKernels JOIN(product_, OUTCORE_VARIANT) = {product_rows, round_row};

}  // namespace outcore
