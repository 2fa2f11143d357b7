// Multiplies few rows by a matrix: y[T, N] = x[T, D] w[D, N], with sums of float32. It is compiled twice, at the same time:
// with -DWEIGHT=float and with -DWEIGHT=int8_t, the type of w.
//
// Every weight is read once for all rows, in XLA's own array. The threads of XLA's pool and the calling thread take panels
// of columns from a counter, until there are none. The caller then waits only for panels that other threads have begun: if
// no thread of the pool is free, the caller computes all panels itself, and cannot deadlock.

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "xla/ffi/api/c_api.h"  // XLA's C++ header takes as long to compile as the kernel

namespace {

constexpr int64_t kLanes = 8;         // floats of a vector
constexpr int kBlock = 8;             // rows of w that are added up before a sum is stored
constexpr int64_t kWidest = 512;      // most columns of a panel: its sums stay in the first-level cache
constexpr int64_t kMostTogether = 9;  // most rows of x in one pass over w: their sums stay in registers
using Weight = WEIGHT;
// Unaligned, and may alias floats.
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }

inline Vector load(const int8_t* from) {
#if defined(__AVX2__) && !defined(__clang__)  // else GCC 12 widens byte by byte; to read <immintrin.h> takes a second
  typedef char Bytes __attribute__((vector_size(16)));
  typedef int64_t Halves __attribute__((vector_size(16)));
  int64_t low;
  std::memcpy(&low, from, kLanes);
  return __builtin_convertvector(__builtin_ia32_pmovsxbd256((Bytes)Halves{low, 0}), Vector);
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, from, kLanes);
  return __builtin_convertvector(bytes, Vector);
#endif
}

// Adds the products of `rows` rows of w, from the row `d` on, to sums[T, kWidest] of the columns from `begin` to `end`.
template <int T>
void add_products(const float* x, const Weight* w, float* sums, int64_t D, int64_t N, int64_t d, int rows,
                  int64_t begin, int64_t end) {
  constexpr int kVectors = T > 4 ? 1 : 2;  // so that sums and weights fit into 16 registers
  int64_t n = begin;
  if (rows == kBlock) {
    for (; n + kVectors * kLanes <= end; n += kVectors * kLanes) {
      Vector total[T][kVectors];
      for (int t = 0; t < T; t++)
        for (int v = 0; v < kVectors; v++) total[t][v] = load(sums + t * kWidest + n - begin + v * kLanes);
#pragma GCC unroll 8
      for (int row = 0; row < kBlock; row++) {
        const Weight* weights = w + (d + row) * N + n;
        __builtin_prefetch(weights + kBlock * N);  // the next block's; beyond the matrix it does nothing
        for (int v = 0; v < kVectors; v++) {
          const Vector weight = load(weights + v * kLanes);
          for (int t = 0; t < T; t++) total[t][v] += x[t * D + d + row] * weight;
        }
      }
      for (int t = 0; t < T; t++)
        for (int v = 0; v < kVectors; v++) std::memcpy(sums + t * kWidest + n - begin + v * kLanes, &total[t][v], sizeof(Vector));
    }
  }
  for (; n < end; n++)
    for (int row = 0; row < rows; row++)
      for (int t = 0; t < T; t++) sums[t * kWidest + n - begin] += x[t * D + d + row] * w[(d + row) * N + n];
}

// Inlined, its sums would leave the registers.
template <int T>
[[gnu::noinline]] void multiply_panel(int64_t rows, const float* x, const Weight* w, float* y, int64_t D, int64_t N,
                                      int64_t begin, int64_t end) {
  if constexpr (T > 1) {
    if (rows < T) return multiply_panel<T - 1>(rows, x, w, y, D, N, begin, end);
  }
  float sums[T * kWidest] = {};
  for (int64_t d = 0; d < D; d += kBlock)
    add_products<T>(x, w, sums, D, N, d, static_cast<int>(std::min<int64_t>(kBlock, D - d)), begin, end);
  for (int t = 0; t < T; t++) std::memcpy(y + t * N + begin, sums + t * kWidest, (end - begin) * sizeof(float));
}

// A product, and what its threads share.
struct Product {
  const float* x;
  const Weight* w;
  float* y;
  int64_t T, D, N, width, count;
  std::atomic<int64_t> begun{0}, done{0}, holders;
};

void leave(Product* p) {
  if (p->holders.fetch_sub(1) == 1) delete p;
}

void compute_panels(Product* p) {
  for (int64_t i; (i = p->begun.fetch_add(1)) < p->count; p->done.fetch_add(1)) {
    const int64_t begin = i * p->width, end = std::min(p->N, begin + p->width);
    for (int64_t t = 0; t < p->T; t += kMostTogether)
      multiply_panel<kMostTogether>(std::min(kMostTogether, p->T - t), p->x + t * p->D, p->w, p->y + t * p->N, p->D, p->N,
                                    begin, end);
  }
}

// Runs in a thread of the pool, perhaps after the product has ended.
void help(void* data) {
  auto* p = static_cast<Product*>(data);
  compute_panels(p);
  leave(p);
}

bool failed(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  if (error == nullptr) return false;
  XLA_FFI_Error_Destroy_Args args{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
  api->XLA_FFI_Error_Destroy(&args);
  return true;
}

}  // namespace

// XLA calls it with x and w, and before that once to learn for which version of its interface it was compiled.
extern "C" XLA_FFI_Error* few_rows(XLA_FFI_CallFrame* frame) {
  if (auto* extension = frame->extension_start; extension && extension->type == XLA_FFI_Extension_Metadata) {
    auto* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = 0;
    metadata->state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
    return nullptr;
  }
  const auto* api = frame->api;
  const auto* x = static_cast<XLA_FFI_Buffer*>(frame->args.args[0]);
  const auto* w = static_cast<XLA_FFI_Buffer*>(frame->args.args[1]);
  const auto* y = static_cast<XLA_FFI_Buffer*>(frame->rets.rets[0]);
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args counted{XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr, frame->ctx, &threads};
  if (failed(api, api->XLA_FFI_ThreadPool_NumThreads(&counted)) || threads < 1) threads = 1;
  const int64_t N = w->dims[1];
  const int64_t width = std::clamp<int64_t>((N / (2 * threads) + 15) / 16 * 16, 16, kWidest);
  const int64_t count = (N + width - 1) / width, workers = std::clamp<int64_t>(count, 1, threads);
  auto* product = new Product{static_cast<const float*>(x->data), static_cast<const Weight*>(w->data),
                              static_cast<float*>(y->data), x->dims[0], w->dims[0], N, width, count};
  product->holders = workers;
  for (int64_t i = 1; i < workers; i++) {
    XLA_FFI_ThreadPool_Schedule_Args task{XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, frame->ctx, help, product};
    if (failed(api, api->XLA_FFI_ThreadPool_Schedule(&task))) leave(product);
  }
  compute_panels(product);
  while (product->done.load() < count) sched_yield();
  leave(product);
  return nullptr;
}
