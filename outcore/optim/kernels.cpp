// AdamW on one range of a chunk. Compiled once per instruction set, with OUTCORE_VARIANT naming the table.
//
// Every result is defined by IEEE operations in the written order (no contraction, correctly rounded division and
// square root), so the variants differ in speed only. Nothing of the C++ library is used here: a template of it,
// instantiated with AVX-512, could be the copy that the linker keeps for the other objects.
//
// A tile of 256 elements passes through L1: gradient -> fp32, states in place or unpacked, AdamW, states packed.
#include "abi.h"

#ifndef OUTCORE_VARIANT
#error "compile with -DOUTCORE_VARIANT=<name>"
#endif
#define INLINE static inline __attribute__((always_inline))

namespace outcore {
namespace {

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr int32_t kNanBits = 0x7fc00000;
constexpr int32_t kSmallestNormalBits = 0x00800000;  // 2^-126: below it, moments become zero
// 8-bit moments: the smallest code of a block must stay a normal fp32, so that a checkpoint in fp32 is exact.
constexpr int32_t kSmallestExpAvg8Bits = (127 - 112) << 23;   // 2^-112
constexpr int32_t kSmallestExpAvgSq8Bits = (127 - 93) << 23;  // 2^-93
constexpr float kLevels = 127.f * 127.f, kInverseLevels = 1.f / kLevels;
constexpr float kRootLevels = 255.f * 255.f, kInverseRootLevels = 1.f / kRootLevels;

INLINE uint32_t bits_of(float x) { uint32_t u; __builtin_memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; __builtin_memcpy(&x, &u, 4); return x; }
INLINE int32_t magnitude_bits(float x) { return (int32_t)(bits_of(x) & 0x7fffffffu); }

// One quiet NaN for all of them: which payload survives depends on the order of operands a compiler picks.
INLINE uint32_t one_nan(uint32_t u) { return (int32_t)(u & 0x7fffffffu) > kInfinityBits ? (uint32_t)kNanBits : u; }
// Moments below `smallest` become +0: a moment that decays for ever would end as a denormal, for which many processors
// take a slow path.
INLINE float without_tiny(float x, int32_t smallest) {
  return float_of(bits_of(x) & (uint32_t)-(int32_t)(magnitude_bits(x) >= smallest));
}

INLINE float from_half(uint32_t h) {
  const uint32_t em = h & 0x7fffu;
  uint32_t u = (em << 13) + (112u << 23);
  u = em >= 0x7c00u ? u + (112u << 23) : u;
  const float subnormal = (float)(int32_t)em * 5.9604644775390625e-8f;  // 2^-24
  u = em < 0x400u ? bits_of(subnormal) : u;
  return float_of(u | (h & 0x8000u) << 16);
}

INLINE uint16_t to_half(float x) {  // to nearest, ties to even
  const uint32_t u = bits_of(x), a = u & 0x7fffffffu;
  const uint32_t normal = (a + 0xfffu + ((a >> 13) & 1u) - (112u << 23)) >> 13;
  const uint32_t subnormal = bits_of(float_of(a) + 0.5f) - 0x3f000000u;  // the addition rounds to 2^-24
  uint32_t h = (int32_t)a < 0x38800000 ? subnormal : normal;
  h = (int32_t)a >= 0x47800000 ? 0x7c00u : h;
  h = (int32_t)a > kInfinityBits ? 0x7e00u : h | ((u >> 16) & 0x8000u);
  return (uint16_t)h;
}

// Rounded half up in its bit pattern, as the split needs it, in every format: they all give the same parameters.
INLINE uint16_t to_bfloat16(float x) { return (uint16_t)((bits_of(x) + 0x8000u) >> 16); }

INLINE void load_as_float(float* __restrict out, int32_t dtype, const void* data, int64_t at, int64_t n) {
  if (dtype == kFloat32) {
    const float* __restrict x = (const float*)data + at;
    for (int64_t i = 0; i < n; i++) out[i] = x[i];
  } else if (dtype == kBfloat16) {
    const uint16_t* __restrict x = (const uint16_t*)data + at;
    for (int64_t i = 0; i < n; i++) out[i] = float_of((uint32_t)x[i] << 16);
  } else {
    const uint16_t* __restrict x = (const uint16_t*)data + at;
    for (int64_t i = 0; i < n; i++) out[i] = from_half(x[i]);
  }
}

INLINE void store_param(int32_t dtype, void* param, int64_t at, const float* __restrict w, int64_t n) {
  if (dtype == kBfloat16) {
    uint16_t* __restrict p = (uint16_t*)param + at;
    for (int64_t i = 0; i < n; i++) p[i] = to_bfloat16(w[i]);
  } else if (dtype == kFloat16) {
    uint16_t* __restrict p = (uint16_t*)param + at;
    for (int64_t i = 0; i < n; i++) p[i] = to_half(w[i]);
  } else if (dtype == kFloat32) {
    float* __restrict p = (float*)param + at;
    for (int64_t i = 0; i < n; i++) p[i] = w[i];
  }
}

// master <-> (parameter, residual): the parameter is the rounded master, the residual the master's low 16 bits. The carry into the parameter is the residual's top bit, so the pair determines all 2^32 patterns.
INLINE void join(float* __restrict w, const uint16_t* __restrict p, const uint16_t* __restrict residual, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    w[i] = float_of(((uint32_t)p[i] << 16) + (uint32_t)(int32_t)(int16_t)residual[i]);
}
INLINE void split(uint16_t* __restrict p, uint16_t* __restrict residual, const float* __restrict w, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    p[i] = to_bfloat16(w[i]);
    residual[i] = (uint16_t)bits_of(w[i]);
  }
}

// g, m, v, w -> m, v (its square root when `root`), w. The order of operations is torch.optim.AdamW's, see hyper.py.
template <bool root>
INLINE void adamw(float* __restrict w, float* __restrict m, float* __restrict v, const float* __restrict g, int64_t n,
                  const Hyper& h, int32_t smallest_m, int32_t smallest_v) {
  const float scale = h.grad_scale, coefficient = h.lerp_coefficient, beta2 = h.beta2, rest2 = h.one_minus_beta2;
  const float correction = h.bias_correction2_sqrt, eps = h.eps, step = h.negative_step_size, decay = h.decay;
  const uint32_t from_grad = h.lerp_from_grad ? ~0u : 0u;
  for (int64_t i = 0; i < n; i++) {
    const float gi = g[i] * scale;
    const float base = float_of((bits_of(gi) & from_grad) | (bits_of(m[i]) & ~from_grad));
    const float mi = without_tiny(base + coefficient * (gi - m[i]), smallest_m);
    const float vi = without_tiny(v[i] * beta2 + (rest2 * gi) * gi, smallest_v);
    const float si = __builtin_sqrtf(vi);
    const float wi = w[i] * decay + (step * mi) / (si / correction + eps);
    m[i] = root ? mi : float_of(one_nan(bits_of(mi)));  // 8-bit moments show it in their scales
    v[i] = root ? si : float_of(one_nan(bits_of(vi)));
    w[i] = float_of(one_nan(bits_of(wi)));
  }
}

INLINE uint64_t mix(uint64_t x) {  // splitmix64's finalizer
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

INLINE int32_t largest_magnitude(const float* __restrict x, int64_t n) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; i++) {
    const int32_t a = magnitude_bits(x[i]);
    largest = a > largest ? a : largest;
  }
  return largest;
}

// Codes: m = scale * (q/127)|q/127|, sqrt(v) = scale * (r/255)^2. Rounding is stochastic and unbiased in m and in
// sqrt(v); the largest of a block is exact, and no v of a block with one above zero becomes zero (it divides).
INLINE void unpack(float* __restrict m, float* __restrict v, const int8_t* __restrict q, const uint8_t* __restrict r,
                   float scale_m, float scale_s, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float code = (float)q[i];
    m[i] = scale_m * ((code * float_of((uint32_t)magnitude_bits(code))) * kInverseLevels);
  }
  for (int64_t i = 0; i < n; i++) {
    const float code = (float)r[i];
    const float s = scale_s * ((code * code) * kInverseRootLevels);
    v[i] = s * s;
  }
}

// One of the two whole numbers around sqrt(x), at random so that its square is x on average: the upper one if
// uniform * (high^2 - low^2) < x - low^2. `twice` is twice the uniform number in [0, 1).
INLINE int32_t round_root(float x, float twice) {
  const int32_t floor = (int32_t)__builtin_sqrtf(x);
  const float low = (float)floor;
  return floor + (int32_t)(twice * (low + 0.5f) < x - low * low);
}

// Maps the largest magnitude of a block to `levels`, or by rounding a hair above it, never below.
INLINE float to_levels(int32_t top, float levels) {
  return top == 0 ? 0.f : (levels / float_of((uint32_t)top)) * 1.0000002384185791015625f;  // 1 + 2^-22
}

INLINE void pack(int8_t* __restrict q, uint8_t* __restrict r, float* scale_m, float* scale_s,
                 const float* __restrict m, const float* __restrict s, int64_t n, uint64_t key) {
  const int32_t top_m = largest_magnitude(m, n), top_s = largest_magnitude(s, n);
  if (top_m >= kInfinityBits || top_s >= kInfinityBits) {  // shows, and stays
    *scale_m = *scale_s = float_of(kNanBits);
    for (int64_t i = 0; i < n; i++) q[i] = 0, r[i] = 0;
    return;
  }
  *scale_m = float_of((uint32_t)top_m);
  *scale_s = float_of((uint32_t)top_s);
  const float factor_m = to_levels(top_m, kLevels), factor_s = to_levels(top_s, kRootLevels);
  const int32_t most_m = (int32_t)bits_of(kLevels), most_s = (int32_t)bits_of(kRootLevels);
  const int32_t least_s = top_s == 0 ? 0 : (int32_t)bits_of(1.f);
  const uint32_t key_high = (uint32_t)(key >> 32);
  uint32_t counter = (uint32_t)key;
  // Numbers of 32 bits first, narrowed afterwards: a loop that stores bytes works on four times the registers at once.
  alignas(64) int32_t code_m[kBlock], code_s[kBlock];
  for (int64_t i = 0; i < n; i++) {
    uint32_t x = counter;
    counter += 0x9e3779b9u;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x ^= key_high;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    x ^= x >> 16;
    const float twice_m = (float)(int32_t)(x & 0xffffu) * (1.f / 32768);
    const float twice_s = (float)(int32_t)(x >> 16) * (1.f / 32768);

    int32_t y = (int32_t)bits_of(float_of((uint32_t)magnitude_bits(m[i])) * factor_m);
    y = y > most_m ? most_m : y;
    const int32_t sign = (int32_t)bits_of(m[i]) >> 31;
    code_m[i] = (round_root(float_of((uint32_t)y), twice_m) ^ sign) - sign;

    int32_t z = (int32_t)bits_of(s[i] * factor_s);
    z = z > most_s ? most_s : z;
    z = z < least_s ? least_s : z;
    code_s[i] = round_root(float_of((uint32_t)z), twice_s);
  }
  for (int64_t i = 0; i < n; i++) q[i] = (int8_t)code_m[i];
  for (int64_t i = 0; i < n; i++) r[i] = (uint8_t)code_s[i];
}

INLINE void update_tile(const Types& types, const Job& job, const Layout& at, const Hyper& h, uint64_t key,
                        int64_t start, int64_t n) {
  alignas(64) float grad[kBlock], master[kBlock], exp_avg[kBlock], exp_avg_sq[kBlock];
  char* state = (char*)job.state;
  uint16_t* residual = (uint16_t*)(state + at.master) + start;
  uint16_t* param16 = (uint16_t*)job.param + start;
  load_as_float(grad, types.grad_dtype, job.grad, start, n);
  float* w = is_split(types.format) ? master : (float*)(state + at.master) + start;
  if (is_split(types.format)) join(master, param16, residual, n);
  if (has_moments8(types.format)) {
    int8_t* q = (int8_t*)(state + at.exp_avg) + start;
    uint8_t* r = (uint8_t*)(state + at.exp_avg_sq) + start;
    float* scale_m = (float*)(state + at.exp_avg_scale) + start / kBlock;
    float* scale_s = (float*)(state + at.exp_avg_sq_scale) + start / kBlock;
    unpack(exp_avg, exp_avg_sq, q, r, *scale_m, *scale_s, n);
    adamw<true>(w, exp_avg, exp_avg_sq, grad, n, h, kSmallestExpAvg8Bits, kSmallestExpAvgSq8Bits);
    const uint64_t block = (uint64_t)((job.element_offset + start) / kBlock);
    pack(q, r, scale_m, scale_s, exp_avg, exp_avg_sq, n, mix(key + block * 0x9e3779b97f4a7c15ull));
  } else {
    adamw<false>(w, (float*)(state + at.exp_avg) + start, (float*)(state + at.exp_avg_sq) + start, grad, n, h,
                 kSmallestNormalBits, kSmallestNormalBits);
  }
  if (is_split(types.format)) split(param16, residual, master, n);
  else store_param(types.param_dtype, job.param, start, w, n);
}

void update(const Types& types, const Job& job, const Hyper& hyper, int64_t start, int64_t stop) {
  Hyper h = hyper;
  if (!job.decays) h.decay = 1.f;
  const Layout at = layout_of(types.format, job.numel);
  const uint64_t key = mix(mix(h.seed + 0x9e3779b97f4a7c15ull) ^ (uint64_t)h.step);
  for (; start + kBlock <= stop; start += kBlock) update_tile(types, job, at, h, key, start, kBlock);
  if (start < stop) update_tile(types, job, at, h, key, start, stop - start);
}

typedef float Float8 __attribute__((vector_size(32)));
typedef double Double8 __attribute__((vector_size(64)));

// 64 lanes, each the sum of 64 squares one after the other, then halves added until one is left. The products are
// exact in double precision.
INLINE double sum_block(const float* x) {
  Double8 lane[8] = {};
  for (int row = 0; row < 64; row++)
    for (int j = 0; j < 8; j++) {
      Float8 f;
      __builtin_memcpy(&f, x + 64 * row + 8 * j, sizeof f);
      const Double8 d = __builtin_convertvector(f, Double8);
      lane[j] += d * d;
    }
  double flat[64];
  __builtin_memcpy(flat, lane, sizeof flat);
  for (int half = 32; half >= 1; half /= 2)
    for (int j = 0; j < half; j++) flat[j] += flat[j + half];
  return flat[0];
}

uint32_t sum_squares(int32_t dtype, const void* grad, int64_t start, int64_t stop, double* partial) {
  alignas(64) float tile[kSumBlock];
  int32_t largest = 0;
  for (; start < stop; start += kSumBlock) {
    const int64_t n = stop - start < kSumBlock ? stop - start : kSumBlock;
    load_as_float(tile, dtype, grad, start, n);
    for (int64_t i = n; i < kSumBlock; i++) tile[i] = 0.f;
    const int32_t top = largest_magnitude(tile, kSumBlock);
    largest = top > largest ? top : largest;
    *partial++ = sum_block(tile);
  }
  return (uint32_t)largest;
}

}  // namespace

#define TABLE_NAME(variant) kernels_##variant
#define TABLE(variant) extern const Kernels TABLE_NAME(variant); const Kernels TABLE_NAME(variant) = {update, sum_squares};
TABLE(OUTCORE_VARIANT)

}  // namespace outcore
