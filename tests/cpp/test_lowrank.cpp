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

TEST(Lowrank, basis_orders) {
  using Rows = std::vector<int>;
  EXPECT_EQ(hot::basis_order(Basis::lowpass, 16),
            (Rows{0, 8, 2, 12, 3, 10, 4, 1, 14, 11, 6, 9, 15, 7, 13, 5}));
  EXPECT_EQ(hot::basis_order(Basis::sequency, 16),
            (Rows{0, 8, 12, 4, 6, 14, 10, 2, 3, 11, 15, 7, 5, 13, 9, 1}));
  EXPECT_EQ(hot::basis_order(Basis::lowpass, 2), (Rows{0, 1}));
  EXPECT_EQ(hot::basis_order(Basis::lowpass, 4), (Rows{0, 2, 1, 3}));
  EXPECT_EQ(hot::basis_order(Basis::lowpass, 8), (Rows{0, 4, 2, 3, 6, 1, 7, 5}));
  const Rows order = hot::basis_order(Basis::lowpass, 32);
  EXPECT_EQ(Rows(order.begin(), order.begin() + 8), (Rows{0, 16, 4, 24, 6, 20, 8, 2}));
}

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

TEST(Lowrank, counter_is_added_to_the_offset) {
  const LowRank spec = low_rank(Basis::sketch, 8);
  const Floats x = floats(100, 9, normal(900));
  for (int round = 0; round < 8; ++round) {
    const CountedKey key;
    EXPECT_EQ(project(cpu().with_key(key.counted()), x, spec, Side::gradient),
              project(cpu().with_key(key.plain), x, spec, Side::gradient));
  }
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

TEST(Lowrank, row_counts) {
  EXPECT_EQ(hot::hla_rows(197, low_rank(Basis::lowpass, 8)), 13 * 8);
  EXPECT_EQ(hot::hla_rows(0, low_rank(Basis::sketch, 8)), 0);
  EXPECT_EQ(hot::hla_rows(197, low_rank(Basis::full, 8)), 197);
  LowRank spec = low_rank(Basis::lowpass, 8);
  spec.layout = {14, 14, 1};
  EXPECT_EQ(hot::hla_rows(2 * 197, spec), (2 * 196 + 15) / 16 * 8 + 2);
}
