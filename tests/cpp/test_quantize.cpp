#include "golden.h"
#include "support.h"

using namespace hot_test;
using hot::Granularity;
using hot::QuantSpec;
using hot::Rounding;

namespace {

struct Quantised {
  std::vector<std::int8_t> codes;
  std::vector<float> scale;
};

Quantised run_quantize(const hot::Context& context, const Floats& x, const QuantSpec& spec) {
  Bytes q(x.rows(), x.cols(), DType::i8, 3);
  Quantised out;
  out.scale.resize(static_cast<std::size_t>(hot::scale_count(x.rows(), x.cols(), spec.scale)),
                   -1.0F);
  hot::quantize(context, x.view(), spec, q.view(), as_vector(out.scale, DType::f32));
  EXPECT_TRUE(q.margins_intact());
  out.codes = q.values();
  return out;
}

constexpr Granularity granularities[] = {Granularity::tensor, Granularity::row,
                                         Granularity::column};
constexpr Rounding roundings[] = {Rounding::nearest, Rounding::stochastic,
                                  Rounding::pseudo_stochastic};

std::size_t scale_index(Granularity scale, std::int64_t r, std::int64_t c) {
  return static_cast<std::size_t>(scale == Granularity::row      ? r
                                  : scale == Granularity::column ? c
                                                                 : 0);
}

}  // namespace

TEST(Quantize, golden) {
  for_golden("quantize", "codes", [](const GoldenCase& one, const hot::Context& context) {
    const GoldenInput x(one.arrays.at("x"));
    GoldenOutput q(one.arrays.at("codes")), scale(one.arrays.at("scale"));
    const std::string& of = one.text("scale_of");
    const QuantSpec spec{one.number("bits"),
                         of == "row"      ? Granularity::row
                         : of == "column" ? Granularity::column
                                          : Granularity::tensor,
                         golden_rounding(one.text("rounding"))};
    hot::quantize(context, x.view, spec, q.view, scale.view);
    q.check("codes");
    scale.check("scale");
  });
}

TEST(Quantize, error_below_one_step) {
  for (const int bits : {4, 8}) {
    for (const Granularity scale : granularities) {
      for (const Rounding rounding : roundings) {
        const std::int64_t R = random_int(1, 40), C = random_int(1, 300);
        const Floats x = floats(R, C, normal(R * C, 3.0F), 2);
        const Quantised q = run_quantize(cpu(), x, {bits, scale, rounding});
        const float limit = rounding == Rounding::nearest ? 0.5F : 1.0F;
        const int q_max = bits == 4 ? 7 : 127;
        for (std::int64_t r = 0; r < R; ++r) {
          for (std::int64_t c = 0; c < C; ++c) {
            const float s = q.scale[scale_index(scale, r, c)];
            const int code = q.codes[static_cast<std::size_t>(r * C + c)];
            ASSERT_LE(std::abs(code), q_max);
            ASSERT_LE(std::abs(static_cast<float>(code) * s - x.at(r, c)), limit * s * 1.0001F);
          }
        }
      }
    }
  }
}

TEST(Quantize, largest_value_is_the_largest_code) {
  const Floats x = floats(3, 33, normal(99));
  for (const int bits : {4, 8}) {
    for (const Rounding rounding : roundings) {
      const Quantised q = run_quantize(cpu(), x, {bits, Granularity::row, rounding});
      for (std::int64_t r = 0; r < 3; ++r) {
        int largest = 0;
        for (std::size_t c = 0; c < 33; ++c) {
          largest = std::max(largest, std::abs(int{q.codes[static_cast<std::size_t>(r) * 33 + c]}));
        }
        // fl(amax * fl(Q / amax)) may be one ulp below Q, a fraction just below a whole step, which
        // the value's low bits may still round down.
        const int q_max = bits == 4 ? 7 : 127;
        EXPECT_LE(largest, q_max);
        EXPECT_GE(largest, rounding == Rounding::pseudo_stochastic ? q_max - 1 : q_max);
      }
    }
  }
}

TEST(Quantize, zero_stays_zero) {
  for (const Rounding rounding : roundings) {
    std::vector<float> values(64, 0.0F);
    values[5] = 0x1p-101F;  // below the smallest amax
    Quantised q = run_quantize(cpu(), floats(2, 32, values), {8, Granularity::row, rounding});
    EXPECT_EQ(q.codes, std::vector<std::int8_t>(64, 0));
    EXPECT_EQ(q.scale, (std::vector<float>{0.0F, 0.0F}));
    values[5] = 127.0F;
    q = run_quantize(cpu(), floats(2, 32, values), {8, Granularity::tensor, rounding});
    for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(q.codes[i], i == 5 ? 127 : 0);
  }
}

TEST(Quantize, integers_stay) {
  // With amax = Q the scale is 1: integers are codes under every rounding.
  for (const int bits : {4, 8}) {
    const int q_max = bits == 4 ? 7 : 127;
    std::vector<float> values = small_integers(160, q_max);
    values[0] = static_cast<float>(q_max);
    for (const Rounding rounding : roundings) {
      const Quantised q =
          run_quantize(cpu(), floats(1, 160, values), {bits, Granularity::tensor, rounding});
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(static_cast<float>(q.codes[i]), values[i]);
      }
    }
  }
}

TEST(Quantize, non_finite_values_show) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (const Rounding rounding : roundings) {
      std::vector<float> values = normal(3 * 40);
      values[40 + 7] = bad;
      const Quantised q =
          run_quantize(cpu(), floats(3, 40, values), {8, Granularity::row, rounding});
      EXPECT_FALSE(std::isnan(q.scale[0]));
      EXPECT_TRUE(std::isnan(q.scale[1]));
      for (std::size_t c = 40; c < 80; ++c) EXPECT_EQ(q.codes[c], 0);
      const Quantised column =
          run_quantize(cpu(), floats(3, 40, values), {8, Granularity::column, rounding});
      for (std::size_t c = 0; c < 40; ++c) {
        EXPECT_EQ(std::isnan(column.scale[c]), c == 7);
        if (c == 7) {
          EXPECT_EQ(column.codes[47], 0);
        }
      }
      EXPECT_TRUE(std::isnan(
          run_quantize(cpu(), floats(3, 40, values), {4, Granularity::tensor, rounding}).scale[0]));
    }
  }
}

TEST(Quantize, stochastic_rounding_is_unbiased) {
  const std::int64_t C = 512;
  std::vector<float> values = normal(C);
  values[0] = 8.0F;
  const Floats x = floats(1, C, values);
  for (const int bits : {4, 8}) {
    constexpr int draws = 2000;
    std::vector<double> sum(static_cast<std::size_t>(C), 0.0);
    float scale = 0;
    for (int draw = 0; draw < draws; ++draw) {
      const hot::Context context = cpu(1).with_key({run_seed(), static_cast<unsigned>(draw), 0});
      const Quantised q = run_quantize(context, x, {bits, Granularity::row, Rounding::stochastic});
      scale = q.scale[0];
      for (std::size_t c = 0; c < q.codes.size(); ++c) sum[c] += q.codes[c];
    }
    double total = 0;
    for (std::size_t c = 0; c < sum.size(); ++c) {
      const double target = static_cast<double>(values[c]) / static_cast<double>(scale);
      const double fraction = target - std::floor(target);
      // One draw is a coin of this variance; eight random bits leave a bias of at most 1/512.
      const double error = std::sqrt(fraction * (1 - fraction) / draws) + 1e-9;
      const double z = (sum[c] / draws - target) / error;
      ASSERT_LT(std::abs(sum[c] / draws - target), 5.5 * error + 1.0 / 512) << "column " << c;
      total += std::max(-10.0, std::min(10.0, z));
    }
    EXPECT_LT(std::abs(total) / std::sqrt(static_cast<double>(C)), 6.0);
  }
}

TEST(Quantize, same_key_same_bits) {
  const Floats x = floats(9, 131, normal(9 * 131));
  const QuantSpec spec{4, Granularity::row, Rounding::stochastic};
  const auto first = run_quantize(cpu(), x, spec).codes;
  EXPECT_EQ(run_quantize(cpu(8), x, spec).codes, first);
  EXPECT_NE(run_quantize(cpu().with_key({1, 2, 3}), x, spec).codes, first);
  EXPECT_NE(run_quantize(cpu().with_key({0x123456789ABCDEFULL, 8, 5}), x, spec).codes, first);
  EXPECT_NE(run_quantize(cpu().with_key({0x123456789ABCDEFULL, 7, 6}), x, spec).codes, first);
}

TEST(Quantize, counter_is_added_to_the_offset) {
  const Floats x = floats(9, 131, normal(9 * 131));
  const QuantSpec spec{4, Granularity::row, Rounding::stochastic};
  for (int round = 0; round < 8; ++round) {
    CountedKey key;
    const hot::Context counting = cpu().with_key(key.counted());
    const auto expected = run_quantize(cpu().with_key(key.plain), x, spec).codes;
    EXPECT_EQ(run_quantize(counting, x, spec).codes, expected);
    ++key.counter;  // is read at each call
    EXPECT_NE(run_quantize(counting, x, spec).codes, expected);
  }
}

TEST(Quantize, same_bits_on_every_path) {
  for (const int bits : {4, 8}) {
    for (const Granularity scale : granularities) {
      for (const Rounding rounding : roundings) {
        const std::int64_t R = random_int(1, 30), C = random_int(1, 5000);
        const Floats x = floats(R, C, normal(R * C));
        const QuantSpec spec{bits, scale, rounding};
        const Quantised expected = run_quantize(cpu(1).with_isa(hot::Isa::plain), x, spec);
        for (const hot::Isa isa : isas()) {
          const Quantised q = run_quantize(cpu(8).with_isa(isa), x, spec);
          EXPECT_EQ(q.codes, expected.codes) << hot::isa_name(isa);
          EXPECT_EQ(q.scale, expected.scale) << hot::isa_name(isa);
        }
      }
    }
  }
}

TEST(Quantize, packed_codes) {
  for (const std::int64_t C : {1, 2, 33, 4096, 4099}) {
    const Floats x = floats(3, C, normal(3 * C));
    const QuantSpec spec{4, Granularity::row, Rounding::stochastic};
    const Quantised q = run_quantize(cpu(), x, spec);
    Bytes packed(3, (C + 1) / 2, DType::i4x2), back(3, C, DType::i8);
    std::vector<float> scale(3);
    hot::quantize(cpu(), x.view(), spec, packed.view(), as_vector(scale, DType::f32));
    const Bytes& input = packed;
    hot::unpack_int4(cpu(), input.view(), back.view());
    EXPECT_EQ(back.values(), q.codes);
    EXPECT_EQ(scale, q.scale);
  }
}

TEST(Quantize, dequantize_multiplies) {
  for (const Granularity scale : granularities) {
    const Floats x = floats(5, 21, normal(105));
    const QuantSpec spec{8, scale, Rounding::nearest};
    Bytes q(5, 21, DType::i8);
    std::vector<float> s(static_cast<std::size_t>(hot::scale_count(5, 21, scale)));
    hot::quantize(cpu(), x.view(), spec, q.view(), as_vector(s, DType::f32));
    Floats out(5, 21, DType::f32, 2);
    const Bytes& codes_in = q;
    const std::vector<float>& scales_in = s;
    hot::dequantize(cpu(), codes_in.view(), as_vector(scales_in, DType::f32), scale, out.view());
    for (std::int64_t r = 0; r < 5; ++r) {
      for (std::int64_t c = 0; c < 21; ++c) {
        EXPECT_EQ(out.at(r, c), static_cast<float>(q.at(r, c)) * s[scale_index(scale, r, c)]);
      }
    }
    EXPECT_TRUE(out.margins_intact());
  }
}

TEST(Quantize, empty) {
  EXPECT_TRUE(run_quantize(cpu(), Floats(0, 5, DType::f32), {8, Granularity::row}).codes.empty());
  EXPECT_EQ(run_quantize(cpu(), Floats(4, 0, DType::f32), {8, Granularity::row}).scale,
            std::vector<float>(4, 0.0F));
}
