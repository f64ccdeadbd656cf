#include "golden.h"
#include "support.h"

using namespace hot_test;

namespace {

// H along `axis` of a contiguous [a, b, c] array, in fp64.
std::vector<double> reference(const std::vector<float>& x, const std::int64_t (&shape)[3], int axis,
                              int block) {
  std::vector<double> out(x.size(), 0.0);
  const std::int64_t strides[3] = {shape[1] * shape[2], shape[2], 1};
  for (std::int64_t flat = 0; flat < static_cast<std::int64_t>(x.size()); ++flat) {
    const std::int64_t position = flat / strides[axis] % shape[axis];
    const std::int64_t start = flat - position % block * strides[axis];
    for (std::int64_t j = 0; j < block; ++j) {
      out[static_cast<std::size_t>(flat)] +=
          sylvester(position % block, j) *
          static_cast<double>(x[static_cast<std::size_t>(start + j * strides[axis])]);
    }
  }
  return out;
}

void run_fwht(const std::vector<float>& x, std::vector<float>& out, std::int64_t rows,
              std::int64_t cols, int axis, int block) {
  hot::fwht(cpu(), hot::matrix(static_cast<const void*>(x.data()), DType::f32, rows, cols), axis,
            block, hot::matrix(out.data(), DType::f32, rows, cols));
}

}  // namespace

TEST(Hadamard, golden) {
  for_golden("hadamard", "out", [](const GoldenCase& one, const hot::Context& context) {
    const GoldenInput x(one.arrays.at("x"));
    GoldenOutput out(one.arrays.at("out"));
    hot::fwht(context, x.view, one.number("axis"), one.number("block"), out.view);
    out.check("out");
  });
}

TEST(Hadamard, one_to_sixteen) {
  std::vector<float> x(16), out(16);
  for (int i = 0; i < 16; ++i) x[static_cast<std::size_t>(i)] = static_cast<float>(i + 1);
  run_fwht(x, out, 1, 16, -1, 16);
  EXPECT_EQ(out, (std::vector<float>{136, -8, -16, 0, -32, 0, 0, 0, -64, 0, 0, 0, 0, 0, 0, 0}));
}

TEST(Hadamard, matches_float64_on_every_axis) {
  for (const int block : {1, 2, 4, 8, 16, 32, 64, 256, 512, 2048}) {
    for (int axis = 0; axis < 3; ++axis) {
      std::int64_t shape[3] = {random_int(1, 5), random_int(1, 67), random_int(1, 70)};
      shape[axis] = block * random_int(1, block > 64 ? 1 : 3);
      if (block > 256) shape[(axis + 1) % 3] = 3;
      const std::int64_t count = shape[0] * shape[1] * shape[2];
      const std::vector<float> x = normal(count);
      std::vector<float> out(x.size(), std::numeric_limits<float>::quiet_NaN());
      ConstTensorView in{x.data(), DType::f32, {}, 3, {}, {}};
      TensorView to{out.data(), DType::f32, {}, 3, {}, {}};
      for (int d = 0; d < 3; ++d) {
        in.shape[d] = to.shape[d] = shape[d];
        in.stride[d] = to.stride[d] = d == 0 ? shape[1] * shape[2] : d == 1 ? shape[2] : 1;
      }
      hot::fwht(cpu(), in, axis - 3, block, to);
      const std::vector<double> expected = reference(x, shape, axis, block);
      double largest = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        largest = std::max(largest, std::abs(static_cast<double>(out[i]) - expected[i]));
      }
      // log2(n) roundings of sums of at most n values of about 4.5 sigma.
      EXPECT_LE(largest, std::log2(block + 1) * std::ldexp(1.0, -24) * 5 * block)
          << "block " << block << " axis " << axis;
    }
  }
}

TEST(Hadamard, in_place_and_strided) {
  for (const int axis : {0, 1}) {
    const std::int64_t rows = axis == 0 ? 32 : 7, cols = axis == 0 ? 37 : 48;
    const std::vector<float> x = normal(rows * cols);
    std::vector<float> expected(x.size());
    run_fwht(x, expected, rows, cols, axis, 16);
    Floats m = floats(rows, cols, x, 5);
    hot::fwht(cpu(), m.view(), axis, 16, m.view());
    EXPECT_EQ(m.values(), expected);
    EXPECT_TRUE(m.margins_intact());

    // Transposed and reversed input: element (r, c) at c * rows + (rows - 1 - r).
    std::vector<float> turned(x.size()), out(x.size());
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        turned[static_cast<std::size_t>(c * rows + rows - 1 - r)] =
            x[static_cast<std::size_t>(r * cols + c)];
      }
    }
    ConstTensorView in =
        hot::matrix(static_cast<const void*>(turned.data() + rows - 1), DType::f32, rows, cols);
    in.stride[0] = -1;
    in.stride[1] = rows;
    hot::fwht(cpu(), in, axis, 16, hot::matrix(out.data(), DType::f32, rows, cols));
    EXPECT_EQ(out, expected);
  }
}

TEST(Hadamard, half_types) {
  // Small integers are exact in every type, sums of 16 of them too.
  const std::vector<float> x = small_integers(3 * 32, 8);
  std::vector<float> expected(x.size());
  run_fwht(x, expected, 3, 32, 1, 16);
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Matrix<std::uint16_t> half(3, 32, dtype), back(3, 32, dtype);
    Floats wide(3, 32, DType::f32);
    Floats source = floats(3, 32, x);
    // block 1 converts: fp32 -> 16 bits
    hot::fwht(cpu(), source.view(), 1, 1, half.view());
    hot::fwht(cpu(), half.view(), 1, 16, back.view());
    hot::fwht(cpu(), back.view(), 1, 1, wide.view());
    EXPECT_EQ(wide.values(), expected) << hot::dtype_name(dtype);
  }
}

TEST(Hadamard, empty) {
  std::vector<float> none;
  EXPECT_NO_THROW(run_fwht(none, none, 0, 16, 1, 16));
  EXPECT_NO_THROW(run_fwht(none, none, 16, 0, 0, 16));
}
