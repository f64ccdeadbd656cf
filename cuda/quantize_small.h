// All operands of a small backward quantised in one launch, where several would take most of the
// time. The results are those of quantize.cu and lowrank.cu.
#pragma once

#include "kernels.h"

namespace hot::detail {

// Words that two launches use of an Operand::amax with one scale for all: the most thread blocks of
// an operand.
inline constexpr std::int64_t small_slots = 1024;

// Quantises what there is and returns true, or does nothing: too large to gain, or not a case of
// the kernel (quantize_small.cu).
bool quantize_small(const Context&, const BackwardOperands&);

}  // namespace hot::detail
