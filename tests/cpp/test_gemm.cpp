#include "support.h"

using namespace hot_test;
using hot::GemmSpec;

namespace {

const ConstTensorView no_scale{};

std::vector<std::int64_t> sums(const Bytes& a, const Bytes& b) {
  std::vector<std::int64_t> out;
  for (std::int64_t m = 0; m < a.rows(); ++m) {
    for (std::int64_t n = 0; n < b.rows(); ++n) {
      std::int64_t sum = 0;
      for (std::int64_t k = 0; k < a.cols(); ++k) sum += std::int64_t{a.at(m, k)} * b.at(n, k);
      out.push_back(sum);
    }
  }
  return out;
}

Bytes bytes(std::int64_t rows, std::int64_t cols, const std::vector<std::int8_t>& values,
            std::int64_t gap = 0, DType dtype = DType::i8) {
  Bytes m(rows, cols, dtype, gap);
  m.fill(values);
  return m;
}

void run_gemm(const hot::Context& context, const Bytes& a, const Bytes& b,
              const ConstTensorView& a_scale, const ConstTensorView& b_scale, const GemmSpec& spec,
              const TensorView& out) {
  Scratch scratch(hot::gemm_workspace(context, a.rows(), b.rows(), a.cols()));
  hot::gemm_int8(context, a.view(), b.view(), a_scale, b_scale, spec, out, scratch.workspace());
}

}  // namespace

TEST(Gemm, strided_output) {
  const Bytes a = bytes(6, 33, codes(6 * 33, 127)), b = bytes(5, 33, codes(5 * 33, 127));
  const std::vector<float> one{1.0F};
  Floats plain(6, 5, DType::f32), transposed(5, 6, DType::f32);
  for (const TensorView& out : {plain.view(), turned(transposed.view())}) {
    run_gemm(cpu(), a, b, as_vector(one, DType::f32), as_vector(one, DType::f32), {}, out);
  }
  for (std::int64_t m = 0; m < 6; ++m) {
    for (std::int64_t n = 0; n < 5; ++n) EXPECT_EQ(transposed.at(n, m), plain.at(m, n));
  }
}

// The stride of a single row is arbitrary, and no address is computed with it.
TEST(Gemm, a_single_row_may_have_any_stride) {
  for (const hot::Isa isa : isas()) {
    const Bytes a = bytes(1, 37, codes(37, 127)), b = bytes(1, 37, codes(37, 127));
    ConstTensorView far_a = a.view(), far_b = b.view();
    far_a.stride[0] = far_b.stride[0] = std::numeric_limits<std::int64_t>::max() / 3;
    std::int32_t sum = 0;
    const hot::Context context = hot::Context::cpu(1).with_isa(isa);
    Scratch scratch(hot::gemm_workspace(context, 1, 1, 37));
    hot::gemm_int8(context, far_a, far_b, no_scale, no_scale, {},
                   hot::matrix(&sum, DType::i32, 1, 1), scratch.workspace());
    EXPECT_EQ(sum, sums(a, b)[0]);
  }
}
