// Stage: fast Walsh-Hadamard transform.
#pragma once

#include "hot/api.h"
#include "hot/context.h"
#include "hot/tensor.h"

namespace hot {

inline constexpr int max_fwht_block = 32768;

/// Unnormalised Walsh-Hadamard transform, natural order, of consecutive blocks along one axis.
///
/// @param x     f32, f16 or bf16, 1 to 4 dimensions, any strides.
/// @param axis  the transformed axis, negative counts from the end; its length is a multiple of
///              `block`.
/// @param block power of two, 1 to 32768.
/// @param out   the shape of x, f32, f16 or bf16, any strides; may be x itself, no other overlap.
///
/// Computed in fp32, rounded once. docs/numerics.md, "FWHT".
HOT_API void fwht(const Context& context, const ConstTensorView& x, int axis, int block,
                  const TensorView& out);

}  // namespace hot
