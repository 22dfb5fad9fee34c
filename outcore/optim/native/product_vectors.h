// 64 bytes of codes and their products with 64 rounded activations, on each instruction set.
//
// Narrow codes are 0..128, so a pair of products fits 16 bits. Wide ones are signed bytes; where the instruction wants
// unsigned ones they are moved up by kWideOffset, which the caller takes off again with the sum of activations.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace outcore {
namespace {

#if defined(__AVX512VNNI__)

constexpr int kWideOffset = 128;
typedef __m512i Codes;
typedef __m512 Sum;
typedef __m512 Scales;

inline Sum no_sum() { return _mm512_setzero_ps(); }
inline Codes join(__m256i first, __m256i second) { return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1); }
// Low halves of 32 bytes, then the high ones; or the other way round.
inline Codes halves(const uint8_t* p, bool high_first) {
  const __m256i raw = _mm256_loadu_si256((const __m256i*)p), mask = _mm256_set1_epi8(15);
  const __m256i low = _mm256_and_si256(raw, mask), high = _mm256_and_si256(_mm256_srli_epi16(raw, 4), mask);
  return high_first ? join(high, low) : join(low, high);
}
// Of two blocks of 16 bytes: low and high halves of the first, then of the second.
inline Codes halves_of_two(const uint8_t* p, const uint8_t* q) {
  const __m128i a = _mm_loadu_si128((const __m128i*)p), b = _mm_loadu_si128((const __m128i*)q);
  const __m256i first = _mm256_inserti128_si256(_mm256_castsi128_si256(a), _mm_srli_epi16(a, 4), 1);
  const __m256i second = _mm256_inserti128_si256(_mm256_castsi128_si256(b), _mm_srli_epi16(b, 4), 1);
  return _mm512_and_si512(join(first, second), _mm512_set1_epi8(15));
}
inline Codes signed_bytes(const uint8_t* p, const uint8_t* q) {  // 32 and 32 bytes
  const Codes raw = join(_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)q));
  return _mm512_xor_si512(raw, _mm512_set1_epi8((char)0x80));
}
inline Codes look_up(Codes codes, const uint8_t* table) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), codes);
}
// Low or high halves of 64 bytes.
inline Codes half_of_each(const uint8_t* p, bool high) {
  const Codes raw = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  return _mm512_and_si512(high ? _mm512_srli_epi16(raw, 4) : raw, mask);
}
// Puts kBits bits above the four of each code: of 32 bytes those from `bit` on for the first 32 codes, the next ones for
// the others.
template <int kBits>
inline Codes upper_bits(Codes codes, const uint8_t* p, int bit) {
  const __m256i raw = _mm256_loadu_si256((const __m256i*)p), mask = _mm256_set1_epi8((1 << kBits) - 1);
  const __m128i by = _mm_cvtsi32_si128(bit), next = _mm_cvtsi32_si128(bit + kBits);
  const Codes bits = join(_mm256_and_si256(_mm256_srl_epi16(raw, by), mask), _mm256_and_si256(_mm256_srl_epi16(raw, next), mask));
  return _mm512_or_si512(codes, _mm512_slli_epi16(bits, 4));
}
inline Scales one_scale(float s) { return _mm512_set1_ps(s); }
inline Scales two_scales(float s, float t) {  // of the first and the second 32 codes
  return _mm512_insertf32x8(_mm512_set1_ps(s), _mm256_set1_ps(t), 1);
}
inline Scales inner_scales(float s, float t) {  // of the first and the second 16 codes of each 32
  return _mm512_broadcast_f32x8(_mm256_insertf128_ps(_mm256_set1_ps(s), _mm_set1_ps(t), 1));
}
inline Scales four_scales(const float* s) {  // of 16 codes each
  return _mm512_permutexvar_ps(_mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0),
                               _mm512_castps128_ps512(_mm_loadu_ps(s)));
}
template <bool kWide>
inline Sum add(Sum sum, Codes codes, const int8_t* x, Scales scales) {
  const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, _mm512_loadu_si512(x));
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scales, sum);
}
inline Sum add_times(Sum sum, Sum part, float by) { return _mm512_fmadd_ps(part, _mm512_set1_ps(by), sum); }
inline float total(Sum sum) { return _mm512_reduce_add_ps(sum); }

#elif defined(__AVX2__)

#if defined(__AVXVNNI__)
constexpr int kWideOffset = 128;
#else
constexpr int kWideOffset = 0;
#endif
struct Codes {
  __m256i first, second;
};
typedef __m256 Sum;
struct Scales {
  __m256 first, second;
};

inline Sum no_sum() { return _mm256_setzero_ps(); }
inline Codes halves(const uint8_t* p, bool high_first) {
  const __m256i raw = _mm256_loadu_si256((const __m256i*)p), mask = _mm256_set1_epi8(15);
  const __m256i low = _mm256_and_si256(raw, mask), high = _mm256_and_si256(_mm256_srli_epi16(raw, 4), mask);
  return high_first ? Codes{high, low} : Codes{low, high};
}
inline __m256i halves_of_one(const uint8_t* p) {
  const __m128i a = _mm_loadu_si128((const __m128i*)p);
  const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(a), _mm_srli_epi16(a, 4), 1);
  return _mm256_and_si256(both, _mm256_set1_epi8(15));
}
inline Codes halves_of_two(const uint8_t* p, const uint8_t* q) { return {halves_of_one(p), halves_of_one(q)}; }
inline __m256i moved_up(__m256i bytes) {
  return kWideOffset ? _mm256_xor_si256(bytes, _mm256_set1_epi8((char)0x80)) : bytes;
}
inline Codes signed_bytes(const uint8_t* p, const uint8_t* q) {
  return {moved_up(_mm256_loadu_si256((const __m256i*)p)), moved_up(_mm256_loadu_si256((const __m256i*)q))};
}
inline Codes look_up(Codes codes, const uint8_t* table) {
  const __m256i wide = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(wide, codes.first), _mm256_shuffle_epi8(wide, codes.second)};
}
inline Codes half_of_each(const uint8_t* p, bool high) {
  const __m256i mask = _mm256_set1_epi8(15);
  const __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)(p + 32));
  return {_mm256_and_si256(high ? _mm256_srli_epi16(a, 4) : a, mask), _mm256_and_si256(high ? _mm256_srli_epi16(b, 4) : b, mask)};
}
template <int kBits>
inline Codes upper_bits(Codes codes, const uint8_t* p, int bit) {
  const __m256i raw = _mm256_loadu_si256((const __m256i*)p), mask = _mm256_set1_epi8((1 << kBits) - 1);
  const __m256i a = _mm256_and_si256(_mm256_srl_epi16(raw, _mm_cvtsi32_si128(bit)), mask);
  const __m256i b = _mm256_and_si256(_mm256_srl_epi16(raw, _mm_cvtsi32_si128(bit + kBits)), mask);
  return {_mm256_or_si256(codes.first, _mm256_slli_epi16(a, 4)), _mm256_or_si256(codes.second, _mm256_slli_epi16(b, 4))};
}
inline Scales one_scale(float s) { return {_mm256_set1_ps(s), _mm256_set1_ps(s)}; }
inline Scales two_scales(float s, float t) { return {_mm256_set1_ps(s), _mm256_set1_ps(t)}; }
inline Scales inner_scales(float s, float t) {
  const __m256 both = _mm256_insertf128_ps(_mm256_set1_ps(s), _mm_set1_ps(t), 1);
  return {both, both};
}
inline Scales four_scales(const float* s) {
  return {_mm256_insertf128_ps(_mm256_set1_ps(s[0]), _mm_set1_ps(s[1]), 1),
          _mm256_insertf128_ps(_mm256_set1_ps(s[2]), _mm_set1_ps(s[3]), 1)};
}
template <bool kWide>
inline __m256i dot32(__m256i codes, __m256i x) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), codes, x);
#else
  const __m256i ones = _mm256_set1_epi16(1);
  if (kWide) return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes)), ones);
  return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), ones);
#endif
}
template <bool kWide>
inline Sum add(Sum sum, Codes codes, const int8_t* x, Scales scales) {
  const __m256i a = dot32<kWide>(codes.first, _mm256_loadu_si256((const __m256i*)x));
  const __m256i b = dot32<kWide>(codes.second, _mm256_loadu_si256((const __m256i*)(x + 32)));
  sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(a), scales.first, sum);
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(b), scales.second, sum);
}
inline Sum add_times(Sum sum, Sum part, float by) { return _mm256_fmadd_ps(part, _mm256_set1_ps(by), sum); }
inline float total(Sum sum) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}

#else  // any processor

constexpr int kWideOffset = 0;
struct Codes {
  int16_t at[64];
};
typedef float Sum;
struct Scales {
  float quarter[4];  // of 16 codes each
};

inline Sum no_sum() { return 0.0f; }
inline Codes halves(const uint8_t* p, bool high_first) {
  Codes codes;
  for (int i = 0; i < 32; i++) {
    codes.at[i + (high_first ? 32 : 0)] = p[i] & 15;
    codes.at[i + (high_first ? 0 : 32)] = p[i] >> 4;
  }
  return codes;
}
inline Codes halves_of_two(const uint8_t* p, const uint8_t* q) {
  Codes codes;
  for (int i = 0; i < 16; i++) {
    codes.at[i] = p[i] & 15;
    codes.at[16 + i] = p[i] >> 4;
    codes.at[32 + i] = q[i] & 15;
    codes.at[48 + i] = q[i] >> 4;
  }
  return codes;
}
inline Codes signed_bytes(const uint8_t* p, const uint8_t* q) {
  Codes codes;
  for (int i = 0; i < 32; i++) {
    codes.at[i] = (int8_t)p[i];
    codes.at[32 + i] = (int8_t)q[i];
  }
  return codes;
}
inline Codes look_up(Codes codes, const uint8_t* table) {
  for (int i = 0; i < 64; i++) codes.at[i] = (int8_t)table[codes.at[i]];
  return codes;
}
inline Codes half_of_each(const uint8_t* p, bool high) {
  Codes codes;
  for (int i = 0; i < 64; i++) codes.at[i] = high ? p[i] >> 4 : p[i] & 15;
  return codes;
}
template <int kBits>
inline Codes upper_bits(Codes codes, const uint8_t* p, int bit) {
  for (int i = 0; i < 64; i++) codes.at[i] |= (int16_t)(((p[i & 31] >> (bit + i / 32 * kBits)) & ((1 << kBits) - 1)) << 4);
  return codes;
}
inline Scales one_scale(float s) { return {{s, s, s, s}}; }
inline Scales two_scales(float s, float t) { return {{s, s, t, t}}; }
inline Scales inner_scales(float s, float t) { return {{s, t, s, t}}; }
inline Scales four_scales(const float* s) { return {{s[0], s[1], s[2], s[3]}}; }
template <bool kWide>
inline Sum add(Sum sum, const Codes& codes, const int8_t* x, const Scales& scales) {
  for (int quarter = 0; quarter < 4; quarter++) {
    int32_t dot = 0;
    for (int i = quarter * 16; i < quarter * 16 + 16; i++) dot += codes.at[i] * x[i];
    sum += (float)dot * scales.quarter[quarter];
  }
  return sum;
}
inline Sum add_times(Sum sum, Sum part, float by) { return sum + part * by; }
inline float total(Sum sum) { return sum; }

#endif

inline float half_to_float(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 0x3ff;
  uint32_t word;
  if (exponent == 31) {
    word = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent != 0) {
    word = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {  // subnormal: mantissa * 2^-24
    const float value = (float)mantissa * 5.9604644775390625e-8f;
    memcpy(&word, &value, 4);
    word |= sign;
  }
  float value;
  memcpy(&value, &word, 4);
  return value;
#endif
}
inline float read_half(const uint8_t* p) {
  uint16_t bits;
  memcpy(&bits, p, 2);
  return half_to_float(bits);
}
inline float bits_to_float(uint32_t word) {
  float value;
  memcpy(&value, &word, 4);
  return value;
}

}  // namespace
}  // namespace outcore
