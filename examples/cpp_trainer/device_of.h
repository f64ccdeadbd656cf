// Arithmetic that both devices share: `Launch` calls a function for every index below n.
#pragma once

#include <cmath>

#include "device.h"

#ifdef __CUDACC__
#define TRAINER_BOTH __host__ __device__
#else
#define TRAINER_BOTH
#endif

namespace trainer {

// One element of c = a b for each index.
struct Multiply {
  Matrix a, b, c;
  TRAINER_BOTH void operator()(std::int64_t index) const {
    const std::int64_t row = index / c.cols, col = index % c.cols;
    const float* left = a.data + row * a.row_stride;
    const float* right = b.data + col * b.col_stride;
    float sum = 0;
    for (std::int64_t k = 0; k < a.cols; ++k) {
      sum += left[k * a.col_stride] * right[k * b.row_stride];
    }
    c.data[row * c.row_stride + col * c.col_stride] = sum;
  }
};

struct AddBias {
  Matrix y;
  const float* bias;
  std::uint8_t* mask;
  TRAINER_BOTH void operator()(std::int64_t index) const {
    const float sum = y.data[index] + bias[index % y.cols];
    const bool kept = mask == nullptr || sum > 0;
    y.data[index] = kept ? sum : 0;
    if (mask != nullptr) mask[index] = kept ? 1 : 0;
  }
};

struct ApplyMask {
  float* g;
  const std::uint8_t* mask;
  TRAINER_BOTH void operator()(std::int64_t index) const {
    if (mask[index] == 0) g[index] = 0;
  }
};

// One row for each index.
struct CrossEntropy {
  Matrix logits;
  const std::uint8_t* labels;
  float *losses, *hits;
  TRAINER_BOTH void operator()(std::int64_t index) const {
    float* row = logits.data + index * logits.row_stride;
    const std::int64_t label = labels[index];
    std::int64_t best = 0;
    for (std::int64_t c = 1; c < logits.cols; ++c) best = row[c] > row[best] ? c : best;
    const float largest = row[best], of_label = row[label];
    float sum = 0;
    for (std::int64_t c = 0; c < logits.cols; ++c) sum += expf(row[c] - largest);
    losses[index] = logf(sum) + largest - of_label;
    hits[index] = best == label ? 1.0F : 0.0F;
    for (std::int64_t c = 0; c < logits.cols; ++c) {
      const float share = expf(row[c] - largest) / sum;
      row[c] = (share - (c == label ? 1.0F : 0.0F)) / static_cast<float>(logits.rows);
    }
  }
};

struct ColumnSums {
  Matrix g;
  float* sums;
  TRAINER_BOTH void operator()(std::int64_t index) const {
    float sum = 0;
    for (std::int64_t row = 0; row < g.rows; ++row) sum += g.data[row * g.row_stride + index];
    sums[index] = sum;
  }
};

struct Update {
  float* w;
  const float* g;
  float *velocity, rate;
  TRAINER_BOTH void operator()(std::int64_t index) const {
    velocity[index] = 0.9F * velocity[index] + g[index];
    w[index] -= rate * velocity[index];
  }
};

template <class Launch>
class DeviceOf : public Device {
 public:
  DeviceOf(hot::Context context, hot::Allocator allocator, Launch launch)
      : context_(std::move(context)), allocator_(std::move(allocator)), launch_(launch) {}

  const hot::Context& context() const override { return context_; }
  const hot::Allocator& allocator() const override { return allocator_; }
  void multiply(const Matrix& a, const Matrix& b, const Matrix& c) override {
    launch_(c.rows * c.cols, Multiply{a, b, c});
  }
  void add_bias(const Matrix& y, const float* bias, std::uint8_t* mask) override {
    launch_(y.rows * y.cols, AddBias{y, bias, mask});
  }
  void apply_mask(const Matrix& g, const std::uint8_t* mask) override {
    launch_(g.rows * g.cols, ApplyMask{g.data, mask});
  }
  void cross_entropy(const Matrix& logits, const std::uint8_t* labels, float* losses,
                     float* hits) override {
    launch_(logits.rows, CrossEntropy{logits, labels, losses, hits});
  }
  void column_sums(const Matrix& g, float* sums) override { launch_(g.cols, ColumnSums{g, sums}); }
  void update(std::int64_t count, float* w, const float* g, float* velocity, float rate) override {
    launch_(count, Update{w, g, velocity, rate});
  }

 protected:
  hot::Context context_;
  hot::Allocator allocator_;
  Launch launch_;
};

}  // namespace trainer
