#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "device_of.h"

namespace trainer {
namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
  }
}

template <class Function>
__global__ void for_each(std::int64_t count, Function function) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) function(i);
}

struct Grid {
  cudaStream_t stream;
  template <class Function>
  void operator()(std::int64_t count, const Function& function) const {
    if (count == 0) return;
    const auto blocks = static_cast<unsigned>((count + 127) / 128);
    for_each<<<blocks, 128, 0, stream>>>(count, function);
    check(cudaGetLastError());
  }
};

cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  return stream;
}

// Allocator for libhot's buffers, from the stream's memory pool.
hot::Allocator pool_of(cudaStream_t stream) {
  return {hot::Device{hot::Device::Type::cuda, 0},
          [stream](std::size_t bytes) {
            void* data = nullptr;
            check(cudaMallocAsync(&data, bytes, stream));
            check(cudaMemsetAsync(data, 0, bytes, stream));
            return data;
          },
          [stream](void* data) { static_cast<void>(cudaFreeAsync(data, stream)); }};
}

class Cuda : public DeviceOf<Grid> {
 public:
  explicit Cuda(cudaStream_t stream)
      : DeviceOf(hot::Context::cuda(0, stream), pool_of(stream), Grid{stream}) {}
  ~Cuda() override {
    static_cast<void>(cudaStreamSynchronize(launch_.stream));
    static_cast<void>(cudaStreamDestroy(launch_.stream));
  }
  Cuda(const Cuda&) = delete;
  Cuda& operator=(const Cuda&) = delete;
  void copy(void* to, const void* from, std::size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, launch_.stream));
    check(cudaStreamSynchronize(launch_.stream));
  }
};

}  // namespace

std::unique_ptr<Device> make_cuda() { return std::make_unique<Cuda>(make_stream()); }

}  // namespace trainer
