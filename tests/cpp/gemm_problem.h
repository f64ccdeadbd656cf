// Integer product with its arrays on both sides, for tests of kernels that libhot does not export.
#pragma once

#include <memory>
#include <string>

#include "kernels.h"
#include "support_cuda.h"

namespace hot_test {

enum class Layout { rows, padded_rows, odd_rows, second_columns, transposed };
constexpr Layout layouts[] = {Layout::rows, Layout::padded_rows, Layout::odd_rows,
                              Layout::second_columns, Layout::transposed};

struct Options {
  DType dtype = DType::bf16;  // i32: unscaled sums
  Layout layout = Layout::rows;
  bool accumulate = false, extreme = false;
  bool aligned = true;  // rows of the operands are aligned to 16 bytes
  bool int4 = false;    // packed operands, K even

  static Options any() {
    return {float_types[random_int(0, 2)], layouts[random_int(0, 4)], random_int(0, 1) == 0, false};
  }
};

// Rows of codes. The bytes behind the K codes of a row are not zero.
inline std::unique_ptr<Mirrored> operand(std::int64_t rows, std::int64_t pitch, std::int64_t offset,
                                         bool extreme) {
  auto array = std::make_unique<Mirrored>(static_cast<std::size_t>(offset + rows * pitch));
  array->fill_codes();
  if (extreme) {
    std::fill(array->host.begin(), array->host.end(), static_cast<char>(-128));
    array->push();
  }
  return array;
}

inline std::unique_ptr<Mirrored> random_numbers(std::int64_t count, DType dtype, float scale) {
  auto array = std::make_unique<Mirrored>(static_cast<std::size_t>(count) * hot::dtype_size(dtype));
  if (dtype == DType::i32) {
    array->fill_codes();
    return array;
  }
  const std::vector<float> values = normal(count, scale);
  hot::fwht(cpu(), as_vector(values, DType::f32), 0, 1,  // blocks of 1 convert
            hot::vector(static_cast<void*>(array->host.data()), dtype, count));
  array->push();
  return array;
}

// Product with its arrays. The output's memory initially holds random numbers, also in gaps and
// margin.
class Problem {
 public:
  Problem(std::int64_t m, std::int64_t n, std::int64_t k, Options options)
      : m_(m),
        n_(n),
        k_(k),
        options_(options),
        pitch_a_(any_pitch()),
        pitch_b_(any_pitch()),
        offset_a_(options.aligned ? 0 : random_int(0, 15)),
        offset_b_(options.aligned ? 0 : random_int(0, 15)),
        one_scale_a_(random_int(0, 3) == 0),
        one_scale_b_(random_int(0, 3) == 0),
        a_(operand(m, pitch_a_, offset_a_, options.extreme)),
        b_(operand(n, pitch_b_, offset_b_, options.extreme)),
        a_scale_(random_numbers(one_scale_a_ ? 1 : m, DType::f32, 0.1F)),
        b_scale_(random_numbers(one_scale_b_ ? 1 : n, DType::f32, 0.01F)) {
    const bool transposed = options.layout == Layout::transposed;
    const std::int64_t step = options.layout == Layout::second_columns ? 2 : 1;
    const std::int64_t gap = options.layout == Layout::padded_rows ? 16
                             : options.layout == Layout::odd_rows  ? 1 + n % 2
                                                                   : 0;
    row_stride_ = transposed ? 1 : n * step + gap;
    col_stride_ = transposed ? m : step;
    out_ = random_numbers(m * n * step + m * gap + margin, options.dtype, 1.0F);
  }

  hot::detail::GemmArgs args(bool on_gpu) {
    hot::detail::GemmArgs args{};
    args.a = a_->on<std::int8_t>(on_gpu) + offset_a_;
    args.b = b_->on<std::int8_t>(on_gpu) + offset_b_;
    args.m = m_, args.n = n_, args.k = k_, args.lda = pitch_a_, args.ldb = pitch_b_;
    if (options_.dtype != DType::i32) {
      args.a_scale = a_scale_->on<float>(on_gpu);
      args.b_scale = b_scale_->on<float>(on_gpu);
    }
    args.a_scale_step = one_scale_a_ ? 0 : 1;
    args.b_scale_step = one_scale_b_ ? 0 : 1;
    args.inv_divisor = 1.0F / 16.0F;
    args.accumulate = options_.accumulate;
    args.out = {out_->on<char>(on_gpu), options_.dtype, m_, n_, row_stride_, col_stride_};
    return args;
  }

  void run_cpu() {
    const hot::detail::GemmArgs g = args(false);
    const hot::Context context = cpu(2);
    std::vector<char> scratch(hot::gemm_workspace(context, m_, n_, k_) + 1);
    TensorView out = hot::matrix(g.out.data, g.out.dtype, m_, n_, row_stride_);
    out.stride[1] = col_stride_;
    const auto scale = [](const float* data, std::int64_t count) {
      return data == nullptr ? hot::ConstTensorView{} : hot::vector(data, DType::f32, count);
    };
    const hot::ConstTensorView a_scale = scale(g.a_scale, one_scale_a_ ? 1 : m_);
    const hot::ConstTensorView b_scale = scale(g.b_scale, one_scale_b_ ? 1 : n_);
    const hot::GemmSpec spec{options_.dtype == DType::i32 ? 1 : 16, options_.accumulate};
    const hot::Workspace workspace{scratch.data(), scratch.size()};
    if (options_.int4) {
      hot::gemm_int4(context, hot::matrix(g.a, DType::i4x2, m_, k_ / 2, pitch_a_),
                     hot::matrix(g.b, DType::i4x2, n_, k_ / 2, pitch_b_), k_, a_scale, b_scale,
                     spec, out, workspace);
    } else {
      hot::gemm_int8(context, hot::matrix(g.a, DType::i8, m_, k_, pitch_a_),
                     hot::matrix(g.b, DType::i8, n_, k_, pitch_b_), a_scale, b_scale, spec, out,
                     workspace);
    }
  }

  // Expects equal outputs on GPU and CPU, also in gaps and margin.
  void expect_equal(const std::string& plan) const {
    const std::vector<char> got = out_->pulled();
    if (got == out_->host) return;
    const std::size_t size = hot::dtype_size(options_.dtype);
    std::size_t first = 0, different = 0;
    for (std::size_t i = 0; i + size <= got.size(); i += size) {
      if (std::memcmp(&got[i], &out_->host[i], size) != 0 && different++ == 0) first = i / size;
    }
    ADD_FAILURE() << plan << ": " << m_ << " " << n_ << " " << k_ << " "
                  << hot::dtype_name(options_.dtype) << " layout "
                  << static_cast<int>(options_.layout) << " accumulate " << options_.accumulate
                  << ": " << different << " of " << got.size() / size
                  << " elements differ, the first is element " << first;
  }

 private:
  std::int64_t any_pitch() const {
    const std::int64_t bytes = options_.int4 ? k_ / 2 : k_;
    if (!options_.aligned) return bytes + random_int(0, 9);
    return hot::detail::round_up(bytes, 16) + 16 * random_int(0, 1);
  }

  static constexpr std::int64_t margin = 32;
  std::int64_t m_, n_, k_;
  Options options_;
  std::int64_t pitch_a_, pitch_b_, offset_a_, offset_b_, row_stride_ = 0, col_stride_ = 0;
  bool one_scale_a_, one_scale_b_;
  std::unique_ptr<Mirrored> a_, b_, a_scale_, b_scale_, out_;
};

}  // namespace hot_test
