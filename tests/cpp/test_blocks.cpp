#include "hot/blocks.h"

#include <algorithm>

#include "support.h"

using namespace hot_test;

namespace {

// Vector and results of a random case, in poisoned memory.
struct Case {
  std::int64_t n = random_int(0, 3) == 0 ? random_int(0, 70000) : random_int(0, 300);
  std::int64_t parts = random_int(1, 9), ranks = random_int(1, 8);
  std::int64_t bytes = ((n + parts - 1) / parts + 63) / 64 * 68;
  hot::Rounding rounding = static_cast<hot::Rounding>(random_int(0, 2));
  Floats x = floats(ranks, n, normal(ranks* n), random_int(0, 3));

  // The wire, then the bytes of the sum.
  std::vector<char> run(const hot::Context& context) {
    Bytes wire(1, ranks * parts * bytes, DType::i8);
    Floats out(1, n, DType::f32);
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      hot::Key key{11, 22, static_cast<std::uint32_t>(100 * rank)};
      hot::encode_blocks(context.with_key(key), hot::vector(&x.at(rank, 0), DType::f32, n),
                         rounding,
                         hot::matrix(wire.data() + rank * parts * bytes, DType::i8, parts, bytes));
    }
    const TensorView all = cube(wire.data(), DType::i8, ranks, parts, bytes);
    hot::sum_blocks(context, all, 0.3F, hot::vector(out.data(), DType::f32, n));
    EXPECT_TRUE(wire.margins_intact() && out.margins_intact());
    std::vector<char> result(wire.data(), wire.data() + ranks * parts * bytes);
    const char* const sums = reinterpret_cast<const char*>(out.data());
    result.insert(result.end(), sums, sums + 4 * n);
    return result;
  }
};

}  // namespace

TEST(Blocks, same_bits_with_all_threads_and_instruction_sets) {
  for (int round = 0; round < 30; ++round) {
    Case one;
    const std::vector<char> expected = one.run(cpu(1));
    for (const hot::Isa isa : isas()) {
      EXPECT_TRUE(one.run(cpu(3).with_isa(isa)) == expected) << hot::isa_name(isa);
    }
  }
}

// Blocks are rows of the stages fwht and quantize, and sums those of dequantize and fwht.
TEST(Blocks, equal_the_stages_that_they_join) {
  for (int round = 0; round < 30; ++round) {
    const std::int64_t blocks = random_int(1, 40), ranks = random_int(1, 8);
    Floats rows(blocks, 64, DType::f32), part(blocks, 64, DType::f32), out(blocks, 64, DType::f32);
    Floats total = floats(blocks, 64, std::vector<float>(static_cast<std::size_t>(blocks * 64)));
    std::vector<char> wires;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      const hot::Context context = cpu().with_key({generator()(), 3, 4});
      const Floats x = floats(blocks, 64, normal(blocks * 64));
      Bytes wire(1, blocks * 68, DType::i8), q(blocks, 64, DType::i8);
      std::vector<float> scale(static_cast<std::size_t>(blocks));
      hot::encode_blocks(context, hot::vector(x.data(), DType::f32, blocks * 64),
                         hot::Rounding::stochastic,
                         hot::vector(wire.data(), DType::i8, blocks * 68));
      hot::fwht(context, x.view(), 1, 64, rows.view());
      hot::quantize(context, rows.view(), {}, q.view(), as_vector(scale, DType::f32));
      EXPECT_EQ(std::memcmp(wire.data(), q.data(), static_cast<std::size_t>(blocks * 64)), 0);
      EXPECT_EQ(std::memcmp(wire.data() + blocks * 64, scale.data(), scale.size() * 4), 0);
      hot::dequantize(context, q.view(), as_vector(scale, DType::f32), hot::Granularity::token,
                      part.view());
      for (std::int64_t i = 0; i < blocks * 64; ++i) total.data()[i] += part.data()[i];
      wires.insert(wires.end(), wire.data(), wire.data() + blocks * 68);
    }
    hot::fwht(cpu(), total.view(), 1, 64, total.view());
    for (std::int64_t i = 0; i < blocks * 64; ++i) total.data()[i] *= 0.25F / 64;
    hot::sum_blocks(cpu(), hot::matrix(wires.data(), DType::i8, ranks, blocks * 68), 0.25F,
                    hot::vector(out.data(), DType::f32, blocks * 64));
    EXPECT_EQ(out.values(), total.values());
  }
}
