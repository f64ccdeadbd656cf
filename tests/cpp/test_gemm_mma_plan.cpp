// Division of products among thread blocks (plan/gemm_sm80_plan.h): host code, for any GPU.
#include "plan/gemm_sm80_plan.h"
#include "support.h"

using namespace hot_test;
using hot::detail::mma_can, hot::detail::mma_choose, hot::detail::mma_code;
using hot::detail::mma_plan_of, hot::detail::mma_tile, hot::detail::mma_tile_count;
using hot::detail::mma_tiles, hot::detail::mma_workspace, hot::detail::MmaDevice;
using hot::detail::MmaPlan, hot::detail::MmaProduct, hot::detail::MmaTileFacts;

namespace {

// A100, A40, RTX 3090, Orin, RTX 4090, H200, B200, RTX 5090.
constexpr MmaDevice devices[] = {{108, 80}, {84, 86},  {82, 86},   {16, 87},
                                 {128, 89}, {132, 90}, {148, 100}, {170, 120}};

// Maximum shared memory of a thread block in bytes (CUDA's programming guide).
int most_shared(int capability) {
  const int kb = capability == 80 || capability == 87    ? 163
                 : capability == 90 || capability == 100 ? 227
                                                         : 99;
  return kb * 1024;
}

void expect_sound(const MmaDevice& device, const MmaProduct& product, const MmaPlan& plan) {
  ASSERT_GE(plan.tile, 0);
  ASSERT_LT(plan.tile, mma_tile_count);
  const MmaTileFacts& tile = mma_tiles[plan.tile];
  EXPECT_TRUE(mma_can(device, product, plan.tile)) << tile.name;
  EXPECT_LE(tile.shared_bytes, most_shared(device.capability)) << tile.name;
  const std::int64_t high = (product.m + tile.m - 1) / tile.m;
  EXPECT_EQ(std::int64_t{plan.whole} + plan.shared, high * ((product.n + tile.n - 1) / tile.n));
  EXPECT_GE(plan.band, 1);
  EXPECT_LE(plan.band, high);
  EXPECT_GE(plan.blocks, 1);
  EXPECT_GE(plan.whole, 0);
  if (plan.shared == 0) {
    EXPECT_LE(plan.blocks, plan.whole);
    EXPECT_EQ(mma_workspace(plan), 0U);
    return;
  }
  const std::int64_t steps = (product.k + tile.step - 1) / tile.step;
  if (product.long_k) {  // a sharer's sums fit an INT32
    EXPECT_EQ(plan.whole, 0);
    const std::int64_t longest =
        (plan.shared * steps + plan.sharers - 1) / plan.sharers * tile.step;
    EXPECT_LE(longest * 128 * 128, INT32_MAX);
  }
  // Every sharer has a step. Otherwise fixup_kernel would read unwritten sums.
  EXPECT_GE(plan.sharers, 1);
  EXPECT_LE(plan.sharers, plan.blocks);
  EXPECT_LE(plan.sharers, plan.shared * steps);
  // A sharer writes sums per tile that it works on: one more per tile that begins.
  EXPECT_EQ(mma_workspace(plan), static_cast<std::size_t>(plan.sharers + plan.shared) *
                                     static_cast<std::size_t>(tile.m * tile.n) * 4);
}

MmaPlan chosen(const MmaDevice& device, std::int64_t m, std::int64_t n, std::int64_t k,
               bool may_share = true) {
  return mma_choose(device, {m, n, k, true, false}, may_share);
}

}  // namespace

// Without the code of a tile the kernel would silently return.
TEST(MmaPlan, code_that_runs_on_a_later_gpu_holds_its_tiles) {
  for (const MmaDevice& built : devices) {
    for (const MmaDevice& device : devices) {
      if (device.capability < built.capability) continue;
      for (int tile = 0; tile < mma_tile_count; ++tile) {
        if (!mma_can(device, {4096, 4096, 4096, true, false}, tile)) continue;
        EXPECT_TRUE(mma_code(built.capability, mma_tiles[tile].shared_bytes, false))
            << mma_tiles[tile].name << ", built for " << built.capability << ", on "
            << device.capability;
      }
    }
  }
}

TEST(MmaPlan, every_choice_is_sound) {
  for (const MmaDevice& device : devices) {
    for (int round = 0; round < 300; ++round) {
      const auto size = [&] { return random_int(1, round % 3 == 0 ? 300 : 30000); };
      const MmaProduct product{size(), size(), round % 10 == 0 ? random_int(0, 3) : size(),
                               random_int(0, 3) != 0, random_int(0, 9) == 0};
      for (const bool may_share : {false, true}) {
        const MmaPlan plan = mma_choose(device, product, may_share);
        expect_sound(device, product, plan);
        if (!may_share) {
          EXPECT_EQ(plan.shared, 0);
        }
        EXPECT_EQ(mma_tiles[plan.tile].any, !product.aligned || (product.long_k && !may_share));
      }
      for (int tile = 0; tile < mma_tile_count; ++tile) {
        if (!mma_can(device, product, tile)) continue;
        for (const bool share : {false, true}) {
          expect_sound(device, product, mma_plan_of(device, product, tile, share));
        }
      }
    }
  }
}

TEST(MmaPlan, tiles) {
  for (int tile = 0; tile < mma_tile_count; ++tile) {
    EXPECT_EQ(mma_tile(mma_tiles[tile].name), tile);
    EXPECT_LE(mma_tiles[tile].shared_bytes, 227 * 1024) << mma_tiles[tile].name;
  }
  EXPECT_EQ(mma_tile("96x96"), -1);
  for (const MmaDevice& device : devices) {  // "any" takes everything everywhere
    EXPECT_TRUE(mma_can(device, {1, 1, 1, false, true}, mma_tile("any")));
  }
}

TEST(MmaPlan, few_tiles_of_a_long_contraction_are_shared) {
  for (const MmaDevice& device : devices) {
    EXPECT_EQ(chosen(device, 32768, 4096, 256).shared, 0);  // many tiles
    const MmaTileFacts& tile = mma_tiles[chosen(device, 49, 64, 512, false).tile];
    EXPECT_LE(tile.m * tile.n, 64 * 128) << tile.name;  // a small product
    if (device.sm_count < 80) continue;
    // g_w of a ViT's `proj` layer: 36 tiles of 128 x 128.
    EXPECT_GT(chosen(device, 768, 768, 12608).shared, 0);
    EXPECT_EQ(chosen(device, 768, 768, 12608, false).shared, 0);
  }
}

TEST(MmaPlan, tiles_of_sums_beyond_int32_are_shared) {
  for (const MmaDevice& device : devices) {
    for (int round = 0; round < 200; ++round) {
      const std::int64_t limit = round % 4 == 0 ? 20000 : 600;
      const MmaProduct product{random_int(1, limit), random_int(1, limit),
                               random_int(133144, 2000000), true, true};
      const MmaPlan plan = mma_choose(device, product, true);
      EXPECT_GT(plan.shared, 0);
      expect_sound(device, product, plan);
    }
  }
}

TEST(MmaPlan, int4_has_tiles_where_there_is_code) {
  for (const MmaDevice& device : devices) {
    const MmaProduct product{4096, 4096, 2048, true, false, true};
    const MmaTileFacts& tile = mma_tiles[mma_choose(device, product, false).tile];
    if (device.capability < 100) {
      EXPECT_TRUE(tile.int4 && !tile.any) << tile.name;
    }
    EXPECT_EQ(mma_can(device, product, mma_tile("any")), device.capability < 100);
    EXPECT_FALSE(mma_can(device, product, mma_tile("64x64x64")));
  }
}
