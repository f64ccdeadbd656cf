#include "stock_gemm.cuh"

namespace hot::stock {

int cooperative_256x128_1x2(const Problem& problem, Order order, cudaStream_t stream) {
  return Cooperative<256, 128, 1, 2>::run(problem, order, stream);
}

}  // namespace hot::stock
