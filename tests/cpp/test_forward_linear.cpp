#include "hot/forward_linear.h"

#include "golden.h"
#include "support.h"

using namespace hot_test;
using hot::ForwardLinearSpec;

namespace {

const ConstTensorView no_bias{};

std::int64_t rounded_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// One layer with its arrays.
struct Forward {
  std::int64_t L, O, I;
  ForwardLinearSpec spec;
  Floats x, w;
  std::vector<float> bias;

  Forward(std::int64_t tokens, std::int64_t out, std::int64_t in, int block, float scale = 1.0F)
      : L(tokens),
        O(out),
        I(in),
        spec{block},
        x(floats(L, I, normal(L * I, scale), 3)),
        w(floats(O, I, normal(O * I), 1)),
        bias(normal(O)) {}

  ConstTensorView x_view() const { return x.view(); }
  ConstTensorView w_view() const { return w.view(); }
  ConstTensorView bias_view() const { return as_vector(bias, DType::f32); }

  void run(const hot::Context& context, const ConstTensorView& b, const TensorView& y) const {
    Scratch scratch(hot::forward_linear_workspace(context, {L, O, I}, spec, false));
    hot::forward_linear(context, x_view(), w_view(), b, spec, y, scratch.workspace());
  }
  Floats result(const hot::Context& context, bool with_bias = true) const {
    Floats y(L, O, DType::f32, 2);
    run(context, with_bias ? bias_view() : no_bias, y.view());
    EXPECT_TRUE(y.margins_intact());
    return y;
  }
};

Forward any_forward() {
  return {random_int(1, 70), random_int(1, 90), random_int(1, 200),
          1 << static_cast<int>(random_int(0, 8))};
}

// Codes and scales of rows after the transform, by the stages of their own.
struct Codes {
  Bytes codes;
  std::vector<float> scale;

  Codes(const Floats& x, int block)
      : codes(x.rows(), rounded_up(x.cols(), block), DType::i8),
        scale(static_cast<std::size_t>(x.rows())) {
    Floats padded(x.rows(), codes.cols(), DType::f32);
    for (std::int64_t r = 0; r < padded.rows(); ++r) {
      for (std::int64_t c = 0; c < padded.cols(); ++c) {
        padded.at(r, c) = c < x.cols() ? x.at(r, c) : 0.0F;
      }
    }
    hot::fwht(cpu(), padded.view(), 1, block, padded.view());
    hot::quantize(cpu(), padded.view(), {8, hot::Granularity::row, hot::Rounding::nearest},
                  codes.view(), as_vector(scale, DType::f32));
  }
};

}  // namespace

TEST(ForwardLinear, golden) {
  std::map<std::string, GoldenCase> cases;  // some have the inputs of another
  for (const GoldenCase& one : golden_cases("forward_linear")) cases.emplace(one.name, one);
  for_golden("forward_linear", "y", [&](const GoldenCase& one, const hot::Context& context) {
    const GoldenCase& of = one.params.count("input") == 0 ? one : cases.at(one.text("input"));
    const GoldenInput x(of.arrays.at("x")), w(of.arrays.at("w"));
    const ForwardLinearSpec spec{one.number("forward_block")};
    const std::int64_t L = x.view.shape[0], I = x.view.shape[1], O = w.view.shape[0];
    GoldenOutput y(one.arrays.at("y"));
    Scratch scratch(hot::forward_linear_workspace(context, {L, O, I}, spec, false));
    ConstTensorView bias{};
    std::vector<float> values(static_cast<std::size_t>(O));
    if (one.arrays.count("bias") != 0) {
      const GoldenInput b(one.arrays.at("bias"));
      std::memcpy(values.data(), b.view.data, values.size() * sizeof(float));
      bias = as_vector(values, DType::f32);
    }
    hot::forward_linear(context, x.view, w.view, bias, spec, y.view, scratch.workspace());
    y.check("y");
  });
}

TEST(ForwardLinear, equals_its_stages) {
  for (int round = 0; round < 25; ++round) {
    const Forward layer = any_forward();
    const Codes a(layer.x, layer.spec.hadamard_block), b(layer.w, layer.spec.hadamard_block);
    Floats expected(layer.L, layer.O, DType::f32);
    Scratch scratch(hot::gemm_workspace(cpu(), layer.L, layer.O, a.codes.cols()));
    hot::gemm_int8(cpu(), a.codes.view(), b.codes.view(), as_vector(a.scale, DType::f32),
                   as_vector(b.scale, DType::f32), {layer.spec.hadamard_block, false},
                   expected.view(), scratch.workspace());
    EXPECT_EQ(layer.result(cpu(), false).values(), expected.values());
    for (std::int64_t l = 0; l < layer.L; ++l) {
      for (std::int64_t o = 0; o < layer.O; ++o) {
        expected.at(l, o) += layer.bias[static_cast<std::size_t>(o)];
      }
    }
    for (const hot::Isa isa : isas()) {
      EXPECT_EQ(layer.result(cpu(3).with_isa(isa)).values(), expected.values())
          << hot::isa_name(isa) << " " << layer.L << " " << layer.O << " " << layer.I << " block "
          << layer.spec.hadamard_block;
    }
  }
}

// docs/numerics.md, "Bounds on floating-point results".
TEST(ForwardLinear, is_near_the_plain_product) {
  for (const int block : {1, 16, 64, 128}) {
    const Forward layer(40, 30, 200, block);
    const Floats y = layer.result(cpu());
    const Codes a(layer.x, block), b(layer.w, block);
    // Sum of a transformed row's magnitudes.
    const auto magnitude = [](const Codes& of, std::int64_t r) {
      double sum = 0;
      for (std::int64_t k = 0; k < of.codes.cols(); ++k) {
        sum += (std::abs(of.codes.at(r, k)) + 0.5) *
               static_cast<double>(of.scale[static_cast<std::size_t>(r)]);
      }
      return sum;
    };
    double largest = 0;
    for (std::int64_t l = 0; l < layer.L; ++l) {
      for (std::int64_t o = 0; o < layer.O; ++o) {
        double plain = static_cast<double>(layer.bias[static_cast<std::size_t>(o)]);
        for (std::int64_t i = 0; i < layer.I; ++i) {
          plain += static_cast<double>(layer.x.at(l, i)) * static_cast<double>(layer.w.at(o, i));
        }
        const double s_x = static_cast<double>(a.scale[static_cast<std::size_t>(l)]);
        const double s_w = static_cast<double>(b.scale[static_cast<std::size_t>(o)]);
        const double bound = (s_x * magnitude(b, o) / 2 + s_w * magnitude(a, l) / 2 +
                              static_cast<double>(a.codes.cols()) * s_x * s_w / 4) /
                             block;
        const double error = std::abs(static_cast<double>(y.at(l, o)) - plain);
        EXPECT_LE(error, bound) << block << " " << l << " " << o;
        largest = std::max(largest, error / bound);
      }
    }
    EXPECT_GT(largest, 0.01) << "a bound that is never near would hold for anything";
  }
}

TEST(ForwardLinear, types_are_rounded_once) {
  const Forward layer(33, 40, 130, 64);
  const Floats exact = layer.result(cpu());
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Matrix<std::uint16_t> y(layer.L, layer.O, dtype, 3), expected(layer.L, layer.O, dtype, 3);
    layer.run(cpu(), layer.bias_view(), y.view());
    hot::fwht(cpu(), exact.view(), 1, 1, expected.view());  // block 1 converts
    EXPECT_EQ(y.values(), expected.values()) << hot::dtype_name(dtype);
    EXPECT_TRUE(y.margins_intact());

    // Inputs of 16 bits are those numbers exactly.
    Matrix<std::uint16_t> half(layer.L, layer.I, dtype), bias(1, layer.O, dtype, 1);
    hot::fwht(cpu(), layer.x_view(), 1, 1, half.view());
    hot::fwht(cpu(),
              hot::matrix(static_cast<const void*>(layer.bias.data()), DType::f32, 1, layer.O), 1,
              1, bias.view());
    Forward wide = layer;
    hot::fwht(cpu(), half.view(), 1, 1, wide.x.view());
    Floats wide_bias(1, layer.O, DType::f32);
    hot::fwht(cpu(), bias.view(), 1, 1, wide_bias.view());
    wide.bias = wide_bias.values();
    Floats narrow(layer.L, layer.O, DType::f32);
    Scratch scratch(
        hot::forward_linear_workspace(cpu(), {layer.L, layer.O, layer.I}, layer.spec, false));
    const ConstTensorView bias_row =
        hot::vector(static_cast<const void*>(bias.data()), dtype, layer.O);
    hot::forward_linear(cpu(), half.view(), layer.w_view(), bias_row, layer.spec, narrow.view(),
                        scratch.workspace());
    EXPECT_EQ(narrow.values(), wide.result(cpu()).values());
  }
}

TEST(ForwardLinear, a_quantised_weight_gives_the_same_bits) {
  for (int round = 0; round < 10; ++round) {
    const Forward layer = any_forward();
    const std::size_t bytes = hot::forward_weight_bytes(layer.O, layer.I, layer.spec);
    std::vector<char> memory(bytes + 16, static_cast<char>(0xA5));
    char* const data =
        memory.data() + (16 - reinterpret_cast<std::uintptr_t>(memory.data()) % 16) % 16;
    const hot::ConstQuantizedWeight w =
        hot::quantize_forward_weight(cpu(), layer.w_view(), layer.spec, {data, bytes});
    EXPECT_EQ(w.format, hot::forward_weight_format(layer.spec));
    Floats y(layer.L, layer.O, DType::f32);
    Scratch scratch(
        hot::forward_linear_workspace(cpu(), {layer.L, layer.O, layer.I}, layer.spec, true));
    hot::forward_linear(cpu(), layer.x_view(), w, layer.bias_view(), layer.spec, y.view(),
                        scratch.workspace());
    EXPECT_EQ(y.values(), layer.result(cpu()).values());

    hot::ConstQuantizedWeight other = w;
    other.format ^= 1;
    expect_error(hot::ErrorCode::invalid_argument, {"w was made by quantize_forward_weight"}, [&] {
      hot::forward_linear(cpu(), layer.x_view(), other, no_bias, layer.spec, y.view(),
                          scratch.workspace());
    });
  }
}

TEST(ForwardLinear, nan_and_infinity_are_seen) {
  Forward layer(20, 30, 100, 64);
  layer.x.at(3, 7) = std::numeric_limits<float>::infinity();
  layer.x.at(5, 99) = std::numeric_limits<float>::quiet_NaN();
  layer.w.at(11, 0) = -std::numeric_limits<float>::infinity();
  layer.bias[4] = std::numeric_limits<float>::infinity();
  const Floats y = layer.result(cpu());
  for (std::int64_t l = 0; l < layer.L; ++l) {
    for (std::int64_t o = 0; o < layer.O; ++o) {
      const bool lost = l == 3 || l == 5 || o == 11;
      EXPECT_EQ(std::isnan(y.at(l, o)), lost) << l << " " << o;
      EXPECT_EQ(std::isinf(y.at(l, o)), !lost && o == 4) << l << " " << o;
    }
  }
}

TEST(ForwardLinear, empty_arrays) {
  const Forward no_features(3, 4, 0, 64);
  for (const float value : no_features.result(cpu(), false).values()) EXPECT_EQ(value, 0.0F);
  const Floats y = no_features.result(cpu());
  for (std::int64_t o = 0; o < 4; ++o) {
    EXPECT_EQ(y.at(2, o), no_features.bias[static_cast<std::size_t>(o)]);
  }
  Forward(0, 4, 8, 16).result(cpu());
  Forward(4, 0, 8, 16).result(cpu());
}

TEST(ForwardLinear, bad_arguments_are_named) {
  const Forward layer(6, 5, 32, 16);
  Floats y(6, 5, DType::f32);
  const auto code = hot::ErrorCode::invalid_argument;
  const auto call = [&](const ConstTensorView& x, const ConstTensorView& w,
                        const ConstTensorView& bias, const ForwardLinearSpec& spec,
                        const TensorView& out) {
    Scratch scratch(1 << 20);
    hot::forward_linear(cpu(), x, w, bias, spec, out, scratch.workspace());
  };
  const ConstTensorView x = layer.x_view(), w = layer.w_view(), bias = layer.bias_view();
  expect_error(code, {"forward_linear", "hadamard_block is 3"},
               [&] { call(x, w, bias, {3}, y.view()); });
  expect_error(code, {"hadamard_block is 512"}, [&] { call(x, w, bias, {512}, y.view()); });
  const Forward other(6, 5, 31, 16);
  expect_error(code, {"w has shape (5, 31)"},
               [&] { call(x, other.w_view(), bias, layer.spec, y.view()); });
  const std::vector<float> long_bias(6);
  expect_error(code, {"bias has shape (6,)", "(5,)"},
               [&] { call(x, w, as_vector(long_bias, DType::f32), layer.spec, y.view()); });
  Floats wide(6, 6, DType::f32);
  expect_error(code, {"y has shape (6, 6)", "(6, 5)"},
               [&] { call(x, w, bias, layer.spec, wide.view()); });
  Floats square = floats(32, 32, normal(1024));
  expect_error(code, {"y", "x"},
               [&] { call(square.view(), square.view(), no_bias, layer.spec, square.view()); });
  expect_error(hot::ErrorCode::workspace_too_small, {"workspace"},
               [&] { hot::forward_linear(cpu(), x, w, bias, layer.spec, y.view(), {}); });
  const Floats& untouched = y;
  EXPECT_EQ(untouched.values(), Floats(6, 5, DType::f32).values());
}

TEST(ForwardLinear, supported_says_why_not) {
  EXPECT_TRUE(hot::forward_supported(cpu(), {8, 8, 8}, {}).ok);
  const hot::Support block = hot::forward_supported(cpu(), {8, 8, 8}, {48});
  EXPECT_FALSE(block.ok);
  EXPECT_NE(block.why.find("hadamard_block is 48"), std::string::npos) << block.why;
  EXPECT_FALSE(hot::forward_supported(cpu(), {-1, 8, 8}, {}).ok);
}
