// The CUDA backend as a whole; its stages are in the files named after them.
#include "cuda/backend.h"

namespace hot::detail {

const Backend& cuda_backend() {
  static const CudaBackend backend;
  return backend;
}

}  // namespace hot::detail
