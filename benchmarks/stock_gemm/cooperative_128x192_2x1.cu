#include "stock_gemm.cuh"

namespace hot::stock {

int cooperative_128x192_2x1(const Problem& problem, Order order, cudaStream_t stream) {
  return Cooperative<128, 192, 2, 1>::run(problem, order, stream);
}

}  // namespace hot::stock
