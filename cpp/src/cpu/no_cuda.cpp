// Replacement for cuda/ in a build without CUDA.
#include "cuda_device.h"
#include "hot/error.h"
#include "kernels.h"

namespace hot::detail {

const Backend& cuda_backend() {
  throw Error(ErrorCode::unsupported,
              "this build of hotcore has no CUDA backend; rebuild it on a machine with a CUDA "
              "compiler (nvcc 12.0 or newer): in its source tree, HOT_CUDA=ON pip install "
              "--force-reinstall --no-deps . (C++: cmake -DHOT_CUDA=ON). "
              "python -m hotcore.info describes a build");
}

const char* cuda_archs() noexcept { return ""; }

int cuda_device_count() noexcept { return 0; }

const char* cuda_device_trouble() noexcept { return ""; }

Capability cuda_capability(int /*device*/) { return {0, 0}; }

void with_device_facts(const Context&, const std::function<void(const plan::DeviceFacts&)>&) {
  cuda_backend();  // throws
}

}  // namespace hot::detail
