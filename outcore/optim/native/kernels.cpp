// AdamW on one range of a chunk. Compiled once per instruction set, with OUTCORE_VARIANT naming the table.
//
// Every result is defined by IEEE operations in the written order (no contraction, correctly rounded division and
// square root), so the variants differ in speed only. Nothing of the C++ library is used here: a template of it,
// instantiated with AVX-512, could be the copy that the linker keeps for the other objects.
//
// A block of 256 elements stays in L1 while short loops pass over it: for 8-bit moments random numbers, then moments,
// then the master, then, for 8-bit moments, codes. One loop that does all of it is slower: a processor looks ahead by so
// many operations, and in a short loop finds more elements to work on while a division or a square root takes its time.
#include "abi.h"
#include "compressed.h"
#include "lanes.h"

#ifndef OUTCORE_VARIANT
#error "compile with -DOUTCORE_VARIANT=<name>"
#endif

namespace outcore {
namespace {

constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr int32_t kNanBits = 0x7fc00000;
constexpr float kSmallestNormal = 1.1754943508222875e-38f;  // 2^-126: below it, moments become zero
// 8-bit moments: the smallest code of a block must stay a normal fp32, so that a checkpoint in fp32 is exact.
constexpr float kSmallestExpAvg8 = 1.925929944387236e-34f;     // 2^-112
constexpr float kSmallestExpAvgSq8 = 1.0097419586828951e-28f;  // 2^-93
constexpr float kLevels = 127.f * 127.f, kInverseLevels = 1.f / kLevels;
constexpr float kRootLevels = 255.f * 255.f, kInverseRootLevels = 1.f / kRootLevels;

// One quiet NaN for all of them: which payload survives depends on the order of operands a compiler picks.
INLINE Floats one_nan(Floats x) { return x == x ? x : floats_of(all(kNanBits)); }

// Moments below `smallest` become +0: a moment that decays for ever would end as a denormal, for which many processors
// take a slow path.
INLINE Floats without_tiny(Floats x, Floats magnitude_of_x, float smallest) {
  return magnitude_of_x < smallest ? Floats{} : x;
}

// master <-> (parameter, residual): the parameter is the rounded master, the residual the master's low 16 bits. The
// carry into the parameter is the residual's top bit, so the pair determines all 2^32 patterns.
INLINE Floats join(const uint16_t* param, const int16_t* residual) {
  return floats_of((load_wide(param) << 16) + load_wide(residual));
}
// The same of a master of 24 bits, whose lowest 8 are zero.
INLINE Floats join(const uint16_t* param, const int8_t* residual) {
  return floats_of((load_wide(param) << 16) + (load_wide(residual) << 8));
}
// To 24 bits: up in magnitude if the 8 bits that go and `random`, below 2^8, carry. Infinity and the one NaN stay.
INLINE Words round_to_24_bits(Floats x, Words random) { return ((Words)x + random) & 0xffffff00u; }

struct Moments {
  Floats m, v;
};

// The order of operations is torch.optim.AdamW's, see hyper.py. Not yet without tiny ones.
INLINE Moments new_moments(Moments old, Floats g, const Hyper& h) {
  g *= h.grad_scale;
  const Floats base = h.lerp_from_grad ? g : old.m;
  return {base + h.lerp_coefficient * (g - old.m), old.v * h.beta2 + (h.one_minus_beta2 * g) * g};
}

// `root` is divided by bias_correction2_sqrt already.
INLINE Floats new_master(Floats w, Floats m, Floats root, const Hyper& h) {
  return one_nan(w * h.decay + (h.negative_step_size * m) / (root + h.eps));
}

INLINE uint64_t mix(uint64_t x) {  // splitmix64's finalizer
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Codes: m = scale * (q/127)|q/127|, sqrt(v) = scale * (r/255)^2. Rounding is stochastic and unbiased in m and in
// sqrt(v); the largest of a block is exact, and no v of a block with one above zero becomes zero (it divides).
INLINE Floats unpack_exp_avg(Ints q, float scale) {
  const Floats code = to_floats(q);
  return scale * ((code * magnitude(code)) * kInverseLevels);
}
INLINE Floats unpack_exp_avg_sq(Ints r, float scale) {
  const Floats code = to_floats(r);
  const Floats root = scale * ((code * code) * kInverseRootLevels);
  return root * root;
}

// One of the two whole numbers around sqrt(x), at random so that its square is x on average: the upper one if
// uniform * (high^2 - low^2) < x - low^2, where uniform = random * 2^-16 and high^2 - low^2 = 2 * low + 1. Only the
// product with `random` is rounded: low is below 2^8, so that all others are exact.
INLINE Ints round_root(Floats x, Ints random) {
  const Ints floor = truncated(square_root(x));
  const Floats low = to_floats(floor);
  const Floats apart = plus_product(all(0x1p-16f), low, all(0x1p-15f));
  return to_floats(random) * apart < less_product(x, low, low) ? floor + 1 : floor;
}

// Maps the largest magnitude of a block to `levels`, or by rounding a hair above it, never below.
INLINE float to_levels(float top, float levels) { return top == 0 ? 0.f : (levels / top) * 1.0000002384185791015625f; }

static inline int64_t size_of(int32_t dtype) { return dtype == kNone ? 0 : dtype == kFloat32 ? 4 : 2; }

template <bool kMoments8>
constexpr int64_t kMomentSize = kMoments8 ? 1 : 4;

struct Block {  // where kBlock elements are; without param_dtype, param is nothing
  const void* grad;
  void* param;
  void* master;  // fp32, or the residual of a split
  void* exp_avg;
  void* exp_avg_sq;
  float* scale_m;  // the block's, for 8-bit moments
  float* scale_s;
  bool streams;  // param is only written, and past the caches
};

INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

// A hash of 32 bits for every element of the first half of a block, and for the element half a block further.
INLINE void hash_block(uint32_t* hashes, uint64_t key) {
  const Words key_high = all((uint32_t)(key >> 32));
  Words counter = (Words)counting() * 0x9e3779b9u + (uint32_t)key;
  for (int64_t i = 0; i < kBlock / 2; i += kLanes) {
    Words x = (counter ^ (counter >> 16)) * 0x7feb352du;
    counter += kLanes * 0x9e3779b9u;
    x ^= key_high;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    x ^= x >> 16;
    store(hashes + i, x);
  }
}

// A third number of 8 bits for the master's rounding: of both halves of the hash, so independent of either.
INLINE Words random_byte(const uint32_t* hashes, int64_t i) {
  const Words x = load(hashes + i % (kBlock / 2)) * 0x9e3779b9u;
  return i < kBlock / 2 ? x >> 24 : x >> 16 & 0xffu;
}

// `top_m_bits`, `top_s_bits`: the bit patterns of the largest |m|, tiny ones among them, and of the largest root.
INLINE void pack(const Block& block, const float* exp_avg, const float* root, uint32_t top_m_bits, uint32_t top_s_bits,
                 const uint32_t* hashes) {
  uint8_t* q = (uint8_t*)block.exp_avg;
  uint8_t* r = (uint8_t*)block.exp_avg_sq;
  if (top_m_bits >= kInfinityBits || top_s_bits >= kInfinityBits) {  // shows, and stays
    *block.scale_m = *block.scale_s = __builtin_nanf("");
    __builtin_memset(q, 0, kBlock);
    __builtin_memset(r, 0, kBlock);
    return;
  }
  if (top_m_bits < bits_of(kSmallestExpAvg8)) top_m_bits = 0;
  __builtin_memcpy(block.scale_m, &top_m_bits, 4);
  __builtin_memcpy(block.scale_s, &top_s_bits, 4);
  const float factor_m = to_levels(*block.scale_m, kLevels), factor_s = to_levels(*block.scale_s, kRootLevels);
  const Floats least_s = all(top_s_bits == 0 ? 0.f : 1.f);
  const auto store_codes = [&](int64_t i, Ints random_m, Ints random_s) __attribute__((always_inline)) {
    const Floats m = load(exp_avg + i), s = load(root + i);
    const Ints code = round_root(smaller(magnitude(m) * factor_m, all(kLevels)), random_m);
    store_narrow(q + i, bits_of(m) < 0 ? -code : code);
    store_narrow(r + i, round_root(larger(smaller(s * factor_s, all(kRootLevels)), least_s), random_s));
  };
  // A hash of 32 bits has two uniform numbers. The element half a block further takes them the other way round: each
  // element's two are independent, and so are those of all exp_avg and those of all exp_avg_sq.
  for (int64_t i = 0; i < kBlock / 2; i += kLanes) {
    const Words x = load(hashes + i);
    const Ints low = (Ints)(x & 0xffffu), high = (Ints)(x >> 16);
    store_codes(i, low, high);
    store_codes(i + kBlock / 2, high, low);
  }
}

// `n` elements of an array to a block of their own, zeros behind them.
INLINE void take_block(char* to, const void* from, int64_t n, int64_t size) {
  if (n < kBlock) {
    __builtin_memset(to, 0, kBlock * size);
    if (size > 0) __builtin_memcpy(to, from, n * size);
    return;
  }
  for (int64_t i = 0; i < kBlock * size; i += kLineBytes) {
    fetch_ahead(from, i, 1);
    __builtin_memcpy(to + i, (const char*)from + i, kLineBytes);
  }
}

// kMaster: bytes of the master (4), or of the residual of a split (2, 1).
template <int kMaster, bool kMoments8>
INLINE void update_block(const Types& types, const Block& block, const Hyper& h, const Divisor& bias_correction2_sqrt,
                         uint64_t key) {
  const int64_t grad_size = size_of(types.grad_dtype);
  alignas(64) float unpacked[kMoments8 ? kBlock : 1], root[kBlock];
  alignas(64) uint32_t hashes[kMoments8 ? kBlock / 2 : 1];
  if constexpr (kMoments8) hash_block(hashes, key);
  float* const exp_avg = kMoments8 ? unpacked : (float*)block.exp_avg;
  Words top_m{}, top_s{};
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    fetch_ahead(block.grad, i, grad_size);
    fetch_ahead(block.exp_avg, i, kMomentSize<kMoments8>);
    fetch_ahead(block.exp_avg_sq, i, kMomentSize<kMoments8>);
    const Floats g = load_as_float(types.grad_dtype, block.grad, i);
    if constexpr (kMoments8) {
      const Moments old = {unpack_exp_avg(load_wide((const int8_t*)block.exp_avg + i), *block.scale_m),
                           unpack_exp_avg_sq(load_wide((const uint8_t*)block.exp_avg_sq + i), *block.scale_s)};
      const auto [m, v] = new_moments(old, g, h);
      const Floats size = magnitude(m), s = square_root(without_tiny(v, v, kSmallestExpAvgSq8));  // v >= 0, or NaN
      top_m = larger(top_m, (Words)size);  // NaN is the largest
      top_s = larger(top_s, (Words)s);     // whatever its sign
      store(exp_avg + i, without_tiny(m, size, kSmallestExpAvg8));
      store(root + i, s);
    } else {
      const auto [m, v] = new_moments({load(exp_avg + i), load((float*)block.exp_avg_sq + i)}, g, h);
      const Floats positive = without_tiny(v, magnitude(v), kSmallestNormal);
      store(root + i, square_root(positive));
      store(exp_avg + i, one_nan(without_tiny(m, magnitude(m), kSmallestNormal)));
      store((float*)block.exp_avg_sq + i, one_nan(positive));
    }
  }
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    fetch_ahead(block.master, i, kMaster);
    if (kMaster < 4) fetch_ahead(block.param, i, 2);
    // With 8-bit moments arithmetic takes longer than memory does.
    const Floats m = load(exp_avg + i), s = load(root + i);
    const Floats corrected = kMoments8 ? quotient(s, bias_correction2_sqrt) : s / bias_correction2_sqrt.by;
    if constexpr (kMaster == 2) {
      uint16_t *param = (uint16_t*)block.param + i, *residual = (uint16_t*)block.master + i;
      const Floats w = new_master(join(param, (const int16_t*)residual), m, corrected, h);
      store_as(kBfloat16, block.param, i, w);
      store_narrow(residual, bits_of(w));
    } else if constexpr (kMaster == 1) {
      uint8_t* residual = (uint8_t*)block.master + i;
      const Floats w = new_master(join((uint16_t*)block.param + i, (const int8_t*)residual), m, corrected, h);
      const Words bits = round_to_24_bits(w, random_byte(hashes, i));
      store_as(kBfloat16, block.param, i, (Floats)bits);
      store_narrow(residual, (Ints)(bits >> 8));
    } else {
      const Floats w = new_master(load((float*)block.master + i), m, corrected, h);
      store((float*)block.master + i, w);
      if (block.streams) stream_as(types.param_dtype, block.param, i, w);
      else store_as(types.param_dtype, block.param, i, w);
    }
  }
  if constexpr (kMoments8) pack(block, exp_avg, root, largest_of(top_m), largest_of(top_s), hashes);
}

template <int kMaster, bool kMoments8, bool kCompressed = false>
void update_range(const Types types, const Job job, const Hyper h, int64_t start, int64_t stop) {
  const Layout at = layout_of(types.format, job.numel);
  const uint64_t step_key = mix(mix(h.seed + 0x9e3779b97f4a7c15ull) ^ (uint64_t)h.step);
  const int64_t grad_size = size_of(types.grad_dtype), param_size = size_of(types.param_dtype);
  char *state = (char*)job.state, *next = (char*)job.next;
  const Divisor bias_correction2_sqrt(h.bias_correction2_sqrt);
  for (; start < stop; start += kBlock) {
    const auto block_in = [&](char* states) __attribute__((always_inline)) {
      Block block;
      block.grad = (const char*)job.grad + start * grad_size;
      block.param = (char*)job.param + start * param_size;
      block.master = states + at.master + start * kMaster;
      block.exp_avg = states + at.exp_avg + start * kMomentSize<kMoments8>;
      block.exp_avg_sq = states + at.exp_avg_sq + start * kMomentSize<kMoments8>;
      block.scale_m = kMoments8 ? (float*)(states + at.exp_avg_scale) + start / kBlock : nullptr;
      block.scale_s = kMoments8 ? (float*)(states + at.exp_avg_sq_scale) + start / kBlock : nullptr;
      block.streams = kMaster == 4 && !kMoments8 && param_size == 2 && (uintptr_t)block.param % kStreamBytes == 0;
      return block;
    };
    Block block = block_in(state);
    const uint64_t key = mix(step_key + (uint64_t)((job.element_offset + start) / kBlock) * 0x9e3779b97f4a7c15ull);
    alignas(64) float m[kCompressed ? kBlock : 1], v[kCompressed ? kBlock : 1];
    if constexpr (kCompressed) {
      CompressedBlock(state, at, start / kBlock).read(m, v, true, true);
      block.exp_avg = m;
      block.exp_avg_sq = v;
    }
    const int64_t n = stop - start < kBlock ? stop - start : kBlock;
    if (n == kBlock && next == nullptr) {
      update_block<kMaster, kMoments8>(types, block, h, bias_correction2_sqrt, key);
    } else {  // in a block of its own: the last few of a chunk with zeros behind, which stay zeros; what goes elsewhere
      alignas(64) char grad[4 * kBlock], param[4 * kBlock], master[4 * kBlock];
      alignas(64) char exp_avg[4 * kBlock], exp_avg_sq[4 * kBlock];
      const Block to = next == nullptr ? block : block_in(next);
      if (n < kBlock) take_block(grad, block.grad, n, grad_size);
      take_block(param, block.param, n, param_size);
      take_block(master, block.master, n, kMaster);
      take_block(exp_avg, block.exp_avg, n, kMomentSize<kMoments8>);
      take_block(exp_avg_sq, block.exp_avg_sq, n, kMomentSize<kMoments8>);
      if (job.kept != nullptr) stream_bytes((char*)job.kept + start * param_size, param, n * param_size);
      if constexpr (kMoments8) {
        *to.scale_m = *block.scale_m;
        *to.scale_s = *block.scale_s;
      }
      const Block own = {
          n < kBlock ? grad : block.grad, param, master, exp_avg, exp_avg_sq, to.scale_m, to.scale_s, false};
      update_block<kMaster, kMoments8>(types, own, h, bias_correction2_sqrt, key);
      if (param_size > 0) __builtin_memcpy(block.param, param, n * param_size);
      stream_bytes(to.master, master, n * kMaster);
      stream_bytes(to.exp_avg, exp_avg, n * kMomentSize<kMoments8>);
      stream_bytes(to.exp_avg_sq, exp_avg_sq, n * kMomentSize<kMoments8>);
    }
    if constexpr (kCompressed) CompressedBlock(state, at, start / kBlock).write(m, v);
  }
  end_streams();
}

void update_alike(const Types& types, const Job& job, const Hyper& h, int64_t start, int64_t stop) {
  if (types.format == kFp32) update_range<4, false>(types, job, h, start, stop);
  else if (types.format == kSplit) update_range<2, false>(types, job, h, start, stop);
  else if (types.format == kFp32Moments8) update_range<4, true>(types, job, h, start, stop);
  else if (types.format == kSplit8) update_range<2, true>(types, job, h, start, stop);
  else if (types.format == kFp32Compressed) update_range<4, false, true>(types, job, h, start, stop);
  else if (types.format == kSplitCompressed) update_range<2, false, true>(types, job, h, start, stop);
  else update_range<1, true>(types, job, h, start, stop);
}

void update(const Types& types, const Job& job, const Hyper& hyper, int64_t start, int64_t stop) {
  if (job.undecayed == nullptr) return update_alike(types, job, hyper, start, stop);
  Hyper without = hyper;
  without.decay = 1.f;
  for (const int64_t* next = job.undecayed; start < stop;) {
    while (next[1] <= start) next += 2;
    const bool decays = start < next[0];
    const int64_t end = decays ? next[0] : next[1], until = end < stop ? end : stop;
    update_alike(types, job, decays ? hyper : without, start, until);
    start = until;
  }
}

void expand(int32_t format, int64_t numel, const void* state, float* exp_avg, float* exp_avg_sq) {
  const Layout at = layout_of(format, numel);
  alignas(64) float m[kBlock], v[kBlock];
  for (int64_t start = 0; start < numel; start += kBlock) {
    const int64_t n = numel - start < kBlock ? numel - start : kBlock;
    CompressedBlock(const_cast<void*>(state), at, start / kBlock)
        .read(m, v, exp_avg != nullptr, exp_avg_sq != nullptr);
    if (exp_avg != nullptr) __builtin_memcpy(exp_avg + start, m, 4 * n);
    if (exp_avg_sq != nullptr) __builtin_memcpy(exp_avg_sq + start, v, 4 * n);
  }
}

void compress(int32_t format, int64_t numel, void* state, const float* exp_avg, const float* exp_avg_sq) {
  const Layout at = layout_of(format, numel);
  for (int64_t start = 0; start < numel; start += kBlock) {
    const int64_t n = numel - start < kBlock ? numel - start : kBlock;
    alignas(64) float m[kBlock] = {}, v[kBlock] = {};
    __builtin_memcpy(m, exp_avg + start, 4 * n);
    __builtin_memcpy(v, exp_avg_sq + start, 4 * n);
    CompressedBlock(state, at, start / kBlock).write(m, v);
  }
}

// 64 lanes, each the sum of 64 squares one after the other, then halves added until one is left. The products are
// exact in double precision.
INLINE double sum_block(const float* x) {
  constexpr int kTogether = kLanes / 2;  // lanes of a register; four of these at a time
  double flat[64];
  for (int first = 0; first < 64; first += 4 * kTogether) {
    Doubles a{}, b{}, c{}, d{};
    for (int row = 0; row < 64; row++) {
      const float* at = x + 64 * row + first;
      a += squares(at);
      b += squares(at + kTogether);
      c += squares(at + 2 * kTogether);
      d += squares(at + 3 * kTogether);
    }
    store(flat + first, a);
    store(flat + first + kTogether, b);
    store(flat + first + 2 * kTogether, c);
    store(flat + first + 3 * kTogether, d);
  }
  for (int half = 32; half >= 1; half /= 2)
    for (int j = 0; j < half; j++) flat[j] += flat[j + half];
  return flat[0];
}

uint32_t sum_squares(int32_t dtype, const void* grad, int64_t start, int64_t stop, double* partial) {
  alignas(64) float tile[kSumBlock];
  alignas(64) char filled[4 * kSumBlock];
  const int64_t size = size_of(dtype);
  Words top{};
  for (; start < stop; start += kSumBlock) {
    const void* block = (const char*)grad + start * size;
    if (stop - start < kSumBlock) {  // the last few, filled up with zeros
      __builtin_memset(filled, 0, sizeof filled);
      __builtin_memcpy(filled, block, (stop - start) * size);
      block = filled;
    }
    for (int64_t i = 0; i < kSumBlock; i += kLanes) {
      const Floats x = load_as_float(dtype, block, i);
      top = larger(top, (Words)magnitude(x));
      store(tile + i, x);
    }
    *partial++ = sum_block(tile);
  }
  return largest_of(top);
}

// As torch rounds: a gradient added up on one device and one added up over ranks have the same bits.
INLINE void store_to_even(int32_t dtype, void* data, int64_t at, Floats x) {
  if (dtype != kBfloat16) return store_as(dtype, data, at, x);
  const Words bits = (Words)one_nan(x);
  store_narrow((uint16_t*)data + at, (Ints)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16));
}

uint32_t add_up(int32_t dtype, const Job& job, int64_t start, int64_t stop, double* partial) {
  alignas(64) float tile[kSumBlock];
  alignas(64) char filled[4 * kSumBlock], rounded[4 * kSumBlock];
  const void* const* sources = (const void* const*)job.param;
  const int64_t size = size_of(dtype);
  Words top{};
  for (; start < stop; start += kSumBlock) {
    const int64_t n = stop - start < kSumBlock ? stop - start : kSumBlock;
    for (int64_t s = 0; s < job.element_offset; s++) {
      const void* block = (const char*)sources[s] + start * size;
      if (n < kSumBlock) {  // the last few, filled up with zeros
        __builtin_memset(filled, 0, sizeof filled);
        __builtin_memcpy(filled, block, n * size);
        block = filled;
      }
      for (int64_t i = 0; i < kSumBlock; i += kLanes) {
        fetch_ahead(block, i, size);
        const Floats x = load_as_float(dtype, block, i);
        store(tile + i, s == 0 ? x : load(tile + i) + x);
      }
    }
    for (int64_t i = 0; i < kSumBlock; i += kLanes) {
      store_to_even(dtype, rounded, i, load(tile + i));
      const Floats x = load_as_float(dtype, rounded, i);
      top = larger(top, (Words)magnitude(x));
      store(tile + i, x);
    }
    stream_bytes((char*)job.state + start * size, rounded, n * size);
    *partial++ = sum_block(tile);
  }
  end_streams();
  return largest_of(top);
}

}  // namespace

#define TABLE_NAME(variant) kernels_##variant
#define TABLE(variant) extern const Kernels TABLE_NAME(variant); const Kernels TABLE_NAME(variant) = {update, sum_squares, add_up, expand, compress};
TABLE(OUTCORE_VARIANT)

}  // namespace outcore
