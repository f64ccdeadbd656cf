// The plans of the token storages (docs/numerics.md, "One code a value"): rows of g_y serve both
// products; for g_w they are transposed, x becomes what its tokens contribute, and the transforms
// are undone after the product.
#include <algorithm>
#include <cstdint>

#include "cuda/plan_steps.h"

namespace hot::detail::plan {
namespace {

// How token_rows_kernel divides rows.
struct RowDivision {
  int threads, rows;  // of a CTA; rows at a time, 0: the row is too long for registers
  bool sum;           // whether it adds up columns, where that is wanted
  std::int64_t cta_rows, ctas;
  std::size_t shared_bytes;
};

RowDivision row_division(const DeviceFacts& facts, std::int64_t rows, std::int64_t padded,
                         DType dtype, bool packed, bool sum) {
  const auto size = static_cast<int>(dtype_size(dtype));
  const std::int64_t pieces = std::max<std::int64_t>(1, ceil_div(padded, token::item));
  const RowDivision too_long{token::max_row_threads, 0, false, 1, rows, 0};
  if (pieces > token::max_row_threads) return too_long;
  const auto layout_of = [&](std::int64_t at_once) {
    return token::RowsLayout(static_cast<int>(padded / 16), static_cast<int>(at_once), size,
                             packed);
  };
  // Enough CTAs for all SMs, two on each.
  std::int64_t at_once = std::min<std::int64_t>(
      {token::max_rows, token::max_row_threads / pieces,
       std::max<std::int64_t>(1, ceil_div(rows, std::int64_t{2} * facts.sm_count))});
  if (packed) at_once = std::min(at_once, dither_tile);  // of two tiles at most
  const std::int64_t half = facts.shared_bytes / 2;
  while (at_once > 1 && layout_of(at_once).bytes > half) --at_once;
  const token::RowsLayout layout = layout_of(at_once);
  if (layout.bytes > facts.shared_bytes) return too_long;
  RowDivision d{};
  d.rows = static_cast<int>(at_once);
  d.shared_bytes = static_cast<std::size_t>(layout.bytes);
  std::int64_t threads = round_up(at_once * pieces, 32);
  const std::int64_t for_sums =
      round_up(ceil_div(pieces * (token::item / 8), token::max_column_vectors), 32);
  d.sum = sum && for_sums <= token::max_row_threads;
  if (d.sum) threads = std::max(threads, for_sums);
  d.threads = static_cast<int>(threads);
  const std::int64_t wanted = ceil_div(rows, std::int64_t{2} * facts.sm_count);
  d.cta_rows = round_up(std::max<std::int64_t>(1, wanted), at_once);
  d.ctas = ceil_div(rows, d.cta_rows);
  return d;
}

// Returns the partial sums of a column that the step makes, where it makes them.
std::int64_t add_token_rows(Plan& plan, const DeviceFacts& facts, RowsOf of, std::int64_t rows,
                            std::int64_t cols, std::int64_t padded, const ArrayFacts& x,
                            bool packed, bool sum) {
  const RowDivision d = row_division(facts, rows, padded, x.dtype, packed, sum);
  const bool of_gy = of == RowsOf::gy;
  Buffers writes = of_gy ? Buffer::gy_rows : Buffer::saved;
  if (d.sum) writes |= Buffer::sums;
  if (d.rows == 0) plan.takes({Kernel::token_rows, "%a is read twice", too_long(cols)});
  note_loads(plan, Kernel::token_rows, not_vectors(x.rows_aligned, cols));
  Step& step = plan.add(Kernel::token_rows, {d.ctas, d.threads, d.shared_bytes},
                        (of_gy ? Buffer::gy : Buffer::x) | Buffer::features, writes);
  step.dtype = x.dtype;
  step.work = TokenRowsStep{of, d.rows, d.cta_rows};
  return d.sum ? d.ctas : 0;
}

}  // namespace

// For any type.
std::int64_t token_row_sums(const DeviceFacts& facts, std::int64_t rows, std::int64_t padded) {
  const auto sums = [&](DType dtype) {
    const RowDivision d = row_division(facts, rows, padded, dtype, false, true);
    return d.sum ? d.ctas : 0;
  };
  return std::max(sums(DType::bf16), sums(DType::f32));
}

namespace {

void add_feature_sizes(Plan& plan, RowsOf of, std::int64_t features, std::int64_t tokens,
                       const ArrayFacts& x) {
  const bool of_gy = of == RowsOf::gy;
  const Buffer from = of_gy ? Buffer::gy : Buffer::x;
  const auto add = [&](Kernel kernel, std::int64_t blocks, Buffers reads, Buffers writes) {
    Step& step = plan.add(kernel, {blocks, token::size_threads}, reads, writes);
    step.dtype = x.dtype;
    step.work = SizesStep{of, tokens};
  };
  if (tokens > 0) add(Kernel::sampled_tokens, tokens, from, Buffer::sizes);
  const std::int64_t strip =
      token::strip_lanes * 16 / static_cast<std::int64_t>(dtype_size(x.dtype));
  Buffers reads, writes = Buffer::features;
  if (tokens > 0) reads = from | Buffer::sizes, writes |= Buffer::sizes;
  if (!of_gy) writes |= Buffer::saved;
  const std::int64_t parts = ceil_div(tokens, token::strip_tokens);
  add(Kernel::feature_sums, std::max<std::int64_t>(1, ceil_div(features, strip) * parts), reads,
      writes);
}

bool token_given(const BackwardWork& work) { return work.gx && !work.weight; }

}  // namespace

Reason why_transposed(const DeviceFacts& facts, const BackwardWork& work) {
  if (draws_tokens(work.spec)) return {"a share of the tokens"};
  const LinearShape& shape = work.shape;
  const std::int64_t outs = work.out_features.k_padded;
  const std::int64_t ins = TokenCodesLayout(shape.tokens, shape.in_features, work.spec).padded;
  Products products;
  if (work.gx) products.add(0, shape.tokens, shape.in_features, outs, {}, {});
  products.add(1, outs, ins, work.tokens.k_padded, {DType::f32, true, true}, {});
  return why_not_rows(facts, products);
}

void add_kept_tokens(Plan& plan, const DeviceFacts& facts, const CompressShape& kept) {
  const TokenCodesLayout layout(kept.rows, kept.cols, kept.spec);
  add_feature_sizes(plan, RowsOf::x, kept.cols, std::min(kept.rows, size_sample), kept.x);
  add_token_rows(plan, facts, RowsOf::x, kept.rows, kept.cols, layout.padded, kept.x,
                 kept.spec.storage != Storage::token8, false);
}

Plan plan_token_backward(const DeviceFacts& facts, const BackwardWork& work,
                         const BackwardArrays& arrays) {
  const BackwardLinearSpec& spec = work.spec;
  const LinearShape& shape = work.shape;
  const std::int64_t outs = work.out_features.k_padded, kw = work.tokens.k_padded;
  const std::int64_t ins = TokenCodesLayout(shape.tokens, shape.in_features, spec).padded;
  Plan plan;
  std::int64_t runs = 0;
  bool by_rows = false;
  if (work.gx || work.gw) {
    add_zero(plan, amax_words(facts, work));
    add_feature_sizes(plan, RowsOf::gy, shape.out_features,
                      token_given(work) ? 0 : std::min(shape.tokens, size_sample), arrays.gy);
    runs = add_token_rows(plan, facts, RowsOf::gy, shape.tokens, shape.out_features, outs,
                          arrays.gy, false, work.gb);
  }
  if (work.weight) {
    add_columns(plan, facts,
                {Job::weight, arrays.w, Buffer::w, Buffer::weight, Buffer::weight_amax,
                 shape.in_features, work.out_features, weight_quant(spec), shape.in_features});
  }
  if (work.gw) {
    Buffers codes = Buffer::gy_rows, x = Buffer::saved | Buffer::gy_rows;
    if (draws_tokens(spec)) {
      plan.add(Kernel::draw_tokens, {1, token::draw_threads}, x, Buffer::drawn);
      codes |= Buffer::drawn;
      x |= Buffer::drawn;
    }
    constexpr int threads = 32 * token::tile_warps;
    constexpr std::int64_t cta_tokens = token::tile * token::tile_warps;
    by_rows = plan.takes({Kernel::wgmma_rows, nullptr, why_transposed(facts, work)});
    if (!by_rows) {
      plan.add(Kernel::token_transpose,
               {ceil_div(outs, token::transpose_tile) * ceil_div(kw, token::transpose_tile),
                token::transpose_threads},
               codes, Buffer::transposed);
    }
    const std::int64_t strips = ceil_div(ins, token::tile), ranges = ceil_div(kw, cta_tokens);
    // Four waves of CTAs are enough; more tiles of a warp save atomics.
    const std::int64_t tiles =
        std::clamp<std::int64_t>(strips * ranges / (8 * facts.sm_count), 1, 8);
    plan.add(Kernel::token_amax, {strips * ceil_div(ranges, tiles), threads},
             x | Buffer::columns_amax, Buffer::columns_amax)
        .work = ContributionsStep{tiles};
    Step& step = plan.add(Kernel::token_contributions, {strips * ranges, threads},
                          x | Buffer::columns_amax, Buffer::activation);
    step.rounding = spec.gw_rounding;
    step.work = ContributionsStep{1, by_rows};
  }

  Products products;
  add_gx(plan, products, work, arrays.gx);
  if (work.gw) {
    const ProductBuffers of{(by_rows ? Buffer::gy_rows : Buffer::transposed) | Buffer::features,
                            Buffer::activation, Buffer::product};
    ProductShape& p = products.add(1, outs, ins, kw, {DType::f32, true, true}, of);
    p.one_scale_a = p.one_scale_b = false;
    p.by_rows = by_rows;
  }
  add_products(plan, facts, products);
  if (work.gw) {
    Buffers reads = Buffer::product | Buffer::features | Buffer::saved;
    if (work.accumulate) reads |= Buffer::gw;
    const std::int64_t tiles = ceil_div(outs, token::tile) * ceil_div(ins, token::tile);
    plan.add(Kernel::undo_transforms, {ceil_div(tiles, 2), 2 * token::tile}, reads, Buffer::gw)
        .dtype = arrays.gw.dtype;
  }
  add_no_gw(plan, work);
  if (!work.gb || shape.out_features == 0) return plan;
  if (runs > 0) {
    add_final_sum(plan, runs, shape.out_features, work.accumulate, Buffer::sums);
  } else {
    if (work.gx || work.gw) note_sum_again(plan, too_long(shape.out_features));
    add_sum_alone(plan, shape, arrays.gy, work.accumulate);
  }
  return plan;
}

}  // namespace hot::detail::plan
