// Rows of 16-bit weights times fp32 activations, which are taken as they are. The product with one that came from 16
// bits is exact in fp32, and fp32 sums it.
//
// kTall rows of weights are multiplied with kWide rows of activations at once: the former share loads of activations,
// the latter the widening of weights. Where there are more rows of activations, some columns of some rows of weights
// stay in the second cache for all of them, and come from memory once; so many columns of kWide rows of activations stay
// in the first one. Sums of kSpan columns are added up in order whatever the other rows are, so none of them changes a
// bit of a result. Denormals of fp32, which 16-bit weights seldom are, count as zeros.
#pragma once
#include <stdint.h>

#include "product_vectors.h"
#include "products.h"
#include "threads.h"

namespace outcore {
namespace {

constexpr int kLine = 32;         // weights of a cache line, of which rows are made
constexpr int kTall = 4, kWide = 4;
constexpr int64_t kBand = 64;     // rows of weights that stay in the second cache

#if defined(__AVX512VNNI__)

typedef Floats Lanes;
constexpr int64_t kSpan = 1536;
constexpr int kTallOfMany = 4;  // as many as registers hold

inline Lanes no_lanes() { return no_floats(); }
inline Lanes lanes_once(const float* p) {  // into a register: see load_once
  Lanes found = _mm512_loadu_ps(p);
  __asm__("" : "+v"(found));
  return found;
}
inline Lanes widened_bf16(const uint16_t* p) {  // each word behind one of zeros
  const __m512i twice = _mm512_set_epi32(0xf000f, 0xe000e, 0xd000d, 0xc000c, 0xb000b, 0xa000a, 0x90009, 0x80008, 0x70007,
                                         0x60006, 0x50005, 0x40004, 0x30003, 0x20002, 0x10001, 0);
  const __m512i words = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, twice, words));
}
inline Lanes widened_fp16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

#else

typedef Eight Lanes;
constexpr int64_t kSpan = 1024;
constexpr int kTallOfMany = 2;

#if defined(__AVX2__)
inline Lanes no_lanes() { return _mm256_setzero_ps(); }
inline Lanes lanes_once(const float* p) {
  Lanes found = _mm256_loadu_ps(p);
  __asm__("" : "+x"(found));
  return found;
}
inline Lanes widened_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Lanes widened_fp16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
#else
inline Lanes no_lanes() { return Lanes{}; }
inline Lanes lanes_once(const float* p) { return eight(p); }
inline Lanes widened_bf16(const uint16_t* p) {
  Lanes found;
  for (int i = 0; i < 8; i++) found.at[i] = bits_to_float((uint32_t)p[i] << 16);
  return found;
}
inline Lanes widened_fp16(const uint16_t* p) {
  Lanes found;
  for (int i = 0; i < 8; i++) found.at[i] = half_to_float(p[i]);
  return found;
}
#endif
#endif

struct Bf16 {
  static inline Lanes widened(const uint16_t* p) { return widened_bf16(p); }
};
struct Fp16 {
  static inline Lanes widened(const uint16_t* p) { return widened_fp16(p); }
};

// Columns [at, stop) of R rows of weights from `first` on, but none from `end` on (the last one is taken again), with M
// rows of activations from number `from` on. `ahead`: weights from here to those that are asked for, to come next.
template <class Kind, int R, int M>
inline void add_tile(const Product& p, int64_t first, int64_t end, int64_t from, int64_t at, int64_t stop,
                     int64_t ahead) {
  constexpr int kLanes = sizeof(Lanes) / sizeof(float);
  const float* x = (const float*)p.x + from * p.columns;
  const uint16_t* w[R];
  Lanes sums[R][M];
  for (int r = 0; r < R; r++) {
    w[r] = (const uint16_t*)p.codes + (first + r < end ? first + r : end - 1) * p.columns;
    for (int m = 0; m < M; m++) sums[r][m] = no_lanes();
  }
  for (int64_t column = at; column < stop; column += kLine) {
    for (int r = 0; r < R; r++) __builtin_prefetch(w[r] + column + ahead, 0, 2);
    for (int in = 0; in < kLine; in += kLanes) {
      Lanes wide[R];
      for (int r = 0; r < R; r++) wide[r] = Kind::widened(w[r] + column + in);
      for (int m = 0; m < M; m++) {
        const Lanes activations = lanes_once(x + m * p.columns + column + in);
        for (int r = 0; r < R; r++) sums[r][m] = add(sums[r][m], wide[r], activations);
      }
    }
  }
  for (int r = 0; r < R && first + r < end; r++)
    for (int m = 0; m < M; m++) {
      float& out = p.out[(from + m) * p.rows + first + r];
      const float sum = total(sums[r][m]);
      out = at == 0 ? sum : out + sum;
    }
}

// kTall rows of weights at most.
template <class Kind, int M>
inline void add_tall(const Product& p, int64_t first, int64_t end, int64_t from, int64_t at, int64_t stop,
                     int64_t ahead) {
  constexpr int R = M > 2 ? kTallOfMany : kTall;
  for (int64_t row = first; row < end; row += R) add_tile<Kind, R, M>(p, row, end, from, at, stop, ahead);
}

// kWide rows of activations at most.
template <class Kind, int M = kWide>
inline void add_some(const Product& p, int64_t count, int64_t first, int64_t end, int64_t from, int64_t at,
                     int64_t stop, int64_t ahead) {
  if (count >= M) return add_tall<Kind, M>(p, first, end, from, at, stop, ahead);
  if constexpr (M > 1) add_some<Kind, M - 1>(p, count, first, end, from, at, stop, ahead);
}

template <class Kind>
void plain_rows(const Product& p, int64_t start, int64_t stop) {
  FloatMode flushing(FloatMode::kFlushes);
  const int64_t band = p.m > kWide ? kBand : kTall;
  for (int64_t first = start; first < stop; first += band) {
    const int64_t end = first + band < stop ? first + band : stop;
    for (int64_t at = 0; at < p.columns; at += kSpan) {
      const int64_t until = at + kSpan < p.columns ? at + kSpan : p.columns;
      for (int64_t from = 0; from < p.m; from += kWide) {
        const int64_t ahead = from == 0 ? kTall * p.columns : 0;
        for (int64_t row = first; row < end; row += kTall) {
          const int64_t last = row + kTall < end ? row + kTall : end;
          add_some<Kind>(p, p.m - from, row, last, from, at, until, ahead);
        }
      }
    }
  }
}

}  // namespace
}  // namespace outcore
