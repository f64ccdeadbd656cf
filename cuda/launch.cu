// The host side of a launch, and what it asks of the runtime: what takes long to answer and is
// never answered otherwise is remembered, by device. That is all that the library keeps, and nobody
// sees it.
#include "cuda/launch.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda_device.h"

namespace hot::detail {
namespace {

struct DeviceFacts {
  int major = 0, minor = 0, sm_count = 0, shared_bytes = 0;
  bool overlap = false;
};

int ask_device(int device, cudaDeviceAttr attribute, const char* stage) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), stage, "cudaDeviceGetAttribute");
  return value;
}

// Of every device, from the first call on. Asking makes no device's context.
const DeviceFacts& device_facts(const Context& context, const char* stage) {
  static const std::vector<DeviceFacts> all = [&] {
    std::vector<DeviceFacts> facts(static_cast<std::size_t>(cuda_device_count()));
    const bool built = std::string(cuda_archs()).find("90") != std::string::npos;
    int device = 0;
    for (DeviceFacts& one : facts) {
      one.major = ask_device(device, cudaDevAttrComputeCapabilityMajor, stage);
      one.minor = ask_device(device, cudaDevAttrComputeCapabilityMinor, stage);
      one.sm_count = ask_device(device, cudaDevAttrMultiProcessorCount, stage);
      one.shared_bytes = ask_device(device, cudaDevAttrMaxSharedMemoryPerBlockOptin, stage);
      one.overlap = built && one.major == 9;
      ++device;
    }
    return facts;
  }();
  return all[static_cast<std::size_t>(context.device().index)];
}

// What a kernel was allowed on a device.
struct Allowed {
  std::size_t shared_bytes = 0;
  bool large_clusters = false;
};

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
      return ask_device(context.device().index, attribute, stage);
  }
}

bool kernels_overlap(const Context& context, const char* stage) {
  return device_facts(context, stage).overlap;
}

void allow_kernel(const char* stage, const Context& context, const void* kernel,
                  const LaunchShape& shape) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, Allowed> kernels;
  const std::lock_guard<std::mutex> lock(mutex);
  Allowed& allowed = kernels[{context.device().index, kernel}];
  if (shape.shared_bytes > allowed.shared_bytes) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shape.shared_bytes)),
               stage, "cudaFuncSetAttribute");
    allowed.shared_bytes = shape.shared_bytes;
  }
  if (shape.cluster > 8 && !allowed.large_clusters) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               stage, "cudaFuncSetAttribute");
    allowed.large_clusters = true;
  }
}

int clusters_at_once(const char* stage, const Context& context, const void* kernel,
                     const LaunchShape& shape) {
  using Question = std::tuple<int, const void*, int, std::size_t, int>;
  static std::mutex mutex;
  static std::map<Question, int> answers;
  const std::lock_guard<std::mutex> lock(mutex);
  const Question question{context.device().index, kernel, shape.threads, shape.shared_bytes,
                          shape.cluster};
  const auto known = answers.find(question);
  if (known != answers.end()) return known->second;
  int clusters = 0;
  if (shape.cluster > 1) {
    cudaLaunchAttribute attributes[2];
    const cudaLaunchConfig_t config = launch_config(shape, context.stream(), attributes);
    check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), stage,
               "cudaOccupancyMaxActiveClusters");
  } else {
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&clusters, kernel, shape.threads,
                                                             shape.shared_bytes),
               stage, "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    clusters *= device_attribute(context, cudaDevAttrMultiProcessorCount, stage);
  }
  return answers.emplace(question, std::max(1, clusters)).first->second;
}

const char* cuda_archs() noexcept { return HOT_CUDA_ARCHS; }

Capability cuda_capability(int device) {
  return {ask_device(device, cudaDevAttrComputeCapabilityMajor, "cuda_capability"),
          ask_device(device, cudaDevAttrComputeCapabilityMinor, "cuda_capability")};
}

const char* cuda_device_trouble() noexcept {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess) return "";
  cudaGetLastError();  // an answer, as below
  return cudaGetErrorString(status);
}

int cuda_device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // no driver or no device is an answer, not an error to leave behind
    return 0;
  }
  return count;
}

}  // namespace hot::detail
