#include "support.h"

using namespace hot_test;

namespace {

void run_fwht(const std::vector<float>& x, std::vector<float>& out, std::int64_t rows,
              std::int64_t cols, int axis, int block) {
  hot::fwht(cpu(), hot::matrix(static_cast<const void*>(x.data()), DType::f32, rows, cols), axis,
            block, hot::matrix(out.data(), DType::f32, rows, cols));
}

}  // namespace

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
