// Products of weights with a few rows of activations: out[m][row] = sum over columns of weight * x.
//
// Where weights are packed, activations are rounded to 16 bits with a scale for 256 columns; codes of weights become
// words, and products of words are summed in int32 and scaled once for each run of columns. Weights of 16 bits are
// multiplied with the activations as they are (plain_products.h). Weights are read once for all rows of activations.
#pragma once
#include <atomic>
#include <stdint.h>

namespace outcore {

enum Packed : int32_t { kNf4 = 0, kInt8 = 1, kInt4 = 2, kMxfp4 = 3, kQ4_0 = 4, kQ8_0 = 5, kQ4_K = 6, kQ5_K = 7,
                        kQ4_1 = 8, kQ6_K = 9, kBf16 = 10, kFp16 = 11 };
enum ScaleType : int32_t { kScaleF32 = 0, kScaleF16 = 1, kScaleBf16 = 2 };

constexpr int64_t kGroup = 256;     // columns of activations that share a scale
constexpr int kRuns = 8;            // runs of 32 columns in it
constexpr int64_t kTaskRows = 16;   // rows of weights that a thread takes at a time, at least

struct Product {
  const uint8_t* codes;   // the first plane
  const void* scale;      // the second and third, where the format has them
  const uint8_t* zero;
  const void* x;          // int16 [m][whole groups of columns], rounded, in the format's order, zeros at the end; with
                          // weights of 16 bits fp32 [m][columns], as given
  const float* x_scale;   // [m][groups]
  const float* x_sum;     // [m][groups][runs]: of scale * rounded activation
  float* out;             // [m][rows]
  int64_t rows, columns;
  int32_t format, scale_type;
  int32_t block_shift;    // columns that share a scale, as a power of two
  int32_t m;
  const int32_t* places;  // [m], where each row's results go among the rows of `out`; null: in order
};

// Weights of one shape (experts), of which each pair of a row of activations and a weight is multiplied: pair number n
// has row n / share and weight numbers[n]; those without a weight are left out, with what `out` held.
struct Stack {
  Product first;          // weight 0
  int64_t codes_stride, scale_stride, zero_stride;  // bytes from a weight to the next
  const int32_t* numbers;   // [pairs]
  const int32_t* elsewhere; // [count]: not below 0 for weights that somebody else multiplies; null: there are none
  const int32_t* every;     // of the other pairs every so many are somebody else's; null or 0: none is
  int32_t count, share;   // weights; neighbouring pairs of a row
  const int64_t* places;  // [count]: bytes from weight 0 to each, instead of the strides, or kAbsent; null: strides
  // Called where a weight that is needed is absent, with all that are needed: sets their places. 0 or an errno.
  int (*fetch)(const int32_t* numbers, int32_t count);
};

constexpr int64_t kAbsent = INT64_MIN;

struct ProductKernels {
  // Rows [start, stop) of the weights.
  void (*rows)(const Product&, int64_t start, int64_t stop);
  // One row of activations to int16 in the order of the format, with a scale for each group and a sum for each run.
  void (*round_row)(const float* x, int64_t columns, int32_t format, int16_t* rounded, float* scale, float* sum);
};

// Where a GPU asks for products, in RAM that both read. It writes the rows, then to `asked` a number that was not there
// before: a count in the upper half, rows, and the task. `answered` has the same number when the results are there.
struct Box {
  static constexpr int kTaskBits = 20;
  alignas(64) std::atomic<uint64_t> asked;
  alignas(64) std::atomic<uint64_t> answered;
  alignas(64) double busy_s;  // that products have taken
  int32_t failed;             // errno of a task whose results are not there, the last one; 0: none
  static int32_t rows_of(uint64_t asked) { return (int32_t)((uint32_t)asked >> kTaskBits); }
  static size_t task_of(uint64_t asked) { return asked & ((1u << kTaskBits) - 1); }
};

static inline bool is_plain(const Product& product) { return product.format >= kBf16; }  // weights of 16 bits
static inline int64_t groups_of(int64_t columns) { return (columns + kGroup - 1) / kGroup; }

}  // namespace outcore
