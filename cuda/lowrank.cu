// Stage: HLA along the tokens: rows of P x as floats.
//
// hla_kernel: a thread takes a column and keeps a block of it in its own column of shared memory.
//   There are no barriers and no bank conflicts.
#include <cstdint>

#include "cuda/backend.h"
#include "cuda/device/begin_kernel.cuh"
#include "cuda/launch.h"
#include "cuda/lowrank.cuh"

namespace hot::detail {
namespace {

__global__ void hla_kernel(MatrixIn x, DeviceProjection p, RowRuns runs, MatrixOut out) {
  begin_kernel();
  extern __shared__ float shared[];
  const int threads = static_cast<int>(blockDim.x);
  const std::int64_t tiles = (x.cols + threads - 1) / threads;
  const std::int64_t place = blockIdx.x % tiles * threads + threadIdx.x;
  const bool live = place < x.cols;
  const std::int64_t col = live ? place : x.cols - 1;  // walk_rows needs whole warps
  walk_rows(x, p, col, runs[blockIdx.x / tiles], SharedColumn{shared + threadIdx.x, threads},
            [&](std::int64_t k, float value) {
              if (live) store_element(out, k, col, value);
            });
}

}  // namespace

void CudaBackend::hla(const Context& context, const MatrixIn& x, const Projection& p,
                      const Key& sketch_key, const MatrixOut& out) const {
  if (p.k == 0 || x.cols == 0) return;
  const DeviceGuard guard(context.device().index, "hla");
  const plan::GenericGrid grid = plan::generic_grid(p, x.cols, 0);
  launch("hla", context, hla_kernel, {grid.blocks, grid.threads, grid.shared_bytes}, x,
         DeviceProjection{p, device_key(sketch_key, Purpose::sketch)}, RowRuns(p, grid.run), out);
}

}  // namespace hot::detail
