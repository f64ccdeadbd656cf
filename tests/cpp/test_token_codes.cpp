// Storages token8 and token4, one code a value (docs/numerics.md).
#include <string>
#include <vector>

#include "golden.h"
#include "support.h"

using namespace hot_test;
using hot::BackwardLinearSpec;
using hot::Granularity;
using hot::Rounding;
using hot::Storage;

namespace {

constexpr Storage storages[] = {Storage::token8, Storage::token4, Storage::token2};

BackwardLinearSpec spec_of(Storage storage) {
  BackwardLinearSpec spec;
  spec.hadamard_block = 64;
  spec.gx_rounding = Rounding::nearest;
  spec.gw_scale = Granularity::token;
  spec.storage = storage;
  if (storage == Storage::token8) spec.x_rounding = Rounding::nearest;
  return spec;
}

// What was kept and every gradient, as bytes.
std::vector<char> bytes_of(Layer& layer) {
  std::vector<char> all(layer.saved_data(), layer.saved_data() + layer.layout.bytes);
  const auto add = [&](const std::vector<float>& values) {
    const auto* const from = reinterpret_cast<const char*>(values.data());
    all.insert(all.end(), from, from + values.size() * sizeof(float));
  };
  add(layer.gx.values());
  add(layer.gw.values());
  add(layer.gb);
  return all;
}

}  // namespace

TEST(TokenCodes, golden) {
  for_golden("one_code", "stored", [](const GoldenCase& one, const hot::Context& context) {
    const GoldenInput gy(one.arrays.at("gy")), w(one.arrays.at("w")), x(one.arrays.at("x"));
    const BackwardLinearSpec spec = golden_spec(one);
    const GoldenSaved saved(x.view, spec, context.with_key(one.key("saved_key")));
    GoldenOutput::check_memory(one.arrays.at("stored"), saved.data, "stored");
    if (one.arrays.count("back") != 0) {
      GoldenOutput back(one.arrays.at("back"));
      hot::decompress_activation(context, saved.view, 0, x.view.shape[0], spec, back.view);
      back.check("back");
    }
    const hot::LinearShape shape{gy.view.shape[0], gy.view.shape[1], w.view.shape[1]};
    const bool gx_wanted = one.arrays.count("gx") != 0, gw_wanted = one.arrays.count("gw") != 0;
    const bool accumulate = one.arrays.count("gw_before") != 0;
    GoldenOutput gx(one.arrays.at(gx_wanted ? "gx" : "x")),
        gw(one.arrays.at(gw_wanted ? "gw" : "w"));
    if (accumulate) {
      gw.input.memory = one.arrays.at("gw_before").bytes();
      gw.view.data = gw.input.memory.data();
    }
    Scratch scratch(hot::backward_linear_workspace(context, shape, spec, gx_wanted, gw_wanted));
    const hot::BackwardOutputs outputs{gx_wanted ? &gx.view : nullptr,
                                       gw_wanted ? &gw.view : nullptr, nullptr, accumulate};
    if (one.number("quantized_weight") != 0) {
      const std::size_t bytes =
          hot::quantized_weight_bytes(shape.out_features, shape.in_features, spec);
      Scratch memory(bytes + 16), more(hot::quantize_weight_workspace(context, shape.out_features,
                                                                      shape.in_features, spec));
      const auto address = reinterpret_cast<std::uintptr_t>(memory.memory.data());
      const hot::ConstQuantizedWeight weight = hot::quantize_weight(
          context, w.view, spec, {memory.memory.data() + (16 - address % 16) % 16, bytes},
          more.workspace());
      hot::backward_linear(context, gy.view, weight, saved.view, spec, outputs,
                           scratch.workspace());
    } else {
      hot::backward_linear(context, gy.view, w.view, saved.view, spec, outputs,
                           scratch.workspace());
    }
    if (gx_wanted) gx.check("gx");
    if (gw_wanted) gw.check("gw");
  });
}

TEST(TokenCodes, same_on_every_path) {
  const std::int64_t sizes[][3] = {{197, 67, 50}, {16, 64, 128}, {600, 130, 70}, {3, 5, 4200}};
  for (const Storage storage : storages) {
    for (const auto& size : sizes) {
      Layer layer(size[0], size[1], size[2], spec_of(storage));
      std::vector<char> expected;
      for (const hot::Isa isa : isas()) {
        for (const int threads : {1, 3, 8}) {
          layer.run(cpu(threads).with_isa(isa));
          if (expected.empty()) expected = bytes_of(layer);
          ASSERT_EQ(bytes_of(layer), expected)
              << hot::storage_name(storage) << " " << hot::isa_name(isa) << " " << threads;
        }
      }
      EXPECT_TRUE(layer.gx.margins_intact());
      EXPECT_TRUE(layer.gw.margins_intact());
    }
  }
}

TEST(TokenCodes, a_share_of_the_tokens) {
  for (const Storage storage : storages) {
    BackwardLinearSpec spec = spec_of(storage);
    spec.low_rank.basis = hot::Basis::sketch;
    spec.low_rank.block = 16;
    spec.low_rank.rank = 8;
    Layer layer(200, 60, 70, spec);
    for (std::int64_t l = 0; l < layer.L; ++l) {  // half contribute nothing
      for (std::int64_t o = 0; l % 2 == 0 && o < layer.O; ++o) layer.gy.at(l, o) = 0;
    }
    std::vector<char> expected;
    for (const hot::Isa isa : isas()) {
      for (const int threads : {1, 3}) {
        layer.run(cpu(threads).with_isa(isa));
        if (expected.empty()) expected = bytes_of(layer);
        ASSERT_EQ(bytes_of(layer), expected) << hot::isa_name(isa) << " " << threads;
      }
    }
    BackwardLinearSpec whole = spec_of(storage);
    EXPECT_EQ(hot::saved_format(spec), hot::saved_format(whole));
    spec.low_rank.layout = {4, 4, 0};
    expect_error(hot::ErrorCode::invalid_argument, {"token_grid", "none"},
                 [&] { hot::saved_layout(200, 70, spec); });
    spec.low_rank.layout = {};
    expect_error(hot::ErrorCode::unsupported, {"2147483648 tokens", "sketch"}, [&] {
      hot::backward_linear_workspace(cpu(), {std::int64_t{1} << 31, 4, 4}, spec, true, true);
    });
  }
}

TEST(TokenCodes, empty) {
  const std::int64_t sizes[][3] = {{0, 5, 7}, {5, 0, 7}, {5, 7, 0}, {0, 0, 0}};
  for (const Storage storage : storages) {
    for (const auto& size : sizes) {
      Layer layer(size[0], size[1], size[2], spec_of(storage));
      layer.run(cpu());
      for (const float got : layer.gx.values()) EXPECT_EQ(got, 0.0F);
      for (const float got : layer.gw.values()) EXPECT_EQ(got, 0.0F);
      if (layer.L > 0) continue;
      for (const float got : layer.gb) EXPECT_EQ(got, 0.0F);
    }
  }
}

TEST(TokenCodes, errors) {
  const struct {
    const char *field, *expected;
    void (*spoil)(BackwardLinearSpec&);
  } cases[] = {
      {"hadamard_block", "16, 32 or 64", [](auto& s) { s.hadamard_block = 128; }},
      {"hadamard_block", "16, 32 or 64", [](auto& s) { s.hadamard_block = 8; }},
      {"gx_bits", "8", [](auto& s) { s.gx_bits = 4; }},
      {"gx_scale", "token", [](auto& s) { s.gx_scale = Granularity::tensor; }},
      {"weight_scale", "channel", [](auto& s) { s.weight_scale = Granularity::tensor; }},
      {"gw_scale", "token", [](auto& s) { s.gw_scale = Granularity::channel; }},
      {"gw_rounding", "nearest or stochastic",
       [](auto& s) { s.gw_rounding = Rounding::pseudo_stochastic; }},
      {"x_rounding", "stochastic", [](auto& s) { s.x_rounding = Rounding::pseudo_stochastic; }},
      {"x_scale", "channel", [](auto& s) { s.x_scale = Granularity::tensor; }},
      {"equalize_tokens", "false", [](auto& s) { s.equalize_tokens = true; }},
      {"storage", "basis full", [](auto& s) { s.low_rank.basis = hot::Basis::lowpass; }},
  };
  for (const Storage storage : storages) {
    for (const auto& one : cases) {
      BackwardLinearSpec spec = spec_of(storage);
      one.spoil(spec);
      const auto expect = [&](const std::function<void()>& call) {
        expect_error(hot::ErrorCode::invalid_argument,
                     {one.field, one.expected, hot::storage_name(storage)}, call);
      };
      expect([&] { hot::saved_layout(20, 12, spec); });
      expect([&] { hot::backward_linear_workspace(cpu(), {20, 12, 8}, spec, true, true); });
      EXPECT_FALSE(hot::supported(cpu(), {20, 12, 8}, spec).ok);
    }
    EXPECT_TRUE(hot::supported(cpu(), {20, 12, 8}, spec_of(storage)).ok);
    // Formats tell the storages, and blocks that the bytes depend on, apart.
    BackwardLinearSpec narrow = spec_of(storage), plain;
    narrow.hadamard_block = 32;
    EXPECT_NE(hot::saved_format(narrow), hot::saved_format(spec_of(storage)));
    EXPECT_NE(hot::weight_format(narrow), hot::weight_format(spec_of(storage)));
    plain.hadamard_block = 64;
    EXPECT_NE(hot::weight_format(plain), hot::weight_format(spec_of(storage)));
  }
  BackwardLinearSpec nearest = spec_of(Storage::token4);
  nearest.x_rounding = Rounding::nearest;
  expect_error(hot::ErrorCode::invalid_argument, {"x_rounding", "stochastic", "token4"},
               [&] { hot::saved_layout(20, 12, nearest); });
}
