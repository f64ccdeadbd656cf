// Rows of P x for any projection, one column per thread, for HLA and the generic column quantiser.
#pragma once

#include <cstdint>

#include "cuda/device/matrix_io.cuh"
#include "cuda/device/rounding.cuh"
#include "kernels.h"
#include "row_runs.h"

namespace hot::detail {

// Projection as a kernel argument.
struct DeviceProjection : Projection {
  DeviceKey sketch;
};

// This thread's column of shared memory.
struct SharedColumn {
  float* base;
  int threads;
  __device__ float& operator[](int i) const { return base[i * threads]; }
};

__device__ inline void butterfly_shared(const SharedColumn& v, int length) {
  for (int h = 1; h < length; h *= 2) {
    for (int i = 0; i < length; ++i) {
      if ((i & h) != 0) continue;
      const float a = v[i], b = v[i + h];
      v[i] = a + b;
      v[i + h] = a - b;
    }
  }
}

// Calls emit(k, value) for a run of the rows of P x. All lanes of a warp must call it with the same
// run, because each computes the places of some of its tokens.
template <class Emit>
__device__ void walk_rows(const MatrixIn& x, const DeviceProjection& p, std::int64_t col,
                          const RowRun& run, const SharedColumn& v, const Emit& emit) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  std::int64_t k = run.begin * p.rank + run.prefix;
  const DeviceOffset offset = offset_of(p.sketch);
  for (std::int64_t block = run.begin; block < run.end; ++block) {
    std::int64_t token = 0;
    for (int t = 0; t < p.block; ++t) {
      const std::int64_t position = block * p.block + t;
      if (t % 32 == 0) token = p.order.body(min(position + lane, p.body_tokens - 1));
      const std::int64_t row = __shfl_sync(0xffffffffU, token, t % 32);
      v[t] = position < p.body_tokens ? load_scaled(x, row, col) : 0.0F;
    }
    int length = p.block;
    if (p.basis == Basis::sketch && p.folds > 0) {
      const RandomWords draw = random_words(p.sketch, offset, static_cast<std::uint64_t>(block));
      for (int fold = 0; fold < p.folds; ++fold, length /= 2) {
        const int a = sketch_draw(draw, fold, length);
        const int top = 1 << (31 - __clz(a));
        int to = 0;  // folding in place is safe: result i reads only rows >= i
        for (int t = 0; t < length; ++t) {
          if ((t & top) == 0) v[to++] = v[t] + v[t ^ a];
        }
      }
    }
    if (p.basis != Basis::full) butterfly_shared(v, length);
    for (int i = 0; i < p.rank; ++i) {
      float value;
      if (p.basis == Basis::sketch) {
        value = i == 0 || p.folds == 0 ? v[i] : v[i] * p.sketch_weight;
      } else {
        value = v[p.rank == p.block ? i : p.rows[static_cast<std::size_t>(i)]];
      }
      emit(k++, value);
    }
  }
  for (std::int64_t j = run.prefix; j < run.prefix_end; ++j) {
    emit(k++, load_scaled(x, p.order.prefix_token(j), col) * p.prefix_factor);
  }
}

}  // namespace hot::detail
