// What the CUDA tests share: checked calls, memory on the device, and a fixture with a stream of
// its own that skips where there is no device.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "support.h"

namespace hot_test {

inline constexpr hot::Device gpu{hot::Device::Type::cuda, 0};
inline constexpr DType float_types[] = {DType::f32, DType::f16, DType::bf16};

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) {
    check(cudaMalloc(&data_, std::max<std::size_t>(bytes, 1)));
  }
  ~DeviceMemory() { static_cast<void>(cudaFree(data_)); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
};

// The same bytes on both sides.
class Mirrored {
 public:
  explicit Mirrored(std::size_t bytes, char fill = 0) : host(bytes, fill), device_(bytes) {}

  // A copy from pageable memory may return before its last part has landed, and the tests' stream
  // does not wait for the default one.
  void push() {
    check(cudaMemcpy(device_.data(), host.data(), host.size(), cudaMemcpyHostToDevice));
    check(cudaDeviceSynchronize());
  }
  std::vector<char> pulled() const {
    std::vector<char> out(host.size());
    check(cudaMemcpy(out.data(), device_.data(), out.size(), cudaMemcpyDeviceToHost));
    return out;
  }
  template <class T>
  T* on(bool on_gpu) {
    return reinterpret_cast<T*>(on_gpu ? device_.data() : host.data());
  }

  std::vector<char> host;

 private:
  DeviceMemory device_;
};

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      GTEST_SKIP() << "no CUDA device on this machine";
    }
    // Does not wait for the default stream, nor the default stream for it.
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  void TearDown() override {
    if (stream_ != nullptr) check(cudaStreamDestroy(stream_));
  }

  cudaStream_t stream_ = nullptr;
};

}  // namespace hot_test
