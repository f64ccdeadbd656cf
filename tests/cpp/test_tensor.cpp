#include "support.h"

using namespace hot_test;

TEST(Tensor, dtype_sizes) {
  EXPECT_EQ(hot::dtype_size(DType::f32), 4U);
  EXPECT_EQ(hot::dtype_size(DType::f16), 2U);
  EXPECT_EQ(hot::dtype_size(DType::bf16), 2U);
  EXPECT_EQ(hot::dtype_size(DType::i8), 1U);
  EXPECT_EQ(hot::dtype_size(DType::i32), 4U);
  EXPECT_EQ(hot::dtype_size(DType::i4x2), 1U);
  EXPECT_STREQ(hot::dtype_name(DType::bf16), "bfloat16");
}

TEST(Tensor, views) {
  float memory[12] = {};
  const TensorView m = hot::matrix(memory, DType::f32, 3, 2, 4);
  EXPECT_EQ(m.ndim, 2);
  EXPECT_EQ(m.stride[0], 4);
  EXPECT_EQ(m.stride[1], 1);
  const ConstTensorView c = m;
  EXPECT_EQ(c.data, memory);
  EXPECT_EQ(c.shape[0], 3);
  EXPECT_EQ(hot::matrix(memory, DType::f32, 3, 4).stride[0], 4);
  EXPECT_EQ(hot::vector(memory, DType::f32, 12).ndim, 1);
}

TEST(Tensor, context) {
  EXPECT_EQ(hot::Context::cpu(3).threads(), 3);
  EXPECT_GE(hot::Context::cpu().threads(), 1);
  EXPECT_EQ(hot::Context::cpu().isa(), hot::best_isa());
  EXPECT_EQ(cpu().with_isa(hot::Isa::plain).isa(), hot::Isa::plain);
  EXPECT_EQ(hot::Context::cpu().with_key({9, 8, 7}).key().offset, 8U);
  EXPECT_STREQ(hot::isa_name(hot::Isa::avx512), "avx512");
  EXPECT_STREQ(hot::isa_name(hot::Isa::amx), "amx");
  expect_error(hot::ErrorCode::invalid_argument, {"threads", "-1"}, [] { hot::Context::cpu(-1); });
  expect_error(hot::ErrorCode::invalid_argument, {"key.stream", "8192"},
               [] { hot::Context::cpu(1).with_key({0, 0, 8192}); });
}

TEST(Tensor, version) {
  EXPECT_EQ(std::string(hot::version()).find('.'), 1U);
  EXPECT_EQ(hot::built_with_cuda(), std::string(hot::cuda_architectures()) != "");
}
