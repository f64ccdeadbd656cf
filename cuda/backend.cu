// The CUDA backend as a whole; its stages are in the files named after them.
#include "cuda/backend.h"

#include "cuda/launch.h"

namespace hot::detail {
const Backend& cuda_backend() {
  static const CudaBackend backend;
  return backend;
}

const char* cuda_archs() noexcept { return HOT_CUDA_ARCHS; }

int cuda_device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // no driver or no device is an answer, not an error to leave behind
    return 0;
  }
  return count;
}

}  // namespace hot::detail
