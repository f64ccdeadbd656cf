// A backward pass on the CPU: its stages in order.
#include "backward_work.h"

#include <algorithm>
#include <optional>

#include "checks.h"
#include "cpu/backend.h"

namespace hot::detail {
namespace {

BackwardScratch take_scratch(const Backend& backend, const Context& context,
                             const BackwardWork& work, void* workspace) {
  return take_backward_scratch(workspace, work, nullptr,
                               [&](std::int64_t m, std::int64_t n, std::int64_t k, bool) {
                                 return backend.gemm_workspace(context, m, n, k);
                               });
}

// Whether the pass over g_y's rows may find the largest values of the columns as they are quantised
// for g_w: each column has a scale and is not transformed.
bool can_find_columns(const BackwardWork& work) {
  const BackwardLinearSpec& spec = work.spec;
  const Projection& p = work.tokens;
  return spec.gx_scale != Granularity::tensor && spec.gw_scale == Granularity::channel &&
         p.basis == Basis::full && p.body_tokens == p.tokens && !p.signs && !p.equalized &&
         work.shape.out_features <= QuantizeRows::most_found;
}

// One code a value: rows of g_y first, since their scales make x what it contributes.
void backward_tokens(const Context& context, const BackwardCall& call, const BackwardScratch& s) {
  const BackwardWork& work = call.work;
  const BackwardLinearSpec& spec = work.spec;
  // A weight that was quantised before has fixed signs and out features as they are.
  const bool given = work.gx && !work.weight;
  const Key& sign_key = given ? fixed_signs_key : context.key();
  auto* const slots = static_cast<std::int64_t*>(s.drawn);

  std::optional<FeatureSizes> sizes;
  std::optional<QuantizeRows> rows;
  std::optional<QuantizeColumns> weight;
  std::optional<TransposeCodes> transposed;
  std::optional<Contributions> contributions;
  std::optional<Product> gx, gw;
  std::optional<UndoTransforms> undone;
  std::optional<SumColumns> sums;
  if (work.gb) sums.emplace(context, call.gy, call.gb, work.accumulate);
  if (work.gx || work.gw) {
    rows.emplace(context, RowsJob{call.gy, work.out_features.block, gradient_rows_quant(spec),
                                  s.rows, s.features.factors});
    if (!given) sizes.emplace(context, call.gy, s.features, s.exponents);
  }
  if (work.gx) {
    Operand codes = call.quantized;
    if (work.weight) {
      codes = s.weight;
      MatrixIn sized = call.w;
      sized.exponents = s.exponents;
      weight.emplace(context, ColumnsJob{sized, &work.out_features, Side::activation, sign_key,
                                         weight_quant(spec), codes});
    }
    gx.emplace(context, product(s.rows, codes, work.out_features.divisor, false, call.gx),
               s.gx_gemm);
  }
  if (work.gw) {
    const TokenCodesIn& x = *call.tokens;
    *s.columns.scale = 1.0F;
    const DrawnTokens drawn{slots, s.drawn_factor, work.tokens.k};
    transposed.emplace(s.rows, drawn, s.columns);
    contributions.emplace(context, x, call.sketch_key, s.rows.scale, drawn, spec.gw_rounding,
                          s.activation);
    gw.emplace(context, product(s.columns, s.activation, 1, false, {}), s.gw_gemm);
    undone.emplace(context, *gw, work.out_features.block, x.layout.block, sign_key, s.exponents,
                   in_signs_key(x.storage, call.sketch_key), x.exponents(), work.accumulate,
                   call.gw);
  }

  Phase phase(context);
  if (sums) sums->add_sums(phase);
  if (sizes) sizes->add_tokens(phase);
  phase.run();
  if (sizes) sizes->add_sums(phase);
  phase.run();
  if (sizes) sizes->finish();
  if (rows) {
    if (given) std::fill_n(s.exponents, work.shape.out_features, std::uint8_t{127});
    feature_factors(sign_key, s.exponents, true, 1.0F, 0, work.shape.out_features,
                    s.features.factors);
    rows->add_codes(phase);
  }
  if (weight) weight->add_largest(phase);
  phase.run();

  if (slots != nullptr) {
    draw_tokens(context, *call.tokens, s.rows.scale, work.tokens.k, slots, s.drawn_factor);
  }
  if (contributions) contributions->add_largest(phase);
  if (transposed) transposed->add_codes(phase);
  if (weight) weight->add_codes(phase);
  if (gx && !weight) gx->add_panels(phase);
  phase.run();

  if (contributions) contributions->add_codes(phase);
  if (weight) weight->add_finish(phase);
  if (gx && weight) gx->add_panels(phase);
  if (gx) gx->add_bias(phase);
  if (gw) gw->add_bias(phase);
  phase.run();

  if (contributions) contributions->finish();
  if (gx) gx->add_tiles(phase);
  if (gw) gw->add_panels(phase);
  phase.run();

  if (undone) undone->add_tiles(phase);
  phase.run();
  if (work.clear_gx) fill_zero(context, call.gx);
  if (work.clear_gw) fill_zero(context, call.gw);
}

}  // namespace

void CpuBackend::compress(const Context& context, const CompressJob& job, void* workspace) const {
  if (job.tokens) return compress_tokens(context, job, workspace);
  if (job.exponents != nullptr) token_exponents(context, job.x, job.exponents);
  if (job.spec.storage == Storage::int8) {
    quantize_columns(context, activation_columns(context, job));
  } else if (job.x.rows == 0 || job.x.cols == 0) {
    return;
  } else if (job.spec.storage == Storage::int4) {
    compress_groups(context, job.equalized(), job);
  } else {
    compress_rotated(context, job.equalized(), job);
  }
}

std::size_t CpuBackend::backward_workspace(const Context& context, const BackwardWork& work) const {
  return take_scratch(*this, context, work, nullptr).bytes;
}

// Four phases, which the threads start and end together: what reads g_y, w and x first; codes that
// need the largest values of all, unless a strip was kept whole; panels; products. A phase begins
// with its longest tasks: one that begins last keeps the other threads waiting.
void CpuBackend::backward(const Context& context, const BackwardCall& call, const Checker& check,
                          const Workspace& workspace) const {
  const BackwardWork& work = call.work;
  const BackwardLinearSpec& spec = work.spec;
  const BackwardScratch s = take_scratch(*this, context, work, workspace.data);
  check.workspace(workspace, s.bytes);
  if (is_token_storage(spec.storage)) return backward_tokens(context, call, s);
  const bool by_token = spec.gw_scale == Granularity::token;

  std::optional<QuantizeRows> rows;
  std::optional<QuantizeColumns> weight, columns;
  std::optional<RequantizeGroups> groups;
  std::optional<Product> gx, gw;
  std::optional<SumColumns> sums;
  if (work.gx) {
    rows.emplace(context, RowsJob{call.gy, spec.hadamard_block, gradient_rows_quant(spec), s.rows});
    Operand codes = call.quantized;
    if (spec.weight_scale == Granularity::tensor) codes.scales = 1;
    if (work.weight) {
      codes = s.weight;
      weight.emplace(context, ColumnsJob{call.w, &work.out_features, Side::activation,
                                         context.key(), weight_quant(spec), codes});
    }
    gx.emplace(context, product(s.rows, codes, work.out_features.divisor, false, call.gx),
               s.gx_gemm);
  }
  Operand x = call.saved;
  if (work.gw) {
    MatrixIn gradient = call.gy;
    gradient.exponents = call.exponents;
    columns.emplace(context, ColumnsJob{gradient, &work.tokens, Side::gradient, call.sketch_key,
                                        gradient_columns_quant(spec), s.columns});
    if (spec.storage != Storage::int8) {
      GroupsJob job = call.groups;
      x = job.out = s.activation;
      if (s.offsets != nullptr) {
        dither_offsets(context, call.sketch_key, work.tokens.blocks, s.offsets);
        job.offsets = s.offsets;
      }
      groups.emplace(context, job);
    }
    if (!by_token) {
      gw.emplace(context, product(s.columns, x, work.tokens.divisor, work.accumulate, call.gw),
                 s.gw_gemm);
    }
  }
  if (work.gb) sums.emplace(context, call.gy, call.gb, work.accumulate);
  const bool found_by_rows = rows && columns && can_find_columns(work);
  if (found_by_rows) rows->find_columns(columns->amax());

  Phase phase(context);
  const bool one_scale = spec.gx_scale == Granularity::tensor;
  if (sums) sums->add_sums(phase);
  if (rows && one_scale) rows->add_largest(phase);
  if (rows && !one_scale) rows->add_codes(phase);
  if (columns && !found_by_rows) columns->add_largest(phase);
  if (weight) weight->add_largest(phase);
  if (groups) groups->add_codes(phase);
  phase.run();

  if (gw) gw->add_panels(phase);
  if (gx && !weight) gx->add_panels(phase);
  if (rows && one_scale) rows->add_codes(phase);
  if (columns) columns->add_codes(phase, found_by_rows);
  if (weight) weight->add_codes(phase);
  phase.run();

  if (rows) rows->finish();
  if (columns) columns->add_finish(phase);
  if (weight) weight->add_finish(phase);
  if (gx && weight) gx->add_panels(phase);
  if (gx) gx->add_bias(phase);
  if (gw) gw->add_bias(phase);
  phase.run();

  const bool gx_longer = work.out_features.k_padded > work.tokens.k_padded;
  if (gx && gx_longer) gx->add_tiles(phase);
  if (gw) gw->add_tiles(phase);
  if (gx && !gx_longer) gx->add_tiles(phase);
  phase.run();

  if (work.gw && by_token) {
    gemm_token(context, token_product(s.columns, x, work.tokens.divisor, work.accumulate, call.gw),
               s.gw_gemm);
  }
  if (work.clear_gx) fill_zero(context, call.gx);
  if (work.clear_gw) fill_zero(context, call.gw);
}

}  // namespace hot::detail
