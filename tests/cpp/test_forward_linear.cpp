#include "hot/forward_linear.h"

#include <algorithm>

#include "support.h"

using namespace hot_test;
using hot::ForwardLinearSpec;

namespace {

const ConstTensorView no_bias{};

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
          forward_block(random_int(0, 7))};
}

}  // namespace

TEST(ForwardLinear, quantised_operands_give_the_same_bits) {
  for (int round = 0; round < 20; ++round) {
    const Forward layer = any_forward();
    const hot::LinearShape shape{layer.L, layer.O, layer.I};
    Buffer codes(hot::forward_input_bytes(layer.L, layer.I, layer.spec));
    Buffer weight(hot::forward_weight_bytes(layer.O, layer.I, layer.spec));
    const hot::ConstQuantizedInput x = hot::quantize_forward_input(
        cpu(), layer.x_view(), layer.spec, {codes.data(), codes.bytes()});
    const hot::ConstQuantizedWeight w = hot::quantize_forward_weight(
        cpu(), layer.w_view(), layer.spec, {weight.data(), weight.bytes()});
    const std::vector<float> expected = layer.result(cpu()).values();
    for (const hot::Isa isa : isas()) {
      const hot::Context context = cpu(3).with_isa(isa);
      for (const bool quantized : {false, true}) {
        Floats y(layer.L, layer.O, DType::f32, 2);
        Scratch scratch(hot::forward_linear_workspace(context, shape, layer.spec, quantized, true));
        const auto product = [&](const auto& right) {
          hot::forward_linear(context, x, right, layer.bias_view(), layer.spec, y.view(),
                              scratch.workspace());
        };
        quantized ? product(w) : product(layer.w_view());
        EXPECT_EQ(y.values(), expected) << hot::isa_name(isa) << " " << quantized;
        EXPECT_TRUE(y.margins_intact());
      }
    }
    hot::ConstQuantizedWeight other = w;
    other.format ^= 1;
    expect_error(hot::ErrorCode::invalid_argument, {"w was made by quantize_forward_weight"}, [&] {
      Floats y(layer.L, layer.O, DType::f32);
      Scratch scratch(hot::forward_linear_workspace(cpu(), shape, layer.spec, true));
      hot::forward_linear(cpu(), layer.x_view(), other, no_bias, layer.spec, y.view(),
                          scratch.workspace());
    });
    EXPECT_LE(hot::forward_linear_workspace(cpu(), shape, layer.spec, false, true),
              hot::forward_linear_workspace(cpu(), shape, layer.spec, false, false));
  }
}
