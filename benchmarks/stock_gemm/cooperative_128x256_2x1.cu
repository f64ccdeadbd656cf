#include "stock_gemm.cuh"

namespace hot::stock {

int cooperative_128x256_2x1(const Problem& problem, Order order, cudaStream_t stream) {
  return Cooperative<128, 256, 2, 1>::run(problem, order, stream);
}

}  // namespace hot::stock
