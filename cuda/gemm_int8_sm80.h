// The mma.sync products, for every architecture from sm_80 on.
#pragma once

#include "kernels.h"

namespace hot::detail {

void sm80_gemm(const Context&, const GemmArgs&);
void sm80_gemm_token(const Context&, const GemmTokenArgs&);

}  // namespace hot::detail
