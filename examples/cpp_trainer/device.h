// Memory of a device, and the computations that libhot does not have. Real trainers have their own
// tensors, matrix product and memory pool; device_cpu.cpp and device_cuda.cu are minimal versions.
#pragma once

#include <hot/hot.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace trainer {

/// Matrix of fp32 [rows, cols] with any strides.
struct Matrix {
  float* data;
  std::int64_t rows, cols, row_stride, col_stride;

  Matrix transposed() const { return {data, cols, rows, col_stride, row_stride}; }
};

class Device {
 public:
  virtual ~Device() = default;

  /// Device, stream or threads for libhot's calls, without a key.
  virtual const hot::Context& context() const = 0;
  virtual const hot::Allocator& allocator() const = 0;
  /// Copies to or from the host and waits for the copy.
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;

  /// c = a b.
  virtual void multiply(const Matrix& a, const Matrix& b, const Matrix& c) = 0;
  /// y += bias. With `mask` (one byte per value) also applies ReLU and stores its mask.
  virtual void add_bias(const Matrix& y, const float* bias, std::uint8_t* mask) = 0;
  /// g *= mask.
  virtual void apply_mask(const Matrix& g, const std::uint8_t* mask) = 0;
  /// Cross entropy and hits (0 or 1) of every row of `logits`, which becomes the mean's gradient.
  virtual void cross_entropy(const Matrix& logits, const std::uint8_t* labels, float* losses,
                             float* hits) = 0;
  /// sums = column sums of g.
  virtual void column_sums(const Matrix& g, float* sums) = 0;
  /// SGD with momentum.
  virtual void update(std::int64_t count, float* w, const float* g, float* velocity,
                      float rate) = 0;
};

std::unique_ptr<Device> make_cpu();
/// Exists only if the program is built with TRAINER_CUDA.
std::unique_ptr<Device> make_cuda();

}  // namespace trainer
