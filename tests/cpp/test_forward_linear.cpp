#include "hot/forward_linear.h"

#include <algorithm>

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
          forward_block(random_int(0, 7))};
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
    hot::quantize(cpu(), padded.view(), {8, hot::Granularity::token, hot::Rounding::nearest},
                  codes.view(), as_vector(scale, DType::f32));
  }
};

// A buffer of so many bytes, aligned to 16 and poisoned, with a margin after it.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes)
      : bytes_(bytes), memory_(bytes + 16 + margin, static_cast<char>(0xA5)) {}
  char* data() {
    return memory_.data() + (16 - reinterpret_cast<std::uintptr_t>(memory_.data()) % 16) % 16;
  }
  std::size_t bytes() const { return bytes_; }
  // With the margin.
  std::vector<char> content() { return {data(), data() + bytes_ + margin}; }
  bool untouched() {
    const std::vector<char> all = content();
    return std::all_of(all.begin(), all.end(),
                       [](char one) { return one == static_cast<char>(0xA5); });
  }

 private:
  static constexpr std::size_t margin = 32;
  std::size_t bytes_;
  std::vector<char> memory_;
};

// x [tokens, in] of a type, its rows `gap` elements longer, and how it is kept.
struct Input {
  std::int64_t L, I;
  Matrix<std::uint16_t> half;
  Floats wide;
  DType dtype;
  ForwardLinearSpec forward;
  hot::BackwardLinearSpec spec;

  Input(std::int64_t tokens, std::int64_t in, DType type, std::int64_t gap, int block,
        hot::BackwardLinearSpec how)
      : L(tokens),
        I(in),
        half(L, I, type, gap),
        wide(floats(L, I, normal(L * I, 3.0F), gap)),
        dtype(type),
        forward{block},
        spec(std::move(how)) {
    if (dtype != DType::f32) hot::fwht(cpu(), wide.view(), 1, 1, half.view());  // converts
  }

  ConstTensorView view() const { return dtype == DType::f32 ? wide.view() : half.view(); }
  std::string text() const {
    return std::to_string(L) + " x " + std::to_string(I) + " of " + hot::dtype_name(dtype) +
           ", block " + std::to_string(forward.hadamard_block) + ", x as " +
           hot::storage_name(spec.storage) + (spec.equalize_tokens ? " equalised" : "");
  }

  // Whether one call leaves what two leave, to the byte, and what it returns fits to it.
  void check(const hot::Context& context) const {
    SCOPED_TRACE(text());
    const hot::SavedLayout layout = hot::saved_layout(L, I, spec);
    const std::size_t bytes = hot::forward_input_bytes(L, I, forward);
    Buffer codes(bytes), kept(layout.bytes), alone(bytes), saved(layout.bytes);
    const hot::ConstQuantizedInput quantized =
        hot::quantize_forward_input(context, view(), forward, {alone.data(), bytes});
    Scratch scratch(hot::compress_activation_workspace(context, L, I, spec));
    const hot::ConstSavedActivation compressed = hot::compress_activation(
        context, view(), spec, {saved.data(), layout.bytes}, scratch.workspace());
    const hot::ForwardInput both =
        hot::quantize_forward_input(context, view(), forward, {codes.data(), bytes}, spec,
                                    {kept.data(), layout.bytes}, scratch.workspace());
    EXPECT_EQ(codes.content(), alone.content());
    EXPECT_EQ(kept.content(), saved.content());
    EXPECT_EQ(both.quantized.data, codes.data());
    for (const hot::ConstQuantizedInput& one : {quantized, both.quantized}) {
      EXPECT_EQ(one.bytes, bytes);
      EXPECT_EQ(one.tokens, L);
      EXPECT_EQ(one.in_features, I);
      EXPECT_EQ(one.format, hot::forward_input_format(forward));
    }
    EXPECT_EQ(both.saved.data, kept.data());
    EXPECT_EQ(both.saved.bytes, compressed.bytes);
    EXPECT_EQ(both.saved.tokens, L);
    EXPECT_EQ(both.saved.in_features, I);
    EXPECT_EQ(both.saved.key.offset, compressed.key.offset);
    EXPECT_EQ(both.saved.format, compressed.format);
    if (bytes == 0) return;
    // The codes are those of the stages of their own; rows are padded to 16.
    const Codes expected(converted(), forward.hadamard_block);
    const std::int64_t k = expected.codes.cols(), pitch = rounded_up(k, 16);
    for (std::int64_t l = 0; l < L; ++l) {
      EXPECT_EQ(std::memcmp(codes.data() + l * pitch, &expected.codes.at(l, 0),
                            static_cast<std::size_t>(k)),
                0)
          << "token " << l;
    }
    EXPECT_EQ(std::memcmp(codes.data() + L * pitch, expected.scale.data(),
                          expected.scale.size() * sizeof(float)),
              0);
  }

 private:
  Floats converted() const {
    Floats out(L, I, DType::f32);
    hot::fwht(cpu(), view(), 1, 1, out.view());
    return out;
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

TEST(ForwardLinear, a_quantised_input_gives_the_same_bits) {
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
        if (quantized) {
          hot::forward_linear(context, x, w, layer.bias_view(), layer.spec, y.view(),
                              scratch.workspace());
        } else {
          hot::forward_linear(context, x, layer.w_view(), layer.bias_view(), layer.spec, y.view(),
                              scratch.workspace());
        }
        EXPECT_EQ(y.values(), expected) << hot::isa_name(isa) << " " << quantized;
        EXPECT_TRUE(y.margins_intact());
      }
    }
    EXPECT_LE(hot::forward_linear_workspace(cpu(), shape, layer.spec, false, true),
              hot::forward_linear_workspace(cpu(), shape, layer.spec, false, false));
  }
}

TEST(ForwardLinear, an_input_that_is_kept_has_the_bits_of_both_calls) {
  const DType dtypes[] = {DType::f32, DType::f16, DType::bf16};
  const std::int64_t tokens[] = {0, 1, 2, 3, 16, 17, 63, 64, 65, 97, 131};
  const std::int64_t features[] = {0, 1, 2, 7, 16, 31, 64, 67, 128, 192};
  for (const std::string& name : recipe_names()) {
    for (int round = 0; round < 12; ++round) {
      hot::BackwardLinearSpec spec = recipe(name);
      if (round % 3 == 1) spec.equalize_tokens = !spec.equalize_tokens;
      if (spec.low_rank.basis == hot::Basis::full && round % 2 == 0) {
        spec.storage = round % 4 == 0 ? hot::Storage::int8 : hot::Storage::int4;
      }
      const Input input(tokens[random_int(0, 10)], features[random_int(0, 9)],
                        dtypes[random_int(0, 2)], random_int(0, 3), forward_block(random_int(0, 7)),
                        spec);
      input.check(cpu(static_cast<int>(random_int(1, 3)))
                      .with_isa(isas()[static_cast<std::size_t>(
                          random_int(0, static_cast<std::int64_t>(isas().size()) - 1))]));
    }
  }
  // No tokens, or no features: nothing but what such an x has.
  for (const DType dtype : dtypes) {
    for (const auto& [L, I] : {std::pair<std::int64_t, std::int64_t>{0, 5}, {5, 0}, {0, 0}}) {
      for (const std::string& name : recipe_names()) {
        Input(L, I, dtype, 0, 64, recipe(name)).check(cpu());
      }
    }
  }
}

TEST(ForwardLinear, bad_inputs_are_named) {
  const hot::BackwardLinearSpec spec = recipe("default");
  const Input input(48, 40, DType::f32, 1, 16, spec);
  const ForwardLinearSpec& forward = input.forward;
  const auto code = hot::ErrorCode::invalid_argument;
  const std::size_t bytes = hot::forward_input_bytes(48, 40, forward);
  const std::size_t saved_bytes = hot::saved_layout(48, 40, spec).bytes;
  Buffer out(bytes + 16), saved(saved_bytes + 16);
  Scratch scratch(1 << 16);
  const auto refused = [&](const std::vector<std::string>& parts, const ConstTensorView& x,
                           const ForwardLinearSpec& of, const hot::QuantizedInput& to,
                           const hot::BackwardLinearSpec& how, const hot::SavedActivation& keep,
                           const hot::Workspace& workspace) {
    expect_error(code, parts,
                 [&] { hot::quantize_forward_input(cpu(), x, of, to, how, keep, workspace); });
    EXPECT_TRUE(out.untouched() && saved.untouched()) << parts.back();
  };
  const hot::QuantizedInput to{out.data(), bytes};
  const hot::SavedActivation keep{saved.data(), saved_bytes};
  const ConstTensorView x = input.view();
  const auto workspace = scratch.workspace();
  const char* const call = "quantize_forward_input";
  refused({call, "hadamard_block is 48"}, x, {48}, to, spec, keep, workspace);
  refused({call, "x has"}, hot::vector(x.data, DType::f32, 40), forward, to, spec, keep, workspace);
  refused({call, "x is int8"}, hot::matrix(static_cast<const void*>(x.data), DType::i8, 48, 40),
          forward, to, spec, keep, workspace);
  refused({call, "out has"}, x, forward, {out.data(), bytes - 1}, spec, keep, workspace);
  refused({call, "out has"}, x, forward, {out.data(), bytes + 1}, spec, keep, workspace);
  refused({call, "out is not aligned"}, x, forward, {out.data() + 8, bytes}, spec, keep, workspace);
  refused({call, "out has 0 bytes"}, x, forward, {nullptr, bytes}, spec, keep, workspace);
  refused({call, "saved has"}, x, forward, to, spec, {saved.data(), saved_bytes - 1}, workspace);
  refused({call, "saved is not aligned"}, x, forward, to, spec, {saved.data() + 4, saved_bytes},
          workspace);
  refused({call, "saved", "out"}, x, forward, to, spec, {out.data(), saved_bytes}, workspace);
  hot::BackwardLinearSpec bad = spec;
  bad.gx_bits = 5;
  refused({call, "gx_bits is 5"}, x, forward, to, bad, keep, workspace);
  bad = recipe("fast");
  bad.low_rank.layout = {5, 5, 0};  // 48 tokens are no whole samples
  refused({"48 tokens", "25"}, x, forward, to, bad, keep, workspace);
  hot::BackwardLinearSpec columns = recipe("fast");
  if (hot::compress_activation_workspace(cpu(), 48, 40, columns) > 0) {
    expect_error(hot::ErrorCode::workspace_too_small, {call, "workspace"},
                 [&] { hot::quantize_forward_input(cpu(), x, forward, to, columns, keep, {}); });
  }
  // The codes, or what is kept, over x.
  Floats large = floats(64, 512, normal(64 * 512));
  const Floats before = large;
  const ConstTensorView all =
      hot::matrix(static_cast<const void*>(large.data()), DType::f32, 48, 40);
  auto* const inside = reinterpret_cast<char*>(large.data()) + 16;
  char* const placed = inside + (16 - reinterpret_cast<std::uintptr_t>(inside) % 16) % 16;
  refused({call, "out", "x"}, all, forward, {placed, bytes}, spec, keep, workspace);
  refused({call, "saved", "x"}, all, forward, to, spec, {placed, saved_bytes}, workspace);
  expect_error(code, {call, "out", "x"},
               [&] { hot::quantize_forward_input(cpu(), all, forward, {placed, bytes}); });
  EXPECT_EQ(large.values(), before.values());
  EXPECT_TRUE(out.untouched() && saved.untouched());

  expect_error(code, {"forward_input_bytes: tokens is -1, in_features 5; expected"},
               [&] { hot::forward_input_bytes(-1, 5, forward); });
  expect_error(code, {"forward_input_bytes", "2^48"},
               [&] { hot::forward_input_bytes(1, std::int64_t{1} << 62, forward); });
  expect_error(code, {"forward_input_bytes", "hadamard_block is 0"},
               [&] { hot::forward_input_bytes(1, 1, {0}); });

  // What forward_linear takes.
  const hot::ConstQuantizedInput quantized = hot::quantize_forward_input(cpu(), x, forward, to);
  const Forward layer(48, 5, 40, 16);
  Floats y(48, 5, DType::f32);
  const std::vector<float> poisoned = y.values();
  const auto fails = [&](const hot::ConstQuantizedInput& given,
                         const std::vector<std::string>& parts, const TensorView& to_y) {
    expect_error(code, parts, [&] {
      hot::forward_linear(cpu(), given, layer.w_view(), no_bias, forward, to_y,
                          scratch.workspace());
    });
    const std::vector<float> now = y.values();
    EXPECT_EQ(std::memcmp(now.data(), poisoned.data(), now.size() * sizeof(float)), 0)
        << parts.back();
  };
  const auto changed = [&](const std::function<void(hot::ConstQuantizedInput&)>& change) {
    hot::ConstQuantizedInput other = quantized;
    change(other);
    return other;
  };
  fails(changed([](auto& q) { q.format ^= 1; }),
        {"forward_linear", "x was made by quantize_forward_input"}, y.view());
  fails(changed([](auto& q) { q.format = 0; }), {"x.format is 0"}, y.view());
  fails(changed([](auto& q) { --q.bytes; }), {"x has"}, y.view());
  fails(changed([](auto& q) { ++q.tokens; }), {"x has"}, y.view());
  fails(changed([](auto& q) { q.tokens = -1; }), {"tokens is -1"}, y.view());
  fails(changed([](auto& q) { q.in_features = -4; }), {"in_features -4"}, y.view());
  fails(changed([](auto& q) { q.data = nullptr; }), {"x has 0 bytes"}, y.view());
  fails(changed([&](auto& q) { q.data = out.data() + 8; }), {"x is not aligned"}, y.view());
  Floats other_y(47, 5, DType::f32);
  fails(quantized, {"y has shape (47, 5)", "(48, 5)"}, other_y.view());
  fails(quantized, {"y", "x"}, hot::matrix(static_cast<void*>(out.data()), DType::f32, 48, 5));
  const Forward wider(48, 5, 41, 16);
  expect_error(code, {"w has shape (5, 41)"}, [&] {
    hot::forward_linear(cpu(), quantized, wider.w_view(), no_bias, forward, y.view(),
                        scratch.workspace());
  });
  expect_error(code, {"x was made by quantize_forward_input"}, [&] {
    hot::forward_linear(cpu(), quantized, layer.w_view(), no_bias, {32}, y.view(),
                        scratch.workspace());
  });
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
  ConstTensorView scalar = bias;  // not an empty view, so not "no bias"
  scalar.ndim = 0;
  expect_error(code, {"bias has 0 dimensions"}, [&] { call(x, w, scalar, layer.spec, y.view()); });
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
