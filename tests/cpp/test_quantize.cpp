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

constexpr Granularity granularities[] = {Granularity::tensor, Granularity::token,
                                         Granularity::channel};
constexpr Rounding roundings[] = {Rounding::nearest, Rounding::stochastic,
                                  Rounding::pseudo_stochastic};

}  // namespace

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
