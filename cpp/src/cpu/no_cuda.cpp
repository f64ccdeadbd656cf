// Linked in place of cuda/ in a build without CUDA.
#include "hot/error.h"
#include "kernels.h"

namespace hot::detail {

const Backend& cuda_backend() {
  throw Error(ErrorCode::unsupported, "this build of hotcore has no CUDA backend");
}

const char* cuda_archs() noexcept { return ""; }

int cuda_device_count() noexcept { return 0; }

}  // namespace hot::detail
