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

/// Format id of a weight quantised for the forward pass; never 0.
HOT_API std::uint64_t forward_weight_format(const ForwardLinearSpec& spec);

HOT_API std::size_t forward_weight_bytes(std::int64_t out_features, std::int64_t in_features,
                                         const ForwardLinearSpec& spec);

/// Quantises w [O, I] (f32, f16, bf16, any strides) once for several calls of forward_linear with
/// the same spec, which then give the same bits as with w itself. No random numbers.
///
/// @param out  forward_weight_bytes bytes, 16-byte aligned: codes [O, K], O scales; K is I
///             rounded up to whole blocks n and to 16.
/// Returns what forward_linear takes. docs/numerics.md: "Forward".
HOT_API ConstQuantizedWeight quantize_forward_weight(const Context& context,
                                                     const ConstTensorView& w,
                                                     const ForwardLinearSpec& spec,
                                                     const QuantizedWeight& out);

/// x prepared for forward_linear: transformed along I, quantised. Layers with the same x share it.
struct QuantizedInput {
  void* data = nullptr;  // forward_input_bytes bytes, 16-byte aligned
  std::size_t bytes = 0;
};
/// A quantised x, as quantize_forward_input returns it.
struct ConstQuantizedInput {
  const void* data = nullptr;
  std::size_t bytes = 0;
  std::int64_t tokens = 0;
  std::int64_t in_features = 0;
  std::uint64_t format = 0;  // forward_input_format of the spec it was made with
};

/// Format id of an x quantised for the forward pass; never 0.
HOT_API std::uint64_t forward_input_format(const ForwardLinearSpec& spec);

HOT_API std::size_t forward_input_bytes(std::int64_t tokens, std::int64_t in_features,
                                        const ForwardLinearSpec& spec);

/// Quantises x [L, I] (f32, f16, bf16; 2 to 4 dimensions whose leading ones collapse) once for
/// several calls of forward_linear with the same spec, which then give the same bits as with x
/// itself. No random numbers.
///
/// @param out  forward_input_bytes bytes, 16-byte aligned: codes [L, K], L scales; K as of
///             quantize_forward_weight.
/// Returns what forward_linear takes. docs/numerics.md: "Forward".
HOT_API ConstQuantizedInput quantize_forward_input(const Context& context, const ConstTensorView& x,
                                                   const ForwardLinearSpec& spec,
                                                   const QuantizedInput& out);

/// Both forms of an x: for the forward product, and kept for backward.
struct ForwardInput {
  ConstQuantizedInput quantized{};
  ConstSavedActivation saved{};
};

/// The same, and compress_activation of that x by `kept`, with the same bits as the two calls. On a
/// GPU both forms come from one read of x where a kernel can (hot/explain.h says which).
///
/// @param kept       how x is kept for backward.
/// @param saved      saved_layout(...).bytes bytes, 16-byte aligned, no overlap with `out` or x.
/// @param workspace  compress_activation_workspace bytes, for `kept`.
HOT_API ForwardInput quantize_forward_input(const Context& context, const ConstTensorView& x,
                                            const ForwardLinearSpec& spec,
                                            const QuantizedInput& out,
                                            const BackwardLinearSpec& kept,
                                            const SavedActivation& saved,
                                            const Workspace& workspace);

/// Scratch for forward_linear; `quantized_weight`, `quantized_input`: w, x were quantised before.
HOT_API std::size_t forward_linear_workspace(const Context& context, const LinearShape& shape,
                                             const ForwardLinearSpec& spec, bool quantized_weight,
                                             bool quantized_input = false);

/// y = x w^T + b by an INT8 product: both operands after a Hadamard transform in blocks along I,
/// rounded to nearest, x with a scale for each token and w with one for each out feature.
///
/// @param x     [L, I] f32, f16 or bf16, 2 to 4 dimensions whose leading ones collapse.
/// @param w     [O, I] f32, f16 or bf16, any strides.
/// @param bias  [O] f32, f16 or bf16, any stride; none: an empty view (ConstTensorView{}). Added in
///              fp32 before the one rounding to y's type.
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

/// The same with x quantised before (quantize_forward_input), and w as it is or quantised, too.
HOT_API void forward_linear(const Context& context, const ConstQuantizedInput& x,
                            const ConstTensorView& w, const ConstTensorView& bias,
                            const ForwardLinearSpec& spec, const TensorView& y,
                            const Workspace& workspace);
HOT_API void forward_linear(const Context& context, const ConstQuantizedInput& x,
                            const ConstQuantizedWeight& w, const ConstTensorView& bias,
                            const ForwardLinearSpec& spec, const TensorView& y,
                            const Workspace& workspace);

}  // namespace hot
