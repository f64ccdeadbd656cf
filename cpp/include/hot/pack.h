// Stage: packing INT4 codes, two a byte, low nibble first, two's complement.
#pragma once

#include "hot/api.h"
#include "hot/context.h"
#include "hot/tensor.h"

namespace hot {

/// out[..., j] = q[..., 2j] & 15 | q[..., 2j+1] << 4 along the last axis.
///
/// @param q    i8 [R, C], values in [-8, 7] (others lose their upper bits), rows contiguous.
/// @param out  i4x2 [R, ceil(C/2)], rows contiguous; no overlap with q.
HOT_API void pack_int4(const Context& context, const ConstTensorView& q, const TensorView& out);

/// The reverse; `out` i8 [R, C] with ceil(C/2) bytes a row in `packed`.
HOT_API void unpack_int4(const Context& context, const ConstTensorView& packed,
                         const TensorView& out);

}  // namespace hot
