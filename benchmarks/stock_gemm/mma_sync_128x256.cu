#include "mma_sync.cuh"

namespace hot::stock {

int mma_sync_128x256(const Problem& problem, Order order, cudaStream_t stream) {
  return MmaSync<128, 256, 64, 3>::run(problem, order, stream);
}

}  // namespace hot::stock
