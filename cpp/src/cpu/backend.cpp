#include "cpu/backend.h"

#include <algorithm>

#include "cpu/scalar.h"

namespace hot::detail {

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

const SimdKernels& simd_kernels([[maybe_unused]] Isa isa) {
#if HOT_AMX
  if (isa == Isa::amx) return simd_amx();
#endif
#if HOT_X86
  if (isa == Isa::avx512) return simd_avx512();
  if (isa == Isa::avx2) return simd_avx2();
#endif
  return simd_plain();
}

void fill_zero(const Context& context, const MatrixOut& out) {
  const SimdKernels& simd = simd_kernels(context.isa());
  constexpr std::int64_t chunk = 4096;
  context.pool()->run(out.rows, [&](std::int64_t row) {
    const float zeros[chunk] = {};
    for (std::int64_t col = 0; col < out.cols; col += chunk) {
      store_row(simd, zeros, row, col, std::min(chunk, out.cols - col), out);
    }
  });
}

std::int64_t task_elements(const Context& context, std::int64_t total) {
  constexpr std::int64_t least = 4096, limit = 32768;
  return std::clamp(ceil_div(total, std::int64_t{8} * context.threads()), least, limit);
}

void atomic_max(std::uint32_t* pattern, std::uint32_t value) {
  std::uint32_t current = __atomic_load_n(pattern, __ATOMIC_RELAXED);
  while (value > current && !__atomic_compare_exchange_n(pattern, &current, value, true,
                                                         __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

void load_run(const SimdKernels& simd, const void* data, DType dtype, std::int64_t first,
              std::int64_t stride, std::int64_t count, float* dst) {
  if (stride == 1) {
    return simd.load(static_cast<const char*>(data) + first * element_bytes(dtype), dtype, count,
                     dst);
  }
  if (dtype == DType::f32) {
    const auto* p = static_cast<const float*>(data) + first;
    for (std::int64_t i = 0; i < count; ++i) dst[i] = p[i * stride];
    return;
  }
  const auto* p = static_cast<const std::uint16_t*>(data) + first;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint16_t half = p[i * stride];
    dst[i] = dtype == DType::bf16 ? bf16_to_float(half) : f16_to_float(half);
  }
}

void store_run(const SimdKernels& simd, const float* src, std::int64_t count, void* data,
               DType dtype, std::int64_t first, std::int64_t stride) {
  if (stride == 1) {
    return simd.store(src, count, dtype, static_cast<char*>(data) + first * element_bytes(dtype));
  }
  if (dtype == DType::f32) {
    auto* p = static_cast<float*>(data) + first;
    for (std::int64_t i = 0; i < count; ++i) p[i * stride] = src[i];
    return;
  }
  auto* p = static_cast<std::uint16_t*>(data) + first;
  for (std::int64_t i = 0; i < count; ++i) {
    p[i * stride] = dtype == DType::bf16 ? float_to_bf16(src[i]) : float_to_f16(src[i]);
  }
}

namespace {

bool is_resized(const MatrixIn& x, std::int64_t row) {
  return x.exponents != nullptr && x.exponents[row] != 127;  // 127: factor 1
}

// Factor of a row with an exponent.
float row_power(const MatrixIn& x, std::int64_t row) {
  const std::uint32_t biased = x.exponents[row];
  return float_from_bits((x.divide ? 254U - biased : biased) << 23);
}

}  // namespace

void load_row(const SimdKernels& simd, const MatrixIn& x, std::int64_t row, std::int64_t col,
              std::int64_t count, float* dst) {
  load_run(simd, x.data, x.dtype, row * x.row_stride + col * x.col_stride, x.col_stride, count,
           dst);
  if (!is_resized(x, row)) return;
  const float power = row_power(x, row);
  for (std::int64_t i = 0; i < count; ++i) dst[i] *= power;
}

ColumnStrip::ColumnStrip(const SimdKernels& simd, const MatrixIn& x, std::int64_t col,
                         std::int64_t count)
    : simd_(simd),
      x_(x),
      col_(col),
      count_(count),
      size_(element_bytes(x.dtype)),
      bytes_together_(x.col_stride == 1 ? count * size_ : 0),
      plain_(x.col_stride == 1) {}

void ColumnStrip::resize(std::int64_t row, float* dst) const {
  if (is_resized(x_, row)) simd_.scale_row(dst, row_power(x_, row));
}

void store_row(const SimdKernels& simd, const float* src, std::int64_t row, std::int64_t col,
               std::int64_t count, const MatrixOut& out) {
  store_run(simd, src, count, out.data, out.dtype, row * out.row_stride + col * out.col_stride,
            out.col_stride);
}

}  // namespace hot::detail
