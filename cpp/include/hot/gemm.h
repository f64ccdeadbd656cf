// Stage: integer matrix product with the dequantisation in its epilogue.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hot/api.h"
#include "hot/context.h"
#include "hot/tensor.h"

namespace hot {

struct GemmSpec {
  int divisor = 1;          // power of two that divides the result (block n of the transform)
  bool accumulate = false;  // add to `out`; f32, f16 and bf16 outputs only
};

/// Bytes of scratch for either product of a [M, K] and b [N, K].
HOT_API std::size_t gemm_workspace(const Context& context, std::int64_t m, std::int64_t n,
                                   std::int64_t k);

/// out[m, n] = sum_k a[m, k] b[n, k] * a_scale[m] * b_scale[n] / divisor.
///
/// @param a        i8 [M, K], b i8 [N, K]; K contiguous, any row stride.
/// @param a_scale  f32 vector of M elements or 1; b_scale: N elements or 1.
/// @param out      [M, N] f32, f16 or bf16, or i32 for unscaled sums. i32 requires empty views as
///                 scales, divisor 1 and K at most 131,071.
/// The sums are exact for any K. docs/numerics.md, "Integer GEMM", defines the order of rounding.
HOT_API void gemm_int8(const Context& context, const ConstTensorView& a, const ConstTensorView& b,
                       const ConstTensorView& a_scale, const ConstTensorView& b_scale,
                       const GemmSpec& spec, const TensorView& out, const Workspace& workspace);

/// gemm_int8 for packed INT4 operands: a i4x2 [M, ceil(K/2)], b i4x2 [N, ceil(K/2)]; K = `k`.
HOT_API void gemm_int4(const Context& context, const ConstTensorView& a, const ConstTensorView& b,
                       std::int64_t k, const ConstTensorView& a_scale,
                       const ConstTensorView& b_scale, const GemmSpec& spec, const TensorView& out,
                       const Workspace& workspace);

}  // namespace hot
