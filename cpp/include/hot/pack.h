// Stage: packing of INT4 codes, two per byte, low nibble first, two's complement.
#pragma once

#include "hot/api.h"
#include "hot/context.h"
#include "hot/tensor.h"

namespace hot {

/// out[..., j] = q[..., 2j] & 15 | q[..., 2j+1] << 4 along the last axis.
///
/// @param q    i8 [R, C], values in [-8, 7] (others lose their upper bits); rows contiguous.
/// @param out  i4x2 [R, ceil(C/2)], rows contiguous; no overlap with q.
HOT_API void pack_int4(const Context& context, const ConstTensorView& q, const TensorView& out);

/// Inverse of pack_int4: `packed` i4x2 [R, ceil(C/2)], `out` i8 [R, C].
HOT_API void unpack_int4(const Context& context, const ConstTensorView& packed,
                         const TensorView& out);

}  // namespace hot
