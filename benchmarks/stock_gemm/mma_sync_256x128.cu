#include "mma_sync.cuh"

namespace hot::stock {

int mma_sync_256x128(const Problem& problem, Order order, cudaStream_t stream) {
  return MmaSync<256, 128, 64, 3>::run(problem, order, stream);
}

}  // namespace hot::stock
