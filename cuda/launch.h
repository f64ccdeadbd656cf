// Host side of a kernel launch: errors, the current device, the launch itself. Nothing here
// allocates, synchronises or is forbidden during stream capture.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "hot/context.h"
#include "hot/error.h"
#include "kernels.h"

namespace hot::detail {

inline void check_cuda(cudaError_t status, const char* stage, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // reported here; the next call of whoever shares this thread starts clean
  std::string message = std::string(stage) + ": " + call +
                        " failed: " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) +
                        ")";
  if (status == cudaErrorNoKernelImageForDevice) {
    message += std::string("; this build is for the architectures ") + cuda_archs();
  }
  throw Error(ErrorCode::cuda, message);
}

// Makes a device current, and the previous one again at the end.
class DeviceGuard {
 public:
  DeviceGuard(int device, const char* stage) : device_(device) {
    check_cuda(cudaGetDevice(&previous_), stage, "cudaGetDevice");
    if (previous_ != device_) check_cuda(cudaSetDevice(device_), stage, "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (previous_ != device_) static_cast<void>(cudaSetDevice(previous_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_;
  int previous_ = 0;
};

// `kernel<<<blocks, threads, shared, stream of context>>>(args...)`, with the launch's own status:
// cudaGetLastError would also bring up what another library left behind.
template <class... Params, class... Args>
void launch(const char* stage, const Context& context, void (*kernel)(Params...),
            std::int64_t blocks, int threads, std::size_t shared_bytes, const Args&... args) {
  if (blocks > 0x7fffffff) {
    throw Error(ErrorCode::unsupported, std::string(stage) + ": too many elements for one launch");
  }
  if (shared_bytes > 48 * 1024) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)),
               stage, "cudaFuncSetAttribute");
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = context.stream();
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...), stage, "kernel launch");
}

}  // namespace hot::detail
