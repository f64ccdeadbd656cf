// Stage: vectors as INT8 codes of transformed blocks of 64 values, and their sum over processes.
#pragma once

#include "hot/api.h"
#include "hot/context.h"
#include "hot/quantize.h"
#include "hot/tensor.h"

namespace hot {

/// Encodes x for other processes: per block of 64 values an FWHT and one scale, 68 bytes a block.
///
/// @param x     [n], contiguous, f32, f16 or bf16.
/// @param wire  bytes (i8 or i4x2), contiguous, aligned to 4 bytes: [ceil(n/64)*68], or
///              [parts, ceil(m/64)*68] with m = ceil(n/parts). Part i has the values from i*m on,
///              filled up with zeros, as int8 codes of whole blocks and then their f32 scales.
/// `stochastic` uses the context's key; part i adds i to its stream. A block with NaN or Inf gets
/// scale NaN and codes 0. docs/numerics.md, "Blocks".
HOT_API void encode_blocks(const Context& context, const ConstTensorView& x, Rounding rounding,
                           const TensorView& wire);

/// Computes the sum of the vectors of several processes, in order, times `factor`.
///
/// @param wire  results of encode_blocks: [ranks, bytes], or [ranks, parts, bytes], contiguous.
/// @param out   [n], contiguous, f32, f16 or bf16. The sum is in fp32 and rounded once.
HOT_API void sum_blocks(const Context& context, const ConstTensorView& wire, float factor,
                        const TensorView& out);

}  // namespace hot
