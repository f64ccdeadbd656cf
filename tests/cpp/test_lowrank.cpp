#include "golden.h"
#include "support.h"

using namespace hot_test;
using hot::Basis;
using hot::LowRank;
using hot::Side;

namespace {

LowRank low_rank(Basis basis, int rank, int block = 16) {
  LowRank spec;
  spec.basis = basis;
  spec.rank = rank;
  spec.block = block;
  return spec;
}

std::vector<float> project(const hot::Context& context, const Floats& x, const LowRank& spec,
                           Side side) {
  Floats out(hot::hla_rows(x.rows(), spec), x.cols(), DType::f32, 3);
  hot::hla(context, x.view(), spec, side, out.view());
  EXPECT_TRUE(out.margins_intact());
  return out.values();
}

}  // namespace

TEST(Lowrank, golden) {
  for (const GoldenCase& one : golden_cases("lowrank")) {
    if (one.params.count("order") == 0) continue;
    const Basis basis = one.text("basis") == "lowpass" ? Basis::lowpass : Basis::sequency;
    std::vector<int> order;
    for (const std::string& row : one.params.at("order")) order.push_back(std::stoi(row));
    EXPECT_EQ(hot::basis_order(basis, one.number("block")), order) << one.name;
  }
  for_golden("lowrank", "out", [](const GoldenCase& one, const hot::Context& context) {
    const GoldenInput x(one.arrays.at("x"));
    GoldenOutput out(one.arrays.at("out"));
    hot::hla(context, x.view, golden_low_rank(one),
             one.text("side") == "gradient" ? Side::gradient : Side::activation, out.view);
    out.check("out");
  });
}

TEST(Lowrank, same_bits_on_every_path) {
  for (const Basis basis : {Basis::full, Basis::lowpass, Basis::sequency, Basis::sketch}) {
    for (const int rank : {2, 4, 8, 16}) {
      const LowRank spec = low_rank(basis, rank);
      const std::int64_t L = random_int(1, 200), C = random_int(1, 150);
      const Floats x = floats(L, C, normal(L * C), 1);
      const auto expected = project(cpu(1).with_isa(hot::Isa::plain), x, spec, Side::gradient);
      for (const hot::Isa isa : isas()) {
        EXPECT_EQ(project(cpu(8).with_isa(isa), x, spec, Side::gradient), expected)
            << hot::basis_name(basis) << " r=" << rank << " " << hot::isa_name(isa);
      }
    }
  }
}
