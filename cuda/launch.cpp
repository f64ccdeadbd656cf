// Host side of a launch. Caches slow, constant queries of the runtime per device, which is the
// library's only global state.
#include "cuda/launch.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda_device.h"

namespace hot::detail {
namespace {

int query_device(int device, cudaDeviceAttr attribute, const char* stage) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), stage, "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

const LaunchFacts& launch_facts(const Context& context, const char* stage) {
  // Facts of every device, queried at the first call. The queries create no CUDA context.
  static const std::vector<LaunchFacts> all = [&] {
    std::vector<LaunchFacts> facts(static_cast<std::size_t>(cuda_device_count()));
    const bool built = std::string(cuda_archs()).find("90") != std::string::npos;
    int device = 0;
    for (LaunchFacts& one : facts) {
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

void set_shared_limit(const char* stage, const Context& context, const void* kernel,
                      std::size_t shared_bytes) {
  // Up to 48 KB needs no opt-in; this leaves 12 KB for static shared memory.
  if (shared_bytes <= 36 * 1024) return;
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, std::size_t> limits;
  const std::lock_guard<std::mutex> lock(mutex);
  std::size_t& limit = limits[{context.device().index, kernel}];
  if (shared_bytes > limit) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)),
               stage, "cudaFuncSetAttribute");
    limit = shared_bytes;
  }
}

cudaLaunchConfig_t launch_config(const char* stage, const Context& context, const void* kernel,
                                 const LaunchShape& shape, cudaLaunchAttribute (&attributes)[2]) {
  if (shape.blocks > 0x7fffffff) {
    throw Error(ErrorCode::unsupported, std::string(stage) + ": too many elements for one launch");
  }
  set_shared_limit(stage, context, kernel, shape.shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads), static_cast<unsigned>(shape.rows));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = context.stream();
  config.attrs = attributes;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  if (shape.early && launch_facts(context, stage).overlap) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  return config;
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
