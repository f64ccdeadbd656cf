// Choice of the kernels for the products of a call.
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>

#include "plan/steps.h"

namespace hot::detail::plan {

namespace {

constexpr std::int64_t wgmma_tile = 128, wgmma_wide_tile = 192, wgmma_large_tile = 256;

// Reason against accesses of 16 bytes to a product's operands or result.
Reason why_not_vectors(const ProductShape& p) {
  if (!p.rows_aligned) {
    return {"rows of the operands are not a multiple of 16 bytes (%k %n)", p.k};
  }
  if (!p.out.dense_rows) return {"neighbours in rows of %a do not lie side by side"};
  return not_vectors(p.out.rows_aligned && p.n * element_bytes(p.out.dtype) % 16 == 0, p.n);
}

Reason too_long_k(std::int64_t k) {
  return {"the contraction (%k %n) is longer than INT32 sums hold", k};
}

Reason why_not_wgmma(const DeviceFacts& facts, const ProductShape& p) {
  const bool newer = facts.hardware.has(Feature::tcgen05);
  if (const Reason why = why_not(facts, newer ? Feature::tcgen05 : Feature::wgmma)) return why;
  if (const Reason why = why_not_vectors(p)) return why;
  if (p.k % 16 != 0) return {"%k %n is not a multiple of 16", p.k};
  if (!p.scaled) return {"bare INT32 sums"};
  // Instances that accumulate in 16 bits were not faster than a separate addition.
  if (p.accumulate && p.out.dtype != DType::f32) return {"sums are added to %a in %t"};
  if (p.k == 0) return {"the contraction is empty"};
  if (p.k > int32_safe_k) return too_long_k(p.k);
  if (p.m >= INT32_MAX || p.n >= INT32_MAX) return {"a side is longer than 2^31 - 2"};
  return {};
}

// Reason against the fast tiles of mma.sync.
Reason why_not_tiles(const ProductShape& p) {
  if (const Reason why = why_not_vectors(p)) return why;
  if (!p.rows_near) return {"rows of the operands are 2^32 bytes apart"};
  return too_long_k(p.k);
}

// Tiles per stripe: at most half of the shorter side, and only if rounding both sides up to whole
// stripes adds few tiles. Stripes consist of clusters, which have two tiles along N.
int swizzle_of(const Thresholds& t, std::int64_t tiles_m, std::int64_t tiles_n) {
  for (int swizzle = t.max_swizzle; swizzle > 1; swizzle /= 2) {
    const std::int64_t padded = round_up(tiles_m, swizzle) * round_up(tiles_n, 2 * swizzle);
    if (std::min(tiles_m, tiles_n) >= 2 * swizzle &&
        padded * 100 <= tiles_m * tiles_n * (100 + t.stripe_waste)) {
      return swizzle;
    }
  }
  return 1;
}

static_assert(static_cast<int>(Kernel::wgmma_stream_k) - static_cast<int>(Kernel::wgmma_128x128) ==
              static_cast<int>(Sm90Kernel::stream_k));
Kernel kernel_of(const Sm90Plan& plan) {
  return static_cast<Kernel>(static_cast<int>(Kernel::wgmma_128x128) +
                             static_cast<int>(plan.kernel));
}

// Plan of stream-K. For up to a third of a wave of tiles, equal shares of the contraction are
// faster than CUTLASS's own division.
Sm90Plan stream_k_plan(const DeviceFacts& facts, std::int64_t tiles) {
  const int sm_count = facts.sm_count;
  const int splits =
      tiles * 3 <= sm_count
          ? static_cast<int>(std::min<std::int64_t>(sm_count / tiles, thresholds.max_splits))
          : 1;
  return {Sm90Kernel::stream_k, sm_count, splits == 1, 1, splits};
}

Sm90Plan wgmma_plan(const DeviceFacts& facts, std::int64_t m, std::int64_t n, std::int64_t k,
                    bool has_wide, bool has_large) {
  const Thresholds& t = thresholds;
  const int sm_count = facts.sm_count;
  const std::int64_t tiles_m = ceil_div(m, wgmma_tile), tiles_n = ceil_div(n, wgmma_tile);
  const std::int64_t tiles = tiles_m * tiles_n;
  const auto waves = [&](std::int64_t count) { return ceil_div(count, sm_count); };
  const auto time_of = [&](std::int64_t tile_n) {
    return waves(round_up(tiles_m, 2) * ceil_div(n, tile_n)) * tile_n;
  };
  // Time, measured in tile columns that an SM computes in sequence. Clusters have two tiles along N
  // (here) or along M (time_of).
  const std::int64_t usual = waves(tiles_m * round_up(tiles_n, 2)) * wgmma_tile;
  // Stream-K shares a long contraction among CTAs if there are fewer than two waves of tiles. An
  // exception are tiles that nearly fill one wave (g_w of a ViT).
  const bool nearly_a_wave = tiles * 4 >= std::int64_t{3} * sm_count && tiles <= sm_count;
  const bool shares = k >= t.stream_k_min_k && tiles < std::int64_t{2} * sm_count && !nearly_a_wave;
  // A large tile moves the fewest bytes. That is faster if the power limit sets the clock and the
  // contraction is long enough to hide its epilogue, which nothing overlaps.
  const std::int64_t least =
      shares ? tiles * wgmma_tile * t.large_gain_of_shared : usual * sm_count * t.large_gain_of;
  if (has_large && k >= t.large_min_k && time_of(wgmma_large_tile) * sm_count * 100 <= least) {
    return {Sm90Kernel::tile_128x256, sm_count, m < n, 2, 1};
  }
  if (shares) return stream_k_plan(facts, tiles);
  // With a narrow operand (g_x of a ViT) stripes do not help, but a wider tile can.
  const std::int64_t wide = time_of(wgmma_wide_tile);
  if (has_wide && std::min(tiles_m, tiles_n) < t.narrow_tiles && m >= n &&
      wide * t.wide_gain <= usual * t.wide_gain_of) {
    return {Sm90Kernel::tile_128x192, sm_count, false, 1, 1};
  }
  const int swizzle = swizzle_of(t, tiles_m, tiles_n);
  return {Sm90Kernel::tile_128x128, sm_count, swizzle > 1 || n > m, swizzle, 1};
}

// Instances that are built: wide tiles for g_x, stream-K for g_w. fp16 outputs have neither, since
// they are rare (with autocast g_w is fp32).
bool has_large(const ProductShape& p) {
  return p.out.dtype != DType::f16 && !(p.out.dtype == DType::f32 && p.bias);
}
bool has_wide(const ProductShape& p) { return has_large(p) && !p.accumulate; }
bool has_stream_k(const ProductShape& p) { return p.out.dtype != DType::f16 && !p.bias; }

Sm90Plan wgmma_plan(const DeviceFacts& facts, const ProductShape& p) {
  Sm90Plan plan = wgmma_plan(facts, p.m, p.n, p.k, has_wide(p), has_large(p));
  // Without a stream-K instance the plain tiles use its order.
  if (plan.kernel == Sm90Kernel::stream_k && !has_stream_k(p)) {
    plan.kernel = Sm90Kernel::tile_128x128;
  }
  return plan;
}

MmaDevice mma_device(const DeviceFacts& facts) { return {facts.sm_count, facts.arch}; }

// Whether CTAs may share mma.sync tiles: only if product_scratch reserves memory for that. It does
// not know the output. With wgmma it reserves memory only for contractions too long for wgmma.
bool may_share(const DeviceFacts& facts, std::int64_t m, std::int64_t n, std::int64_t k) {
  return (!facts.kernels.has(Feature::wgmma) || k > int32_safe_k) && m < INT32_MAX && n < INT32_MAX;
}

// Adds the mma.sync kernel, and the kernel that adds up the tiles shared by CTAs.
void add_mma(Plan& plan, const DeviceFacts& facts, const ProductShape& p, int index, bool int4,
             Buffers reads, Buffers writes) {
  const bool share = !int4 && may_share(facts, p.m, p.n, p.k);
  ProductStep work{index, {}, mma_choose(mma_device(facts), mma_product(p, int4), share), int4};
  const MmaTileFacts& tile = mma_tiles[work.mma.tile];
  const bool shared = work.mma.shared > 0;
  const auto kernel =
      static_cast<Kernel>(static_cast<int>(Kernel::mma_128x256x128) + work.mma.tile);
  if (kernel == Kernel::mma_any) {
    plan.takes({Kernel::mma_128x128x64, "mma.sync, a tile at half the speed", why_not_tiles(p)});
  }
  plan.add(kernel, {work.mma.blocks, tile.threads, static_cast<std::size_t>(tile.shared_bytes)},
           reads, shared ? writes | Buffer::stream_k : writes, work, p.out.dtype);
  if (!shared) return;
  Buffers sums = Buffer::stream_k;  // scales need no entry: they are older than the tiles
  if (p.accumulate) sums |= writes;
  plan.add(Kernel::mma_fixup, {mma_fixup_blocks(work.mma), mma_fixup_threads}, sums, writes, work,
           p.out.dtype);
}

struct ProductBuffers {
  Buffers a, b;
  Buffer out;
  // Buffers that a product reads, and its result if it is added to the values there.
  Buffers reads(bool accumulate) const { return accumulate ? a | b | out : a | b; }
};

constexpr ProductBuffers product_buffers{Buffer::a, Buffer::b, Buffer::out};  // of a single product

// Adds product number `index` of a call.
void add_product(Plan& plan, const DeviceFacts& facts, const ProductShape& p, int index,
                 const ProductBuffers& buffers) {
  if (p.m == 0 || p.n == 0) return;
  Buffers reads = buffers.reads(p.accumulate), writes = buffers.out;
  const bool faster = facts.hardware.has(Feature::wgmma) || facts.hardware.has(Feature::tcgen05);
  if (!plan.takes(
          {Kernel::wgmma_128x128, faster ? "mma.sync" : nullptr, why_not_wgmma(facts, p)})) {
    return add_mma(plan, facts, p, index, false, reads, writes);
  }
  const auto broadcast = [&](std::int64_t count, Buffers from, Buffer to, bool of_b) {
    plan.add(Kernel::broadcast_scale, {ceil_div(count, 256), 256}, from, to,
             OperandStep{index, of_b});
    reads |= to;
  };
  if (p.one_scale_a) broadcast(p.m, buffers.a, Buffer::broadcast_a, false);
  if (p.one_scale_b) broadcast(p.n, buffers.b, Buffer::broadcast_b, true);
  const Sm90Plan wgmma = wgmma_plan(facts, p);
  const Kernel kernel = kernel_of(wgmma);
  if (kernel == Kernel::wgmma_stream_k) {
    writes |= Buffer::stream_k;
  } else {
    plan.zero_counter();
    reads |= Buffer::counter;
    writes |= Buffer::counter;
  }
  // Persistent grid: a CTA of three warp groups per SM. CUTLASS sets the actual shape.
  plan.add(kernel, {facts.sm_count, 384, 0, 2}, reads, writes, ProductStep{index, wgmma},
           p.out.dtype);
}

std::int64_t small_tiles(const ProductShape& p, int tile_m) {
  return ceil_div(p.m, tile_m) * ceil_div(p.n, small_gemm::tile_n);
}

// Predicted time: the longest CTA plus the mean load of an SM (bound of list scheduling). Both
// terms include both products, so their shares are chosen together.
double cost_of(const ProductShape* products, int count, const SmallPlan& plan, const TileCost& cost,
               int sm_count) {
  double work = 0, longest = 0;
  for (int p = 0; p < count; ++p) {
    const int share = plan.share[p];
    const double steps = static_cast<double>(products[p].k) / small_gemm::step_k;
    const double tiles = static_cast<double>(small_tiles(products[p], cost.tile_m));
    const bool shared = share > 1;
    work += tiles * (share * (cost.block + (shared ? cost.exchange : 0.0)) + steps * cost.step);
    longest = std::max(longest,
                       std::ceil(steps / share) * cost.wait + (shared ? cost.exchange_wait : 0.0));
  }
  return longest + work / sm_count;
}

// Products that one launch may share, and their numbers in the call.
struct Products {
  ProductShape shapes[2]{};
  ProductBuffers buffers[2]{};
  int index[2]{};
  int count = 0;
};

Reason why_not_one_launch(const Products& products) {
  std::int64_t work = 0;
  for (int i = 0; i < products.count; ++i) {
    work += products.shapes[i].m * products.shapes[i].n * products.shapes[i].k;
  }
  return work > thresholds.small_gemm_work ? Reason{"%n multiply-adds hide a launch each", work}
                                           : why_not_small_gemms(products.shapes, products.count);
}

ProductShape shape_of(const Work& work, const WorkProduct& product) {
  ProductShape p = product_shape(product.args);
  p.scaled = true;
  p.bias = product.result == Result::y && work.bias.rows > 0;
  return p;
}

ProductBuffers buffers_of(const Work& work, const WorkProduct& product) {
  const Operand* const operands = work.operands.begin();
  Buffers b = codes_buffer(operands[product.b]);
  if (product.result == Result::y && work.bias.rows > 0) {
    b |= work.widens() ? Buffer::wide_bias : Buffer::bias;
  }
  return {codes_buffer(operands[product.a]), b, buffer_of(product.result)};
}

// Adds a product with a scale per k, or zeros.
void add_single(Plan& plan, const Work& work, int index) {
  const WorkProduct& product = work.products[index];
  const Buffer out = buffer_of(product.result);
  const std::int64_t m = product.args.m, n = product.args.n;
  if (product.clear) {
    return plan.add(Kernel::fill_zero, {ceil_div(m * n, 256), 256}, {}, out, ProductStep{index});
  }
  constexpr int tile = token_product::tile;
  const std::int64_t tiles = ceil_div(m, tile) * ceil_div(n, tile);
  plan.takes({Kernel::wgmma_128x128, "fp32 product, k in order", scales_by_token});
  LaunchShape shape{std::min<std::int64_t>(tiles, INT32_MAX), token_product::threads};
  shape.early = false;
  plan.add(Kernel::token, shape, buffers_of(work, product).reads(product.args.accumulate), out,
           ProductStep{index}, product.args.out.dtype);
}

}  // namespace

Reason why_not_small_gemms(const ProductShape* products, int count) {
  if (count < 1 || count > 2) return {"%n products", count};
  std::int64_t blocks = 0;
  for (int i = 0; i < count; ++i) {
    const ProductShape& p = products[i];
    if (p.m <= 0 || p.n <= 0 || p.k <= 0) return {"a product is empty"};
    if (p.k > int32_safe_k) return too_long_k(p.k);
    if (!p.scaled) return {"bare INT32 sums"};
    if (!p.rows_aligned) return why_not_vectors(p);
    if (p.m > 1 << 30 || p.n > 1 << 30) return {"a side is longer than 2^30"};
    blocks += (small_tiles(p, small_gemm::min_tile_m) + 1) * small_gemm::max_cluster;
  }
  return blocks <= INT32_MAX ? Reason{} : Reason{"%n blocks are too many", blocks};
}

SmallPlan small_plan(const DeviceFacts& facts, const ProductShape* products, int count) {
  // More CTAs than steps of the contraction would only add work.
  const auto max_share = [&](const ProductShape& p) {
    int share = 1;
    while (facts.kernels.has(Feature::clusters) && share < small_gemm::max_cluster &&
           std::int64_t{share} * small_gemm::step_k < p.k) {
      share *= 2;
    }
    return share;
  };
  const int max_shares[2] = {max_share(products[0]), count == 2 ? max_share(products[1]) : 1};
  SmallPlan best{};
  double least = 0;
  for (const TileCost& cost : thresholds.tile_costs) {
    for (int first = 1; first <= max_shares[0]; first *= 2) {
      for (int second = 1; second <= max_shares[1]; second *= 2) {
        const SmallPlan plan{cost.tile_m, std::max(first, second), {first, second}};
        const double time = cost_of(products, count, plan, cost, facts.sm_count);
        if (best.tile_m == 0 || time < least) {
          best = plan;
          least = time;
        }
      }
    }
  }
  return best;
}

void add_small_gemms(Plan& plan, const ProductShape* products, int count, const SmallPlan& by,
                     Buffers reads, Buffers writes) {
  const auto block_k = [&](int p) { return products[p].k / by.share[p]; };
  SmallGemmStep work{by, 0, count == 2 && block_k(1) > block_k(0), UINT_MAX};
  std::int64_t steps = 1, blocks = 0;
  bool shares = false;
  for (int place = 0; place < count; ++place) {
    if (place == 1) work.second_block = static_cast<unsigned>(blocks);
    const int p = work.swapped ? 1 - place : place;
    const int share = by.share[p];
    blocks += round_up(small_tiles(products[p], by.tile_m) * share, by.cluster);
    steps = std::max(steps, ceil_div(ceil_div(products[p].k, small_gemm::step_k), share));
    shares = shares || share > 1;
  }
  work.stages = static_cast<int>(std::min<std::int64_t>(steps, small_gemm::max_stages));
  const int ring = work.stages * small_gemm::stage_bytes(by.tile_m);
  const int sums = by.tile_m * small_gemm::sum_row_bytes;
  const auto shared = static_cast<std::size_t>(shares ? ring + sums : std::max(ring, sums));
  plan.add(Kernel::gemm_small, {blocks, small_gemm::threads, shared, by.cluster}, reads, writes,
           work, products[0].out.dtype);
}

void add_products(Plan& plan, const DeviceFacts& facts, const Work& work) {
  Products products;
  for (int i = 0; i < 2; ++i) {
    const WorkProduct& product = work.products[i];
    if (product.a >= 0) {
      const GemmArgs& args = product.args;
      plan.scratch.product[i] = product_scratch(facts, args.m, args.n, args.k);
      plan.scratch.counter = facts.kernels.has(Feature::wgmma);
    }
    if (!product.multiplies()) continue;
    products.shapes[products.count] = shape_of(work, product);
    products.buffers[products.count] = buffers_of(work, product);
    products.index[products.count++] = i;
  }
  const auto& [shapes, buffers, index, count] = products;
  if (count > 0 && plan.takes({Kernel::gemm_small, nullptr, why_not_one_launch(products)})) {
    Buffers reads, writes;
    for (int i = 0; i < count; ++i) {
      reads |= buffers[i].reads(shapes[i].accumulate);
      writes |= buffers[i].out;
    }
    add_small_gemms(plan, shapes, count, small_plan(facts, shapes, count), reads, writes);
  } else {
    for (int i = 0; i < count; ++i) add_product(plan, facts, shapes[i], index[i], buffers[i]);
  }
  for (int i = 0; i < 2; ++i) {
    const WorkProduct& product = work.products[i];
    if (product.exists() && !product.multiplies()) add_single(plan, work, i);
  }
}

Plan plan_gemm(const DeviceFacts& facts, const ProductShape& shape) {
  Plan plan;
  check_counts("gemm_int8", shape.m, shape.n, shape.k);
  add_product(plan, facts, shape, 0, product_buffers);
  return plan;
}

Plan plan_gemm_int4(const DeviceFacts& facts, const ProductShape& shape, bool packed_aligned) {
  Plan plan;
  const std::int64_t m = shape.m, n = shape.n, k = shape.k;
  check_counts("gemm_int4", m, n, k);
  if (m == 0 || n == 0) return plan;
  const Reason why = !facts.int4_units ? Reason{"no INT4 units at full speed on sm_%n", facts.arch}
                     : !packed_aligned
                         ? Reason{"rows of the packed operands are not a multiple of 16 bytes"}
                     : k % 2 != 0        ? Reason{"K %n is odd", k}
                     : k > int32_safe_k4 ? too_long_k(k)
                                         : Reason{};
  if (plan.takes({Kernel::mma_128x256x128, "unpacked to INT8", why})) {
    const Buffers reads = product_buffers.reads(shape.accumulate);
    add_mma(plan, facts, shape, 0, true, reads, Buffer::out);
    return plan;
  }
  plan.add(Kernel::unpack, {ceil_div(m * k, 256), 256}, Buffer::a, Buffer::unpacked_a,
           OperandStep{0, false});
  plan.passed_as_before();
  plan.add(Kernel::unpack, {ceil_div(n * k, 256), 256}, Buffer::b, Buffer::unpacked_b,
           OperandStep{0, true});
  // Reads a and b as well, for their scales.
  add_product(plan, facts, shape, 0,
              {Buffer::a | Buffer::unpacked_a, Buffer::b | Buffer::unpacked_b, Buffer::out});
  return plan;
}

MmaProduct mma_product(const ProductShape& p, bool int4) {
  const bool aligned = p.rows_near && !why_not_vectors(p);
  return {p.m, p.n, int4 ? ceil_div(p.k, 2) : p.k, aligned, !int4 && p.k > int32_safe_k, int4};
}

// Scratch of a product. wgmma: single scales as vectors, and stream-K's partial sums. mma.sync:
// sums of tiles that CTAs share.
std::size_t product_scratch(const DeviceFacts& facts, std::int64_t m, std::int64_t n,
                            std::int64_t k) {
  const bool wgmma = facts.kernels.has(Feature::wgmma);
  if (!wgmma || k > int32_safe_k) {
    if (m <= 0 || n <= 0 || !may_share(facts, m, n, k)) return 0;
    const bool long_k = k > int32_safe_k;
    return mma_workspace(mma_choose(mma_device(facts), {m, n, k, true, long_k}, true));
  }
  std::size_t bytes = static_cast<std::size_t>(round_up(m, 64) + round_up(n, 64)) * sizeof(float);
  if (m > 0 && n > 0 && m < INT32_MAX && n < INT32_MAX) {
    const Sm90Plan plan = wgmma_plan(facts, m, n, k, false, false);
    if (plan.kernel == Sm90Kernel::stream_k) {
      bytes += facts.queries->stream_k_workspace(m, n, k, plan);
    }
  }
  return bytes;
}

std::size_t gemm_workspace(const DeviceFacts& facts, std::int64_t m, std::int64_t n,
                           std::int64_t k) {
  const bool counter = facts.kernels.has(Feature::wgmma) && m > 0 && n > 0;
  return product_scratch(facts, m, n, k) + (counter ? sizeof(std::uint32_t) : 0);
}

}  // namespace hot::detail::plan
