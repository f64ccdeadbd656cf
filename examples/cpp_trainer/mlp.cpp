#include "mlp.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

namespace trainer {
namespace {

Matrix matrix(hot::Tensor& tensor, std::int64_t rows, std::int64_t cols) {
  return {tensor.data<float>(), rows, cols, cols, 1};
}

hot::ConstTensorView input(const Matrix& m, hot::Device device) {
  return hot::matrix(static_cast<const void*>(m.data), hot::DType::f32, m.rows, m.cols, 0, device);
}

}  // namespace

void Score::add(const Score& other) {
  loss += other.loss;
  hits += other.hits;
  rows += other.rows;
}

Mlp::Mlp(Device& device, const std::vector<std::int64_t>& sizes,
         std::optional<hot::BackwardLinearSpec> spec, std::int64_t max_rows, std::uint64_t seed)
    : device_(device), spec_(std::move(spec)), seed_(seed), scratch_(device.allocator()) {
  std::mt19937_64 generator(seed);
  for (std::size_t i = 0; i + 1 < sizes.size(); ++i) {
    const std::int64_t in = sizes[i], out = sizes[i + 1];
    const bool last = i + 2 == sizes.size();
    Layer layer{in,
                out,
                tensor({out, in}),
                tensor({out}),
                tensor({out, in}),
                tensor({out}),
                tensor({out, in}),
                tensor({out}),
                last ? hot::Tensor() : tensor({max_rows, out}, hot::DType::i8),
                spec_ ? hot::Tensor() : tensor({max_rows, in}),
                hot::SavedBuffer(device.allocator())};
    std::normal_distribution<float> he(0.0F, std::sqrt(2.0F / static_cast<float>(in)));
    std::vector<float> weights(static_cast<std::size_t>(out * in));
    for (float& value : weights) value = he(generator);
    device.copy(layer.w.data<float>(), weights.data(), layer.w.bytes());
    layers_.push_back(std::move(layer));
  }
  const std::int64_t widest = *std::max_element(sizes.begin(), sizes.end());
  front_ = tensor({max_rows, widest});
  back_ = tensor({max_rows, widest});
  losses_ = tensor({max_rows});
  hits_ = tensor({max_rows});
}

hot::Tensor Mlp::tensor(std::initializer_list<std::int64_t> shape, hot::DType dtype) const {
  return hot::Tensor(dtype, shape, device_.allocator());
}

Score Mlp::forward(const float* x, const std::uint8_t* labels, std::int64_t rows, bool training) {
  const hot::Device where = device_.context().device();
  std::size_t kept = 0;
  Matrix in{const_cast<float*>(x), rows, layers_.front().in, layers_.front().in, 1};  // only read
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    const Matrix out = matrix(back_, rows, layer.out);
    device_.multiply(in, matrix(layer.w, layer.out, layer.in).transposed(), out);
    device_.add_bias(out, layer.b.data<float>(), layer.mask.data<std::uint8_t>());
    if (training && spec_) {
      // Backward reads the compressed x, so x is free.
      const hot::Key key{seed_, step_, static_cast<std::uint32_t>(i)};
      layer.saved.compress(device_.context().with_key(key), input(in, where), *spec_, scratch_);
      kept += layer.saved.bytes();
    } else if (training) {
      const auto bytes = static_cast<std::size_t>(rows * layer.in) * sizeof(float);
      device_.copy(layer.kept.data<float>(), in.data, bytes);
      kept += bytes;
    }
    std::swap(front_, back_);
    in = matrix(front_, rows, layer.out);
  }
  kept_ = std::max(kept_, kept);
  device_.cross_entropy(in, labels, losses_.data<float>(), hits_.data<float>());
  std::vector<float> values(static_cast<std::size_t>(rows));
  Score score;
  score.rows = rows;
  device_.copy(values.data(), losses_.data<float>(), values.size() * sizeof(float));
  for (const float value : values) score.loss += static_cast<double>(value);
  device_.copy(values.data(), hits_.data<float>(), values.size() * sizeof(float));
  for (const float value : values) score.hits += static_cast<double>(value);
  return score;
}

// front_ holds the gradient of the logits.
void Mlp::backward(std::int64_t rows) {
  for (std::size_t i = layers_.size(); i-- > 0;) {
    Layer& layer = layers_[i];
    const Matrix gy = matrix(front_, rows, layer.out), gx = matrix(back_, rows, layer.in);
    if (layer.mask.size() > 0) device_.apply_mask(gy, layer.mask.data<std::uint8_t>());
    const Matrix* const target = i > 0 ? &gx : nullptr;  // the data needs no gradient
    if (spec_) {
      backward_hot(i, gy, target);
    } else {
      backward_fp32(layer, gy, target);
    }
    std::swap(front_, back_);
  }
}

void Mlp::backward_fp32(Layer& layer, const Matrix& gy, const Matrix* gx) {
  const Matrix w = matrix(layer.w, layer.out, layer.in), gw = matrix(layer.gw, layer.out, layer.in);
  if (gx != nullptr) device_.multiply(gy, w, *gx);
  device_.multiply(gy.transposed(), matrix(layer.kept, gy.rows, layer.in), gw);
  device_.column_sums(gy, layer.gb.data<float>());
}

void Mlp::backward_hot(std::size_t index, const Matrix& gy, const Matrix* gx) {
  Layer& layer = layers_[index];
  const hot::Device where = device_.context().device();
  // Key of forward: each step has its offset, each layer its stream.
  const hot::Context context =
      device_.context().with_key({seed_, step_, static_cast<std::uint32_t>(index)});
  const hot::LinearShape shape{gy.rows, layer.out, layer.in};
  hot::TensorView to_gx{};
  if (gx != nullptr) {
    to_gx = hot::matrix(gx->data, hot::DType::f32, gx->rows, gx->cols, 0, where);
  }
  const hot::BackwardOutputs out{gx != nullptr ? &to_gx : nullptr, &layer.gw.view(),
                                 &layer.gb.view(), /*accumulate=*/false};
  const bool with_gx = gx != nullptr, with_gw = true;
  hot::backward_linear(
      context, input(gy, where), layer.w.view(), layer.saved, *spec_, out,
      scratch_.at_least(hot::backward_linear_workspace(context, shape, *spec_, with_gx, with_gw)));
}

Score Mlp::train(const float* x, const std::uint8_t* labels, std::int64_t rows, float rate) {
  const Score score = forward(x, labels, rows, true);
  backward(rows);
  for (Layer& layer : layers_) {
    device_.update(layer.w.size(), layer.w.data<float>(), layer.gw.data<float>(),
                   layer.w_velocity.data<float>(), rate);
    device_.update(layer.b.size(), layer.b.data<float>(), layer.gb.data<float>(),
                   layer.b_velocity.data<float>(), rate);
  }
  ++step_;
  return score;
}

Score Mlp::test(const float* x, const std::uint8_t* labels, std::int64_t rows) {
  return forward(x, labels, rows, false);
}

}  // namespace trainer
