// Stage: forward_linear, a linear layer's forward pass as an INT8 product.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hot/api.h"
#include "hot/backward_linear.h"
#include "hot/context.h"
#include "hot/tensor.h"

namespace hot {

struct ForwardLinearSpec {
  int hadamard_block = 64;  // block of the transform along I; power of two, 1 to 256
};

/// Whether this build and device can run forward_linear with the spec, and if not, why. Never
/// throws.
HOT_API Support forward_supported(const Context& context, const LinearShape& shape,
                                  const ForwardLinearSpec& spec) noexcept;

/// Number of what the bytes of a weight quantised for the forward pass mean. Never 0.
HOT_API std::uint64_t forward_weight_format(const ForwardLinearSpec& spec);

HOT_API std::size_t forward_weight_bytes(std::int64_t out_features, std::int64_t in_features,
                                         const ForwardLinearSpec& spec);

/// Quantises w [O, I] (f32, f16, bf16, any strides) once for several calls of forward_linear with
/// the same spec, which then give the same bits as with w itself. No random numbers.
///
/// @param out  forward_weight_bytes bytes, 16-byte aligned: codes [O, roundup(I, n)], O scales.
/// Returns what forward_linear takes. docs/numerics.md: "Forward".
HOT_API ConstQuantizedWeight quantize_forward_weight(const Context& context,
                                                     const ConstTensorView& w,
                                                     const ForwardLinearSpec& spec,
                                                     const QuantizedWeight& out);

/// Scratch for forward_linear; `quantized_weight`: w was quantised before.
HOT_API std::size_t forward_linear_workspace(const Context& context, const LinearShape& shape,
                                             const ForwardLinearSpec& spec, bool quantized_weight);

/// y = x w^T + b by an INT8 product: both operands after a Hadamard transform in blocks along I,
/// rounded to nearest, x with a scale for each token and w with one for each out feature.
///
/// @param x     [L, I] f32, f16 or bf16, 2 to 4 dimensions whose leading ones collapse.
/// @param w     [O, I] f32, f16 or bf16, any strides.
/// @param bias  [O] f32, f16 or bf16, any stride; none: a view with ndim 0. Added in fp32 before
///              the one rounding to y's type.
/// @param y     [L, O] f32, f16 or bf16, any row stride, no overlap with an input.
/// Deterministic. A row of x or w with NaN or Inf makes that row or column of y NaN.
/// docs/numerics.md: "Forward".
HOT_API void forward_linear(const Context& context, const ConstTensorView& x,
                            const ConstTensorView& w, const ConstTensorView& bias,
                            const ForwardLinearSpec& spec, const TensorView& y,
                            const Workspace& workspace);

/// The same with w quantised before (quantize_forward_weight).
HOT_API void forward_linear(const Context& context, const ConstTensorView& x,
                            const ConstQuantizedWeight& w, const ConstTensorView& bias,
                            const ForwardLinearSpec& spec, const TensorView& y,
                            const Workspace& workspace);

}  // namespace hot
