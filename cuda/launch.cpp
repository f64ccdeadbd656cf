// Host side of a launch. Caches slow, constant queries of the runtime per device, which is the
// library's only global state.
#include "cuda/launch.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda_device.h"

namespace hot::detail {
namespace {

struct DeviceFacts {
  int major = 0, minor = 0, sm_count = 0, shared_bytes = 0;
  bool overlap = false;
};

int query_device(int device, cudaDeviceAttr attribute, const char* stage) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), stage, "cudaDeviceGetAttribute");
  return value;
}

// Facts of every device, queried at the first call. The queries create no CUDA context.
const DeviceFacts& device_facts(const Context& context, const char* stage) {
  static const std::vector<DeviceFacts> all = [&] {
    std::vector<DeviceFacts> facts(static_cast<std::size_t>(cuda_device_count()));
    const bool built = std::string(cuda_archs()).find("90") != std::string::npos;
    int device = 0;
    for (DeviceFacts& one : facts) {
      one.major = query_device(device, cudaDevAttrComputeCapabilityMajor, stage);
      one.minor = query_device(device, cudaDevAttrComputeCapabilityMinor, stage);
      one.sm_count = query_device(device, cudaDevAttrMultiProcessorCount, stage);
      one.shared_bytes = query_device(device, cudaDevAttrMaxSharedMemoryPerBlockOptin, stage);
      one.overlap = built && one.major == 9;
      ++device;
    }
    return facts;
  }();
  return all[static_cast<std::size_t>(context.device().index)];
}

}  // namespace

int device_attribute(const Context& context, cudaDeviceAttr attribute, const char* stage) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      return device_facts(context, stage).major;
    case cudaDevAttrComputeCapabilityMinor:
      return device_facts(context, stage).minor;
    case cudaDevAttrMultiProcessorCount:
      return device_facts(context, stage).sm_count;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return device_facts(context, stage).shared_bytes;
    default:
      return query_device(context.device().index, attribute, stage);
  }
}

bool kernels_overlap(const Context& context, const char* stage) {
  return device_facts(context, stage).overlap;
}

void set_kernel_limits(const char* stage, const Context& context, const void* kernel,
                       const LaunchShape& shape) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, std::size_t> kernels;
  const std::lock_guard<std::mutex> lock(mutex);
  std::size_t& limit = kernels[{context.device().index, kernel}];
  if (shape.shared_bytes > limit) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shape.shared_bytes)),
               stage, "cudaFuncSetAttribute");
    limit = shape.shared_bytes;
  }
}

const char* cuda_archs() noexcept { return HOT_CUDA_ARCHS; }

Capability cuda_capability(int device) {
  return {query_device(device, cudaDevAttrComputeCapabilityMajor, "cuda_capability"),
          query_device(device, cudaDevAttrComputeCapabilityMinor, "cuda_capability")};
}

const char* cuda_device_trouble() noexcept {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess) return "";
  cudaGetLastError();  // clears the error, see cuda_device_count
  return cudaGetErrorString(status);
}

int cuda_device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // clears the error: no driver or no device is a valid answer
    return 0;
  }
  return count;
}

}  // namespace hot::detail
