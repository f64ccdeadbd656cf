// Host side of a kernel launch: errors, the current device, the launch. Nothing here allocates or
// synchronises, and everything is allowed during stream capture.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "hot/context.h"
#include "hot/error.h"
#include "kernels.h"
#include "plan/plan.h"

namespace hot::detail {

inline void check_cuda(cudaError_t status, const char* stage, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which is reported here
  std::string message = std::string(stage) + ": " + call +
                        " failed: " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) +
                        ")";
  if (status == cudaErrorNoKernelImageForDevice) {
    message += std::string("; this build is for the architectures ") + cuda_archs();
  }
  throw Error(ErrorCode::cuda, message);
}

// Guard that makes a device current, and at the end the previous one.
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

// Facts about the context's device, queried once.
struct LaunchFacts {
  int major = 0, minor = 0, sm_count = 0, shared_bytes = 0;  // maximum per CTA
  // Whether a kernel's start may overlap the end of the previous one (programmatic dependent
  // launch). True only if all kernels are certain to start as in cuda/device/begin_kernel.cuh.
  bool overlap = false;
};
const LaunchFacts& launch_facts(const Context& context, const char* stage);

// Opts a kernel in to shared memory on the context's device, which is current. Limits only ever
// grow; another thread may be relying on them.
void set_shared_limit(const char* stage, const Context& context, const void* kernel,
                      std::size_t shared_bytes);

// Checks a launch and prepares it. `attributes` must live until the launch.
cudaLaunchConfig_t launch_config(const char* stage, const Context& context, const void* kernel,
                                 const LaunchShape& shape, cudaLaunchAttribute (&attributes)[2]);

// `kernel<<<blocks, threads, shared, stream of context>>>(args...)`, with the launch's own status:
// cudaGetLastError would also return another library's earlier error.
template <class... Params, class... Args>
void launch(const char* stage, const Context& context, void (*kernel)(Params...),
            const LaunchShape& shape, const Args&... args) {
  if (shape.blocks == 0) return;
  cudaLaunchAttribute attributes[2];
  const cudaLaunchConfig_t config =
      launch_config(stage, context, reinterpret_cast<const void*>(kernel), shape, attributes);
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...), stage, "kernel launch");
}

}  // namespace hot::detail
