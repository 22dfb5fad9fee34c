// Loads the CPU kernels as another system's Python would, works with them and prints what came out: the same lines on
// every system. On Windows also the calls of storage/windows_file.py, with the numbers that stand there (-D).
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <vector>

#include "../../outcore/optim/native/abi.h"
#include "../../outcore/optim/native/pool.h"
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
static void* open_library(const char* path) { return (void*)LoadLibraryA(path); }
static void* find(void* library, const char* name) { return (void*)GetProcAddress((HMODULE)library, name); }
#else
#include <dlfcn.h>
static void* open_library(const char* path) { return dlopen(path, RTLD_NOW); }
static void* find(void* library, const char* name) { return dlsym(library, name); }
#endif
using namespace outcore;

static uint64_t hash(const void* data, size_t n_bytes) {  // FNV-1a
  uint64_t h = 1469598103934665603ull;
  for (size_t i = 0; i < n_bytes; i++) h = (h ^ ((const uint8_t*)data)[i]) * 1099511628211ull;
  return h;
}

#if defined(_WIN32)
static int check_files() {
  printf("OVERLAPPED %zu %zu %zu %zu\n", sizeof(OVERLAPPED), offsetof(OVERLAPPED, Offset),
         offsetof(OVERLAPPED, OffsetHigh), offsetof(OVERLAPPED, hEvent));
  const int64_t at = (5ll << 30) + 4096;
  HANDLE file = CreateFileW(L"unbuffered.bin", ACCESS, SHARE, nullptr, CREATE, FLAGS, nullptr);
  if (file == INVALID_HANDLE_VALUE) return printf("CreateFileW %lu\n", GetLastError()), 1;
  int64_t size = 3 * 4096;
  printf("reserve %d", SetFileInformationByHandle(file, (FILE_INFO_BY_HANDLE_CLASS)ALLOCATION, &size, 8));
  printf(" %d\n", SetFileInformationByHandle(file, (FILE_INFO_BY_HANDLE_CLASS)END_OF_FILE, &size, 8));
  char* memory = (char*)VirtualAlloc(nullptr, 8192, MEM_COMMIT, PAGE_READWRITE);
  for (int i = 0; i < 4096; i++) memory[i] = (char)(i % 251);
  HANDLE event = CreateEventW(nullptr, TRUE, FALSE, nullptr);
  for (int turn = 0; turn < 3; turn++) {  // write, read it, read behind the end
    OVERLAPPED over{};
    const int64_t place = turn == 2 ? at + 4096 : at;
    over.Offset = (DWORD)place, over.OffsetHigh = (DWORD)(place >> 32), over.hEvent = event;
    BOOL done = turn == 0 ? WriteFile(file, memory, 4096, nullptr, &over)
                          : ReadFile(file, memory + 4096, 4096, nullptr, &over);
    DWORD error = done ? 0 : GetLastError(), moved = 0;
    if (error == 0 || error == PENDING) error = GetOverlappedResult(file, &over, &moved, TRUE) ? 0 : GetLastError();
    printf("%s %lu bytes, error %lu\n", turn == 0 ? "wrote" : "read", moved, error);
  }
  printf("equal %d\n", memcmp(memory, memory + 4096, 4096) == 0);
  int64_t exact = at + 1000;
  SetFileInformationByHandle(file, (FILE_INFO_BY_HANDLE_CLASS)END_OF_FILE, &exact, 8);
  LARGE_INTEGER found;
  GetFileSizeEx(file, &found);
  printf("size %lld of %lld, flush %d, type %lu\n", (long long)found.QuadPart, (long long)exact, FlushFileBuffers(file),
         GetFileType(file));
  printf("removed while open %d\n", DeleteFileW(L"unbuffered.bin"));
  CloseHandle(file);
  return 0;
}
#endif

int main(int count, char** words) {
  void* library = open_library(words[1]);
  if (library == nullptr) return printf("the library does not load\n"), 1;
#define CALL(type, name) ((type)find(library, "outcore_optim_" #name))
  printf("abi %d\n", CALL(int32_t(*)(), abi)());
  const int64_t numel = 100003;
  for (int32_t variant = 0; variant <= CALL(int32_t(*)(), best_variant)(); variant++) {
    for (int32_t format : {kFp32, kSplit, kFp32Moments8, kSplit8, kFp24Moments8}) {
      Layout at;
      CALL(void (*)(int32_t, int64_t, Layout*), layout)(format, numel, &at);
      std::vector<char> state((size_t)at.total), param(4 * numel);
      std::vector<float> grad(numel);
      uint32_t random = 1;
      for (float& value : grad) value = (float)(int32_t)(random = random * 1664525u + 1013904223u) * 1e-12f;
      int code = 0;
      void* pool = CALL(void* (*)(int32_t, int32_t, const int32_t*, int64_t, int*), pool_new)(variant, 3, nullptr, 4096, &code);
      if (pool == nullptr) return printf("no pool: %d\n", code), 1;
      const Types types{format, kFloat32, format & 1 ? kBfloat16 : kFloat32, 0};
      Job job{};
      job.state = state.data(), job.param = param.data(), job.grad = grad.data(), job.numel = numel;
      const Hyper update{1.0f, 0.1f, 0.999f, 0.001f, 0.03f, 1e-8f, -1e-3f, 0.99f, 0, 0, 7, 1};
      for (uint64_t step = 0; step < 3; step++) {
        CALL(uint64_t(*)(void*, int64_t, const Types*, const Job*, int64_t, const Hyper*, int32_t, int32_t, int*), pool_submit)
        (pool, 0, &types, &job, 1, &update, 0, 0, &code);
        if (CALL(uint64_t(*)(void*, uint64_t, double), pool_wait)(pool, step, 60.0) != step + 1) return printf("no end\n"), 1;
      }
      CALL(int32_t(*)(void*, double), pool_stop)(pool, 10.0);
      CALL(void (*)(void*), pool_delete)(pool);
      double sum = 0;
      int32_t finite = 0;
      CALL(int (*)(int32_t, int32_t, const void*, int64_t, int32_t, double*, int32_t*), sum_squares)
      (variant, kFloat32, grad.data(), numel, 3, &sum, &finite);
      printf("variant %d format %d: %016llx %016llx sum %a finite %d\n", variant, format,
             (unsigned long long)hash(state.data(), state.size()), (unsigned long long)hash(param.data(), param.size()), sum,
             finite);
    }
  }
#if defined(_WIN32)
  return check_files();
#endif
  return 0;
}
