// Multiplies few rows by a matrix: y[T, N] = x[T, D] w[D, N], with w of float32 or int8, and sums of float32.
//
// Every weight is read once for all rows, in XLA's own array. The threads of XLA's pool and the calling thread take panels
// of columns from a counter, until there are none. The caller then waits only for panels that other threads have begun: if
// no thread of the pool is free, the caller computes all panels itself, and cannot deadlock.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

constexpr int64_t kLanes = 8;         // floats of a vector
constexpr int kBlock = 8;             // rows of w that are added up before a sum is stored
constexpr int64_t kWidest = 512;      // most columns of a panel: its sums stay in the first-level cache
constexpr int64_t kMostTogether = 9;  // most rows of x in one pass over w: their sums stay in registers
using Rows = ffi::Buffer<ffi::F32, 2>;
// Unaligned, and may alias floats.
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }

inline Vector load(const int8_t* from) {
#ifdef __AVX2__  // GCC 12 would widen the eight bytes one by one
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Vector widened;
  for (int lane = 0; lane < kLanes; lane++) widened[lane] = from[lane];
  return widened;
#endif
}

// Adds the products of `rows` rows of w, from the row `d` on, to sums[T, kWidest] of the columns from `begin` to `end`.
template <int T, typename Weight>
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

template <int T, typename Weight>
void multiply_panel(int64_t rows, const float* x, const Weight* w, float* y, int64_t D, int64_t N, int64_t begin,
                    int64_t end) {
  if constexpr (T > 1) {
    if (rows < T) return multiply_panel<T - 1>(rows, x, w, y, D, N, begin, end);
  }
  float sums[T * kWidest] = {};
  for (int64_t d = 0; d < D; d += kBlock)
    add_products<T>(x, w, sums, D, N, d, static_cast<int>(std::min<int64_t>(kBlock, D - d)), begin, end);
  for (int t = 0; t < T; t++) std::memcpy(y + t * N + begin, sums + t * kWidest, (end - begin) * sizeof(float));
}

struct Panels {
  std::atomic<int64_t> begun{0}, done{0};
};

template <typename Weight>
void multiply(ffi::ThreadPool& pool, const float* x, const Weight* w, float* y, int64_t T, int64_t D, int64_t N) {
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t width = std::clamp<int64_t>((N / (2 * threads) + 15) / 16 * 16, 16, kWidest);
  const int64_t count = (N + width - 1) / width;
  auto panels = std::make_shared<Panels>();  // tasks that begin after the product has ended still read the counter
  auto work = [=] {
    for (int64_t i; (i = panels->begun.fetch_add(1)) < count; panels->done.fetch_add(1)) {
      const int64_t begin = i * width, end = std::min(N, begin + width);
      for (int64_t t = 0; t < T; t += kMostTogether)
        multiply_panel<kMostTogether>(std::min(kMostTogether, T - t), x + t * D, w, y + t * N, D, N, begin, end);
    }
  };
  for (int64_t i = 1; i < std::min(threads, count); i++) pool.Schedule(std::decay_t<decltype(work)>(work));
  work();
  while (panels->done.load() < count) std::this_thread::yield();
}

ffi::Error few_rows_handler(ffi::ThreadPool pool, Rows x, ffi::AnyBuffer w,
                            ffi::Result<Rows> y) {
  const int64_t T = x.dimensions()[0], D = w.dimensions()[0], N = w.dimensions()[1];
  if (w.element_type() == ffi::S8)
    multiply(pool, x.typed_data(), w.typed_data<int8_t>(), y->typed_data(), T, D, N);
  else
    multiply(pool, x.typed_data(), w.typed_data<float>(), y->typed_data(), T, D, N);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(few_rows, few_rows_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Rows>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<Rows>());
