#include "cuda/gemm_sm80.cuh"

namespace hot::detail {

template void mma_run<Mma128x128x64>(const Context&, const GemmArgs&, MmaCodes, const MmaPlan&,
                                     void*);

}  // namespace hot::detail
