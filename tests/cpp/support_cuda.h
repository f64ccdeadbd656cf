// What the CUDA tests share: checked calls, and a fixture with a stream of its own that skips where
// there is no device.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>

#include "support.h"

namespace hot_test {

inline constexpr hot::Device gpu{hot::Device::Type::cuda, 0};
inline constexpr DType float_types[] = {DType::f32, DType::f16, DType::bf16};

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

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
