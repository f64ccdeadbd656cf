// Storages token8, token4 and token2, one code a value (docs/numerics.md): what they have beside
// others. Golden values, paths and empty layers are in test_backward_linear.cpp.
#include <string>
#include <vector>

#include "support.h"

using namespace hot_test;
using hot::BackwardLinearSpec;
using hot::Granularity;
using hot::Rounding;
using hot::Storage;

TEST(TokenCodes, a_share_of_the_tokens) {
  for (const Storage storage : token_storages) {
    BackwardLinearSpec spec = token_spec(storage);
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
        if (expected.empty()) expected = layer.bytes();
        ASSERT_EQ(layer.bytes(), expected) << hot::isa_name(isa) << " " << threads;
      }
    }
    BackwardLinearSpec whole = token_spec(storage);
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
      {"gx_rounding", "nearest or stochastic",
       [](auto& s) { s.gx_rounding = Rounding::pseudo_stochastic; }},
      {"gw_rounding", "nearest or stochastic",
       [](auto& s) { s.gw_rounding = Rounding::pseudo_stochastic; }},
      {"x_rounding", "stochastic", [](auto& s) { s.x_rounding = Rounding::pseudo_stochastic; }},
      {"x_scale", "channel", [](auto& s) { s.x_scale = Granularity::tensor; }},
      {"equalize_tokens", "false", [](auto& s) { s.equalize_tokens = true; }},
      {"storage", "basis full", [](auto& s) { s.low_rank.basis = hot::Basis::lowpass; }},
  };
  for (const Storage storage : token_storages) {
    for (const auto& one : cases) {
      BackwardLinearSpec spec = token_spec(storage);
      one.spoil(spec);
      const auto expect = [&](const std::function<void()>& call) {
        expect_error(hot::ErrorCode::invalid_argument,
                     {one.field, one.expected, hot::storage_name(storage)}, call);
      };
      expect([&] { hot::saved_layout(20, 12, spec); });
      expect([&] { hot::backward_linear_workspace(cpu(), {20, 12, 8}, spec, true, true); });
      EXPECT_FALSE(hot::supported(cpu(), {20, 12, 8}, spec).ok);
    }
    EXPECT_TRUE(hot::supported(cpu(), {20, 12, 8}, token_spec(storage)).ok);
    // Formats tell the storages, and blocks that the bytes depend on, apart.
    BackwardLinearSpec narrow = token_spec(storage), plain;
    narrow.hadamard_block = 32;
    EXPECT_NE(hot::saved_format(narrow), hot::saved_format(token_spec(storage)));
    EXPECT_NE(hot::weight_format(narrow), hot::weight_format(token_spec(storage)));
    plain.hadamard_block = 64;
    EXPECT_NE(hot::weight_format(plain), hot::weight_format(token_spec(storage)));
  }
  BackwardLinearSpec nearest = token_spec(Storage::token4);
  nearest.x_rounding = Rounding::nearest;
  expect_error(hot::ErrorCode::invalid_argument, {"x_rounding", "stochastic", "token4"},
               [&] { hot::saved_layout(20, 12, nearest); });
}
