#include "hot/weight_int4.h"

#include <algorithm>

#include "support.h"

using namespace hot_test;
using hot::WeightInt4Spec;

namespace {

// A random weight with its exponents and results.
struct Weight {
  WeightInt4Spec spec{{forward_block(random_int(0, 7))}, random_int(0, 1) == 0 ? 32 : 64};
  std::int64_t O = random_int(0, 40), I = any_features();
  Floats w = floats(O, I, normal(O* I), 3);
  Buffer exponents{static_cast<std::size_t>(I)};
  bool with_exponents = random_int(0, 1) == 0;

  Weight() {
    for (std::int64_t i = 0; i < I; ++i) {
      exponents.data()[i] = static_cast<char>(4 * random_int(-5, 5));
    }
  }
  std::int64_t any_features() const {
    const std::int64_t block = spec.forward.hadamard_block;
    return random_int(0, 6) * std::max<std::int64_t>(block, spec.group) +
           (block >= spec.group ? random_int(0, block - 1) : 0);
  }
  ConstTensorView exponents_view() {
    if (!with_exponents) return {};
    return hot::vector(static_cast<const void*>(exponents.data()), DType::i8, I);
  }
  // Codes, then expanded codes.
  std::vector<char> run(const hot::Context& context) {
    Buffer codes(hot::weight_int4_bytes(O, I, spec));
    Buffer expanded(hot::forward_weight_bytes(O, I, spec.forward));
    const Floats& from = w;
    const hot::ConstQuantizedWeight q = hot::quantize_weight_int4(
        context, from.view(), exponents_view(), spec, {codes.data(), codes.bytes()});
    const hot::ConstQuantizedWeight e =
        hot::expand_weight_int4(context, q, spec, {expanded.data(), expanded.bytes()});
    EXPECT_TRUE(codes.margin_intact() && expanded.margin_intact());
    EXPECT_EQ(q.format, hot::weight_int4_format(spec));
    EXPECT_EQ(e.format, hot::forward_weight_format(spec.forward));
    EXPECT_EQ(e.out_features, O);
    EXPECT_EQ(e.in_features, I);
    std::vector<char> all = codes.values();
    const std::vector<char> more = expanded.values();
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
};

}  // namespace

TEST(WeightInt4, same_bits_with_all_threads_and_instruction_sets) {
  for (int round = 0; round < 40; ++round) {
    Weight weight;
    const std::vector<char> expected = weight.run(cpu(1));
    for (const hot::Isa isa : isas()) {
      EXPECT_TRUE(weight.run(cpu(3).with_isa(isa)) == expected) << hot::isa_name(isa);
    }
  }
}

// Exponents of zero are as none, and larger ones scale features exactly.
TEST(WeightInt4, exponents_scale_features) {
  for (int round = 0; round < 20; ++round) {
    Weight weight;
    weight.with_exponents = true;
    const std::vector<char> expected = weight.run(cpu());
    for (std::int64_t i = 0; i < weight.I; ++i) {
      for (std::int64_t o = 0; o < weight.O; ++o) {
        weight.w.at(o, i) = std::ldexp(weight.w.at(o, i), weight.exponents.data()[i] / 4);
      }
      weight.exponents.data()[i] = 0;
    }
    EXPECT_TRUE(weight.run(cpu()) == expected);
    weight.with_exponents = false;
    EXPECT_TRUE(weight.run(cpu()) == expected);
  }
}

// x divided by powers of two has the codes of x with exponents.
TEST(WeightInt4, exponents_divide_features_of_an_input) {
  for (int round = 0; round < 20; ++round) {
    Weight weight;  // its matrix is x here
    const auto codes = [&](const ConstTensorView& exponents) {
      const Floats& x = weight.w;
      Buffer out(hot::forward_input_bytes(weight.O, weight.I, weight.spec.forward));
      hot::quantize_forward_input(cpu(), x.view(), weight.spec.forward, {out.data(), out.bytes()},
                                  exponents);
      return out.values();
    };
    weight.with_exponents = true;
    const std::vector<char> expected = codes(weight.exponents_view());
    for (std::int64_t i = 0; i < weight.I; ++i) {
      for (std::int64_t o = 0; o < weight.O; ++o) {
        weight.w.at(o, i) = std::ldexp(weight.w.at(o, i), -weight.exponents.data()[i] / 4);
      }
    }
    EXPECT_TRUE(codes({}) == expected);
  }
}
