// Access to elements of strided matrices.
#pragma once

#include <cstdint>

#include "cuda/device/vec_io.cuh"
#include "operands.h"

namespace hot::detail {

__device__ inline float load_element(const MatrixIn& x, std::int64_t row, std::int64_t col) {
  const std::int64_t i = row * x.row_stride + col * x.col_stride;
  float v = 0.0F;
  with_dtype(x.dtype, [&](auto tag) { v = tag.load(x.data, i); });
  return v;
}

// Factor of a row, a power of two, as the bits of a bf16.
__device__ inline unsigned row_power(const MatrixIn& x, std::int64_t row) {
  if (x.exponents == nullptr) return 127U << 7;
  const unsigned exponent = x.exponents[row];
  return (x.divide ? 254U - exponent : exponent) << 7;
}

// Loads an element and multiplies it by the factor of its row.
__device__ inline float load_scaled(const MatrixIn& x, std::int64_t row, std::int64_t col) {
  const float v = load_element(x, row, col);
  return x.exponents == nullptr ? v : v * __uint_as_float(row_power(x, row) << 16);
}

__device__ inline void store_element(const MatrixOut& out, std::int64_t row, std::int64_t col,
                                     float v) {
  const std::int64_t i = row * out.row_stride + col * out.col_stride;
  with_dtype(out.dtype, [&](auto tag) { tag.store(out.data, i, v); });
}

}  // namespace hot::detail
