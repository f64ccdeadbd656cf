#include "mma_sync.cuh"

namespace hot::stock {

int mma_sync_128x128(const Problem& problem, Order order, cudaStream_t stream) {
  return MmaSync<128, 128, 64, 4>::run(problem, order, stream);
}

}  // namespace hot::stock
