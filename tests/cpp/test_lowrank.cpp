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
