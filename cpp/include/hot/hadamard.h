// Stage: fast Walsh-Hadamard transform.
#pragma once

#include "hot/api.h"
#include "hot/context.h"
#include "hot/tensor.h"

namespace hot {

inline constexpr int max_fwht_block = 32768;

/// Walsh-Hadamard transform of consecutive blocks along one axis: unnormalised, natural order.
///
/// @param x     f32, f16 or bf16, 1 to 4 dimensions, any strides.
/// @param axis  the transformed axis (negative: from the end). Its length is a multiple of `block`.
/// @param block power of two, 1 to 32768.
/// @param out   shape of x, f32, f16 or bf16, any strides. It may be x itself, but must not overlap
///              x otherwise.
/// Computed in fp32, rounded once. Source: docs/numerics.md, "FWHT".
HOT_API void fwht(const Context& context, const ConstTensorView& x, int axis, int block,
                  const TensorView& out);

}  // namespace hot
