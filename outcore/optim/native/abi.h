// What Python and the C++ sources agree on: formats, types, structures. Change OUTCORE_ABI with any of them.
// Everything here is `static inline` or data: kernels.cpp includes it with AVX-512 switched on, and a shared inline function
// compiled so could be the copy that the linker keeps for the others.
#pragma once
#include <stdint.h>

#define OUTCORE_ABI 7

namespace outcore {

// Bit 0: master split into 16-bit parameter and residual. Bit 1: 8-bit moments. Bit 2: a residual of 8 bits, not 16.
// Bit 3: moments compressed without loss.
enum Format : int32_t {
  kFp32 = 0,
  kSplit = 1,
  kFp32Moments8 = 2,
  kSplit8 = 3,
  kFp24Moments8 = 7,
  kFp32Compressed = 8,
  kSplitCompressed = 9
};
static inline bool has_moments8(int32_t format) { return format & 2; }
static inline bool is_compressed(int32_t format) { return format & 8; }
static inline int64_t master_bytes(int32_t format) { return format & 4 ? 1 : format & 1 ? 2 : 4; }  // or the residual's

enum Dtype : int32_t { kNone = 0, kFloat32 = 1, kBfloat16 = 2, kFloat16 = 3 };
enum Variant : int32_t { kAuto = -1, kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

constexpr int64_t kBlock = 256;       // elements per 8-bit block, and per tile of the kernels
constexpr int64_t kSumBlock = 4096;   // elements per partial sum of squares: 64 rows of 64 lanes
constexpr int64_t kRegionBytes = 64;  // alignment of each state inside a chunk
constexpr int64_t kChunkBytes = 4096; // a chunk's size is a multiple of it: direct I/O

struct Job {  // one chunk; for add_up, `state` is where the sum goes, `param` an array of `element_offset` sources
  void* state;
  void* param;
  const void* grad;
  int64_t numel;
  int64_t element_offset;  // of the chunk's first element in the model; a multiple of kBlock
  const int64_t* undecayed;  // null, or [start, stop) of whole blocks without weight decay, in order, and one never reached
  void* next;              // null, or where the updated states go: `state` stays as it was
  void* kept;              // null, or where the parameters go as they were before the update
};

struct Hyper {  // all derived in double precision and rounded once, in hyper.py
  float grad_scale;
  float lerp_coefficient;
  float beta2;
  float one_minus_beta2;
  float bias_correction2_sqrt;
  float eps;
  float negative_step_size;
  float decay;
  int32_t lerp_from_grad;  // 1: m = g + coefficient * (g - m), which torch takes when 1 - beta1 >= 0.5
  int32_t padding;
  uint64_t seed;
  int64_t step;
};

struct Types {
  int32_t format;
  int32_t grad_dtype;
  int32_t param_dtype;
  int32_t padding;
};

struct Layout {  // byte offsets inside a chunk; -1 where the format has no such state
  int64_t master;
  int64_t exp_avg;
  int64_t exp_avg_sq;
  int64_t exp_avg_scale;
  int64_t exp_avg_sq_scale;
  int64_t block_heads;
  int64_t chunk_head;
  int64_t tails;       // two of them
  int64_t tail_bytes;  // of one: no offset
  int64_t total;
};

// Compressed moments, see compressed.py.
constexpr int64_t kPlanesBytes = kBlock * 7 / 2;  // of one moment of a block
struct BlockHead {  // of exp_avg and exp_avg_sq
  uint8_t top[2];
  uint8_t count[2];
  uint32_t tail_offset;
};
struct ChunkHead {
  uint64_t tail_bytes;  // used of the tail that is valid
  uint64_t tail_index;  // which of the two
  uint64_t next_bytes;  // used of the other one by the update under way
};

static inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

static inline Layout layout_of(int32_t format, int64_t numel) {
  Layout at{};
  int64_t end = 0;
  auto place = [&end](int64_t bytes) {
    int64_t start = round_up(end, kRegionBytes);
    end = start + bytes;
    return start;
  };
  const int64_t blocks = round_up(numel, kBlock) / kBlock;
  const int64_t moment_bytes = is_compressed(format) ? blocks * kPlanesBytes : numel * (has_moments8(format) ? 1 : 4);
  at.master = place(numel * master_bytes(format));
  at.exp_avg = place(moment_bytes);
  at.exp_avg_sq = place(moment_bytes);
  at.exp_avg_scale = has_moments8(format) ? place(4 * blocks) : -1;
  at.exp_avg_sq_scale = has_moments8(format) ? place(4 * blocks) : -1;
  at.block_heads = is_compressed(format) ? place(blocks * (int64_t)sizeof(BlockHead)) : -1;
  at.chunk_head = is_compressed(format) ? place(kRegionBytes) : -1;
  at.tails = is_compressed(format) ? round_up(end, kChunkBytes) : -1;
  at.tail_bytes = is_compressed(format) ? round_up(blocks * kBlock, kChunkBytes) : 0;
  at.total = is_compressed(format) ? at.tails + 2 * at.tail_bytes : round_up(end, kChunkBytes);
  return at;
}

// Every block of the chunk has been updated: what was written beside the tail is the tail.
static inline void end_update(const Types& types, const Job& job) {
  if (!is_compressed(types.format)) return;
  ChunkHead* head = (ChunkHead*)(void*)((char*)job.state + layout_of(types.format, job.numel).chunk_head);
  *head = ChunkHead{head->next_bytes, 1 - head->tail_index, 0};
}

// The work of one core on one range of a chunk; one table per instruction set.
struct Kernels {
  // Elements [start, stop) of the chunk; start is a multiple of kBlock.
  void (*update)(const Types&, const Job&, const Hyper&, int64_t start, int64_t stop);
  // partial[i] = sum of squares of the i-th kSumBlock elements from start on (start is a multiple of kSumBlock).
  // Returns the bit pattern of the largest magnitude: 0x7f800000 and above when something is not finite.
  uint32_t (*sum_squares)(int32_t dtype, const void* grad, int64_t start, int64_t stop, double* partial);
  // The same of a sum, in fp32 in order of the job's sources, rounded once to nearest (ties to even) and written.
  uint32_t (*add_up)(int32_t dtype, const Job& job, int64_t start, int64_t stop, double* partial);
  // Blocks of a chunk of compressed moments: to the floats of a whole chunk (null: not this moment), and from them.
  void (*expand)(int32_t format, int64_t numel, const void* state, float* exp_avg, float* exp_avg_sq);
  void (*compress)(int32_t format, int64_t numel, void* state, const float* exp_avg, const float* exp_avg_sq);
};

}  // namespace outcore
