#include <algorithm>
#include <numeric>
#include <set>

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

// G^T X / divisor of two projected operands, in fp64.
std::vector<double> product(const std::vector<float>& g, std::int64_t o,
                            const std::vector<float>& x, std::int64_t i, int divisor) {
  std::vector<double> out(static_cast<std::size_t>(o * i), 0.0);
  for (std::size_t k = 0; k < g.size() / static_cast<std::size_t>(o); ++k) {
    for (std::size_t a = 0; a < static_cast<std::size_t>(o); ++a) {
      for (std::size_t b = 0; b < static_cast<std::size_t>(i); ++b) {
        out[a * static_cast<std::size_t>(i) + b] +=
            static_cast<double>(g[k * static_cast<std::size_t>(o) + a]) *
            static_cast<double>(x[k * static_cast<std::size_t>(i) + b]) / divisor;
      }
    }
  }
  return out;
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

TEST(Lowrank, full_rank_keeps_the_product) {
  const std::int64_t L = random_int(33, 90);
  const Floats g = floats(L, 5, normal(L * 5)), x = floats(L, 7, normal(L * 7));
  std::vector<double> plain = product(g.values(), 5, x.values(), 7, 1);
  for (const int block : {2, 4, 8, 16, 32, 64}) {
    for (const Basis basis : {Basis::lowpass, Basis::sequency, Basis::sketch}) {
      const LowRank spec = low_rank(basis, block, block);
      const auto got = product(project(cpu(), g, spec, Side::gradient), 5,
                               project(cpu(), x, spec, Side::activation), 7, block);
      EXPECT_LT(distance(got, plain), 1e-5) << hot::basis_name(basis) << " " << block;
    }
  }
  const LowRank full = low_rank(Basis::full, 16);
  EXPECT_EQ(project(cpu(), x, full, Side::gradient), x.values());
}

TEST(Lowrank, rows_are_rows_of_the_transform) {
  const std::int64_t L = 32, C = 70;
  const Floats x = floats(L, C, normal(L * C));
  Floats transformed(L, C, DType::f32);
  hot::fwht(cpu(), x.view(), 0, 16, transformed.view());
  LowRank spec = low_rank(Basis::lowpass, 16);
  spec.rows = {11, 0, 5};
  const std::vector<float> got = project(cpu(), x, spec, Side::activation);
  const int ascending[3] = {0, 5, 11};
  for (std::int64_t k = 0; k < 6; ++k) {
    for (std::int64_t c = 0; c < C; ++c) {
      ASSERT_EQ(got[static_cast<std::size_t>(k * C + c)],
                transformed.at(k / 3 * 16 + ascending[k % 3], c));
    }
  }
}

TEST(Lowrank, sketch_keeps_a_subspace) {
  // The rows of a sketch are rows of the transform with parity(a & k) = 0 for one a.
  const std::int64_t L = 16 * 40;
  const Floats x = floats(L, 1, small_integers(L, 50));
  Floats transformed(L, 1, DType::f32);
  hot::fwht(cpu(), x.view(), 0, 16, transformed.view());
  const std::vector<float> got = project(cpu(), x, low_rank(Basis::sketch, 8), Side::activation);
  std::set<int> drawn;
  for (int block = 0; block < 40; ++block) {
    int matches = 0;
    for (int a = 1; a < 16; ++a) {
      std::multiset<float> rows, kept(got.begin() + block * 8, got.begin() + block * 8 + 8);
      for (int k = 0; k < 16; ++k) {
        if (sylvester(a, k) == 1) rows.insert(transformed.at(block * 16 + k, 0));
      }
      if (rows == kept) {
        ++matches;
        drawn.insert(a);
      }
    }
    EXPECT_GE(matches, 1) << "block " << block;
    EXPECT_EQ(got[static_cast<std::size_t>(block * 8)], transformed.at(block * 16, 0));
  }
  EXPECT_GT(drawn.size(), 8U);  // 40 draws of 15 subspaces
}

TEST(Lowrank, sketch_is_unbiased) {
  const std::int64_t L = 48, O = 3, I = 4;
  const Floats g = floats(L, O, normal(L * O)), x = floats(L, I, normal(L * I));
  const std::vector<double> plain = product(g.values(), O, x.values(), I, 1);
  for (const int rank : {2, 4, 8}) {
    const LowRank spec = low_rank(Basis::sketch, rank);
    constexpr int draws = 4000;
    std::vector<double> sum(plain.size(), 0.0), square(plain.size(), 0.0);
    for (int draw = 0; draw < draws; ++draw) {
      const hot::Context context = cpu(1).with_key({run_seed(), static_cast<unsigned>(draw), 1});
      const auto got = product(project(context, g, spec, Side::gradient), O,
                               project(context, x, spec, Side::activation), I, 16);
      for (std::size_t i = 0; i < got.size(); ++i) {
        sum[i] += got[i];
        square[i] += got[i] * got[i];
      }
    }
    for (std::size_t i = 0; i < plain.size(); ++i) {
      const double mean = sum[i] / draws;
      const double error = std::sqrt((square[i] / draws - mean * mean) / draws);
      EXPECT_LT(std::abs(mean - plain[i]), 5 * error) << "rank " << rank << " entry " << i;
    }
  }
}

TEST(Lowrank, token_grid_is_a_bijection) {
  // With all rows kept, any order of the tokens gives the same product. If only one token is
  // non-zero, exactly one block (or prefix row) contains it.
  LowRank spec = low_rank(Basis::lowpass, 16);
  const int grids[][3] = {{14, 14, 1}, {8, 8, 0}, {3, 5, 2}, {4, 9, 1}, {9, 4, 0}, {1, 1, 1}};
  for (const auto& grid : grids) {
    spec.layout = {grid[0], grid[1], grid[2]};
    const std::int64_t L = 3 * (grid[0] * grid[1] + grid[2]);
    const Floats g = floats(L, 2, normal(L * 2)), x = floats(L, 3, normal(L * 3));
    const auto got = product(project(cpu(), g, spec, Side::gradient), 2,
                             project(cpu(), x, spec, Side::activation), 3, 16);
    EXPECT_LT(distance(got, product(g.values(), 2, x.values(), 3, 1)), 1e-5)
        << grid[0] << "x" << grid[1] << "+" << grid[2];
  }
}

TEST(Lowrank, token_grid_tiles) {
  // 8 x 8 patches, a class token: block 0 is the upper left 4 x 4 tile, block 1 the one beside it.
  LowRank spec = low_rank(Basis::lowpass, 1);
  spec.layout = {8, 8, 1};
  std::vector<float> tokens(65);
  for (std::size_t i = 0; i < 65; ++i) tokens[i] = static_cast<float>(i);
  const std::vector<float> got = project(cpu(), floats(65, 1, tokens), spec, Side::activation);
  float sums[4] = {};
  for (int y = 0; y < 8; ++y) {
    for (int x = 0; x < 8; ++x) sums[y / 4 * 2 + x / 4] += static_cast<float>(1 + y * 8 + x);
  }
  EXPECT_EQ(got, (std::vector<float>{sums[0], sums[1], sums[2], sums[3], 0.0F}));
  tokens[0] = 3;
  EXPECT_EQ(project(cpu(), floats(65, 1, tokens), spec, Side::activation).back(), 12.0F);
  EXPECT_EQ(project(cpu(), floats(65, 1, tokens), spec, Side::gradient).back(), 12.0F);
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
