// Linear layers with ReLU between them, trained in fp32 or with HOT's backward.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "device.h"

namespace trainer {

struct Score {
  double loss = 0;  // sum over the rows
  double hits = 0;  // rows classified correctly
  std::int64_t rows = 0;
  void add(const Score& other);
};

class Mlp {
 public:
  /// Layers sizes[0] -> sizes[1] -> ..., in fp32 without `spec`. Equal seeds give equal weights.
  Mlp(Device& device, const std::vector<std::int64_t>& sizes,
      std::optional<hot::BackwardLinearSpec> spec, std::int64_t max_rows, std::uint64_t seed);

  /// Trains one step on x [rows, sizes[0]]. x and labels are in the device's memory.
  Score train(const float* x, const std::uint8_t* labels, std::int64_t rows, float rate);
  Score test(const float* x, const std::uint8_t* labels, std::int64_t rows);

  /// Peak bytes of x that the linear layers keep between forward and backward of a step.
  std::size_t kept_bytes() const { return kept_; }

 private:
  struct Layer {
    std::int64_t in, out;
    hot::Tensor w, b, gw, gb, w_velocity, b_velocity;
    hot::Tensor mask;        // mask of the ReLU after the layer; the last layer has none
    hot::Tensor kept;        // fp32: x itself
    hot::SavedBuffer saved;  // HOT: x compressed
  };

  hot::Tensor tensor(std::initializer_list<std::int64_t> shape,
                     hot::DType dtype = hot::DType::f32) const;
  Score forward(const float* x, const std::uint8_t* labels, std::int64_t rows, bool training);
  void backward(std::int64_t rows);
  void backward_fp32(Layer& layer, const Matrix& gy, const Matrix* gx);
  void backward_hot(std::size_t index, const Matrix& gy, const Matrix* gx);

  Device& device_;
  std::optional<hot::BackwardLinearSpec> spec_;
  std::uint64_t seed_, step_ = 0;
  std::size_t kept_ = 0;
  std::vector<Layer> layers_;
  hot::Tensor front_, back_;  // activations, then gradients; swapped from layer to layer
  hot::Tensor losses_, hits_;
  hot::ScratchBuffer scratch_;
};

}  // namespace trainer
