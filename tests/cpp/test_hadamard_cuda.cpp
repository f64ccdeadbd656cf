// Compares the FWHT on CUDA with the CPU's, bit for bit. Skipped without a device.
#include <algorithm>
#include <array>

#include "support_cuda.h"

using namespace hot_test;

namespace {

// Layout of an array in memory, in elements.
struct Layout {
  int ndim = 0;
  std::int64_t shape[4] = {}, stride[4] = {};
  std::int64_t first = 0;  // offset of element (0, 0, ...)
  std::int64_t span = 0;   // total elements of memory

  TensorView view(char* memory, DType dtype, hot::Device device) const {
    const auto size = static_cast<std::int64_t>(hot::dtype_size(dtype));
    TensorView view{memory + first * size, dtype, device, ndim, {}, {}};
    std::copy(shape, shape + 4, view.shape);
    std::copy(stride, stride + 4, view.stride);
    return view;
  }
};

Layout contiguous(const std::vector<std::int64_t>& shape) {
  Layout layout;
  layout.ndim = static_cast<int>(shape.size());
  layout.span = 1;
  for (int d = layout.ndim - 1; d >= 0; --d) {
    layout.shape[d] = shape[static_cast<std::size_t>(d)];
    layout.stride[d] = layout.span;
    layout.span *= layout.shape[d];
  }
  return layout;
}

// Layout with axes in random order, random gaps and some reversed axes, behind `first` elements.
Layout scattered(const std::vector<std::int64_t>& shape) {
  Layout layout = contiguous(shape);
  std::array<int, 4> order{0, 1, 2, 3};
  std::shuffle(order.begin(), order.begin() + layout.ndim, generator());
  layout.first = random_int(0, 9);
  layout.span = 1;
  for (int i = 0; i < layout.ndim; ++i) {
    const int d = order[static_cast<std::size_t>(i)];
    layout.stride[d] = layout.span;
    layout.span = layout.span * layout.shape[d] + random_int(0, 1) * random_int(0, 17);
    if (random_int(0, 3) == 0) {
      layout.first += (layout.shape[d] - 1) * layout.stride[d];
      layout.stride[d] = -layout.stride[d];
    }
  }
  layout.span += 32;
  return layout;
}

// Values of `dtype`, converted from fp32 by the CPU.
std::vector<char> memory_of(const std::vector<float>& values, DType dtype) {
  std::vector<char> memory(values.size() * hot::dtype_size(dtype));
  const auto count = static_cast<std::int64_t>(values.size());
  hot::fwht(cpu(), as_vector(values, DType::f32), 0, 1, hot::vector(memory.data(), dtype, count));
  return memory;
}

class HadamardCuda : public CudaTest {
 protected:
  void upload(const std::vector<char>& from, char* to) {
    check(cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyHostToDevice, stream_));
  }
  std::vector<char> download(const char* from, std::size_t bytes) {
    std::vector<char> to(bytes);
    check(cudaMemcpyAsync(to.data(), from, bytes, cudaMemcpyDeviceToHost, stream_));
    synchronize();
    return to;
  }
  // Compares all of the output's memory: bytes between its elements must keep their poison.
  void compare(const Layout& x, DType x_dtype, const Layout& out, DType out_dtype, int axis,
               int block) {
    std::vector<char> input = memory_of(normal(x.span), x_dtype);
    std::vector<char> expected(static_cast<std::size_t>(out.span) * hot::dtype_size(out_dtype),
                               static_cast<char>(0xA5));
    DeviceMemory device_x(input.size()), device_out(expected.size());
    upload(input, device_x.data());
    upload(expected, device_out.data());
    hot::fwht(cpu(), x.view(input.data(), x_dtype, {}), axis, block,
              out.view(expected.data(), out_dtype, {}));
    hot::fwht(cuda(), x.view(device_x.data(), x_dtype, gpu), axis, block,
              out.view(device_out.data(), out_dtype, gpu));
    EXPECT_TRUE(download(device_out.data(), expected.size()) == expected)
        << describe(x, x_dtype, out, out_dtype, axis, block);
    EXPECT_TRUE(download(device_x.data(), input.size()) == input) << "the input was written to";
  }

  void compare_in_place(const Layout& x, DType dtype, int axis, int block) {
    std::vector<char> expected = memory_of(normal(x.span), dtype);
    DeviceMemory device(expected.size());
    upload(expected, device.data());
    synchronize();  // `expected` changes next
    const TensorView host_view = x.view(expected.data(), dtype, {});
    const TensorView device_view = x.view(device.data(), dtype, gpu);
    hot::fwht(cpu(), host_view, axis, block, host_view);
    hot::fwht(cuda(), device_view, axis, block, device_view);
    EXPECT_TRUE(download(device.data(), expected.size()) == expected)
        << describe(x, dtype, x, dtype, axis, block);
  }

  static std::string describe(const Layout& x, DType x_dtype, const Layout& out, DType out_dtype,
                              int axis, int block) {
    std::string text = words("block ", block, ", axis ", axis, ", ", hot::dtype_name(x_dtype),
                             " -> ", hot::dtype_name(out_dtype), ", shape (strides):");
    for (int d = 0; d < x.ndim; ++d) {
      text += words(" ", x.shape[d], " (", x.stride[d], ", ", out.stride[d], ")");
    }
    return text;
  }
};

// Shape with about `elements` elements and an axis that is a multiple of `block`.
std::vector<std::int64_t> random_shape(int ndim, int axis, int block, std::int64_t elements) {
  std::vector<std::int64_t> shape;
  std::int64_t left = std::max<std::int64_t>(1, elements / block);
  for (int d = 0; d < ndim; ++d) {
    shape.push_back(random_int(1, std::min<std::int64_t>(left, random_int(0, 2) == 0 ? 5 : 300)));
    left = std::max<std::int64_t>(1, left / shape.back());
  }
  shape[static_cast<std::size_t>(axis)] *= block;
  return shape;
}

}  // namespace

TEST_F(HadamardCuda, every_block_and_type) {
  for (int block = 1; block <= hot::max_fwht_block; block *= 2) {
    for (const DType from : float_types) {
      for (const DType to : float_types) {
        // Odd numbers of blocks leave the kernels' last tile incomplete.
        const Layout layout = contiguous({(40000 / block) | 1, 3 * block});
        compare(layout, from, layout, to, 1, block);
      }
    }
  }
}

TEST_F(HadamardCuda, every_axis) {
  for (int block = 1; block <= hot::max_fwht_block; block *= 2) {
    for (int axis = 0; axis < 3; ++axis) {
      const Layout layout = contiguous(random_shape(3, axis, block, 60000));
      compare(layout, DType::bf16, layout, DType::bf16, axis, block);
      compare(layout, DType::f32, layout, DType::f32, axis - 3, block);
    }
  }
}

TEST_F(HadamardCuda, any_strides) {
  for (int trial = 0; trial < 240; ++trial) {
    const int block = 1 << trial % 16;
    const int ndim = static_cast<int>(random_int(1, 4));
    const int axis = static_cast<int>(random_int(0, ndim - 1));
    const std::vector<std::int64_t> shape = random_shape(ndim, axis, block, 40000);
    compare(scattered(shape), float_types[random_int(0, 2)], scattered(shape),
            float_types[random_int(0, 2)], axis, block);
  }
}

TEST_F(HadamardCuda, padded_rows_and_broadcast_input) {
  for (const int block : {2, 8, 16, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768}) {
    const std::int64_t outer = block > 4096 ? 2 : 37;
    const std::vector<std::int64_t> shape{outer, 5, block * 2};
    // Rows aligned to 16 bytes, to half of it, and unaligned rows.
    for (const int gap : {16, 4, 3}) {
      Layout x = contiguous(shape);
      x.stride[1] += gap;
      x.stride[0] = 5 * x.stride[1] + gap;
      x.span = outer * x.stride[0];
      compare(x, DType::bf16, x, DType::bf16, 2, block);
      compare(x, DType::f32, contiguous(shape), DType::f32, 2, block);
      compare(contiguous(shape), DType::f16, x, DType::f16, 2, block);
    }
    Layout one_row = contiguous(shape);
    one_row.stride[0] = 0;
    compare(one_row, DType::f32, contiguous(shape), DType::f16, 2, block);
    compare(one_row, DType::bf16, contiguous(shape), DType::f32, 2, block);
  }
}

TEST_F(HadamardCuda, more_transforms_than_fit_the_device) {
  // Thread blocks with several transforms, not all with the same number.
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  for (const int block : {16384, 32768}) {
    const Layout layout = contiguous({2 * multiprocessors + random_int(1, 40), block});
    compare(layout, DType::bf16, layout, DType::bf16, 1, block);
    compare(layout, DType::f16, layout, DType::f32, 1, block);
    compare_in_place(layout, DType::bf16, 1, block);
  }
}

TEST_F(HadamardCuda, offsets_past_32_bits) {
  const std::int64_t rows = 2, cols = 8192;
  const std::int64_t stride = (std::int64_t{1} << 32) + 8;
  const std::size_t bytes = static_cast<std::size_t>(stride + cols) * 2;
  std::size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (free_bytes < bytes + (std::size_t{1} << 28)) GTEST_SKIP() << "needs 8.6 GB of device memory";
  DeviceMemory device(bytes);
  for (const int block : {16, 4096, 8192}) {
    std::vector<char> rows_of_x = memory_of(normal(rows * cols), DType::bf16);
    const std::size_t row_bytes = static_cast<std::size_t>(cols) * 2;
    for (std::int64_t r = 0; r < rows; ++r) {
      check(cudaMemcpy(device.data() + r * stride * 2,
                       rows_of_x.data() + static_cast<std::size_t>(r) * row_bytes, row_bytes,
                       cudaMemcpyHostToDevice));
    }
    const TensorView far = hot::matrix(device.data(), DType::bf16, rows, cols, stride, gpu);
    hot::fwht(cuda(), far, 1, block, far);
    const TensorView near = hot::matrix(rows_of_x.data(), DType::bf16, rows, cols);
    hot::fwht(cpu(), near, 1, block, near);
    std::vector<char> got;
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::vector<char> row = download(device.data() + r * stride * 2, row_bytes);
      got.insert(got.end(), row.begin(), row.end());
    }
    EXPECT_TRUE(got == rows_of_x) << "block " << block;
  }
}

TEST_F(HadamardCuda, values_that_are_not_numbers) {
  const float inf = std::numeric_limits<float>::infinity();
  const float odd[] = {inf, -inf, std::numeric_limits<float>::quiet_NaN(), 3e38F, 1e-40F, -0.0F};
  for (const int block : {4, 64, 1024, 2048, 8192, 16384}) {
    std::vector<float> x = normal(6 * block);
    for (int row = 0; row < 6; ++row) {
      x[static_cast<std::size_t>(row * block + row)] = odd[row];
      x[static_cast<std::size_t>(row * block + block - 1)] = odd[row];
    }
    std::vector<float> expected(x.size());
    hot::fwht(cpu(), as_vector(static_cast<const std::vector<float>&>(x), DType::f32), 0, block,
              as_vector(expected, DType::f32));
    const std::size_t bytes = x.size() * sizeof(float);
    DeviceMemory device(bytes);
    check(cudaMemcpy(device.data(), x.data(), bytes, cudaMemcpyHostToDevice));
    check(cudaDeviceSynchronize());  // the copy may return early, and the stream does not wait
    const TensorView view = hot::vector(device.data(), DType::f32, 6 * block, gpu);
    hot::fwht(cuda(), view, 0, block, view);
    std::vector<float> got(x.size());
    const std::vector<char> raw = download(device.data(), bytes);
    std::memcpy(got.data(), raw.data(), bytes);
    for (std::size_t i = 0; i < x.size(); ++i) {
      // All NaNs count as equal. Other values have equal bits, also the sign of zero.
      if (std::isnan(expected[i]) && std::isnan(got[i])) continue;
      ASSERT_EQ(std::memcmp(&got[i], &expected[i], sizeof(float)), 0)
          << "block " << block << " element " << i << ": " << got[i] << ", CPU " << expected[i];
    }
  }
}

TEST_F(HadamardCuda, nothing_to_do) {
  const TensorView none = hot::matrix(static_cast<void*>(nullptr), DType::f32, 0, 16, 0, gpu);
  EXPECT_NO_THROW(hot::fwht(cuda(), none, 1, 16, none));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}
