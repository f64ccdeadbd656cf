// Host side of a kernel launch: errors, the current device, the launch. Nothing here allocates or
// synchronises, and everything is allowed during stream capture.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "hot/context.h"
#include "hot/error.h"
#include "kernels.h"
#include "plan/launch_shape.h"

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

// Attribute of the context's device. Attributes that every launch needs are queried once.
int device_attribute(const Context& context, cudaDeviceAttr attribute, const char* stage);

// Whether a kernel's start may overlap the end of the previous one (programmatic dependent launch).
// True only if all kernels are certain to start as in cuda/device/begin_kernel.cuh.
bool kernels_overlap(const Context& context, const char* stage);

// Opts a kernel in to the shared memory of a shape, on the context's device, which is current.
// Limits only ever grow; another thread may be relying on them.
void set_kernel_limits(const char* stage, const Context& context, const void* kernel,
                       const LaunchShape& shape);

template <class... Params>
void set_kernel_limits(const char* stage, const Context& context, void (*kernel)(Params...),
                       const LaunchShape& shape) {
  // Up to 48 KB needs no opt-in; this leaves 12 KB for static shared memory.
  if (shape.shared_bytes > 36 * 1024) {
    set_kernel_limits(stage, context, reinterpret_cast<const void*>(kernel), shape);
  }
}

inline cudaLaunchConfig_t launch_config(const LaunchShape& shape, cudaStream_t stream,
                                        cudaLaunchAttribute (&attributes)[2]) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads), static_cast<unsigned>(shape.rows));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  return config;
}

// `kernel<<<blocks, threads, shared, stream of context>>>(args...)`, with the launch's own status:
// cudaGetLastError would also return another library's earlier error.
template <class... Params, class... Args>
void launch(const char* stage, const Context& context, void (*kernel)(Params...),
            const LaunchShape& shape, const Args&... args) {
  if (shape.blocks == 0) return;
  if (shape.blocks > 0x7fffffff) {
    throw Error(ErrorCode::unsupported, std::string(stage) + ": too many elements for one launch");
  }
  set_kernel_limits(stage, context, kernel, shape);
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = launch_config(shape, context.stream(), attributes);
  if (kernels_overlap(context, stage)) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...), stage, "kernel launch");
}

template <class... Params, class... Args>
void launch(const char* stage, const Context& context, void (*kernel)(Params...),
            std::int64_t blocks, int threads, std::size_t shared_bytes, const Args&... args) {
  launch(stage, context, kernel, LaunchShape{blocks, threads, shared_bytes}, args...);
}

}  // namespace hot::detail
