// What this processor can do and the system saves, asked of the processor itself: the compilers' __builtin_cpu_supports
// knows AVX-VNNI only from g++ 13 on, and answers nothing where zig's runtime stands in for libgcc.
#pragma once
#include <stdint.h>
#if defined(__x86_64__)
#include <cpuid.h>

namespace outcore {

struct Processor {
  bool sse42 = false, avx2 = false, avx2_fma = false, avx_vnni = false, avx512 = false, avx512_vnni = false;
};

static inline Processor ask_processor() {
  Processor found;
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const auto has = [](uint32_t word, int bit) { return (word >> bit & 1) != 0; };
  found.sse42 = has(c, 20);
  const bool fma = has(c, 12) && has(c, 29);  // with conversions from and to fp16
  if (!has(c, 27)) return found;              // the system saves no wide registers
  uint32_t saved = 0, high = 0;
  asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if ((saved & 0x06) != 0x06 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  found.avx2 = has(b, 5);
  found.avx2_fma = found.avx2 && fma;
  if ((saved & 0xe6) == 0xe6) {
    found.avx512 = has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31);  // F, DQ, BW, VL
    found.avx512_vnni = found.avx512 && fma && has(c, 11);
  }
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) found.avx_vnni = found.avx2_fma && has(a, 4);
  return found;
}

static inline const Processor& processor() {  // asked once: a virtual machine takes long to answer
  static const Processor found = ask_processor();
  return found;
}

}  // namespace outcore
#endif
