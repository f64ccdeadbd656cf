#include "stock_gemm.cuh"

namespace hot::stock {

int pingpong_128x128_2x1(const Problem& problem, Order order, cudaStream_t stream) {
  return Pingpong<128, 128, 2, 1>::run(problem, order, stream);
}

}  // namespace hot::stock
