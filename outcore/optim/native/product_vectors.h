// 128 codes as signed 16-bit words and their products with 128 rounded activations, on each instruction set.
//
// `Words` are 32 words, `Ints` and `Floats` 16 lanes of two words each. Codes are so small that eight products with
// words of 16 bits (sixteen for K-quants) cannot overflow a lane.
//
// kRowsAtOnce rows of weights are multiplied with kShared rows of activations: the former share loads of activations,
// the latter the unpacking of weights.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace outcore {
namespace {

#if defined(__AVX2__)
typedef __m128 Four;
typedef __m128i Sixteen;
inline Four four(float a, float b, float c, float d) { return _mm_set_ps(d, c, b, a); }
inline Sixteen sixteen(uint64_t low, uint64_t high) { return _mm_set_epi64x((int64_t)high, (int64_t)low); }
inline Four powers(const uint8_t* exponents) {  // of two; of the least a subnormal number
  int32_t four_bytes;
  memcpy(&four_bytes, exponents, 4);
  const __m128i bits = _mm_slli_epi32(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(four_bytes)), 23);
  return _mm_castsi128_ps(_mm_max_epi32(bits, _mm_set1_epi32(0x400000)));
}
typedef __m256 Eight;
inline Eight eight(const float* p) { return _mm256_loadu_ps(p); }
inline Eight eight_bytes(uint64_t bytes, float by) {
  return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(sixteen(bytes, 0))), _mm256_set1_ps(by));
}
inline Eight add(Eight sum, Eight a, Eight b) { return _mm256_fmadd_ps(a, b, sum); }
inline float total(Eight sum) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
#endif

#if defined(__AVX512VNNI__)

typedef __m512i Words;
typedef __m512i Ints;
typedef __m512 Floats;
constexpr int kRowsAtOnce = 2, kShared = 4;  // rows of weights, of activations: what 32 registers hold

inline Words load(const void* p) { return _mm512_loadu_si512(p); }
inline Words load_once(const void* p) {  // into a register: loads are as scarce as products where one has two uses
  Words w = _mm512_loadu_si512(p);
  __asm__("" : "+v"(w));
  return w;
}
inline Words load_four(const uint8_t* p, int64_t stride) {  // 16 bytes from each of four places
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p)),
                                              _mm_loadu_si128((const __m128i*)(p + stride)), 1);
  const __m256i high = _mm256_set_m128i(_mm_loadu_si128((const __m128i*)(p + 3 * stride)),
                                        _mm_loadu_si128((const __m128i*)(p + 2 * stride)));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
inline Words load_twice(const uint8_t* p) { return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p)); }
inline Words signed_bytes(const uint8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
template <int kBy>
inline Words shift_right(Words w) { return _mm512_srli_epi16(w, kBy); }
template <int kBy>
inline Words shift_left(Words w) { return _mm512_slli_epi16(w, kBy); }
inline Words upper_byte(Words w) { return _mm512_srai_epi16(w, 8); }  // with its sign
template <int kBy>
inline Words shift_right_upper(Words w) {  // the upper sixteen alone
  return _mm512_mask_srli_epi16(w, 0xffff0000u, w, kBy);
}
inline Words masked(Words w, int16_t by) { return _mm512_and_si512(w, _mm512_set1_epi16(by)); }
inline Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
inline Words minus(Words a, Words b) { return _mm512_sub_epi16(a, b); }
inline Words minus(Words a, int16_t b) { return _mm512_sub_epi16(a, _mm512_set1_epi16(b)); }
inline Words times(Words a, Words b) { return _mm512_mullo_epi16(a, b); }
// Each byte the one of `bytes` that the pattern names; 0x80: zero.
inline Words spread(Sixteen bytes, const uint8_t* pattern) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), _mm512_loadu_si512(pattern));
}
// The four nibbles of each word, from the lowest on, by a table of 16 words.
inline void nibbles(Words raw, const int16_t* table, Words* out) {
  __m512i wide = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)table));  // twice: bit 4 is ignored
  __asm__("" : "+v"(wide));
  out[0] = _mm512_permutexvar_epi16(raw, wide);
  out[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 4), wide);
  out[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 8), wide);
  out[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 12), wide);
}
inline Ints no_ints() { return _mm512_setzero_si512(); }
inline Ints dot(Ints sum, Words a, Words b) { return _mm512_dpwssd_epi32(sum, a, b); }
inline Floats no_floats() { return _mm512_setzero_ps(); }
inline Floats floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Floats of_one(float s) { return _mm512_set1_ps(s); }
inline Floats of_two(float s, float t) {
  return _mm512_mask_broadcastss_ps(_mm512_set1_ps(s), 0xff00, _mm_set_ss(t));
}
inline Floats of_four(__m128 s) {
  return _mm512_permutexvar_ps(_mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0),
                               _mm512_castps128_ps512(s));
}
inline Floats add(Floats sum, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, sum); }
inline float total(Floats sum) { return _mm512_reduce_add_ps(sum); }

#elif defined(__AVX2__)

struct Words {
  __m256i a, b;
};
struct Ints {
  __m256i a, b;
};
struct Floats {
  __m256 a, b;
};
constexpr int kRowsAtOnce = 1, kShared = 4;

inline __m128i load16(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
inline __m256i load32(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Words load(const void* p) { return {load32(p), load32((const uint8_t*)p + 32)}; }
inline Words load_once(const void* p) { return load(p); }
inline Words load_four(const uint8_t* p, int64_t stride) {
  return {_mm256_set_m128i(load16(p + stride), load16(p)),
          _mm256_set_m128i(load16(p + 3 * stride), load16(p + 2 * stride))};
}
inline Words load_twice(const uint8_t* p) { return {load32(p), load32(p)}; }
inline Words signed_bytes(const uint8_t* p) {
  return {_mm256_cvtepi8_epi16(load16(p)), _mm256_cvtepi8_epi16(load16(p + 16))};
}
template <int kBy>
inline Words shift_right(Words w) { return {_mm256_srli_epi16(w.a, kBy), _mm256_srli_epi16(w.b, kBy)}; }
template <int kBy>
inline Words shift_left(Words w) { return {_mm256_slli_epi16(w.a, kBy), _mm256_slli_epi16(w.b, kBy)}; }
inline Words upper_byte(Words w) { return {_mm256_srai_epi16(w.a, 8), _mm256_srai_epi16(w.b, 8)}; }
template <int kBy>
inline Words shift_right_upper(Words w) { return {w.a, _mm256_srli_epi16(w.b, kBy)}; }
inline Words masked(Words w, int16_t by) {
  return {_mm256_and_si256(w.a, _mm256_set1_epi16(by)), _mm256_and_si256(w.b, _mm256_set1_epi16(by))};
}
inline Words either(Words a, Words b) { return {_mm256_or_si256(a.a, b.a), _mm256_or_si256(a.b, b.b)}; }
inline Words minus(Words a, Words b) { return {_mm256_sub_epi16(a.a, b.a), _mm256_sub_epi16(a.b, b.b)}; }
inline Words minus(Words a, int16_t b) { return minus(a, Words{_mm256_set1_epi16(b), _mm256_set1_epi16(b)}); }
inline Words times(Words a, Words b) { return {_mm256_mullo_epi16(a.a, b.a), _mm256_mullo_epi16(a.b, b.b)}; }
inline Words spread(Sixteen bytes, const uint8_t* pattern) {
  const __m256i wide = _mm256_broadcastsi128_si256(bytes);
  return {_mm256_shuffle_epi8(wide, load32(pattern)), _mm256_shuffle_epi8(wide, load32(pattern + 32))};
}
struct Table {
  __m256i low, high;  // bytes of 16 words
};
// Even and odd bytes of codes to words.
inline void look_up(__m256i codes, Table table, __m256i* even, __m256i* odd) {
  const __m256i low = _mm256_shuffle_epi8(table.low, codes), high = _mm256_shuffle_epi8(table.high, codes);
  const __m256i odd_bytes = _mm256_set1_epi16((int16_t)0xff00);
  *even = _mm256_blendv_epi8(low, _mm256_slli_epi16(high, 8), odd_bytes);
  *odd = _mm256_blendv_epi8(_mm256_srli_epi16(low, 8), high, odd_bytes);
}
inline void nibbles(Words raw, const int16_t* table, Words* out) {
  const __m128i first = load16(table), second = load16(table + 8), byte = _mm_set1_epi16(255);
  const __m128i low = _mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(second, byte));
  const __m128i high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
  const Table wide = {_mm256_broadcastsi128_si256(low), _mm256_broadcastsi128_si256(high)};
  const __m256i mask = _mm256_set1_epi8(15);
  look_up(_mm256_and_si256(raw.a, mask), wide, &out[0].a, &out[2].a);
  look_up(_mm256_and_si256(raw.b, mask), wide, &out[0].b, &out[2].b);
  look_up(_mm256_and_si256(_mm256_srli_epi16(raw.a, 4), mask), wide, &out[1].a, &out[3].a);
  look_up(_mm256_and_si256(_mm256_srli_epi16(raw.b, 4), mask), wide, &out[1].b, &out[3].b);
}
inline Ints no_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline __m256i dot(__m256i sum, __m256i a, __m256i b) {
#if defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}
inline Ints dot(Ints sum, Words a, Words b) { return {dot(sum.a, a.a, b.a), dot(sum.b, a.b, b.b)}; }
inline Floats no_floats() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats floats(Ints a) { return {_mm256_cvtepi32_ps(a.a), _mm256_cvtepi32_ps(a.b)}; }
inline Floats of_one(float s) { return {_mm256_set1_ps(s), _mm256_set1_ps(s)}; }
inline Floats of_two(float s, float t) { return {_mm256_set1_ps(s), _mm256_set1_ps(t)}; }
inline Floats of_four(__m128 s) {
  const __m256 both = _mm256_set_m128(s, s);
  return {_mm256_permutevar8x32_ps(both, _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0)),
          _mm256_permutevar8x32_ps(both, _mm256_set_epi32(3, 3, 3, 3, 2, 2, 2, 2))};
}
inline Floats add(Floats sum, Floats a, Floats b) {
  return {_mm256_fmadd_ps(a.a, b.a, sum.a), _mm256_fmadd_ps(a.b, b.b, sum.b)};
}
inline float total(Floats sum) { return total(_mm256_add_ps(sum.a, sum.b)); }

#else  // any processor

struct Words {
  int16_t at[32];
};
struct Ints {
  int32_t at[16];
};
struct Floats {
  float at[16];
};
struct Four {
  float at[4];
};
struct Sixteen {
  uint8_t at[16];
};
constexpr int kRowsAtOnce = 1, kShared = 2;

inline Four four(float a, float b, float c, float d) { return {{a, b, c, d}}; }
inline Four powers(const uint8_t* exponents) {  // of two; of the least a subnormal number
  Four found;
  for (int i = 0; i < 4; i++) {
    const uint32_t bits = exponents[i] ? (uint32_t)exponents[i] << 23 : 0x400000u;
    memcpy(found.at + i, &bits, 4);
  }
  return found;
}
inline Sixteen sixteen(uint64_t low, uint64_t high) {
  Sixteen bytes;
  memcpy(bytes.at, &low, 8);
  memcpy(bytes.at + 8, &high, 8);
  return bytes;
}
template <class Of>
inline Words each_word(Of of) {
  Words w;
  for (int i = 0; i < 32; i++) w.at[i] = (int16_t)of(i);
  return w;
}
template <class Of>
inline Floats each_float(Of of) {
  Floats f;
  for (int i = 0; i < 16; i++) f.at[i] = of(i);
  return f;
}
inline Words load(const void* p) {
  Words w;
  memcpy(w.at, p, 64);
  return w;
}
inline Words load_once(const void* p) { return load(p); }
inline Words load_four(const uint8_t* p, int64_t stride) {
  Words w;
  for (int i = 0; i < 4; i++) memcpy(w.at + 8 * i, p + i * stride, 16);
  return w;
}
inline Words load_twice(const uint8_t* p) {
  Words w;
  memcpy(w.at, p, 32);
  memcpy(w.at + 16, p, 32);
  return w;
}
inline Words signed_bytes(const uint8_t* p) { return each_word([&](int i) { return (int8_t)p[i]; }); }
template <int kBy>
inline Words shift_right(const Words& w) { return each_word([&](int i) { return (uint16_t)w.at[i] >> kBy; }); }
template <int kBy>
inline Words shift_left(const Words& w) { return each_word([&](int i) { return (uint16_t)w.at[i] << kBy; }); }
inline Words upper_byte(const Words& w) { return each_word([&](int i) { return w.at[i] >> 8; }); }
template <int kBy>
inline Words shift_right_upper(const Words& w) {
  return each_word([&](int i) { return i < 16 ? w.at[i] : (uint16_t)w.at[i] >> kBy; });
}
inline Words masked(const Words& w, int16_t by) { return each_word([&](int i) { return w.at[i] & by; }); }
inline Words either(const Words& a, const Words& b) { return each_word([&](int i) { return a.at[i] | b.at[i]; }); }
inline Words minus(const Words& a, const Words& b) { return each_word([&](int i) { return a.at[i] - b.at[i]; }); }
inline Words minus(const Words& a, int16_t b) { return each_word([&](int i) { return a.at[i] - b; }); }
inline Words times(const Words& a, const Words& b) { return each_word([&](int i) { return a.at[i] * b.at[i]; }); }
inline Words spread(const Sixteen& bytes, const uint8_t* pattern) {
  uint8_t found[64];
  for (int i = 0; i < 64; i++) found[i] = pattern[i] & 0x80 ? 0 : bytes.at[pattern[i]];
  return load(found);
}
inline void nibbles(const Words& raw, const int16_t* table, Words* out) {
  for (int s = 0; s < 4; s++) out[s] = each_word([&](int i) { return table[(uint16_t)raw.at[i] >> (4 * s) & 15]; });
}
inline Ints no_ints() { return Ints{}; }
inline Ints dot(Ints sum, const Words& a, const Words& b) {
  for (int i = 0; i < 16; i++) sum.at[i] += a.at[2 * i] * b.at[2 * i] + a.at[2 * i + 1] * b.at[2 * i + 1];
  return sum;
}
inline Floats no_floats() { return Floats{}; }
inline Floats floats(const Ints& a) { return each_float([&](int i) { return (float)a.at[i]; }); }
inline Floats of_one(float s) { return each_float([&](int) { return s; }); }
inline Floats of_two(float s, float t) { return each_float([&](int i) { return i < 8 ? s : t; }); }
inline Floats of_four(const Four& s) { return each_float([&](int i) { return s.at[i / 4]; }); }
inline Floats add(const Floats& sum, const Floats& a, const Floats& b) {
  return each_float([&](int i) { return sum.at[i] + a.at[i] * b.at[i]; });
}
struct Eight {
  float at[8];
};
inline Eight eight(const float* p) {
  Eight e;
  memcpy(e.at, p, sizeof e.at);
  return e;
}
inline Eight eight_bytes(uint64_t bytes, float by) {
  Eight e;
  for (int i = 0; i < 8; i++) e.at[i] = by * (float)(uint8_t)(bytes >> 8 * i);
  return e;
}
inline Eight add(Eight sum, const Eight& a, const Eight& b) {
  for (int i = 0; i < 8; i++) sum.at[i] += a.at[i] * b.at[i];
  return sum;
}
template <class Lanes>
inline float total(const Lanes& sum) {
  float all = 0;
  for (float lane : sum.at) all += lane;
  return all;
}

#endif

inline float bits_to_float(uint32_t word) {
  float value;
  memcpy(&value, &word, 4);
  return value;
}
inline float half_to_float(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 0x3ff;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float value = (float)mantissa * 5.9604644775390625e-8f;  // subnormal: mantissa * 2^-24
  return sign ? -value : value;
#endif
}
inline float read_half(const uint8_t* p) {
  uint16_t bits;
  memcpy(&bits, p, 2);
  return half_to_float(bits);
}

}  // namespace
}  // namespace outcore
