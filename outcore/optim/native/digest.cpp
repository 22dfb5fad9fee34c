// Digests of blocks that go to a drive and come back: CRC-32C in three interleaved streams, folded into 64 bits.
//
// The instruction takes 8 bytes and answers three cycles later, so three independent streams keep it busy: 8 bytes a
// cycle. Word i belongs to stream i mod 3. Each stream is a CRC, so any change within 32 consecutive bits is seen for
// certain; others pass with a chance of 2^-32 where all of them are in one stream, 2^-64 otherwise.
#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("sse4.2,crc32"))) static uint64_t digest(const uint8_t* at, int64_t n_bytes) {
  uint64_t a = 0xffffffffu, b = 0x9e3779b9u, c = 0x7f4a7c15u;
  const uint8_t* end = at + n_bytes;
  for (; end - at >= 24; at += 24) {
    uint64_t words[3];
    memcpy(words, at, 24);
    a = _mm_crc32_u64(a, words[0]);
    b = _mm_crc32_u64(b, words[1]);
    c = _mm_crc32_u64(c, words[2]);
  }
  for (; at < end; at++) a = _mm_crc32_u8((uint32_t)a, *at);
  a = _mm_crc32_u64(a, (uint64_t)n_bytes);
  const uint64_t high = _mm_crc32_u64(a, b | c << 32);
  const uint64_t low = _mm_crc32_u64(b, c | a << 32);
  return high << 32 | low;
}

static bool is_there() { return outcore::processor().sse42; }
#else
static uint64_t digest(const uint8_t*, int64_t) { return 0; }
static bool is_there() { return false; }
#endif

// One digest for each `block_bytes` of the data, the last one shorter. 0, or ENOTSUP where the processor has no CRC-32C.
extern "C" __attribute__((visibility("default"))) int outcore_optim_digest(const void* data, int64_t n_bytes,
                                                                           int64_t block_bytes, uint64_t* out) {
  if (!is_there()) return ENOTSUP;
  for (int64_t done = 0; done < n_bytes; done += block_bytes) {
    const int64_t take = n_bytes - done < block_bytes ? n_bytes - done : block_bytes;
    *out++ = digest((const uint8_t*)data + done, take);
  }
  return 0;
}
