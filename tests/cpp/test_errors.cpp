#include "support.h"

using namespace hot_test;
using hot::ErrorCode;

namespace {

constexpr ErrorCode invalid = ErrorCode::invalid_argument;

// Valid arguments of every call. A case breaks one and names what the message must contain.
struct Arguments {
  std::vector<float> memory = normal(1 << 14);
  std::vector<std::int8_t> code_memory = codes(1 << 14, 7);
  std::vector<float> out_memory = std::vector<float>(1 << 14, -5.0F);

  ConstTensorView x = hot::matrix(static_cast<const void*>(memory.data()), DType::f32, 32, 16);
  TensorView out = hot::matrix(out_memory.data(), DType::f32, 32, 16);
  int axis = 1, block = 16;

  hot::LowRank low_rank{};
  hot::QuantSpec quant{};
  TensorView q = hot::matrix(out_memory.data(), DType::i8, 32, 16);
  TensorView scale = hot::vector(out_memory.data() + 4096, DType::f32, 32);

  ConstTensorView a = hot::matrix(static_cast<const void*>(code_memory.data()), DType::i8, 6, 20);
  ConstTensorView b =
      hot::matrix(static_cast<const void*>(code_memory.data() + 1000), DType::i8, 7, 20);
  ConstTensorView a_scale = hot::vector(static_cast<const void*>(memory.data()), DType::f32, 6);
  ConstTensorView b_scale = hot::vector(static_cast<const void*>(memory.data()), DType::f32, 7);
  hot::GemmSpec gemm{};
  TensorView product = hot::matrix(out_memory.data(), DType::f32, 6, 7);

  std::int64_t k = 20;
  ConstTensorView packed_a =
      hot::matrix(static_cast<const void*>(code_memory.data()), DType::i4x2, 6, 10);
  ConstTensorView packed_b =
      hot::matrix(static_cast<const void*>(code_memory.data() + 1000), DType::i4x2, 7, 10);
  TensorView packed_out = hot::matrix(out_memory.data(), DType::i4x2, 6, 10);
  TensorView unpacked = hot::matrix(out_memory.data(), DType::i8, 6, 20);
  TensorView wide = hot::matrix(out_memory.data(), DType::f32, 6, 20);

  hot::BackwardLinearSpec spec{};
  ConstTensorView gy = hot::matrix(static_cast<const void*>(memory.data()), DType::f32, 20, 10);
  ConstTensorView w =
      hot::matrix(static_cast<const void*>(memory.data() + 1000), DType::f32, 10, 12);
  std::int64_t saved_tokens = 20, saved_features = 12;
  std::uint64_t saved_format = hot::saved_format(spec);
  alignas(16) char saved_memory[4096] = {};
  std::size_t saved_bytes = hot::saved_layout(20, 12, spec).bytes;
  char* saved_data = saved_memory;
  TensorView gx = hot::matrix(out_memory.data(), DType::f32, 20, 12);
  TensorView gw = hot::matrix(out_memory.data() + 1000, DType::f32, 10, 12);
  TensorView gb = hot::vector(out_memory.data() + 2000, DType::f32, 10);

  std::int64_t first = 3, last = 20;
  TensorView part = hot::matrix(out_memory.data(), DType::f32, 17, 12);

  Scratch scratch{1 << 20};
  std::size_t workspace_bytes = 1 << 20;
  const void* workspace_data = nullptr;  // another place
  hot::Context context = cpu();

  hot::Workspace workspace() {
    if (workspace_data != nullptr) return {const_cast<void*>(workspace_data), workspace_bytes};
    return {scratch.memory.data(), workspace_bytes};
  }
};

using Spoil = std::function<void(Arguments&)>;

struct Case {
  std::vector<std::string> message;
  Spoil spoil;
  ErrorCode code = invalid;
};

// Every case fails with its message and leaves the outputs unchanged.
void check_table(const std::vector<Case>& table, const std::function<void(Arguments&)>& call) {
  Arguments good;
  EXPECT_NO_THROW(call(good));
  for (const Case& bad : table) {
    Arguments arguments;
    bad.spoil(arguments);
    const std::vector<float> before = arguments.out_memory;
    expect_error(bad.code, bad.message, [&] { call(arguments); });
    EXPECT_EQ(arguments.out_memory, before) << "written before the error: " << bad.message[1];
  }
}

void* shifted(const void* data, std::ptrdiff_t bytes) {
  return const_cast<char*>(static_cast<const char*>(data)) + bytes;
}

}  // namespace

TEST(Errors, fwht) {
  check_table({{{"fwht", "x", "int8"}, [](Arguments& t) { t.x.dtype = DType::i8; }},
               {{"fwht", "x", "5 dimensions"}, [](Arguments& t) { t.x.ndim = 5; }},
               {{"fwht", "x", "negative"}, [](Arguments& t) { t.x.shape[0] = -1; }},
               {{"fwht", "x", "null"}, [](Arguments& t) { t.x.data = nullptr; }},
               {{"fwht", "x", "aligned"}, [](Arguments& t) { t.x.data = shifted(t.x.data, 2); }},
               {{"fwht", "x", "cuda:1", "cpu"},
                [](Arguments& t) { t.x.device = {hot::Device::Type::cuda, 1}; }},
               {{"fwht", "out", "int32"}, [](Arguments& t) { t.out.dtype = DType::i32; }}},
              [](Arguments& t) { hot::fwht(t.context, t.x, t.axis, t.block, t.out); });
}

TEST(Errors, hla) {
  check_table(
      {{{"hla", "x", "1 dimensions"}, [](Arguments& t) { t.x.ndim = 1; }},
       {{"hla", "out", "(32, 16)", "(16, 16)"},
        [](Arguments& t) {
          t.low_rank.basis = hot::Basis::lowpass;
          t.low_rank.rank = 8;
        }},
       {{"low_rank", "block", "3"},
        [](Arguments& t) {
          t.low_rank.basis = hot::Basis::lowpass;
          t.low_rank.block = 3;
        }}},
      [](Arguments& t) { hot::hla(t.context, t.x, t.low_rank, hot::Side::activation, t.out); });
}

TEST(Errors, quantize) {
  check_table(
      {{{"quantize", "rounding"},
        [](Arguments& t) { t.quant.rounding = static_cast<hot::Rounding>(9); }},
       {{"quantize", "x", "int32"}, [](Arguments& t) { t.x.dtype = DType::i32; }},
       {{"quantize", "q", "float32"}, [](Arguments& t) { t.q.dtype = DType::f32; }},
       {{"quantize", "q", "bits is 8"}, [](Arguments& t) { t.q.dtype = DType::i4x2; }},
       {{"quantize", "q", "(32, 15)"}, [](Arguments& t) { t.q.shape[1] = 15; }},
       {{"quantize", "q", "stride 2"},
        [](Arguments& t) {
          t.q.stride[0] = 32;
          t.q.stride[1] = 2;
        }},
       {{"quantize", "scale", "(31,)", "(32,)"}, [](Arguments& t) { t.scale.shape[0] = 31; }},
       {{"quantize", "scale", "bfloat16"}, [](Arguments& t) { t.scale.dtype = DType::bf16; }},
       {{"quantize", "scale", "overlaps q"}, [](Arguments& t) { t.scale.data = t.q.data; }}},
      [](Arguments& t) { hot::quantize(t.context, t.x, t.quant, t.q, t.scale); });
}

TEST(Errors, dequantize) {
  check_table({{{"dequantize", "q", "float32"}, [](Arguments& t) { t.a.dtype = DType::f32; }},
               {{"dequantize", "q", "(6, 19)", "(6, 20)"}, [](Arguments& t) { t.a.shape[1] = 19; }},
               {{"dequantize", "out", "int8"}, [](Arguments& t) { t.wide.dtype = DType::i8; }}},
              [](Arguments& t) {
                hot::dequantize(t.context, t.a, t.a_scale, hot::Granularity::token, t.wide);
              });
}

TEST(Errors, pack_int4) {
  check_table({{{"pack_int4", "q", "float32"}, [](Arguments& t) { t.a.dtype = DType::f32; }},
               {{"pack_int4", "out", "int8"}, [](Arguments& t) { t.packed_out.dtype = DType::i8; }},
               {{"pack_int4", "out", "(6, 9)", "(6, 10)"},
                [](Arguments& t) { t.packed_out.shape[1] = 9; }}},
              [](Arguments& t) { hot::pack_int4(t.context, t.a, t.packed_out); });
}

TEST(Errors, unpack_int4) {
  check_table(
      {{{"unpack_int4", "packed", "int8"}, [](Arguments& t) { t.packed_a.dtype = DType::i8; }},
       {{"unpack_int4", "packed", "(6, 9)", "(6, 10)"},
        [](Arguments& t) { t.packed_a.shape[1] = 9; }},
       {{"unpack_int4", "out", "float32"}, [](Arguments& t) { t.unpacked.dtype = DType::f32; }}},
      [](Arguments& t) { hot::unpack_int4(t.context, t.packed_a, t.unpacked); });
}

TEST(Errors, gemm_int8) {
  check_table(
      {{{"gemm_int8", "a", "float32"}, [](Arguments& t) { t.a.dtype = DType::f32; }},
       {{"gemm_int8", "a_scale", "0 dimensions"}, [](Arguments& t) { t.a_scale = {}; }},
       {{"gemm_int8", "b_scale", "float16"}, [](Arguments& t) { t.b_scale.dtype = DType::f16; }},
       {{"gemm_int8", "out", "int32", "no a_scale"},
        [](Arguments& t) { t.product.dtype = DType::i32; }},
       {{"gemm_int8", "out", "int32", "no a_scale"},
        [](Arguments& t) {  // no dimensions, but memory
          t.product.dtype = DType::i32;
          t.b_scale = {};
          t.a_scale.ndim = 0;
        }},
       {{"gemm_int8", "out", "overlaps a"},
        [](Arguments& t) { t.product.data = t.code_memory.data(); }},
       {{"gemm_int8", "workspace overlaps a "},
        [](Arguments& t) { t.workspace_data = t.code_memory.data() + 100; }},
       {{"gemm_int8", "workspace overlaps b_scale"},
        [](Arguments& t) { t.workspace_data = t.memory.data() + 6; }},
       {{"gemm_int8", "workspace overlaps out"},
        [](Arguments& t) { t.workspace_data = t.out_memory.data() + 41; }},
       {{"gemm_int8", "workspace", "16 bytes"},
        [](Arguments& t) { t.workspace_bytes = 16; },
        ErrorCode::workspace_too_small}},
      [](Arguments& t) {
        hot::gemm_int8(t.context, t.a, t.b, t.a_scale, t.b_scale, t.gemm, t.product, t.workspace());
      });
}

TEST(Errors, gemm_int4) {
  check_table({{{"gemm_int4", "a", "int8"}, [](Arguments& t) { t.packed_a.dtype = DType::i8; }},
               {{"gemm_int4", "workspace overlaps out"},
                [](Arguments& t) { t.workspace_data = t.out_memory.data(); }},
               {{"gemm_int4", "workspace"},
                [](Arguments& t) { t.workspace_bytes = 0; },
                ErrorCode::workspace_too_small}},
              [](Arguments& t) {
                hot::gemm_int4(t.context, t.packed_a, t.packed_b, t.k, t.a_scale, t.b_scale, t.gemm,
                               t.product, t.workspace());
              });
}

TEST(Errors, compress_activation) {
  check_table(
      {{{"compress_activation", "x", "int8"}, [](Arguments& t) { t.w.dtype = DType::i8; }},
       {{"compress_activation", "x", "1 dimensions"}, [](Arguments& t) { t.w.ndim = 1; }},
       {{"compress_activation", "saved", "bytes"}, [](Arguments& t) { t.saved_bytes = 10; }},
       {{"compress_activation", "saved", "16 bytes"}, [](Arguments& t) { t.saved_data += 4; }},
       {{"compress_activation", "storage", "int4", "lowpass"},
        [](Arguments& t) { t.spec.low_rank.basis = hot::Basis::lowpass; }}},
      [](Arguments& t) {
        hot::compress_activation(t.context, t.w, t.spec, {t.saved_data, t.saved_bytes}, {});
      });
}

TEST(Errors, decompress_activation) {
  check_table(
      {{{"decompress_activation", "saved", "bytes"}, [](Arguments& t) { ++t.saved_bytes; }},
       {{"decompress_activation", "saved", "0 bytes"},
        [](Arguments& t) { t.saved_data = nullptr; }},
       {{"decompress_activation", "saved", "16 bytes"}, [](Arguments& t) { t.saved_data += 4; }},
       {{"decompress_activation", "saved.tokens is -1"}, [](Arguments& t) { t.saved_tokens = -1; }},
       {{"decompress_activation", "saved.format", "0"}, [](Arguments& t) { t.saved_format = 0; }},
       {{"decompress_activation", "saved was made", "another spec"},
        [](Arguments& t) { t.spec.equalize_tokens = true; }},
       {{"decompress_activation", "out", "int8"}, [](Arguments& t) { t.part.dtype = DType::i8; }},
       {{"decompress_activation", "out", "cuda:0"},
        [](Arguments& t) { t.part.device = {hot::Device::Type::cuda, 0}; }},
       {{"decompress_activation", "out", "overlaps saved"},
        [](Arguments& t) { t.part.data = t.saved_data; }}},
      [](Arguments& t) {
        hot::decompress_activation(
            t.context,
            {t.saved_data, t.saved_bytes, t.saved_tokens, t.saved_features, {}, t.saved_format},
            t.first, t.last, t.spec, t.part);
      });
}

TEST(Errors, backward_linear) {
  check_table(
      {{{"backward_linear", "gy", "int32"}, [](Arguments& t) { t.gy.dtype = DType::i32; }},
       {{"backward_linear", "gy", "1 dimensions"}, [](Arguments& t) { t.gy.ndim = 1; }},
       {{"backward_linear", "w", "(11, 12)", "(10, *)"}, [](Arguments& t) { t.w.shape[0] = 11; }},
       {{"backward_linear", "w", "cuda:0"},
        [](Arguments& t) { t.w.device = {hot::Device::Type::cuda, 0}; }},
       {{"backward_linear", "hadamard_block", "12"},
        [](Arguments& t) { t.spec.hadamard_block = 12; }},
       {{"backward_linear", "hadamard_block", "512"},
        [](Arguments& t) { t.spec.hadamard_block = 512; }},
       {{"backward_linear", "gx_bits", "6"}, [](Arguments& t) { t.spec.gx_bits = 6; }},
       {{"backward_linear", "gx_scale"},
        [](Arguments& t) { t.spec.gx_scale = hot::Granularity::channel; }},
       {{"backward_linear", "saved", "19 tokens"}, [](Arguments& t) { t.saved_tokens = 19; }},
       {{"backward_linear", "saved", "13 in_features"},
        [](Arguments& t) { t.saved_features = 13; }},
       {{"backward_linear", "saved", "bytes"}, [](Arguments& t) { ++t.saved_bytes; }},
       {{"backward_linear", "saved", "0 bytes"}, [](Arguments& t) { t.saved_data = nullptr; }},
       {{"backward_linear", "saved.format", "0"}, [](Arguments& t) { t.saved_format = 0; }},
       {{"backward_linear", "saved was made", "another spec"},
        [](Arguments& t) { t.spec.equalize_tokens = true; }},
       {{"backward_linear", "gx", "(20, 11)"}, [](Arguments& t) { t.gx.shape[1] = 11; }},
       {{"backward_linear", "gw", "int8"}, [](Arguments& t) { t.gw.dtype = DType::i8; }},
       {{"backward_linear", "gw", "overlaps gx"},
        [](Arguments& t) { t.gw.data = shifted(t.gx.data, 8); }},
       {{"backward_linear", "workspace overlaps saved"},
        [](Arguments& t) { t.workspace_data = t.saved_data; }},
       {{"backward_linear", "workspace overlaps gy"},
        [](Arguments& t) { t.workspace_data = t.gy.data; }},
       {{"backward_linear", "workspace overlaps w"},
        [](Arguments& t) { t.workspace_data = t.w.data; }},
       {{"backward_linear", "workspace overlaps gb"},
        [](Arguments& t) { t.workspace_data = t.gb.data; }},
       {{"backward_linear", "workspace", "expected"},
        [](Arguments& t) { t.workspace_bytes = 100; },
        ErrorCode::workspace_too_small}},
      [](Arguments& t) {
        hot::backward_linear(
            t.context, t.gy, t.w,
            {t.saved_data, t.saved_bytes, t.saved_tokens, t.saved_features, {}, t.saved_format},
            t.spec, {&t.gx, &t.gw, &t.gb, false}, t.workspace());
      });
}

TEST(Errors, recipes) {
  for (const char* name : {"best", "", "Default", "default "}) {
    expect_error(invalid, {"recipe", std::string("'") + name + "'", "'fast'"},
                 [&] { hot::recipe(name); });
  }
}

TEST(Errors, keys) {
  const std::uint64_t numbers[2] = {};
  const auto* odd = reinterpret_cast<const std::uint64_t*>(shifted(numbers, 4));
  const auto with = [](hot::Key key) { return [key] { cpu().with_key(key); }; };
  expect_error(invalid, {"with_key", "key.stream", "8192"}, with({1, 2, 8192}));
  expect_error(invalid, {"with_key", "key.counter", "multiple of 8"}, with({1, 2, 3, odd}));
  Layer layer(16, 3, 4, {});
  layer.run(cpu());
  layer.key.counter = odd;
  expect_error(invalid, {"backward_linear", "saved.key.counter"}, [&] { layer.backward(cpu()); });
}

// Found by tests/fuzz: products of sizes and strides overflowed 64 bits and became small.
TEST(Errors, sizes_beyond_memory) {
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  const std::int64_t far = std::int64_t{1} << 40;
  const hot::Context context = cpu();
  const hot::BackwardLinearSpec spec{};
  expect_error(invalid, {"saved_layout", "tokens", "2^48"},
               [&] { hot::saved_layout(most, 1, spec); });
  // 2^40 rows of 2^40 / 2 bytes: 2^79, of which 64 bits keep 0.
  expect_error(invalid, {"saved_layout", "in_features", "2^52"},
               [&] { hot::saved_layout(far, far, spec); });
  expect_error(invalid, {"quantized_weight_bytes", "2^52"},
               [&] { hot::quantized_weight_bytes(far, far, spec); });
  expect_error(invalid, {"gemm_workspace", "m", "k", "2^52"},
               [&] { hot::gemm_workspace(context, far, 1, far); });
  expect_error(invalid, {"backward_linear_workspace", "2^52"},
               [&] { hot::backward_linear_workspace(context, {far, far, 1}, spec, true, true); });
  expect_error(invalid, {"low_rank", "tokens"}, [&] { hot::hla_rows(most, {}); });
  EXPECT_FALSE(hot::supported(context, {far, far, far}, spec).ok);
  EXPECT_TRUE(hot::supported(context, {std::int64_t{1} << 24, 1 << 15, 1 << 15}, spec).ok);

  check_table({{{"fwht", "x", "2^58"}, [&](Arguments& t) { t.x.stride[0] = most; }},
               {{"fwht", "x", "2^58"}, [&](Arguments& t) { t.x.stride[0] = -most - 1; }},
               {{"fwht", "out", "2^58"}, [&](Arguments& t) { t.out.stride[1] = -most - 1; }},
               {{"fwht", "x", "2^52"},
                [&](Arguments& t) {  // a broadcast of one number, 2^80 times
                  t.x.shape[0] = t.x.shape[1] = far;
                  t.x.stride[0] = t.x.stride[1] = 0;
                }}},
              [](Arguments& t) { hot::fwht(t.context, t.x, t.axis, t.block, t.out); });
  Arguments last;  // INT64_MAX + 1 was computed before k was checked
  expect_error(invalid, {"gemm_int4", "k"}, [&] {
    hot::gemm_int4(last.context, last.packed_a, last.packed_b, most, last.a_scale, last.b_scale,
                   last.gemm, last.product, last.workspace());
  });
}

// A single row may have any stride.
TEST(Errors, a_stride_that_is_not_used) {
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  Arguments t;
  t.x = hot::matrix(t.memory.data(), DType::f32, 1, 16, most);
  t.out = hot::matrix(t.out_memory.data(), DType::f32, 1, 16, most);
  EXPECT_NO_THROW(hot::fwht(t.context, t.x, 1, 16, t.out));
  // Times the size of an element it overflowed, as tests/fuzz found under UBSan.
  const hot::BackwardLinearSpec spec{};
  alignas(16) char codes[1024];
  const std::size_t bytes = hot::quantized_weight_bytes(1, 16, spec);
  ASSERT_LE(bytes, sizeof codes);
  Scratch scratch(hot::quantize_weight_workspace(t.context, 1, 16, spec));
  EXPECT_NO_THROW(hot::quantize_weight(t.context, t.x, spec, {codes, bytes}, scratch.workspace()));
}

// So may an array without elements, with several leading dimensions. Found by tests/fuzz: the
// product of its strides and sizes overflowed, as UBSan says.
TEST(Errors, strides_of_an_empty_array) {
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  const hot::BackwardLinearSpec spec{};
  float one = 0;
  ConstTensorView x{&one, DType::f32, {}, 4, {3, 2, 2, 0}, {most, most / 2, most - 5, most}};
  const hot::SavedLayout layout = hot::saved_layout(12, 0, spec);
  alignas(16) char kept[16];
  Scratch scratch(hot::compress_activation_workspace(cpu(), 12, 0, spec));
  const hot::ConstSavedActivation saved =
      hot::compress_activation(cpu(), x, spec, {kept, layout.bytes}, scratch.workspace());
  EXPECT_EQ(saved.tokens, 12);
  EXPECT_EQ(saved.in_features, 0);
}

// Numbers that are no enumerator were once printed as `unknown` or taken for another value.
TEST(Errors, unknown_enumerations) {
  const auto refused = [](const char* name, const Spoil& spoil) {
    Arguments t;
    spoil(t);
    expect_error(invalid, {name, "unknown"}, [&] { hot::saved_layout(20, 12, t.spec); });
    EXPECT_FALSE(hot::supported(t.context, {20, 10, 12}, t.spec).ok) << name;
  };
  refused("gx_scale", [](Arguments& t) { t.spec.gx_scale = static_cast<hot::Granularity>(9); });
  refused("gw_scale", [](Arguments& t) { t.spec.gw_scale = static_cast<hot::Granularity>(9); });
  for (const int value : {2, 9}) {  // 2 was rht4
    refused("storage", [&](Arguments& t) { t.spec.storage = static_cast<hot::Storage>(value); });
  }
  refused("basis", [](Arguments& t) {
    t.spec.storage = hot::Storage::int8;
    t.spec.low_rank.basis = static_cast<hot::Basis>(9);
  });
  refused("gx_rounding", [](Arguments& t) { t.spec.gx_rounding = static_cast<hot::Rounding>(9); });
  refused("gw_rounding", [](Arguments& t) { t.spec.gw_rounding = static_cast<hot::Rounding>(9); });

  check_table({{{"quantize", "scale", "unknown"},
                [](Arguments& t) { t.quant.scale = static_cast<hot::Granularity>(9); }}},
              [](Arguments& t) { hot::quantize(t.context, t.x, t.quant, t.q, t.scale); });
}

TEST(Errors, supported) {
  hot::BackwardLinearSpec spec;
  EXPECT_TRUE(hot::supported(cpu(), {20, 10, 12}, spec).ok);
  EXPECT_TRUE(hot::supported(cpu(), {20, 10, 12}, spec).why.empty());
  spec.gx_bits = 3;
  EXPECT_FALSE(hot::supported(cpu(), {20, 10, 12}, spec).ok);
  EXPECT_NE(hot::supported(cpu(), {20, 10, 12}, spec).why.find("gx_bits"), std::string::npos);
  EXPECT_FALSE(hot::supported(cpu(), {-1, 10, 12}, {}).ok);
  spec = recipe("paper");
  spec.low_rank.layout = {14, 14, 1};
  EXPECT_TRUE(hot::supported(cpu(), {197, 10, 12}, spec).ok);
  EXPECT_FALSE(hot::supported(cpu(), {196, 10, 12}, spec).ok);
}

TEST(Errors, missing_backends) {
  for (const hot::Isa isa : {hot::Isa::avx2, hot::Isa::avx512, hot::Isa::amx}) {
    if (static_cast<int>(isa) <= static_cast<int>(hot::best_isa())) continue;
    expect_error(ErrorCode::unsupported, {"isa", hot::isa_name(isa)}, [&] { cpu().with_isa(isa); });
  }
  if (!hot::built_with_cuda()) {
    expect_error(ErrorCode::unsupported, {"CUDA"}, [] { hot::Context::cuda(0, nullptr); });
  } else {
    expect_error(invalid, {"device", "999"}, [] { hot::Context::cuda(999, nullptr); });
  }
}
