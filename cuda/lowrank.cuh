// Rows of P x for any projection, one column per thread, for HLA and the generic column quantiser.
#pragma once

#include <cstdint>

#include "cuda/device/matrix_io.cuh"
#include "cuda/device/rounding.cuh"
#include "kernels.h"

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

// Calls emit(k, value) for the rows of P x from blocks [begin, end) and, at the end, the prefix.
template <class Emit>
__device__ void walk_rows(const MatrixIn& x, const DeviceProjection& p, std::int64_t col,
                          std::int64_t begin, std::int64_t end, const SharedColumn& v,
                          const Emit& emit) {
  std::int64_t k = begin * p.rank;
  const DeviceOffset offset = offset_of(p.sketch);
  for (std::int64_t block = begin; block < end; ++block) {
    for (int t = 0; t < p.block; ++t) {
      const std::int64_t position = block * p.block + t;
      v[t] = position < p.body_tokens ? load_scaled(x, p.order.body(position), col) : 0.0F;
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
  if (end < p.blocks) return;
  for (std::int64_t j = 0; j < p.order.prefix_rows(); ++j) {
    emit(k++, load_scaled(x, p.order.prefix_token(j), col) * p.prefix_factor);
  }
}

}  // namespace hot::detail
