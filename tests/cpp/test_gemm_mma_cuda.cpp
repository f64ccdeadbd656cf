// Compares the mma.sync products (cuda/gemm_sm80.h) with the CPU, byte for byte with margins. Every
// tile is tested by name, with whole and shared tiles, on any GPU. The objects are linked by
// tests/cpp/CMakeLists.txt, since libhot does not export them.
#include "cuda/gemm_sm80.h"
#include "cuda/launch.h"
#include "gemm_problem.h"
#include "plan/plan.h"

using namespace hot_test;
using hot::detail::GemmArgs, hot::detail::mma_tile_count, hot::detail::mma_tiles;
using hot::detail::mma_can, hot::detail::mma_choose, hot::detail::mma_plan_of;
using hot::detail::mma_workspace, hot::detail::MmaCodes, hot::detail::MmaDevice;
using hot::detail::MmaPart, hot::detail::MmaPlan, hot::detail::MmaProduct;

namespace {

namespace plan = hot::detail::plan;

MmaDevice mma_device(const hot::Context& context) {
  const hot::detail::LaunchFacts& facts = hot::detail::launch_facts(context, "test");
  return {facts.sm_count, 10 * facts.major + facts.minor};
}

MmaProduct mma_product(const GemmArgs& args, MmaCodes codes) {
  return plan::mma_product(plan::product_shape(args), codes == MmaCodes::int4);
}

void mma_gemm(const hot::Context& context, const GemmArgs& args, MmaCodes codes,
              const MmaPlan& plan, void* workspace) {
  for (const MmaPart part : {MmaPart::tiles, MmaPart::fixup}) {
    if (part == MmaPart::tiles || plan.shared > 0) {
      hot::detail::mma_gemm(context, args, codes, plan, part, workspace);
    }
  }
}

constexpr DType out_types[] = {DType::f32, DType::f16, DType::bf16, DType::i32};

std::string plan_text(const MmaPlan& plan) {
  return words(mma_tiles[plan.tile].name, ", ", plan.blocks, " thread blocks, band ", plan.band,
               ", ", plan.whole, " tiles whole, ", plan.shared, " shared by ", plan.sharers);
}

class GemmMmaCuda : public CudaTest {
 protected:
  // Runs the product twice, the second time on the result of the first.
  void expect_as_cpu(Problem& problem, bool packed, const MmaPlan& plan) {
    const MmaCodes codes = packed ? MmaCodes::int4 : MmaCodes::int8;
    const GemmArgs args = problem.args(true);
    ASSERT_TRUE(mma_can(mma_device(cuda()), mma_product(args, codes), plan.tile));
    const Mirrored workspace(mma_workspace(plan), static_cast<char>(0x5A));
    for (int time = 0; time < 2; ++time) {
      mma_gemm(cuda(), args, codes, plan, const_cast<Mirrored&>(workspace).on<void>(true));
      problem.run_cpu();
    }
    synchronize();
    problem.expect_equal(plan_text(plan));
  }

  // Tests one tile with all its divisions.
  void expect_as_cpu(std::int64_t m, std::int64_t n, std::int64_t k, const Options& options,
                     int tile) {
    if (mma_tiles[tile].shared_bytes >
        hot::detail::mma_shared_block(mma_device(cuda()).capability)) {
      return;
    }
    for (const bool share : {false, true}) {
      Problem problem(m, n, k, options);
      const MmaProduct product =
          mma_product(problem.args(true), options.int4 ? MmaCodes::int4 : MmaCodes::int8);
      MmaPlan plan = mma_plan_of(mma_device(cuda()), product, tile, share);
      expect_as_cpu(problem, options.int4, plan);
      if (product.long_k && !mma_tiles[tile].any) break;  // only one division
      // Fewer thread blocks than tiles, in narrow bands: each computes several tiles.
      const int tiles = plan.whole + plan.shared;
      plan.band = static_cast<int>(random_int(1, 3));
      plan.blocks = static_cast<int>(random_int(1, 3));
      if (share && !mma_tiles[tile].any) {
        plan.shared = static_cast<int>(random_int(1, tiles));
        plan.whole = tiles - plan.shared;
        plan.sharers = 1;  // then as many as there are thread blocks, if there are enough steps
        const std::int64_t steps = (product.k + mma_tiles[tile].step - 1) / mma_tiles[tile].step;
        if (plan.shared * steps >= plan.blocks) plan.sharers = plan.blocks;
      }
      Problem again(m, n, k, options);
      expect_as_cpu(again, options.int4, plan);
      if (mma_tiles[tile].any) break;
    }
  }

  // Whether this GPU can run INT4.
  bool int4_here() const { return hot::detail::mma_int4(mma_device(cuda()).capability); }

  static Options any_options(bool packed) {
    Options options;
    options.dtype = out_types[random_int(0, 3)];
    options.accumulate = options.dtype != DType::i32 && random_int(0, 1) == 0;
    options.layout = random_int(0, 1) == 0 ? Layout::rows : Layout::padded_rows;
    options.int4 = packed;
    return options;
  }

  static std::int64_t any_size() {
    const std::int64_t sizes[] = {1, 2, 7, 16, 31, 64, 127, 128, 129, 251, 256, 257, 509, 640};
    return sizes[random_int(0, 13)];
  }
  // Number of columns that allows 16-byte accesses in every type.
  static std::int64_t whole_columns() { return 8 * random_int(1, 80); }
};

}  // namespace

TEST_F(GemmMmaCuda, every_tile_equals_cpu) {
  for (int tile = 0; tile < mma_tile_count; ++tile) {
    for (const bool packed : {false, true}) {
      if (packed && !(mma_tiles[tile].int4 && int4_here())) continue;
      for (int round = 0; round < 6; ++round) {
        if (!in_part(6 * tile + round)) continue;
        const std::int64_t k = packed ? 2 * random_int(1, 1000) : random_int(1, 1500);
        expect_as_cpu(any_size(), whole_columns(), k, any_options(packed), tile);
      }
    }
  }
}

TEST_F(GemmMmaCuda, longest_contraction_is_exact) {
  // 128 * 128 * K is the largest sum that 32 bits hold.
  for (int tile = 0; tile < mma_tile_count; ++tile) {
    if (!in_part(tile)) continue;
    const Options options{DType::f32, Layout::rows, false, true};
    expect_as_cpu(3, 8, hot::detail::int32_safe_k, options, tile);
  }
}

TEST_F(GemmMmaCuda, longer_contractions_are_exact) {
  for (int tile = 0; tile < mma_tile_count; ++tile) {
    for (const bool extreme : {false, true}) {
      for (const DType dtype : float_types) {
        const Options options{dtype, Layout::rows, random_int(0, 1) == 0, extreme};
        if (!in_part(tile)) continue;
        expect_as_cpu(3, 8, hot::detail::int32_safe_k + random_int(1, 300000), options, tile);
        if (extreme) continue;
        expect_as_cpu(300, 264, hot::detail::int32_safe_k + 1, options, tile);
      }
    }
  }
}

// A thread block that ends a part of one tile and continues with a whole tile must not mix their
// results.
TEST_F(GemmMmaCuda, a_shared_tile_and_the_next) {
  for (int tile = 0; tile < mma_tile_count; ++tile) {
    if (mma_tiles[tile].any || mma_tiles[tile].shared_bytes >
                                   hot::detail::mma_shared_block(mma_device(cuda()).capability)) {
      continue;
    }
    for (int round = 0; round < 8; ++round) {
      const std::int64_t steps = random_int(2, 9);
      Options options = any_options(false);
      options.layout = Layout::rows;
      // Three tiles for two thread blocks: one and a half each.
      Problem problem(2 * mma_tiles[tile].m + random_int(1, mma_tiles[tile].m), mma_tiles[tile].n,
                      steps * mma_tiles[tile].step, options);
      MmaPlan plan = mma_plan_of(mma_device(cuda()),
                                 mma_product(problem.args(true), MmaCodes::int8), tile, true);
      plan.band = static_cast<int>(random_int(1, 3));
      plan.blocks = plan.sharers = 2;
      plan.whole = 0;
      plan.shared = 3;
      expect_as_cpu(problem, false, plan);
    }
  }
}

TEST_F(GemmMmaCuda, choice_equals_cpu) {
  for (int round = 0; round < 20; ++round) {
    const Options options = any_options(false);
    Problem problem(any_size(), round % 4 == 0 ? random_int(1, 300) : whole_columns(),
                    random_int(1, round % 5 == 0 ? 20000 : 2000), options);
    const MmaProduct product = mma_product(problem.args(true), MmaCodes::int8);
    for (const bool may_share : {false, true}) {
      const MmaPlan plan = mma_choose(mma_device(cuda()), product, may_share);
      if (!may_share) {
        EXPECT_EQ(mma_workspace(plan), 0U);
      }
      expect_as_cpu(problem, false, plan);
    }
  }
}

TEST_F(GemmMmaCuda, what_a_tile_cannot_do) {
  Problem problem(64, 64, 64, {});
  const MmaDevice device = mma_device(cuda());
  const GemmArgs good = problem.args(true);
  const auto can = [&](const GemmArgs& args, int tile) {
    return mma_can(device, mma_product(args, MmaCodes::int8), tile);
  };
  const int any = hot::detail::mma_tile("any"), usual = hot::detail::mma_tile("128x128x64");
  EXPECT_TRUE(can(good, usual));
  const auto cannot = [&](void (*change)(GemmArgs&)) {
    GemmArgs changed = good;
    change(changed);
    EXPECT_FALSE(can(changed, usual));
    EXPECT_TRUE(can(changed, any));
  };
  cannot([](GemmArgs& g) { g.a += 8; });
  cannot([](GemmArgs& g) { g.b += 1; });
  cannot([](GemmArgs& g) { g.lda += 8; });
  cannot([](GemmArgs& g) { g.ldb += 4; });
  cannot([](GemmArgs& g) { g.ldb = std::int64_t{1} << 40; });
  cannot([](GemmArgs& g) { g.n -= 1; });
  cannot([](GemmArgs& g) { g.out.row_stride += 1; });
  cannot([](GemmArgs& g) { g.out.col_stride = 2; });
  cannot([](GemmArgs& g) { g.out.data = static_cast<char*>(g.out.data) + 2; });
}
