// Stage: weight_int4, a frozen weight in INT4 for the 8-bit forward product.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hot/api.h"
#include "hot/backward_linear.h"
#include "hot/context.h"
#include "hot/forward_linear.h"
#include "hot/tensor.h"

namespace hot {

struct WeightInt4Spec {
  ForwardLinearSpec forward{};  // of the product that the codes serve
  int group = 32;               // values along I that share a step: 32 or 64
};

/// Format id of a weight in INT4; never 0.
HOT_API std::uint64_t weight_int4_format(const WeightInt4Spec& spec);

/// Bytes of a weight in INT4: with K as in quantize_forward_weight, O * (K / 2 + 4 + K / group).
HOT_API std::size_t weight_int4_bytes(std::int64_t out_features, std::int64_t in_features,
                                      const WeightInt4Spec& spec);

/// Quantises w [O, I] (f32, f16, bf16, any strides) to INT4 after a transform in blocks along I. A
/// row has a scale, a group a step: the one of 32 candidates with the least squared error. No
/// random numbers.
///
/// @param exponents  i8 [I], contiguous, 16-byte aligned, or an empty view (ConstTensorView{}) for
///                   none. Feature i of w is multiplied by 2^(exponents[i] / 4) before
///                   the transform. quantize_forward_input divides x by the same.
/// @param out        weight_int4_bytes bytes, 16-byte aligned: packed codes [O, K / 2], then O
///                   scales (f32), then steps [O, K / group] (one byte each). `group` must divide
///                   K.
/// A row with NaN or Inf gets scale NaN, codes and steps 0. Returns the argument `w` of
/// expand_weight_int4. docs/numerics.md: "INT4 weights".
HOT_API ConstQuantizedWeight quantize_weight_int4(const Context& context, const ConstTensorView& w,
                                                  const ConstTensorView& exponents,
                                                  const WeightInt4Spec& spec,
                                                  const QuantizedWeight& out);

/// Expands a weight in INT4 to the INT8 codes that forward_linear takes, in integers.
///
/// @param out  forward_weight_bytes bytes, 16-byte aligned, in the layout of
///             quantize_forward_weight. No overlap with w.
/// Returns the argument `w` of forward_linear. With exponents, x must come from
/// quantize_forward_input with the same ones.
HOT_API ConstQuantizedWeight expand_weight_int4(const Context& context,
                                                const ConstQuantizedWeight& w,
                                                const WeightInt4Spec& spec,
                                                const QuantizedWeight& out);

}  // namespace hot
