// Products of packed weights with a few rows of activations: out[m][row] = sum over columns of weight * x.
//
// Activations are rounded to int8 with a scale for 256 columns; codes of weights become bytes, and products of bytes are
// summed in int32 and scaled once for each run of columns. Weights are read once for all rows of activations.
#pragma once
#include <stdint.h>

namespace outcore {

enum Packed : int32_t { kNf4 = 0, kInt8 = 1, kInt4 = 2, kMxfp4 = 3, kQ4_0 = 4, kQ8_0 = 5, kQ4_K = 6, kQ5_K = 7,
                        kQ4_1 = 8, kQ6_K = 9 };
enum ScaleType : int32_t { kScaleF32 = 0, kScaleF16 = 1, kScaleBf16 = 2 };
enum Order : int32_t { kNatural = 0, kEvenOdd = 1 };  // of activations within 64: as they are; even ones, then odd ones

constexpr int64_t kStep = 64;       // columns taken together
constexpr int64_t kGroup = 256;     // columns of activations that share a scale
constexpr int kMaxRows = 16;        // rows of activations
constexpr int64_t kTaskRows = 16;   // rows of weights that a thread takes at a time

struct Product {
  const uint8_t* codes;   // the first plane
  const void* scale;      // the second and third, where the format has them
  const uint8_t* zero;
  const int8_t* x;        // [m][columns], rounded, in the format's order
  const float* x_scale;   // [m][groups of columns]
  const float* x_sum;     // [m][runs of columns]: of scale * rounded activation
  float* out;             // [m][rows]
  int64_t rows, columns;
  int32_t format, scale_type;
  int32_t block_shift;    // columns that share a scale, as a power of two (int8 and int4)
  int32_t m;
  int32_t twice;          // also what rounding took off the activations: m is at most half of kMaxRows then
};

struct ProductKernels {
  // Rows [start, stop) of the weights.
  void (*rows)(const Product&, int64_t start, int64_t stop);
  // One row of activations to int8 in the order of the format, with a scale for each group and a sum for each run. What
  // rounding takes off goes to `rest`, which may be null.
  void (*round_row)(const float* x, int64_t columns, int32_t format, int8_t* rounded, float* scale, float* sum,
                    float* rest);
};

// Columns that share a scale of weights: 64, 32 or 16.
static inline int64_t run_of(int32_t format) {
  return format == kNf4 || format == kInt8 ? kStep : format == kQ6_K ? kStep / 4 : kStep / 2;
}

static inline int32_t order_of(int32_t format) {
  return format == kNf4 || format == kInt4 || format == kMxfp4 ? kEvenOdd : kNatural;
}

}  // namespace outcore
