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
  int hadamard_block = 64;  // block of the transform along I; power of two, 1 to 64, or 256
};

/// Reports if this build and device can run forward_linear, and the reason if not. Never throws.
HOT_API Support forward_supported(const Context& context, const LinearShape& shape,
                                  const ForwardLinearSpec& spec) noexcept;

/// Format id of a weight quantised for the forward pass; never 0.
HOT_API std::uint64_t forward_weight_format(const ForwardLinearSpec& spec);

HOT_API std::size_t forward_weight_bytes(std::int64_t out_features, std::int64_t in_features,
                                         const ForwardLinearSpec& spec);

/// Quantises w [O, I] (f32, f16, bf16, any strides) once for several calls of forward_linear with
/// the same spec. Their bits equal those with w itself. No random numbers.
///
/// @param out  forward_weight_bytes bytes, 16-byte aligned: codes [O, K], then O scales. K is I
///             rounded up to a multiple of hadamard_block, then of 16.
/// Returns the argument `w` of forward_linear. docs/numerics.md: "Forward".
HOT_API ConstQuantizedWeight quantize_forward_weight(const Context& context,
                                                     const ConstTensorView& w,
                                                     const ForwardLinearSpec& spec,
                                                     const QuantizedWeight& out);

/// Memory for x prepared for forward_linear: transformed along I and quantised. Layers with the
/// same x can share the result.
struct QuantizedInput {
  void* data = nullptr;  // forward_input_bytes bytes, 16-byte aligned
  std::size_t bytes = 0;
};
/// A quantised x, returned by quantize_forward_input.
struct ConstQuantizedInput {
  const void* data = nullptr;
  std::size_t bytes = 0;
  std::int64_t tokens = 0;
  std::int64_t in_features = 0;
  std::uint64_t format = 0;  // forward_input_format of the spec that quantised it
};

/// Format id of an x quantised for the forward pass; never 0.
HOT_API std::uint64_t forward_input_format(const ForwardLinearSpec& spec);

HOT_API std::size_t forward_input_bytes(std::int64_t tokens, std::int64_t in_features,
                                        const ForwardLinearSpec& spec);

/// Makes floats of the INT8 codes of quantize_forward_weight or expand_weight_int4.
///
/// @param exponents  i8 [I], contiguous, 16-byte aligned, or an empty view for none: feature i is
///             divided by 2^(exponents[i] / 4).
/// @param out  [O, I] f32, f16 or bf16, any strides, no overlap with another argument. The inverse
///             transform adds integers; the product with the scale is rounded once to out's type.
/// docs/numerics.md: "Forward".
HOT_API void dequantize_weight(const Context& context, const ConstQuantizedWeight& w,
                               const ForwardLinearSpec& spec, const TensorView& out,
                               const ConstTensorView& exponents = {});

/// Quantises x [L, I] once for several calls of forward_linear with the same spec. Their bits equal
/// those with x itself. No random numbers.
///
/// @param x    f32, f16 or bf16, 2 to 4 dimensions whose leading ones collapse.
/// @param out  forward_input_bytes bytes, 16-byte aligned: codes [L, K], then L scales. K is that
///             of quantize_forward_weight.
/// @param exponents  i8 [I], contiguous, 16-byte aligned, or an empty view for none: feature i is
///             divided by 2^(exponents[i] / 4) before the transform. Only for a w with the same
///             exponents (hot/weight_int4.h).
/// Returns the argument `x` of forward_linear. docs/numerics.md: "Forward".
HOT_API ConstQuantizedInput quantize_forward_input(const Context& context, const ConstTensorView& x,
                                                   const ForwardLinearSpec& spec,
                                                   const QuantizedInput& out,
                                                   const ConstTensorView& exponents = {});

/// Both forms of an x: quantised for the forward product, and saved for backward.
struct ForwardInput {
  ConstQuantizedInput quantized{};
  ConstSavedActivation saved{};
};

/// Combines quantize_forward_input and compress_activation, with the same bits as the two calls. On
/// a GPU some kernels make both forms from one read of x (hot/explain.h lists the kernels).
///
/// @param kept       spec of compress_activation.
/// @param saved      saved_layout(...).bytes bytes, 16-byte aligned, no overlap with `out` or x.
/// @param workspace  compress_activation_workspace bytes for the spec `kept`.
/// @param exponents  as above; the saved form ignores them.
HOT_API ForwardInput quantize_forward_input(
    const Context& context, const ConstTensorView& x, const ForwardLinearSpec& spec,
    const QuantizedInput& out, const BackwardLinearSpec& kept, const SavedActivation& saved,
    const Workspace& workspace, const ConstTensorView& exponents = {});

/// Bytes of scratch for forward_linear. The flags say that the call gets w or x already quantised.
HOT_API std::size_t forward_linear_workspace(const Context& context, const LinearShape& shape,
                                             const ForwardLinearSpec& spec, bool quantized_weight,
                                             bool quantized_input = false);

/// Computes y = x w^T + b by an INT8 product. Both operands are Hadamard-transformed in blocks
/// along I and rounded to nearest, x with a scale per token, w with a scale per output feature.
///
/// @param x     [L, I] f32, f16 or bf16, 2 to 4 dimensions whose leading ones collapse.
/// @param w     [O, I] f32, f16 or bf16, any strides.
/// @param bias  [O] f32, f16 or bf16, any stride, or an empty view (ConstTensorView{}) for none. It
///              is added in fp32, before the result is rounded once to y's type.
/// @param y     [L, O] f32, f16 or bf16, any row stride, no overlap with an input.
/// Deterministic. NaN or Inf in a row of x makes that row of y NaN; in a row of w, that column.
/// Throws `workspace_too_small`. docs/numerics.md: "Forward".
HOT_API void forward_linear(const Context& context, const ConstTensorView& x,
                            const ConstTensorView& w, const ConstTensorView& bias,
                            const ForwardLinearSpec& spec, const TensorView& y,
                            const Workspace& workspace);

/// Overload for a w from quantize_forward_weight.
HOT_API void forward_linear(const Context& context, const ConstTensorView& x,
                            const ConstQuantizedWeight& w, const ConstTensorView& bias,
                            const ForwardLinearSpec& spec, const TensorView& y,
                            const Workspace& workspace);

/// Overloads for an x from quantize_forward_input, with a plain and with a quantised w.
HOT_API void forward_linear(const Context& context, const ConstQuantizedInput& x,
                            const ConstTensorView& w, const ConstTensorView& bias,
                            const ForwardLinearSpec& spec, const TensorView& y,
                            const Workspace& workspace);
HOT_API void forward_linear(const Context& context, const ConstQuantizedInput& x,
                            const ConstQuantizedWeight& w, const ConstTensorView& bias,
                            const ForwardLinearSpec& spec, const TensorView& y,
                            const Workspace& workspace);

}  // namespace hot
