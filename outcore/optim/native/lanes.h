// Full registers of 32-bit numbers, as wide as the instruction set this is compiled for; kernels.cpp computes in them.
//
// Arithmetic is that of the compiler's vector types, element by element in IEEE single precision. Intrinsics only where
// these have none (square roots) or where compilers take element after element (numbers of 8 and 16 bits).
#pragma once
#include <stddef.h>
#include <stdint.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "abi.h"

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

namespace outcore {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

INLINE Floats all(float x) { return Floats{} + x; }
INLINE Ints all(int32_t x) { return Ints{} + x; }
INLINE Words all(uint32_t x) { return Words{} + x; }
INLINE Ints counting() {
  Ints x{};
  for (int lane = 0; lane < kLanes; lane++) x[lane] = lane;
  return x;
}

INLINE Ints bits_of(Floats x) { return (Ints)x; }
INLINE Floats floats_of(Ints bits) { return (Floats)bits; }
INLINE Floats magnitude(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }
INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE Ints truncated(Floats x) { return __builtin_convertvector(x, Ints); }
INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }
INLINE Words larger(Words a, Words b) { return a > b ? a : b; }
// Of numbers that are neither NaN nor below zero.
INLINE Floats larger(Floats a, Floats b) { return (Floats)larger((Ints)a, (Ints)b); }
INLINE Floats smaller(Floats a, Floats b) { return (Floats)((Ints)a < (Ints)b ? (Ints)a : (Ints)b); }

INLINE uint32_t largest_of(Words x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32((__m512i)x);
#endif
  uint32_t largest = x[0];
  for (int lane = 1; lane < kLanes; lane++) largest = x[lane] > largest ? x[lane] : largest;
  return largest;
}

INLINE Floats square_root(Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (Floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
  return (Floats)_mm_sqrt_ps((__m128)x);
#else
  for (int lane = 0; lane < kLanes; lane++) x[lane] = __builtin_sqrtf(x[lane]);
  return x;
#endif
}

// z + x * y and z - x * y, rounded once; where there is no such instruction twice, so only for exact products.
#if defined(__AVX512F__)
INLINE Floats plus_product(Floats z, Floats x, Floats y) {
  return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
}
INLINE Floats less_product(Floats z, Floats x, Floats y) {
  return (Floats)_mm512_fnmadd_ps((__m512)x, (__m512)y, (__m512)z);
}
#else
INLINE Floats plus_product(Floats z, Floats x, Floats y) { return z + x * y; }
INLINE Floats less_product(Floats z, Floats x, Floats y) { return z - x * y; }
#endif

// Many numbers x >= 0 (or NaN) over the same one, 0 < by <= 1, correctly rounded as a division is, in less time.
// Brisebarre, Muller and Raina, "Accelerating correctly rounded floating-point division when the divisor is known in
// advance" (2004): with 1 / by as a sum of two numbers, q is one of the two numbers around the quotient. Markstein,
// "Computation of elementary functions on the IBM RISC System/6000 processor" (1990): then x - q * by is exact, and
// added to q in units of the correctly rounded 1 / by it gives the correctly rounded quotient. From x = infinity comes
// NaN, of which the maximum with x makes infinity: a maximum with NaN is its second, and no other quotient is below x.
struct Divisor {
  float by, inverse, rest;
  explicit Divisor(float x) : by(x), inverse(1.f / x), rest((float)(1.0 / (double)x - (double)inverse)) {}
};
INLINE Floats quotient(Floats x, const Divisor& divisor) {
#if defined(__AVX512F__)
  const Floats inverse = all(divisor.inverse);
  const Floats q = plus_product(x * divisor.rest, x, inverse);
  const Floats exact = plus_product(q, less_product(x, q, all(divisor.by)), inverse);
  return (Floats)_mm512_max_ps((__m512)exact, (__m512)x);
#else
  return x / divisor.by;
#endif
}

INLINE Floats load(const float* from) {
  Floats x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}
INLINE void store(float* to, Floats x) { __builtin_memcpy(to, &x, sizeof x); }
INLINE Words load(const uint32_t* from) {
  Words x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}
INLINE void store(uint32_t* to, Words x) { __builtin_memcpy(to, &x, sizeof x); }

typedef double Doubles __attribute__((vector_size(4 * kLanes)));
INLINE void store(double* to, Doubles x) { __builtin_memcpy(to, &x, sizeof x); }
// The squares of kLanes / 2 numbers, exact.
INLINE Doubles squares(const float* from) {
#if defined(__AVX512F__)
  const Doubles x = (Doubles)_mm512_cvtps_pd(_mm256_loadu_ps(from));
#elif defined(__AVX2__)
  const Doubles x = (Doubles)_mm256_cvtps_pd(_mm_loadu_ps(from));
#else
  const Doubles x = {from[0], from[1]};
#endif
  return x * x;
}

// Numbers of 8 and 16 bits as 32-bit ones, and the low 8 or 16 bits of 32-bit ones.
#if defined(__AVX512F__)
INLINE Ints load_wide(const int8_t* from) { return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)); }
INLINE Ints load_wide(const uint8_t* from) { return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)); }
INLINE Ints load_wide(const int16_t* from) {
  return (Ints)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)from));
}
INLINE Ints load_wide(const uint16_t* from) {
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}
INLINE void store_narrow(uint16_t* to, Ints x) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)x));
}
INLINE void store_narrow(uint8_t* to, Ints x) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x)); }
#elif defined(__AVX2__)
INLINE Ints load_wide(const int8_t* from) { return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
INLINE Ints load_wide(const uint8_t* from) { return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
INLINE Ints load_wide(const int16_t* from) {
  return (Ints)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)from));
}
INLINE Ints load_wide(const uint16_t* from) {
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
}
INLINE void store_narrow(uint16_t* to, Ints x) {
  const __m256i low = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0xffff));
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storeu_si128((__m128i*)to, packed);
}
INLINE void store_narrow(uint8_t* to, Ints x) {
  const __m256i low = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0xff));
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(packed, packed));
}
#elif defined(__SSE2__)
INLINE __m128i load_4_bytes(const void* from) {
  int32_t x;
  __builtin_memcpy(&x, from, 4);
  return _mm_cvtsi32_si128(x);
}
INLINE __m128i twofold_8(__m128i x) { return _mm_unpacklo_epi8(x, x); }
INLINE __m128i twofold_16(__m128i x) { return _mm_unpacklo_epi16(x, x); }
INLINE Ints load_wide(const int8_t* from) { return (Ints)twofold_16(twofold_8(load_4_bytes(from))) >> 24; }
INLINE Ints load_wide(const uint8_t* from) { return load_wide((const int8_t*)from) & 0xff; }
INLINE Ints load_wide(const int16_t* from) { return (Ints)twofold_16(_mm_loadl_epi64((const __m128i*)from)) >> 16; }
INLINE Ints load_wide(const uint16_t* from) { return load_wide((const int16_t*)from) & 0xffff; }
INLINE void store_narrow(uint16_t* to, Ints x) {
  const __m128i low = (__m128i)(x << 16 >> 16);
  _mm_storel_epi64((__m128i*)to, _mm_packs_epi32(low, low));
}
INLINE void store_narrow(uint8_t* to, Ints x) {
  const __m128i low = _mm_packs_epi32((__m128i)(x & 0xff), (__m128i)(x & 0xff));
  const int32_t four = _mm_cvtsi128_si32(_mm_packus_epi16(low, low));
  __builtin_memcpy(to, &four, 4);
}
#else
template <typename Narrow>
INLINE Ints load_wide(const Narrow* from) {
  Narrow x[kLanes];
  __builtin_memcpy(x, from, sizeof x);
  return Ints{x[0], x[1], x[2], x[3]};
}
template <typename Narrow>
INLINE void store_narrow(Narrow* to, Ints x) {
  Narrow narrow[kLanes];
  for (int lane = 0; lane < kLanes; lane++) narrow[lane] = (Narrow)x[lane];
  __builtin_memcpy(to, narrow, sizeof narrow);
}
#endif

// Asks for the cache line of `array` that comes kAheadBytes after element `i`, once a line. A processor fetches ahead
// by itself, but begins anew at every page, and here one of some array ends every few hundred elements.
constexpr int64_t kLineBytes = 64, kAheadBytes = 2048;
INLINE void fetch_ahead(const void* array, int64_t i, int64_t size) {
  const int64_t at = i * size;
  if (at % kLineBytes == 0) __builtin_prefetch((const void*)((uintptr_t)array + (uintptr_t)(at + kAheadBytes)));
}

INLINE Floats from_half(Ints h) {
  const Ints em = h & 0x7fff;
  Ints bits = (em << 13) + (112 << 23);
  bits += (Ints)(em >= 0x7c00) & (112 << 23);
  const Floats subnormal = to_floats(em) * 5.9604644775390625e-8f;  // 2^-24
  bits = em < 0x400 ? (Ints)subnormal : bits;
  return (Floats)(bits | (h & 0x8000) << 16);
}

INLINE Ints to_half(Floats x) {  // to nearest, ties to even; in the low 16 bits
  const Ints a = (Ints)magnitude(x), sign = (Ints)x >> 16 & 0x8000;
  const Ints normal = (a + 0xfff + (a >> 13 & 1) - (112 << 23)) >> 13;
  const Ints subnormal = (Ints)((Floats)a + 0.5f) - 0x3f000000;  // the addition rounds to 2^-24
  Ints h = a < 0x38800000 ? subnormal : normal;
  h = a >= 0x47800000 ? all((int32_t)0x7c00) : h;
  return a > 0x7f800000 ? all((int32_t)0x7e00) : h | sign;
}

INLINE Floats load_as_float(int32_t dtype, const void* data, int64_t at) {
  if (dtype == kBfloat16) return (Floats)(load_wide((const uint16_t*)data + at) << 16);
  if (dtype == kFloat32) return load((const float*)data + at);
  return from_half(load_wide((const uint16_t*)data + at));
}

// bf16: rounded half up in its bit pattern, as the split needs it, in every format: they all give the same parameters.
INLINE void store_as(int32_t dtype, void* data, int64_t at, Floats x) {
  if (dtype == kBfloat16) store_narrow((uint16_t*)data + at, (Ints)(((Words)x + 0x8000u) >> 16));
  else if (dtype == kFloat32) store((float*)data + at, x);
  else if (dtype == kFloat16) store_narrow((uint16_t*)data + at, to_half(x));
}

// The same, past the caches where the instruction set can: memory that is only written would be fetched line by line
// first. For 16-bit types, `data` aligned to kStreamBytes; `end_streams` before another thread may look at it.
constexpr uintptr_t kStreamBytes = 32;

INLINE void stream_as(int32_t dtype, void* data, int64_t at, Floats x) {
#if defined(__AVX2__)
  const Ints bits = dtype == kBfloat16 ? (Ints)(((Words)x + 0x8000u) >> 16) : to_half(x);
  uint16_t* to = (uint16_t*)data + at;
#if defined(__AVX512F__)
  _mm256_stream_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)bits));
#else
  alignas(16) uint16_t narrow[kLanes];
  store_narrow(narrow, bits);
  _mm_stream_si128((__m128i*)to, *(const __m128i*)narrow);
#endif
#else
  store_as(dtype, data, at, x);
#endif
}

// The same for `size` bytes as they are.
INLINE void stream_bytes(void* to, const void* from, int64_t size) {
#if defined(__AVX2__)
  if ((uintptr_t)to % kStreamBytes == 0 && size % kStreamBytes == 0) {
    for (int64_t at = 0; at < size; at += kStreamBytes)
      _mm256_stream_si256((__m256i*)((char*)to + at), _mm256_loadu_si256((const __m256i*)((const char*)from + at)));
    return;
  }
#endif
  __builtin_memcpy(to, from, size);
}

INLINE void end_streams() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace outcore
